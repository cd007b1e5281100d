"""Sums of pairs in C against the specification and dense matrices."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.kernels import native, ops, reference, sparse_pairs
from fairfold.kernels.native import calls
from fairfold.kernels.native import sparse_pairs as sparse_calls

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


def strongest_of(matrix: Tensor, roots: Tensor, users: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """Row by row, by Python's sorting."""
    found, strengths = torch.arange(len(matrix))[:, None].repeat(1, most), matrix.new_zeros(len(matrix), most)
    for row, numbers in enumerate(matrix):
        strength = numbers * roots[row] * roots
        if users is not None:
            strength = strength / (users[row] + users - strength).clamp(min=1e-12)
        others = [column for column in range(len(matrix)) if column != row and strength[column] > 0]
        for place, column in enumerate(sorted(others, key=lambda one: -strength[one].item())[:most]):
            found[row, place], strengths[row, place] = column, strength[column]
    return found, strengths


@generated
@given(given_histories=histories(), max_items=st.integers(1, 45), kind=st.sampled_from([torch.int32, torch.int64]))
def test_lists_of_pairs_and_their_matrix(
    given_histories: tuple[Tensor, Tensor, Tensor, Tensor], max_items: int, kind: torch.dtype
) -> None:
    packed = reference.pair_sums(*given_histories, max_items)
    listed = sparse_calls.listed_pair_sums(*given_histories, max_items)
    places, sums = listed
    assert sums.dtype == packed.dtype
    assert bool((places.diff() > 0).all())
    assert torch.zeros_like(packed).index_put_((places,), sums).equal(packed)
    items, begins, ends, weights = given_histories
    together = reference.pair_sums(items, begins, ends, torch.ones_like(weights), max_items)
    assert places.equal(together.nonzero()[:, 0])  # also those whose sum is 0
    matrix = torch.zeros(max_items, max_items, dtype=packed.dtype)
    place = torch.tril_indices(max_items, max_items)
    matrix[place[0], place[1]] = packed
    matrix += matrix.tril(-1).T
    members = torch.randint(0, max_items, (max_items, 3))
    source = torch.Generator().manual_seed(max_items)
    roots = torch.randint(1, 3, (max_items,), generator=source).to(packed.dtype)  # of which some strengths are equal
    for body in (sparse_calls, sparse_pairs):
        assert all(map(torch.equal, body.listed_pair_sums(*given_histories, max_items), listed))
        starts, columns, numbers, diagonal = body.symmetric_rows(*listed, max_items, kind, packed.dtype)
        assert columns.dtype == kind
        rows = torch.searchsorted(starts, torch.arange(len(columns)), right=True) - 1
        assert bool(((rows * max_items + columns).diff() > 0).all())
        assert torch.zeros_like(matrix).index_put_((rows, columns.long()), numbers).equal(matrix)
        assert diagonal.equal(matrix.diagonal().double())
        for users in (None, 1 + torch.rand(max_items, dtype=packed.dtype, generator=source)):
            strongest = body.strongest(starts, columns, numbers, roots, users, 4)
            for one, wanted in zip(strongest, strongest_of(matrix, roots, users, 4), strict=True):
                assert one.equal(wanted)
        found = body.member_blocks(starts, columns, numbers, members)
        assert found.equal(matrix[members[:, :, None], members[:, None, :]])


def test_long_lists_are_cut_into_parts_that_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the specification, where little is held at a time; and by any number of threads in C."""
    before, given_histories = torch.get_num_threads(), many()
    wanted = sparse_pairs.listed_pair_sums(*given_histories, 390)
    matrix = sparse_pairs.symmetric_rows(*wanted, 390, torch.int32, torch.float32)[:3]
    members = torch.randint(0, 390, (390, 40), generator=torch.Generator().manual_seed(1))
    blocks = sparse_pairs.member_blocks(*matrix, members)
    strongest = sparse_pairs.strongest(*matrix, torch.ones(390), None, 9)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert sparse_calls.member_blocks(*matrix, members).equal(blocks)
            assert all(map(torch.equal, sparse_calls.strongest(*matrix, torch.ones(390), None, 9), strongest))
    finally:
        torch.set_num_threads(before)
    for name in ("PAIRS_AT_ONCE", "LISTED_AT_ONCE", "MEMBERS_AT_ONCE", "PADDED_AT_ONCE"):
        monkeypatch.setattr(sparse_pairs, name, 1_001)
    assert all(map(torch.equal, sparse_pairs.listed_pair_sums(*given_histories, 390), wanted))
    assert all(map(torch.equal, sparse_pairs.symmetric_rows(*wanted, 390, torch.int32, torch.float32), matrix))
    assert sparse_pairs.member_blocks(*matrix, members).equal(blocks)
    assert all(map(torch.equal, sparse_pairs.strongest(*matrix, torch.ones(390), None, 9), strongest))


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
