"""Subspaces of different sizes: the paper's consistent and collapsible, as laws."""

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fairfold.errors import NotNested
from fairfold.subspace import Subspace, Sums, nested_subspaces, reduce_all
from tests.support.strategies import chains, dense, nested_pairs, seeds, vector


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@given(nested_pairs)
def test_unfolding_keeps_the_full_vector(pair: tuple[Subspace, Subspace]) -> None:
    small, big = pair
    compact = vector(small.size)
    assert small.nests_in(big)
    assert_close(big.recover(small.unfold(compact, big)), small.recover(compact))


@given(nested_pairs)
def test_folding_sums_and_counts_is_reducing_directly(pair: tuple[Subspace, Subspace]) -> None:
    small, big = pair
    full = vector(small.full_size)
    sums, counts = big.fold(*big.sums_and_counts(full), small)
    direct_sums, direct_counts = small.sums_and_counts(full)
    assert_close(sums, direct_sums)
    assert torch.equal(counts, direct_counts)


@given(chains())
def test_reducing_for_a_chain_is_reducing_for_each(chain: list[Subspace]) -> None:
    full = vector(chain[0].full_size)
    for subspace, compact in reduce_all(full, chain).items():
        assert_close(compact, subspace.reduce(full))


def test_a_mean_of_means_is_another_number() -> None:
    small, big = Subspace(1_000, 50, seed=3), Subspace(1_000, 400, seed=3)
    full = vector(1_000)
    mean_of_means = big.reduce(full).view(50, 8).mean(1)
    assert float((mean_of_means - small.reduce(full)).abs().max()) > 0.05


@given(chains(max_full=60))
def test_theorem_column_spaces_contain_each_other(chain: list[Subspace]) -> None:
    """The paper's Theorem, by rank: adding the columns of the smaller S to those of the larger adds no dimension."""
    matrices = [dense(subspace) for subspace in chain]
    for small, big in pairwise(matrices):
        together = torch.linalg.matrix_rank(torch.cat([small, big], dim=1))
        assert int(together) == int(torch.linalg.matrix_rank(big))


@given(
    st.integers(60, 3_000),
    st.lists(st.integers(1, 16), min_size=1, max_size=5),
    st.sampled_from([("element", 1), ("chunk", 2), ("ranked", 1), ("ranked", 2)]),
    seeds,
)
def test_chains_made_from_capacities_nest(full_size: int, ratios: list[int], kind: tuple[str, int], seed: int) -> None:
    mapping, chunk = kind
    made = nested_subspaces(full_size, [f"{r}x" for r in ratios], seed=seed, mapping=mapping, chunk=chunk)
    full = vector(full_size)
    ordered = sorted(made, key=lambda subspace: subspace.size)
    for small, big in pairwise(ordered):
        assert small.nests_in(big)
        assert_close(small.reduce(big.recover(big.reduce(full))), small.reduce(full))  # coarser projections compose


@given(st.integers(2, 40), st.integers(2, 80), seeds)
def test_sizes_that_do_not_divide_do_not_nest(small_size: int, big_size: int, seed: int) -> None:
    assume(small_size < big_size and big_size % small_size)
    small, big = Subspace(200, small_size, seed), Subspace(200, big_size, seed)
    assert not small.nests_in(big)
    with pytest.raises(NotNested, match="do not divide"):
        small.unfold(vector(small_size), big)
    with pytest.raises(NotNested):
        big.fold(*big.sums_and_counts(vector(200)), small)
    with pytest.raises(NotNested):
        reduce_all(vector(200), [small, big])


def test_sizes_that_do_not_divide_are_not_nested_in_fact() -> None:
    """The refusal has a reason: the column space of such a pair really is larger."""
    small, big = dense(Subspace(300, 20, seed=5)), dense(Subspace(300, 50, seed=5))
    assert int(torch.linalg.matrix_rank(torch.cat([small, big], dim=1))) > int(torch.linalg.matrix_rank(big))


@pytest.mark.parametrize(
    "other",
    [
        Subspace(1_000, 100, seed=1),
        Subspace(1_000, 100, seed=0, sign=False),
        Subspace(1_000, 100, seed=0, mapping="chunk", chunk=2),
        Subspace(999, 100, seed=0),
        Subspace(1_000, 100, seed=0, orthonormal=True),
    ],
)
def test_another_hash_is_not_consistent(other: Subspace) -> None:
    assert not Subspace(1_000, 50, seed=0).nests_in(other)


@given(chains(), st.lists(st.tuples(st.integers(0, 9), st.floats(0.1, 5)), min_size=1, max_size=8))
def test_adding_in_the_compact_space_is_adding_in_the_full_space(
    chain: list[Subspace], devices: list[tuple[int, float]]
) -> None:
    """S_small·ψ = S_big·unfold(ψ): totals per size, unfolded, recovered once, give the mean of all recoveries."""
    sums, expected, weights = Sums(), torch.zeros(chain[0].full_size, dtype=torch.float64), 0.0
    for number, (which, weight) in enumerate(devices):
        subspace = chain[which % len(chain)]
        compact = vector(subspace.size, number)
        sums.add(subspace, compact, weight)
        expected += weight * subspace.recover(compact)
        weights += weight
    assert_close(sums.recover(), expected / weights)


@given(chains())
def test_sums_of_two_servers_add_up(chain: list[Subspace]) -> None:
    left, right, both = Sums(), Sums(), Sums()
    for number, subspace in enumerate([*chain, *chain]):
        compact = vector(subspace.size, number)
        (left if number % 2 else right).add(subspace, compact, number + 1.0)
        both.add(subspace, compact, number + 1.0)
    if left.totals:
        assert_close((left + right).recover(), both.recover())
        assert (left + right).weight == both.weight
