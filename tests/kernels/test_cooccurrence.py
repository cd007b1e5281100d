"""Sums of pairs in C against the specification and dense matrices."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.kernels import native, ops, reference
from fairfold.kernels.native import calls

if not native.status().available:
    pytest.skip(native.status().reason, allow_module_level=True)

UNIT = 2.0**-16
generated = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def histories(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Items, spans in any order with gaps between them, and weights multiples of the unit."""
    mine = draw(st.lists(st.sets(st.integers(0, 40)), max_size=12))
    items, begins, ends = [], [], []
    for history in mine:
        items += draw(st.lists(st.integers(0, 40), max_size=2))  # of no history
        begins.append(len(items))
        items += sorted(history)
        ends.append(len(items))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    weights = torch.tensor([draw(st.integers(0, 1 << 16)) for _ in mine], dtype=dtype) * UNIT
    order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    spans = (torch.tensor(of, dtype=torch.int64)[order] for of in (begins, ends))
    return torch.tensor(items, dtype=torch.int64), *spans, weights  # type: ignore[return-value]


@generated
@given(given_histories=histories(), max_items=st.integers(0, 45))
def test_pair_sums(given_histories: tuple[Tensor, Tensor, Tensor, Tensor], max_items: int) -> None:
    items, begins, ends, weights = given_histories
    found = calls.pair_sums(items, begins, ends, weights, max_items)
    assert found.dtype == weights.dtype
    assert found.equal(reference.pair_sums(items, begins, ends, weights, max_items))
    dense = torch.zeros(len(weights), 45, dtype=weights.dtype)
    for line, begin, end in zip(dense, begins.tolist(), ends.tolist(), strict=True):
        line[items[begin:end]] = 1
    whole = (dense * weights[:, None]).T @ dense
    place = torch.tril_indices(max_items, max_items)
    assert found.equal(whole[place[0], place[1]])  # to the bit: all are multiples of the unit


def many() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some thousand histories, long and short."""
    source = torch.Generator().manual_seed(0)
    lengths = (torch.rand(3000, generator=source) ** 4 * 200).long()
    mine = [torch.randperm(400, generator=source)[:length].sort().values for length in lengths]
    ends = lengths.cumsum(0)
    return torch.cat(mine), ends - lengths, ends, (65536 // lengths.clamp(min=1)) * UNIT


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    before, given_histories = torch.get_num_threads(), many()
    try:
        for dtype in (torch.float32, torch.float64):
            items, begins, ends, weights = given_histories
            uneven = (weights * torch.rand(len(weights))).to(dtype)  # sums that are rounded
            found = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                found.append(ops.pair_sums(items, begins, ends, uneven, 390))
            assert all(of.equal(found[0]) for of in found[1:])
    finally:
        torch.set_num_threads(before)


def test_histories_that_do_not_ascend_or_lie_outside_are_refused() -> None:
    one = torch.ones(1)

    def call(items: list[int], begin: int, end: int) -> Tensor:
        return calls.pair_sums(torch.tensor(items), torch.tensor([begin]), torch.tensor([end]), one, 5)

    assert float(call([0, 3], 0, 2).sum()) == 3
    for items, begin, end in (([3, 0], 0, 2), ([1, 1], 0, 2), ([-1, 2], 0, 2), ([0], 0, 2), ([0], 1, 0), ([0], -1, 1)):
        with pytest.raises(InvalidVector):
            call(items, begin, end)
