"""FairLinear and FairConv2d: torch's layers, whose weights are recovered a block at a time, used and forgotten."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from fairfold.errors import InvalidDtype, InvalidSettings, InvalidVector
from fairfold.kernels import ops, traced
from fairfold.kernels.hashing import Layout
from fairfold.kernels.reference import SUM_DTYPE
from fairfold.nn.base import Device, FairModule, SubspaceOptions, check_same_device
from fairfold.subspace.checks import whole_number

BLOCK_WEIGHTS = 2**20
"""Weights recovered at once (4 MB of float32): enough for a fast product, little beside a model worth compressing."""


class FairLayer(FairModule):
    """A layer of weights [outputs, ...] and, if asked for, a bias, which is not compressed."""

    def __init__(
        self, shape: Sequence[int], bias: bool, device: Device, dtype: torch.dtype | None, options: SubspaceOptions
    ) -> None:
        super().__init__(shape, device, dtype, options)
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1/√(inputs of an output), as torch's layers draw weights and bias."""
        bound = 1 / sqrt(prod(self.shape[1:]))
        for parameter in (self.compact, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def _operand(self, operand: Tensor) -> Tensor:
        """The input, in autocast's dtype (torch does not cast inside functions of our own), or as the weights are."""
        kind = operand.device.type
        known = torch.compiler.is_compiling() or is_autocast_available(kind)  # torch 2.4 cannot compile that question
        if known and torch.is_autocast_enabled(kind):
            return operand.to(torch.get_autocast_dtype(kind))
        check_same_device("input", operand, self.memory)
        if operand.dtype != self.memory.dtype:
            remedy = f"Convert one of them, e.g. layer.to({operand.dtype})."
            raise InvalidDtype(f"input of dtype {operand.dtype}", f"{self.memory.dtype}, the layer's", remedy)
        return operand

    def _product(self, operand: Tensor, geometry: "Geometry") -> Tensor:
        bias = None if self.bias is None else self.bias.to(operand.dtype)
        if traced.is_tracing(self.memory):  # torch decides what is kept for the backward: in general all weights
            return geometry.product(operand, self.weight.to(operand.dtype), bias, geometry.whole)
        arguments = operand, self.memory, bias, self.subspace.layout, self.offset, geometry
        product: Tensor = _Blockwise.apply(*arguments)  # type: ignore[no-untyped-call]
        return product


@dataclass(frozen=True)  # no slots: torch 2.4 cannot compile what reads them
class WeightBlock:
    """Outputs whose weights are recovered together, and the inputs and the number of groups that they belong to."""

    outputs: slice
    inputs: slice
    groups: int


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Recover = Callable[[], Tensor]
Wants = Sequence[bool]


@dataclass(frozen=True)  # no slots: torch 2.4 cannot compile what reads them
class Geometry:
    """The shape of a product of inputs and weights; outputs and inputs are the second dimension."""

    shape: tuple[int, ...]
    groups: int

    def product(self, inputs: Tensor, weights: Tensor, bias: Tensor | None, block: WeightBlock) -> Tensor:
        """The layer's outputs by one block of its weights."""
        raise NotImplementedError

    def gradients(
        self, gradient: Tensor, inputs: Tensor, weights: Recover, block: WeightBlock, total: Tensor | None, wants: Wants
    ) -> Gradients:
        """Gradients of the input (added to ``total``), weights and bias from that of a block's outputs."""
        raise NotImplementedError

    @property
    def whole(self) -> WeightBlock:
        """The block of all outputs."""
        return WeightBlock(slice(0, self.shape[0]), slice(0, self.shape[1] * self.groups), self.groups)

    def blocks(self) -> Iterator[WeightBlock]:
        """Whole groups together while they fit a block; a group that does not fit is cut into outputs."""
        outputs, inputs = self.shape[0] // self.groups, self.shape[1]
        weights_per_output = prod(self.shape[1:])
        if whole := BLOCK_WEIGHTS // (weights_per_output * outputs):
            for first in range(0, self.groups, whole):
                last = min(first + whole, self.groups)
                block = slice(first * outputs, last * outputs), slice(first * inputs, last * inputs)
                yield WeightBlock(*block, last - first)
            return
        step = max(1, BLOCK_WEIGHTS // weights_per_output)
        for group in range(self.groups):
            for start in range(group * outputs, (group + 1) * outputs, step):
                stop = min(start + step, (group + 1) * outputs)
                yield WeightBlock(slice(start, stop), slice(group * inputs, (group + 1) * inputs), 1)


class _Blockwise(torch.autograd.Function):
    """A product block by block; weights are recovered again in the backward, where torch notices a changed memory."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, memory: Tensor, bias: Tensor | None, layout: Layout, offset: int, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(inputs, memory)
        ctx.layout, ctx.offset, ctx.geometry = layout, offset, geometry
        product: Tensor | None = None
        with _without_autocast(inputs):
            for block in geometry.blocks():
                weights = _recover(layout, memory, offset, geometry, block, inputs.dtype)
                outputs = geometry.product(inputs, weights, None if bias is None else bias[block.outputs], block)
                if len(weights) == geometry.shape[0]:
                    return outputs  # all in one block, the usual case
                if product is None:
                    product = outputs.new_empty(len(outputs), geometry.shape[0], *outputs.shape[2:])
                product[:, block.outputs] = outputs
        assert product is not None  # no layer is without weights
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, memory = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        wants, bias_gradients = ctx.needs_input_grad[:3], list[Tensor]()
        input_gradient: Tensor | None = None
        sums = torch.zeros(memory.numel(), dtype=SUM_DTYPE[memory.dtype], device=memory.device)
        for block in geometry.blocks():
            weights = partial(_recover, ctx.layout, memory, ctx.offset, geometry, block, inputs.dtype)
            input_gradient, weight_gradient, bias_gradient = geometry.gradients(
                gradient[:, block.outputs], inputs, weights, block, input_gradient, wants
            )
            if bias_gradient is not None:
                bias_gradients.append(bias_gradient)
            if weight_gradient is not None:
                flat, start = weight_gradient.reshape(-1), _start(ctx.offset, geometry, block)
                ops.accumulate_range(ctx.layout, flat, start, sums)
        memory_gradient = sums.to(memory.dtype) if wants[1] else None
        return input_gradient, memory_gradient, torch.cat(bias_gradients) if wants[2] else None, None, None, None


def _start(offset: int, geometry: Geometry, block: WeightBlock) -> int:
    return offset + int(block.outputs.start) * prod(geometry.shape[1:])


def _recover(
    layout: Layout, memory: Tensor, offset: int, geometry: Geometry, block: WeightBlock, dtype: torch.dtype
) -> Tensor:
    shape = (block.outputs.stop - block.outputs.start, *geometry.shape[1:])
    weights = torch.empty(shape, dtype=memory.dtype, device=memory.device)
    ops.recover_range(layout, memory, _start(offset, geometry, block), weights.view(-1))
    return weights.to(dtype)


def _without_autocast(operand: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast casts nothing: operands have the dtype they should have."""
    kind = operand.device.type
    return torch.autocast(kind, enabled=False) if is_autocast_available(kind) else nullcontext()


class FairLinear(FairLayer):
    """x·Wᵀ + b with W recovered from a compact vector block by block, in the forward and again in the backward pass.

    Arguments are those of torch's layer and :class:`~fairfold.nn.base.SubspaceOptions`. The bias is not compressed.

    Example:
        >>> layer = FairLinear(784, 512, capacity=1 / 8)
        >>> layer(torch.ones(3, 784)).shape, layer.compact.numel(), 784 * 512 // 8
        (torch.Size([3, 512]), 50176, 50176)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SubspaceOptions],
    ) -> None:
        rows, columns = whole_number("out_features", out_features), whole_number("in_features", in_features)
        super().__init__((rows, columns), bias, device, dtype, options)
        self.in_features, self.out_features = columns, rows

    def forward(self, features: Tensor) -> Tensor:
        """Multiply inputs (*, in_features) by the recovered weights: outputs (*, out_features)."""
        features = self._operand(features)
        if features.dim() == 0 or features.shape[-1] != self.in_features:
            given = f"input of shape {tuple(features.shape)}"
            raise InvalidVector(given, f"(*, {self.in_features})", "Check the layer before this one.")
        flat = features.reshape(-1, self.in_features)
        return self._product(flat, _Linear(self.shape, 1)).view(*features.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {self._subspace_repr()}"


class _Linear(Geometry):
    """The geometry of a linear layer, x·Wᵀ."""

    def product(self, inputs: Tensor, weights: Tensor, bias: Tensor | None, block: WeightBlock) -> Tensor:
        return F.linear(inputs, weights, bias)

    def gradients(
        self, gradient: Tensor, inputs: Tensor, weights: Recover, block: WeightBlock, total: Tensor | None, wants: Wants
    ) -> Gradients:
        if wants[0]:
            total = gradient @ weights() if total is None else total.addmm_(gradient, weights())
        return total, gradient.T @ inputs if wants[1] else None, gradient.sum(0) if wants[2] else None


Pair = int | tuple[int, int]
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class FairConv2d(FairLayer):
    """A convolution whose filters are recovered from a compact vector, a block of output channels at a time.

    Arguments are those of torch's layer and :class:`~fairfold.nn.base.SubspaceOptions`. The bias is not compressed.

    Example:
        >>> layer = FairConv2d(16, 32, kernel_size=3, padding=1, capacity=1 / 4)
        >>> layer(torch.ones(1, 16, 8, 8)).shape, layer.compact.numel()
        (torch.Size([1, 32, 8, 8]), 1152)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SubspaceOptions],
    ) -> None:
        self_in, self_out = whole_number("in_channels", in_channels), whole_number("out_channels", out_channels)
        groups = whole_number("groups", groups)
        if groups < 1 or self_in % groups or self_out % groups:
            given = f"groups={groups} for {self_in} input and {self_out} output channels"
            raise InvalidSettings(given, "a number that divides both", "Use groups=1 for an ordinary convolution.")
        if padding_mode not in PADDING_MODES:
            needed = f"one of {', '.join(PADDING_MODES)}"
            raise InvalidSettings(f"padding_mode={padding_mode!r}", needed, "Check the spelling.")
        kernel = _pair("kernel_size", kernel_size)
        super().__init__((self_out, self_in // groups, *kernel), bias, device, dtype, options)
        self.in_channels, self.out_channels, self.kernel_size = self_in, self_out, kernel
        self.stride, self.dilation = _pair("stride", stride), _pair("dilation", dilation)
        self.groups = groups
        self.padding: tuple[int, int] | str = padding if isinstance(padding, str) else _pair("padding", padding, 0)
        self.padding_mode = padding_mode
        self._margins = _margins(self.padding, self.kernel_size, self.dilation, self.stride)

    def forward(self, images: Tensor) -> Tensor:
        """(N, in_channels, H, W) or (in_channels, H, W), to the same with out_channels."""
        images = self._operand(images)
        if images.dim() not in (3, 4) or images.shape[-3] != self.in_channels:
            needed = f"(N, {self.in_channels}, H, W) or ({self.in_channels}, H, W)"
            raise InvalidVector(f"input of shape {tuple(images.shape)}", needed, "Check the layer before this one.")
        batch = images if images.dim() == 4 else images[None]
        left, right, top, bottom = self._margins
        padding = (top, left)
        if self.padding_mode != "zeros" or left != right or top != bottom:
            batch = F.pad(batch, self._margins, mode=self.padding_mode.replace("zeros", "constant"))
            padding = (0, 0)
        result = self._product(batch, _Convolution(self.shape, self.groups, self.stride, padding, self.dilation))
        return result if images.dim() == 4 else result[0]

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"bias={self.bias is not None}, {self._subspace_repr()}"
        )


@dataclass(frozen=True)  # no slots: torch 2.4 cannot compile what reads them
class _Convolution(Geometry):
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def product(self, inputs: Tensor, weights: Tensor, bias: Tensor | None, block: WeightBlock) -> Tensor:
        return F.conv2d(inputs[:, block.inputs], weights, bias, self.stride, self.padding, self.dilation, block.groups)

    def gradients(
        self, gradient: Tensor, inputs: Tensor, weights: Recover, block: WeightBlock, total: Tensor | None, wants: Wants
    ) -> Gradients:
        filters = weights()
        bias_size = [len(filters)] if wants[2] else None
        geometry = (self.stride, self.padding, self.dilation, False, [0, 0], block.groups)
        block_gradient, filter_gradient, bias_gradient = torch.ops.aten.convolution_backward(
            gradient, inputs[:, block.inputs], filters, bias_size, *geometry, list(wants)
        )
        if len(filters) == self.shape[0]:
            total = block_gradient  # all in one block, the usual case
        elif wants[0]:
            total = torch.zeros_like(inputs) if total is None else total
            total[:, block.inputs] += block_gradient
        return total, filter_gradient, bias_gradient


def _pair(name: str, value: Pair, least: int = 1) -> tuple[int, int]:
    height, width = value if isinstance(value, tuple | list) else (value, value)
    pair = whole_number(name, height), whole_number(name, width)
    if min(pair) < least:
        raise InvalidSettings(f"{name}={value}", f"at least {least}", "Give one number, or (height, width).")
    return pair


def _margins(
    padding: tuple[int, int] | str, kernel: tuple[int, int], dilation: tuple[int, int], stride: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Left, right, top and bottom margin; ``"same"`` puts the odd one to the right and below, as torch does."""
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        if stride != (1, 1):
            raise InvalidSettings(f"padding='same' with stride={stride}", "stride=1", "Give the padding as numbers.")
        height, width = (step * (size - 1) for step, size in zip(dilation, kernel, strict=True))
        return width // 2, width - width // 2, height // 2, height - height // 2
    if isinstance(padding, str):
        raise InvalidSettings(f"padding={padding!r}", "numbers, 'same' or 'valid'", "Check the spelling.")
    return padding[1], padding[1], padding[0], padding[0]
