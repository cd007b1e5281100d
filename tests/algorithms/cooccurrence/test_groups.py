"""Sums of groups: what one of them says beyond the others hardly counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairfold.algorithms.cooccurrence import groups
from fairfold.algorithms.cooccurrence.cooccurrence import CoOccurrenceUpload, unpack_triangle
from fairfold.algorithms.cooccurrence.groups import add_to_groups, combined
from fairfold.federation.robust import hostile_groups, winsorized_sum
from fairfold.federation.updates import PLACES, sparse_vector
from fairfold.subspace.projection import LeadingBlock

ITEMS = 12
SIZE = ITEMS * (ITEMS + 1) // 2
FLEETS = st.lists(
    st.lists(st.sets(st.integers(0, ITEMS - 1), min_size=1), min_size=1, max_size=4), min_size=4, max_size=8
)


def sums_of(fleet: list[list[set[int]]]) -> list[Tensor]:
    found = []
    for group in fleet:
        items = torch.tensor([item for history in group for item in sorted(history)], dtype=torch.int64)
        lengths = torch.tensor([len(history) for history in group])
        found.append(CoOccurrenceUpload.of(items, lengths, ITEMS, 0.5).dense(ITEMS, torch.float64))
    return found


def sparse(total: Tensor) -> Tensor:
    places = total.nonzero().flatten()
    return sparse_vector(places, total[places], len(total))


def by_definition(sums: list[Tensor]) -> Tensor:
    matrices = [unpack_triangle(total) for total in sums]
    for matrix in matrices:
        own = matrix.diagonal().clone()
        matrix.copy_(matrix.minimum(own[:, None]).minimum(own[None, :]).clamp(min=0))
    weights = torch.stack([matrix.sum(1) for matrix in matrices])
    hostile = max(1, -(-len(sums) // 3) - 1)  # fewer than a third
    most = weights.sort(0).values[-1 - hostile]
    for matrix, weight in zip(matrices, weights, strict=True):
        scales = torch.where(weight > most, most / weight, 1.0)
        held = matrix * scales[:, None].minimum(scales[None, :])
        held.diagonal().copy_(matrix.diagonal())
        matrix.copy_(held)
    stacked = torch.stack(matrices)
    ordered = stacked.sort(0).values
    return sum(
        (matrix.clamp(min=ordered[hostile], max=ordered[-1 - hostile]) for matrix in stacked),
        torch.zeros(ITEMS, ITEMS).double(),
    )


@given(FLEETS, st.integers(0, 99))
def test_sums_are_combined_by_their_definition_dense_or_sparse(fleet: list[list[set[int]]], seed: int) -> None:
    sums = sums_of(fleet)
    sums[0] = 5 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = by_definition([total.clone() for total in sums])
    torch.testing.assert_close(unpack_triangle(combined(sums, SIZE)), expected)
    torch.testing.assert_close(unpack_triangle(combined(list(map(sparse, sums)), SIZE).to_dense()), expected)


@pytest.mark.parametrize("at_once", [1, 7])
def test_sums_may_be_combined_in_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = sums_of([[{0, 1, 5}], [{0, 5}, {1, 5}], [{5, 6, 7}], [{0, 1}]])
    expected = combined(sums, SIZE)
    monkeypatch.setattr(groups, "AT_ONCE", at_once)
    assert combined(sums, SIZE).equal(expected)
    assert combined(list(map(sparse, sums)), SIZE).to_dense().equal(expected)


@given(FLEETS, st.floats(-1e6, 1e6), st.integers(0, SIZE - 1))
def test_hostile_groups_move_no_number_beyond_the_others(fleet: list[list[set[int]]], claim: float, place: int) -> None:
    """One of four to six groups, two of seven or eight."""
    honest, hostile = sums_of(fleet), 2 if len(fleet) > 6 else 1
    assert hostile_groups(len(fleet)) == hostile
    spoiled = [total.clone() for total in honest]
    for total in spoiled[-hostile:]:
        total[place] = claim
    found, others = combined(spoiled, SIZE), torch.stack(honest[:-hostile])
    assert bool((found <= len(honest) * others.amax(0) + 1e-9).all())
    assert bool((found >= 0).all())


def test_groups_that_agree_are_summed() -> None:
    (total,) = sums_of([[{0, 1, 5}, {0, 5}]])
    assert combined([total] * 4, SIZE).equal(4 * total)
    assert winsorized_sum(torch.tensor([[1.0], [2.0], [3.0], [90.0]])).tolist() == [2 + 2 + 3 + 3]
    assert winsorized_sum(torch.tensor([[1.0], [2], [3], [4], [5], [60], [90]])).tolist() == [3 + 3 + 3 + 4 + 5 + 5 + 5]
    assert [hostile_groups(groups) for groups in (3, 4, 6, 7, 9, 10, 100)] == [1, 1, 1, 2, 2, 3, 33]


def test_two_groups_cannot_be_compared() -> None:
    total = sums_of([[{0, 1}]])[0]
    assert not combined([total, total], SIZE).any()


def test_sums_remember_what_groups_have_uploaded() -> None:
    """Also of a group that has nothing new; what one sends is added to its own sum."""
    one, two, three = sums_of([[{0, 1}], [{0, 1}, {2}], [{0, 2}]])
    block = LeadingBlock((SIZE,), (SIZE,))
    held, _ = add_to_groups({}, {0: [(block, one)], 1: [(block, two)], 2: [(block, three)]}, SIZE)
    again, total = add_to_groups(held, {1: [(block, one)]}, SIZE)
    assert again["0"].equal(one)
    assert again["1"].equal(two + one)
    assert total.equal(combined([one, two + one, three], SIZE))
    listed = {name + ending: of for name, total in held.items() for ending, of in
              (("", sparse(total).values()), (PLACES, sparse(total).indices()[0]))}  # fmt: skip
    after, total = add_to_groups(listed, {}, SIZE)
    assert set(after) == set(listed)
    assert total.to_dense().equal(combined([one, two, three], SIZE))
