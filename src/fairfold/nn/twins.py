"""The compact twin of each standard layer, and the standard twin of each compact one."""

from typing import Any

import torch
from torch import Tensor, nn

from fairfold.nn.bag import FairEmbeddingBag
from fairfold.nn.base import FairModule
from fairfold.nn.conv import FairConv2d
from fairfold.nn.embedding import FairEmbedding
from fairfold.nn.linear import FairLinear
from fairfold.nn.placement import Placement
from fairfold.subspace import Subspace


def compact_twin(layer: Any, subspace: Subspace | None, compact: Tensor | None) -> FairModule:
    """A compact layer with the options and the bias of ``layer`` that reads ``compact``.

    Made on the meta device, where drawing initial values costs nothing and leaves the random state alone. Without a
    subspace it is left without a vector, for :meth:`FairModule.share`.
    """
    placement: Placement = {"size": layer.weight.numel()}
    if subspace is not None:
        placement = {
            "size": subspace.size,
            "seed": subspace.seed,
            "mapping": subspace.mapping,
            "chunk": subspace.chunk,
            "head": 0 if subspace.mapping != "ranked" or subspace.is_full else subspace.head,
            "sign": subspace.sign,
        }
    shape: dict[str, Any] = {"device": "meta", "dtype": layer.weight.dtype}
    twin: FairModule
    if isinstance(layer, nn.Embedding):
        twin = FairEmbedding(
            layer.num_embeddings, layer.embedding_dim, layer.padding_idx, layer.sparse, **shape, **placement
        )
    elif isinstance(layer, nn.EmbeddingBag):
        twin = FairEmbeddingBag(
            layer.num_embeddings,
            layer.embedding_dim,
            layer.mode,
            layer.padding_idx,
            layer.sparse,
            layer.include_last_offset,
            **shape,
            **placement,
        )
    elif isinstance(layer, nn.Linear):
        twin = FairLinear(layer.in_features, layer.out_features, layer.bias is not None, **shape, **placement)
    else:
        twin = FairConv2d(*_convolution(layer), **shape, **placement)
    if compact is not None:
        # A tied layer is handed the very parameter of the first one.
        requires_grad = layer.weight.requires_grad
        twin.compact = compact if isinstance(compact, nn.Parameter) else nn.Parameter(compact, requires_grad)
    _take_bias(twin, layer)
    return twin.train(layer.training)


def dense_twin(layer: FairModule, weight: nn.Parameter | None) -> nn.Module:
    """A standard layer with the recovered weight of ``layer``, or with ``weight`` where a tied layer has it already."""
    shape: dict[str, Any] = {"device": "meta", "dtype": layer.memory.dtype}
    twin: Any
    if isinstance(layer, FairEmbedding):
        twin = nn.Embedding(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, sparse=layer.sparse, **shape)
    elif isinstance(layer, FairEmbeddingBag):
        twin = nn.EmbeddingBag(
            layer.num_embeddings,
            layer.embedding_dim,
            mode=layer.mode,
            sparse=layer.sparse,
            include_last_offset=layer.include_last_offset,
            padding_idx=layer.padding_idx,
            **shape,
        )
    elif isinstance(layer, FairLinear):
        twin = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, **shape)
    elif isinstance(layer, FairConv2d):
        twin = nn.Conv2d(*_convolution(layer), **shape)
    else:
        raise TypeError(f"{type(layer).__name__} has no standard twin")
    if weight is None:
        full = layer.full_weight()
        padding = getattr(layer, "padding_idx", None)
        if padding is not None:
            with torch.no_grad():
                full[padding] = 0  # what the compact table answers
        weight = nn.Parameter(full, layer.memory.requires_grad)
    twin.weight = weight
    _take_bias(twin, layer)
    result: nn.Module = twin.train(layer.training)
    return result


def _convolution(layer: Any) -> tuple[Any, ...]:
    return (
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups,
        layer.bias is not None,
        layer.padding_mode,
    )


def _take_bias(twin: nn.Module, layer: nn.Module) -> None:
    bias = getattr(layer, "bias", None)
    if isinstance(bias, Tensor):
        twin.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
