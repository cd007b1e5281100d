"""The gradient of a cohort's step in one launch, for models of a known form."""

from torch import Tensor

from fairfold.kernels.form import Form, Lines
from fairfold.kernels.gpu.device_slopes import pairwise_kernel
from fairfold.kernels.gpu.launch import on_device

BLOCK = 8
"""Samples of a program, which is one warp: of blocks of 8 to 64 the smallest was fastest on an H200."""

MOST_WEIGHTS = 1024
"""A program keeps a layer's weights, and their gradient, in registers."""

MOST_NUMBERS = 4096
"""Weights times samples of a program, likewise."""


def _lanes(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def add_slopes(form: Form, regulariser: float, values: Tensor, gradient: Tensor, lines: Lines) -> bool:
    """Add the gradient of the pairwise loss of a step's batches; False where a form is not served.

    The specification is the same step under autograd, in ``backends/cuda_graph.py``. Nothing is read back, so it can
    be captured in a CUDA graph.
    """
    weights = _lanes(form.layers[0] if form.layers else 0) * _lanes(form.item)
    if len(form.layers) > 1 or weights > MOST_WEIGHTS:
        return False
    _, clients, batch, width = lines.places.shape
    block = min(BLOCK, MOST_NUMBERS // weights)
    with on_device(values):
        pairwise_kernel[((batch + block - 1) // block, clients)](
            values, gradient, lines.rows.positions, lines.rows.signs, lines.fixed.positions, lines.fixed.signs,
            lines.places, lines.shares, lines.step, clients, batch, lines.fixed.positions.shape[1],
            regulariser=regulariser, width=width, product=form.product, user=form.user, item=form.item,
            units=sum(form.layers), output=form.output, product_lanes=_lanes(form.product),
            user_lanes=_lanes(form.user), item_lanes=_lanes(form.item), unit_lanes=_lanes(sum(form.layers)),
            block=block, num_warps=1,
        )  # fmt: skip
    return True
