"""FairConv2d: ``nn.Conv2d`` in the memory a device has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from fairfold.errors import InvalidSettings, InvalidVector
from fairfold.nn.blocks import FairLayer, Geometry, Made, Part, Slopes
from fairfold.nn.placement import Placement
from fairfold.subspace.checks import whole_number

Pair = int | tuple[int, int]
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class FairConv2d(FairLayer):
    """A convolution whose filters are recovered from a compact vector, a block of output channels at a time.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Size of the filters, one number or (height, width).
        stride: As in torch.
        padding: As in torch, with ``"same"`` and ``"valid"``.
        dilation: As in torch.
        groups: As in torch.
        bias: Whether a bias is added; it is kept as it is.
        padding_mode: As in torch.
        device: Where the vectors live.
        dtype: Type of their numbers.
        placement: See :class:`~fairfold.nn.placement.Placement`.

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
            raise InvalidSettings(
                f"padding_mode={padding_mode!r}", f"one of {', '.join(PADDING_MODES)}", "Check the spelling."
            )
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
        geometry = _Convolution(self.shape, self.groups, self.stride, padding, self.dilation)
        result = self._multiplied(batch, geometry)
        return result if images.dim() == 4 else result[0]

    def extra_repr(self) -> str:
        """Sizes, as torch's modules show them."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"bias={self.bias is not None}, {self._placement_repr()}"
        )


@dataclass(frozen=True)  # no slots: torch 2.4 cannot compile what reads them
class _Convolution(Geometry):
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def product(self, given: Tensor, weights: Tensor, bias: Tensor | None, part: Part) -> Tensor:
        return F.conv2d(given[:, part.inputs], weights, bias, self.stride, self.padding, self.dilation, part.groups)

    def slopes(
        self, slope: Tensor, given: Tensor, weights: Made, part: Part, of_given: Tensor | None, wants: Sequence[bool]
    ) -> Slopes:
        filters = weights()
        of_input, of_filters, of_bias = torch.ops.aten.convolution_backward(
            slope, given[:, part.inputs], filters, [len(filters)] if wants[2] else None,
            self.stride, self.padding, self.dilation, False, [0, 0], part.groups, list(wants),
        )  # fmt: skip
        if len(filters) == self.shape[0]:
            of_given = of_input  # all in one part, the usual case
        elif wants[0]:
            of_given = torch.zeros_like(given) if of_given is None else of_given
            of_given[:, part.inputs] += of_input
        return of_given, of_filters, of_bias


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
