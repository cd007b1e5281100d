"""What every fast body is held to: generated layouts and arguments, and the specification's result beside its own.

Slots and signs must be equal bit for bit. Values that are only moved must be equal; sums may differ by the order of
their terms, :func:`assert_sums_close` says by how much.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from fairfold.kernels.hashing import Layout, expand_seed

DTYPES = (torch.float32, torch.float64)
EPSILON = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


@dataclass(frozen=True)
class Table:
    """A layout whose full vector is a table, and a batch of its rows."""

    layout: Layout
    row_size: int
    rows: Tensor
    dtype: torch.dtype
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def compact(self) -> Tensor:
        return torch.randn(self.layout.size, dtype=self.dtype, generator=self.generator())

    def values(self) -> Tensor:
        return torch.randn(len(self.rows), self.row_size, dtype=self.dtype, generator=self.generator())


@st.composite
def layouts(draw: st.DrawFn, full_size: int | None = None) -> Layout:
    """Any layout the kernels may meet, also those that no Subspace has (a head that is no multiple of the chunk)."""
    if full_size is None:
        full_size = draw(st.integers(1, 3000))
    chunk = draw(st.one_of(st.sampled_from([1, 2, 4, 8, 16, 24, 32, 33, 64, 96, 100]), st.integers(1, 130)))
    if draw(st.booleans()) and draw(st.booleans()):
        return Layout(full_size, full_size, 0, chunk, 0, True)  # the full space
    blocks = draw(st.integers(1, 40))
    head = draw(st.one_of(st.just(0), st.integers(0, full_size), st.just(full_size // 2 // chunk * chunk)))
    key = expand_seed(draw(st.integers(0, 2**64 - 1)))
    return Layout(full_size, head, blocks * chunk, chunk, key, draw(st.booleans()))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """A table of any shape and a batch of its rows: none, repeated, int32, with gaps in memory."""
    row_size = draw(st.one_of(st.sampled_from([1, 8, 16, 32, 64]), st.integers(1, 200)))
    count = draw(st.integers(1, 60))
    layout = draw(layouts(count * row_size + draw(st.integers(0, row_size - 1))))
    ids = draw(st.lists(st.integers(0, count - 1), max_size=40))
    rows = torch.tensor(ids, dtype=draw(st.sampled_from([torch.int64, torch.int32])))
    if draw(st.booleans()):
        rows = torch.stack([rows, rows], 1)[:, 0]
    return Table(layout, row_size, rows, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**31)))


@st.composite
def ranges(draw: st.DrawFn, layout: Layout) -> tuple[int, int]:
    start = draw(st.integers(0, layout.full_size))
    return start, draw(st.integers(start, layout.full_size))


def gapped(tensor: Tensor) -> Tensor:
    """The same values with gaps in memory."""
    spread = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]


def assert_sums_close(actual: Tensor, expected: Tensor, terms: int, largest: float) -> None:
    """Equal up to rounding: each of at most ``terms`` additions may err by one part in 2**23 (2**52) of the sum."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = 2 * EPSILON[actual.dtype] * max(terms, 1) * max(largest, 1.0) * max(terms, 1)
    assert torch.allclose(actual, expected, rtol=1e-5 if actual.dtype is torch.float32 else 1e-12, atol=tolerance)
