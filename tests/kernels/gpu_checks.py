"""What the Triton body is held to: each operation beside the plain torch body, on any device.

Needs torch and Triton only, as benchmarks/kernels_gpu.py runs these checks on machines that have nothing else.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fairfold.kernels import reference
from fairfold.kernels.gpu import calls
from fairfold.kernels.gpu.launch import piece_layout
from fairfold.kernels.hashing import Layout, expand_seed, slots_and_signs

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the norm of what is expected: rounding of the type, as both sides add in another order."""


class Check(NamedTuple):
    name: str
    passed: bool
    detail: str = ""


def close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> Check:
    error = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    return Check(name, found.shape == expected.shape and error <= tolerance, f"(relative error {error:.1e})")


def golden_checks(device: str) -> Iterator[Check]:
    """Slots and signs of the golden vectors, found coordinate by coordinate and in every width of piece."""
    for case in json.loads((Path(__file__).parents[1] / "golden" / "slots.json").read_text()):
        full_size, head, tail, chunk = (case[name] for name in ("full_size", "head", "tail", "chunk"))
        layout = Layout(full_size, head, tail, chunk, expand_seed(case["seed"]), case["signed"])
        coordinates = torch.tensor(case["coordinates"], device=device)
        widest = piece_layout(layout).width
        for width in [width for width in (1, 2, 4, 8, 16, 32) if widest % width == 0]:
            slots, signs = calls.slots_and_signs(layout, coordinates, width)
            right = slots.tolist() == case["slots"] and signs.tolist() == case["signs"]
            yield Check(f"golden n={layout.full_size} Z={layout.chunk} head={layout.head} pieces of {width}", right)


def layout_checks(layout: Layout, row_size: int, dtype: torch.dtype, batch: int, device: str) -> Iterator[Check]:
    """Every operation of one layout; what is only moved must be equal, sums are compared with float64 ones."""
    name = f"n={layout.full_size} head={layout.head} tail={layout.tail} Z={layout.chunk} d={row_size} {dtype}"
    table_rows = layout.full_size // row_size
    rows = torch.randint(table_rows, (batch,), device=device)
    rows[:4] = torch.tensor([0, table_rows - 1, table_rows - 1, 0])[:batch]
    for check in (*_rows(layout, row_size, dtype, rows), *_ranges(layout, dtype, device)):
        yield check._replace(name=f"{check.name} {name}")


def _rows(layout: Layout, row_size: int, dtype: torch.dtype, rows: Tensor) -> Iterator[Check]:
    device, tolerance = rows.device, TOLERANCE[dtype]
    compact = torch.randn(layout.size, device=device).to(dtype)
    values = torch.randn(len(rows), row_size, device=device).to(dtype)
    found = calls.recover_rows(layout, compact, rows.int() if layout.full_size < 2**31 else rows, row_size)
    yield Check("recover_rows", torch.equal(found, reference.recover_rows(layout, compact, rows, row_size)))

    gradient = torch.zeros(layout.size, dtype=torch.float64, device=device)
    reference.accumulate_rows(layout, values.double(), rows, gradient)
    sums = torch.zeros(layout.size, dtype=dtype, device=device)
    calls.accumulate_rows(layout, values, rows, sums)
    yield close("accumulate_rows", sums, gradient, tolerance)

    stepped = compact.clone()
    calls.accumulate_rows(layout, values, rows, stepped, -0.1)
    yield close("a step of SGD", stepped, compact.double() - 0.1 * gradient, tolerance)

    slots, touched = calls.touched_rows(layout, values, rows)
    places, _ = slots_and_signs(layout, reference.row_coordinates(rows, row_size))
    yield Check("touched slots", torch.equal(slots, torch.unique(places)))
    yield close("touched sums", touched, gradient[slots], tolerance)


def _ranges(layout: Layout, dtype: torch.dtype, device: str) -> Iterator[Check]:
    """A range that cuts chunks at both ends."""
    start = min(3, layout.full_size - 1)
    length = max(min(layout.full_size - start - 2, 300_001), 1)
    if layout.full_size > 2**33:
        start = 2**32 - length // 2  # over the edge of a word
    compact = torch.randn(layout.size, device=device).to(dtype)
    out = torch.full((length,), torch.nan, dtype=dtype, device=device)
    expected = out.clone()
    calls.recover_range(layout, compact, start, out)
    reference.recover_range(layout, compact, start, expected)
    yield Check("recover_range", torch.equal(out, expected))

    values = torch.randn(length, device=device).to(dtype)
    sums = torch.zeros(layout.size, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    counts = torch.zeros(layout.size, dtype=torch.int32, device=device)
    calls.accumulate_range(layout, values, start, sums, counts)
    expected, expected_counts = torch.zeros_like(sums, dtype=torch.float64), torch.zeros_like(counts)
    reference.accumulate_range(layout, values.double(), start, expected, expected_counts)
    yield close("accumulate_range", sums, expected, TOLERANCE[dtype])
    yield Check("counts", torch.equal(counts, expected_counts))
    if layout.full_size > 2**24:
        return
    full = torch.randn(layout.full_size, device=device).to(dtype)
    expected = reference.reduce(layout, full.double())
    for again in ("", ", again"):
        yield close(f"reduce{again}", calls.reduce(layout, full), expected, TOLERANCE[dtype])
    if layout.tail and layout.head % layout.chunk == layout.full_size % layout.chunk == 0:
        means = calls.segment_means(layout, full, calls.make_order(layout, full.device))
        yield close("reduce by order", means.to(dtype), expected, TOLERANCE[dtype])
