"""FairConv2d: ``nn.Conv2d`` in the memory a device has."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from fairfold.errors import InvalidSettings, InvalidVector
from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout
from fairfold.nn.blocks import BLOCK_WEIGHTS, FairLayer, recover_block, without_autocast
from fairfold.nn.placement import Placement
from fairfold.subspace.checks import SUM_DTYPE, whole_number

Pair = int | tuple[int, int]
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class FairConv2d(FairLayer):
    """A convolution whose filters are recovered from a compact vector, a block of output channels at a time.

    Args:
        in_channels: Of the input.
        out_channels: Of the output.
        kernel_size: Of the filters, one number or (height, width).
        stride: As in torch.
        padding: As in torch, with ``"same"`` and ``"valid"``.
        dilation: As in torch.
        groups: As in torch.
        bias: Whether a bias is added; it is kept as it is.
        padding_mode: As in torch.
        device: Where the vectors live.
        dtype: Of the vectors.
        placement: See :class:`~fairfold.nn.placement.Placement`.
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
        **placement: Unpack[Placement],
    ) -> None:
        self_in, self_out = whole_number("in_channels", in_channels), whole_number("out_channels", out_channels)
        groups = whole_number("groups", groups)
        if groups < 1 or self_in % groups or self_out % groups:
            raise InvalidSettings(
                f"groups={groups} for {self_in} input and {self_out} output channels",
                "a number that divides both",
                "Use groups=1 for an ordinary convolution.",
            )
        if padding_mode not in PADDING_MODES:
            raise InvalidSettings(f"padding_mode={padding_mode!r}", f"one of {', '.join(PADDING_MODES)}", "Check it.")
        kernel = _pair("kernel_size", kernel_size)
        super().__init__((self_out, self_in // groups, *kernel), bias, device, dtype, placement)
        self.in_channels, self.out_channels, self.kernel_size = self_in, self_out, kernel
        self.stride, self.dilation, self.groups = _pair("stride", stride), _pair("dilation", dilation), groups
        self.padding: tuple[int, int] | str = padding if isinstance(padding, str) else _pair("padding", padding, 0)
        self.padding_mode = padding_mode
        self._margins = _margins(self.padding, self.kernel_size, self.dilation, self.stride)

    def forward(self, images: Tensor) -> Tensor:
        """(N, in_channels, H, W) or (in_channels, H, W), to the same with out_channels."""
        images = self._operand(images)
        if images.dim() not in (3, 4) or images.shape[-3] != self.in_channels:
            raise InvalidVector(
                f"input of shape {tuple(images.shape)}",
                f"(N, {self.in_channels}, H, W) or ({self.in_channels}, H, W)",
                "Check the layer before this one.",
            )
        batch = images if images.dim() == 4 else images[None]
        left, right, top, bottom = self._margins
        padding = (top, left)
        if self.padding_mode != "zeros" or left != right or top != bottom:
            batch = F.pad(batch, self._margins, mode=self.padding_mode.replace("zeros", "constant"))
            padding = (0, 0)
        geometry = _Geometry(self.shape, self.stride, padding, self.dilation, self.groups)
        result: Tensor = _Convolve.apply(  # type: ignore[no-untyped-call]
            batch,
            self.memory,
            None if self.bias is None else self.bias.to(batch.dtype),
            self.subspace.layout,
            self.offset,
            geometry,
        )
        return result if images.dim() == 4 else result[0]

    def extra_repr(self) -> str:
        """Sizes, as torch's modules show them."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"bias={self.bias is not None}, {self._placement_repr()}"
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Output channels whose filters are recovered together, and the input channels they see."""

    outputs: slice
    inputs: slice
    groups: int


@dataclass(frozen=True, slots=True)
class _Geometry:
    """All of a convolution but its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def parts(self) -> Iterator[_Part]:
        """Whole groups together while they fit a block; a group that does not fit is cut into output channels."""
        outputs, seen = self.shape[0] // self.groups, self.shape[1]
        each = max(prod(self.shape[1:]), 1)
        whole = BLOCK_WEIGHTS // (each * max(outputs, 1))
        if whole:
            for first in range(0, self.groups, whole):
                last = min(first + whole, self.groups)
                yield _Part(slice(first * outputs, last * outputs), slice(first * seen, last * seen), last - first)
            return
        step = max(1, BLOCK_WEIGHTS // each)
        for group in range(self.groups):
            for start in range(group * outputs, (group + 1) * outputs, step):
                stop = min(start + step, (group + 1) * outputs)
                yield _Part(slice(start, stop), slice(group * seen, (group + 1) * seen), 1)

    def filters(self, layout: Layout, memory: Tensor, offset: int, part: _Part, dtype: torch.dtype) -> Tensor:
        """The recovered filters of one part."""
        shape = (part.outputs.stop - part.outputs.start, *self.shape[1:])
        return recover_block(layout, memory, self.start(offset, part), shape, dtype)

    def start(self, offset: int, part: _Part) -> int:
        """The first coordinate of a part's filters."""
        return offset + int(part.outputs.start) * prod(self.shape[1:])


class _Convolve(torch.autograd.Function):
    """Convolution part by part; filters are recovered again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        memory: Tensor,
        bias: Tensor | None,
        layout: Layout,
        offset: int,
        geometry: _Geometry,
    ) -> Tensor:
        ctx.save_for_backward(images, memory)
        ctx.layout, ctx.offset, ctx.geometry = layout, offset, geometry
        results = []
        with without_autocast(images):
            for part in geometry.parts():
                filters = geometry.filters(layout, memory, offset, part, images.dtype)
                results.append(
                    F.conv2d(
                        images[:, part.inputs],
                        filters,
                        None if bias is None else bias[part.outputs],
                        geometry.stride,
                        geometry.padding,
                        geometry.dilation,
                        part.groups,
                    )
                )
        return results[0] if len(results) == 1 else torch.cat(results, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        images, memory = ctx.saved_tensors
        geometry: _Geometry = ctx.geometry
        wants_images, wants_memory, wants_bias = ctx.needs_input_grad[:3]
        of_images: Tensor | None = None
        of_bias: list[Tensor] = []
        sums = torch.zeros(memory.numel(), dtype=SUM_DTYPE[memory.dtype], device=memory.device)
        for part in geometry.parts():
            filters = geometry.filters(ctx.layout, memory, ctx.offset, part, images.dtype)
            of_input, of_filters, of_part = torch.ops.aten.convolution_backward(
                gradient[:, part.outputs],
                images[:, part.inputs],
                filters,
                [len(filters)] if wants_bias else None,
                geometry.stride,
                geometry.padding,
                geometry.dilation,
                False,
                [0, 0],
                part.groups,
                [wants_images, wants_memory, wants_bias],
            )
            of_bias.append(of_part)
            if wants_images and part.groups == geometry.groups and len(filters) == geometry.shape[0]:
                of_images = of_input  # all in one part, the usual case
            elif wants_images:
                of_images = torch.zeros_like(images) if of_images is None else of_images
                of_images[:, part.inputs] += of_input
            if wants_memory:
                start = geometry.start(ctx.offset, part)
                ops.accumulate_range(ctx.layout, of_filters.reshape(-1), start, sums)
        of_memory = sums.to(memory.dtype) if wants_memory else None
        return of_images, of_memory, torch.cat(of_bias) if wants_bias else None, None, None, None


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
