"""What linear and convolution have in common: weights recovered a block at a time, used and forgotten."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.function import once_differentiable

from fairfold.errors import InvalidDtype
from fairfold.kernels import ops, traced
from fairfold.kernels.hashing import Layout
from fairfold.nn.base import Device, FairModule, check_same_device
from fairfold.nn.placement import Placement
from fairfold.subspace.checks import SUM_DTYPE

BLOCK_WEIGHTS = 2**20
"""Weights recovered at once (4 MB of float32): enough for a fast product, little beside a model worth folding."""


class FairLayer(FairModule):
    """A layer of weights [outputs, ...] and, if asked for, a bias, which is kept as it is."""

    def __init__(
        self, shape: Sequence[int], bias: bool, device: Device, dtype: torch.dtype | None, placement: Placement
    ) -> None:
        super().__init__(shape, device, dtype, placement)
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1/√(inputs of an output), as torch's layers draw weights and bias."""
        bound = 1 / sqrt(prod(self.shape[1:]))
        for parameter in (self.compact, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def _operand(self, operand: Tensor) -> Tensor:
        """The input, in the dtype that autocast asks for: torch does not cast inside functions of our own.

        Outside of autocast what torch's layers refuse is refused: another device or another dtype than the weights'.
        """
        kind = operand.device.type
        known = torch.compiler.is_compiling() or is_autocast_available(kind)  # torch 2.4 cannot compile that question
        if known and torch.is_autocast_enabled(kind):
            return operand.to(torch.get_autocast_dtype(kind))
        check_same_device("input", operand, self.memory)
        if operand.dtype != self.memory.dtype:
            given, remedy = f"input of dtype {operand.dtype}", f"Convert one of them, e.g. layer.to({operand.dtype})."
            raise InvalidDtype(given, f"{self.memory.dtype}, the layer's", remedy)
        return operand

    def _multiplied(self, operand: Tensor, geometry: "Geometry") -> Tensor:
        bias = None if self.bias is None else self.bias.to(operand.dtype)
        if traced.needed(self.memory):  # torch decides what is kept for the backward: all weights at once, in general
            return geometry.product(operand, self.weight.to(operand.dtype), bias, geometry.whole)
        arguments = operand, self.memory, bias, self.subspace.layout, self.offset, geometry
        product: Tensor = _Blockwise.apply(*arguments)  # type: ignore[no-untyped-call]
        return product


@dataclass(frozen=True)  # no slots: torch 2.4 cannot compile what reads them
class Part:
    """Outputs whose weights are recovered together, and the inputs they see, in so many groups."""

    outputs: slice
    inputs: slice
    groups: int


Slopes = tuple[Tensor | None, Tensor | None, Tensor | None]
Made = Callable[[], Tensor]


@dataclass(frozen=True)  # no slots: torch 2.4 cannot compile what reads them
class Geometry:
    """All of a product of inputs and weights but its numbers; outputs and inputs are the second dimension."""

    shape: tuple[int, ...]
    groups: int

    def product(self, given: Tensor, weights: Tensor, bias: Tensor | None, part: Part) -> Tensor:
        """The outputs of one part."""
        raise NotImplementedError

    def slopes(
        self, slope: Tensor, given: Tensor, weights: Made, part: Part, of_given: Tensor | None, wants: Sequence[bool]
    ) -> Slopes:
        """From that of a part's outputs the slope of the input, added to ``of_given``, of its weights and its bias."""
        raise NotImplementedError

    @property
    def whole(self) -> Part:
        """All outputs."""
        return Part(slice(0, self.shape[0]), slice(0, self.shape[1] * self.groups), self.groups)

    def parts(self) -> Iterator[Part]:
        """Whole groups together while they fit a block; a group that does not fit is cut into outputs."""
        outputs, seen, each = self.shape[0] // self.groups, self.shape[1], prod(self.shape[1:])
        whole = BLOCK_WEIGHTS // (each * outputs)
        if whole:
            for first in range(0, self.groups, whole):
                last = min(first + whole, self.groups)
                yield Part(slice(first * outputs, last * outputs), slice(first * seen, last * seen), last - first)
            return
        step = max(1, BLOCK_WEIGHTS // each)
        for group in range(self.groups):
            for start in range(group * outputs, (group + 1) * outputs, step):
                stop = min(start + step, (group + 1) * outputs)
                yield Part(slice(start, stop), slice(group * seen, (group + 1) * seen), 1)


class _Blockwise(torch.autograd.Function):
    """A product part by part; weights are recovered again in the backward.

    The memory is saved, by reference, so that torch notices a change before the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, memory: Tensor, bias: Tensor | None, layout: Layout, offset: int, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(given, memory)
        ctx.layout, ctx.offset, ctx.geometry = layout, offset, geometry
        product: Tensor | None = None
        with _without_autocast(given):
            for part in geometry.parts():
                weights = _recovered(layout, memory, offset, geometry, part, given.dtype)
                found = geometry.product(given, weights, None if bias is None else bias[part.outputs], part)
                if len(weights) == geometry.shape[0]:
                    return found  # all in one part, the usual case
                if product is None:
                    product = found.new_empty(len(found), geometry.shape[0], *found.shape[2:])
                product[:, part.outputs] = found
        assert product is not None  # no layer is without weights
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, memory = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        wants = ctx.needs_input_grad[:3]
        of_given: Tensor | None = None
        of_bias: list[Tensor] = []
        sums = torch.zeros(memory.numel(), dtype=SUM_DTYPE[memory.dtype], device=memory.device)
        for part in geometry.parts():
            place = ctx.layout, memory, ctx.offset, geometry, part, given.dtype
            slope, weights = gradient[:, part.outputs], partial(_recovered, *place)
            of_given, of_weights, of_part = geometry.slopes(slope, given, weights, part, of_given, wants)
            if of_part is not None:
                of_bias.append(of_part)
            if of_weights is not None:
                start = _start(ctx.offset, geometry, part)
                ops.accumulate_range(ctx.layout, of_weights.reshape(-1), start, sums)
        of_memory = sums.to(memory.dtype) if wants[1] else None
        return of_given, of_memory, torch.cat(of_bias) if wants[2] else None, None, None, None


def _start(offset: int, geometry: Geometry, part: Part) -> int:
    """The first coordinate of a part's weights."""
    return offset + int(part.outputs.start) * prod(geometry.shape[1:])


def _recovered(
    layout: Layout, memory: Tensor, offset: int, geometry: Geometry, part: Part, dtype: torch.dtype
) -> Tensor:
    shape = (part.outputs.stop - part.outputs.start, *geometry.shape[1:])
    block = torch.empty(shape, dtype=memory.dtype, device=memory.device)
    ops.recover_range(layout, memory, _start(offset, geometry, part), block.view(-1))
    return block.to(dtype)


def _without_autocast(operand: Tensor) -> AbstractContextManager[object]:
    """A block in which autocast casts nothing: operands have the dtype they should have."""
    kind = operand.device.type
    return torch.autocast(kind, enabled=False) if is_autocast_available(kind) else nullcontext()
