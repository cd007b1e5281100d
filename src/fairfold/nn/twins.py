"""The compact twin of each standard layer, and the standard twin of each compact one."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fairfold.nn.bag import FairEmbeddingBag
from fairfold.nn.base import FairModule
from fairfold.nn.conv import FairConv2d
from fairfold.nn.linear import FairLinear
from fairfold.nn.placement import Placement
from fairfold.nn.table import FairEmbedding
from fairfold.subspace import Subspace

Twin = TypeVar("Twin", bound=nn.Module)

_TABLE = ("num_embeddings", "embedding_dim", "padding_idx", "sparse", "max_norm", "norm_type")
_CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_KINDS: list[tuple[type[Any], type[Any], tuple[str, ...]]] = [
    (nn.Embedding, FairEmbedding, _TABLE),
    (nn.EmbeddingBag, FairEmbeddingBag, (*_TABLE, "mode", "include_last_offset")),
    (nn.Linear, FairLinear, ("in_features", "out_features")),
    (nn.Conv2d, FairConv2d, _CONVOLUTION),
]
"""A standard layer, its compact twin, and the options of both, which are also their attributes."""


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
    kind, names = next((compact, names) for standard, compact, names in _KINDS if isinstance(layer, standard))
    twin: FairModule = kind(**_options(layer, names), device="meta", dtype=layer.weight.dtype, **placement)
    if compact is not None:
        # A tied layer is handed the very parameter of the first one.
        requires_grad = layer.weight.requires_grad
        twin.compact = compact if isinstance(compact, nn.Parameter) else nn.Parameter(compact, requires_grad)
    return _finished(twin, layer)


def dense_twin(layer: FairModule, weight: nn.Parameter | None) -> nn.Module:
    """A standard layer with the recovered weight of ``layer``, or with ``weight`` where a tied layer has it already."""
    kinds = [(standard, names) for standard, compact, names in _KINDS if isinstance(layer, compact)]
    if not kinds:
        raise TypeError(f"{type(layer).__name__} has no standard twin")
    kind, names = kinds[0]
    twin: nn.Module = kind(**_options(layer, names), device="meta", dtype=layer.memory.dtype)
    if weight is None:
        full = layer.full_weight()
        padding = getattr(layer, "padding_idx", None)
        if padding is not None:
            with torch.no_grad():
                full[padding] = 0  # what the compact table answers
        weight = nn.Parameter(full, layer.memory.requires_grad)
    twin.weight = weight
    return _finished(twin, layer)


def _options(layer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    options = {name: getattr(layer, name) for name in names}
    return options | ({"bias": layer.bias is not None} if hasattr(layer, "bias") else {})


def _finished(twin: Twin, layer: nn.Module) -> Twin:
    """The twin with the layer's bias, in its mode."""
    bias = getattr(layer, "bias", None)
    if isinstance(bias, Tensor):
        twin.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return twin.train(layer.training)
