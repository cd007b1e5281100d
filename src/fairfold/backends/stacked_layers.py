"""The networks of a cohort as one: the same modules, whose layers hold the weights of all clients side by side.

Layers fold the clients into the batch, so a network's own code runs unchanged. A convolution is a linear layer of
patches. A layer's weight may be whole, a product of two factors, or the sum of both: clients that do not have a part
hold zeros there (see :mod:`.image_layout`), so one program serves whole and factored layers, of any rank.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LEFT, RIGHT = "/left", "/right"
MANY_ROWS, PIECES = 4096, 64


@dataclass(frozen=True)
class Part:
    """A tensor of all clients and where its gradient goes, both [clients, ...]."""

    values: Tensor
    slopes: Tensor


class _Affine(torch.autograd.Function):
    """x @ weightᵀ + bias for every client; the gradients of weight and bias are written where they belong."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, weight_part: Part, bias: Part | None) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.parts = weight_part, bias
        if bias is None:
            return torch.bmm(given, weight.transpose(1, 2))
        return torch.baddbmm(bias.values[:, None], given, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (slope,) = slopes
        given, weight = ctx.saved_tensors
        weight_part, bias = ctx.parts
        _add_products(slope, given, weight_part.slopes)
        if bias is not None:
            torch.sum(slope, 1, out=bias.slopes)
        return torch.bmm(slope, weight) if ctx.needs_input_grad[0] else None, None, None, None


def _add_products(slope: Tensor, given: Tensor, out: Tensor) -> None:
    """slopeᵀ @ given for every client; over very many rows (patches of images) in pieces, side by side on a GPU."""
    clients, rows = slope.shape[:2]
    pieces = math.gcd(rows, PIECES) if rows >= MANY_ROWS else 1
    if pieces == 1:
        torch.bmm(slope.transpose(1, 2), given, out=out)
        return
    parts = (tensor.reshape(clients * pieces, rows // pieces, tensor.shape[2]) for tensor in (slope, given))
    left, right = parts
    torch.sum(torch.bmm(left.transpose(1, 2), right).view(clients, pieces, *out.shape[1:]), 1, out=out)


def _affine(given: Tensor, weight: Part, bias: Part | None) -> Tensor:
    # Followed by autograd although its gradient is not asked for: else a first layer would have no backward.
    result: Tensor = _Affine.apply(given, weight.values.detach().requires_grad_(), weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Stacked(nn.Module):
    """A linear layer or a convolution of every client."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, name: str, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self._convolution = layer if isinstance(layer, nn.Conv2d) else None
        weight = f"{name}.weight"
        self._whole, self._bias = parts.get(weight), parts.get(f"{name}.bias")
        self._factors = (parts[weight + LEFT], parts[weight + RIGHT]) if weight + LEFT in parts else None
        self._clients = len(next(iter(parts.values())).values)

    def forward(self, given: Tensor) -> Tensor:
        if self._convolution is None:
            found = self._product(given.view(self._clients, -1, given.shape[-1]))
            return found.view(len(given), -1)
        (height, width), padding = self._convolution.kernel_size, self._convolution.padding
        assert not isinstance(padding, str)
        padded = functional.pad(given, (padding[1], padding[1], padding[0], padding[0]))
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [images, channels, rows, columns, height, width]
        images, _, rows, columns = windows.shape[:4]
        patches = windows.permute(0, 2, 3, 1, 4, 5).reshape(self._clients, images // self._clients * rows * columns, -1)
        return self._product(patches).view(images, rows, columns, -1).permute(0, 3, 1, 2).contiguous()

    def _product(self, given: Tensor) -> Tensor:
        """What a layer gives for [clients, rows, inputs]."""
        found = None if self._whole is None else _affine(given, self._whole, self._bias)
        if self._factors is None:
            assert found is not None
            return found
        left, right = self._factors
        through = _affine(_affine(given, right, None), left, self._bias if found is None else None)
        return through if found is None else found + through


def stacked_network(network: nn.Module, parts: Mapping[str, Part]) -> nn.Module:
    """Put the cohort's layers in the place of a network's own. Every weight is seen as a matrix.

    Args:
        network: Without memory, changed in place; all its tensors are those of linear layers and convolutions.
        parts: By the name of the tensor; of factors by that and :data:`LEFT` or :data:`RIGHT`.
    """
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            above, _, last = name.rpartition(".")
            setattr(network.get_submodule(above), last, _Stacked(layer, name, parts))
    return network
