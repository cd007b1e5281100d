"""Steps of training that touch only the slots of the batch: their cost does not depend on the size of the vector.

SGD is linear in the gradient, so its step is one pass of atomic additions. Adagrad must square the *sum* of a slot's
gradients: the batch is sorted by place (whole pieces at a time, so there are few keys), added up in a buffer of the
batch's size, and the step taken once a touched slot. Nothing waits for the device.
"""

from contextlib import ExitStack

import torch
from torch import Tensor

from fairfold.kernels.gpu import device, device_steps
from fairfold.kernels.gpu.launch import CHECKED, on_device, place_arguments, sum_dtype, tiled, writable
from fairfold.kernels.gpu.placement import Placement, placement
from fairfold.kernels.hashing import Layout

_SHORT = 2**31


def add_rows(layout: Layout, values: Tensor, rows: Tensor, sums: Tensor, scale: float = 1.0) -> None:
    """Add ``scale`` times the signed values of chosen rows into ``sums`` (float32 or float64, without gaps)."""
    place = placement(layout, values.shape[1])
    count = values.numel() // place.width
    values = values.detach().contiguous()
    grid, pieces, warps = tiled("accumulate_rows", count, place.width)
    with on_device(sums):
        device.accumulate_rows_kernel[grid](
            values,
            rows.contiguous(),
            sums,
            scale=scale,
            row_count=layout.full_size // values.shape[1],
            count=count,
            row_pieces=values.shape[1] // place.width,
            **place_arguments(place),
            pieces=pieces,
            num_warps=warps,
            **CHECKED,
        )


def touched_rows(layout: Layout, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The slots of a batch in increasing order, each once, and the signed values summed into each.

    Waits for the device to learn how many slots there are.
    """
    if values.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device), values.new_empty(0)
    place = placement(layout, values.shape[1])
    touched, positions, sums = _touched(layout, place, values, rows)
    number = int(positions[-1]) + 1
    lanes = torch.arange(place.width, device=values.device)
    slots = touched[:number, None] * place.width + lanes
    return slots.view(-1), sums[:number].to(values.dtype).view(-1)


@torch.no_grad()
def sgd_rows(layout: Layout, compact: Tensor, values: Tensor, rows: Tensor, rate: float) -> None:
    """A whole step of SGD in place: compact[slot] -= rate · (sum of the signed gradients ``values`` in that slot)."""
    if values.numel() == 0:
        return
    if compact.dtype == sum_dtype(compact.dtype):
        with writable(compact) as work:
            add_rows(layout, values, rows, work, -rate)
    else:  # adding many small steps to a short type would lose them: add them up first
        _step(layout, compact, None, values, rows, rate, 0.0)


@torch.no_grad()
def adagrad_rows(
    layout: Layout,
    compact: Tensor,
    state: Tensor,
    values: Tensor,
    rows: Tensor,
    rate: float,
    epsilon: float = 1e-10,
) -> None:
    """A whole step of Adagrad in place, on the slots of the batch; ``state`` is shaped like ``compact``."""
    if values.numel():
        _step(layout, compact, state, values, rows, rate, epsilon)


def _touched(layout: Layout, place: Placement, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Touched places in increasing order, the position among them of each sorted piece, and the sums of each place.

    All have as many entries as the batch has pieces; those past the last position are not set.
    """
    rows, values = rows.contiguous(), values.detach().contiguous()
    count = values.numel() // place.width
    key_type = torch.int32 if layout.size // place.width < _SHORT else torch.int64
    places = torch.empty(count, dtype=key_type, device=values.device)
    touched = torch.empty(count, dtype=torch.int64, device=values.device)
    sums = torch.zeros(count, place.width, dtype=sum_dtype(values.dtype), device=values.device)
    common = {
        "row_count": layout.full_size // values.shape[1],
        "count": count,
        "row_pieces": values.shape[1] // place.width,
        **place_arguments(place),
        **CHECKED,
    }
    with on_device(values):
        grid, pieces, warps = tiled("count", count)
        device_steps.place_rows_kernel[grid](rows, places, **common, pieces=pieces, num_warps=warps)
        ordered, order = torch.sort(places)
        positions = torch.zeros(count, dtype=torch.int32, device=values.device)
        torch.cumsum(ordered[1:] != ordered[:-1], 0, dtype=torch.int32, out=positions[1:])
        grid, pieces, warps = tiled("touched", count, place.width)
        device_steps.gather_touched_kernel[grid](
            values, rows, order, positions, touched, sums, **common, pieces=pieces, num_warps=warps
        )
    return touched, positions, sums


def _step(
    layout: Layout, compact: Tensor, state: Tensor | None, values: Tensor, rows: Tensor, rate: float, epsilon: float
) -> None:
    place = placement(layout, values.shape[1])
    touched, positions, sums = _touched(layout, place, values, rows)
    grid, pieces, warps = tiled("touched", len(touched), place.width)
    with ExitStack() as stack:
        work = stack.enter_context(writable(compact))
        work_state = work if state is None else stack.enter_context(writable(state))
        stack.enter_context(on_device(compact))
        device_steps.step_kernel[grid](
            work,
            work_state,
            touched,
            positions,
            sums,
            rate=rate,
            epsilon=epsilon,
            count=len(touched),
            adagrad=state is not None,
            width=place.width,
            pieces=pieces,
            num_warps=warps,
        )
