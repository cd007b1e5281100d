"""A chain of linear layers of many clients on a CUDA device: the gradient of their cross-entropy, in a few kernels.

The same numbers as :mod:`fairfold.backends.stacked_layers` gives, up to rounding. The order of every sum is fixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.kernels.gpu import device_affine as device
from fairfold.kernels.gpu.launch import on_device

PRECISION = "tf32x3"
"""How a product of float32 is formed: by three products of tensor cores, as exact as one of float32."""


TILES: dict[str, dict[str, int]] = {
    "forward": {"tall": 64, "wide": 32, "deep": 64, "num_warps": 4, "num_stages": 3},
    "weights": {"tall": 128, "wide": 64, "deep": 64, "num_warps": 8, "num_stages": 2},
    "inputs": {"tall": 64, "wide": 64, "deep": 32, "num_warps": 4, "num_stages": 2},
}
"""The work of one program: rows and columns of the result, terms of a sum at a time, warps, loads under way."""
SMALL = 16
"""The least that a side of a product on tensor cores can be; layers of so few units are one tile wide."""


@dataclass(frozen=True)
class Link:
    """A layer of all clients."""

    weight: Tensor  # [clients, outputs, inputs]; clients may stand apart
    weight_slope: Tensor  # where its gradient goes
    bias: Tensor | None  # [clients, outputs]
    bias_slope: Tensor | None
    rectify: bool  # whether negative results are cut


@dataclass(frozen=True)
class Batches:
    """What the steps of a round read."""

    pixels: Tensor  # [images, inputs]
    labels: Tensor  # int64 [images]
    rows: Tensor  # int32 [steps, all clients, batch]: which images
    shares: Tensor  # like rows: of each in the loss
    number: Tensor  # int64 [1]: which step it is


def chain_slopes(chain: Sequence[Link], batches: Batches) -> None:
    """Write the gradients of the cross-entropy of the next step's batches, for the clients of the chain."""
    given, kept = batches.pixels, []
    with on_device(given):
        for link in chain:
            kept.append(given)
            given = _forward(link, given, batches, first=len(kept) == 1)
        _cross_entropy(given, batches)
        slope = given
        for number in range(len(chain) - 1, -1, -1):
            link, given = chain[number], kept[number]
            _weight_slope(link, slope, given, batches, first=number == 0)
            if number:
                slope = _input_slope(link, slope, given, rectified=chain[number - 1].rectify)


def _tile(name: str, outputs: int, side: str) -> dict[str, int]:
    """The tile of a product, on the side of the outputs as small as a layer of few units."""
    return TILES[name] | ({side: SMALL} if outputs <= SMALL else {})


def _forward(link: Link, given: Tensor, batches: Batches, *, first: bool) -> Tensor:
    working, outputs, inputs = link.weight.shape
    _, clients, batch = batches.rows.shape
    out = torch.empty(working, batch, outputs, device=given.device)
    tile = _tile("forward", outputs, "wide")
    device.forward_kernel[-(-outputs // tile["wide"]), working, -(-batch // tile["tall"])](
        given, batches.rows, batches.number, link.weight, link.weight if link.bias is None else link.bias, out,
        link.weight.stride(0), batch=batch, clients=clients, inputs=inputs, outputs=outputs,
        looked_up=first, has_bias=link.bias is not None, rectify=link.rectify, precision=PRECISION, **tile,
    )  # fmt: skip
    return out


def _cross_entropy(logits: Tensor, batches: Batches) -> None:
    working, batch, classes = logits.shape
    tall, wide = 64, max(16, 1 << (classes - 1).bit_length())
    device.cross_entropy_kernel[working, -(-batch // tall)](
        logits, batches.labels, batches.rows, batches.shares, batches.number,
        batch=batch, clients=batches.rows.shape[1], classes=classes, tall=tall, wide=wide,
    )  # fmt: skip


def _weight_slope(link: Link, slope: Tensor, given: Tensor, batches: Batches, *, first: bool) -> None:
    working, outputs, inputs = link.weight.shape
    _, clients, batch = batches.rows.shape
    tile = _tile("weights", outputs, "tall")
    device.weight_slope_kernel[-(-inputs // tile["wide"]), working, -(-outputs // tile["tall"])](
        slope, given, batches.rows, batches.number, link.weight_slope,
        link.weight_slope if link.bias_slope is None else link.bias_slope,
        link.weight.stride(0), batch=batch, clients=clients, inputs=inputs, outputs=outputs,
        looked_up=first, has_bias=link.bias_slope is not None, precision=PRECISION, **tile,
    )  # fmt: skip


def _input_slope(link: Link, slope: Tensor, given: Tensor, *, rectified: bool) -> Tensor:
    working, outputs, inputs = link.weight.shape
    batch = slope.shape[1]
    out = torch.empty(working, batch, inputs, device=slope.device)
    tile = _tile("inputs", outputs, "deep")
    device.input_slope_kernel[-(-inputs // tile["wide"]), working, -(-batch // tile["tall"])](
        slope, link.weight, given, out, link.weight.stride(0), batch=batch, inputs=inputs, outputs=outputs,
        rectified=rectified, precision=PRECISION, **tile,
    )  # fmt: skip
    return out
