"""Capacities, schemes and chains."""

from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.subspace import Capacity, assign_groups, fit_sizes, parse_scheme


@pytest.mark.parametrize(
    ("text", "share"),
    [("16x", Fraction(1, 16)), ("1x", 1), ("2.5x", Fraction(2, 5)), (0.0625, Fraction(1, 16)),
     ("0.0625", Fraction(1, 16)),
     ("1/16", Fraction(1, 16)), (1, 1), (" 4 X ", Fraction(1, 4)), ("8×", Fraction(1, 8))],
)  # fmt: skip
def test_shares(text: str | float, share: Fraction) -> None:
    assert Capacity.parse(text).share == share


@pytest.mark.parametrize(
    ("text", "budget"),
    [("40MB", 40_000_000), ("40 MiB", 40 * 2**20), ("512kB", 512_000), ("1.5GB", 1_500_000_000), ("100b", 100)],
)
def test_budgets(text: str, budget: int) -> None:
    capacity = Capacity.parse(text)
    assert capacity.budget == budget
    assert capacity.limit(10**12) == budget // 4
    assert capacity.limit(10**12, itemsize=2) == budget // 2
    assert capacity.limit(5) == 5


@given(st.integers(1, 10**6))
def test_capacities_are_written_as_they_are_read(ratio: int) -> None:
    assert str(Capacity.parse(f"{ratio}x")) == f"{ratio}x"
    assert Capacity.parse(str(Capacity.parse(f"{ratio}kB"))) == Capacity.parse(f"{ratio}kB")


def test_schemes() -> None:
    assert [str(capacity) for capacity in parse_scheme("1x-4x-16x")] == ["1x", "4x", "16x"]
    assert [str(capacity) for capacity in parse_scheme("1x-2x-...-16x")] == ["1x", "2x", "4x", "8x", "16x"]
    assert [str(capacity) for capacity in parse_scheme("2x-…-8x-40MB")] == ["2x", "4x", "8x", "40MB"]


def test_groups_are_near_equal_runs_in_id_order() -> None:
    groups = assign_groups(100, 3)
    assert torch.equal(groups, groups.sort().values)
    assert sorted(torch.bincount(groups).tolist()) == [33, 33, 34]
    assert assign_groups(99, 2).tolist() == [0] * 50 + [1] * 49  # the paper: the first half of the users


def test_groups_of_given_shares_have_one_device_at_least() -> None:
    assert torch.bincount(assign_groups(99, 2, [1, 99])).tolist() == [1, 98]
    assert torch.bincount(assign_groups(99, 2, [0.5, 0.5])).tolist() in ([50, 49], [49, 50])
    assert torch.bincount(assign_groups(10, 3, [1e-9, 1, 1e-9])).tolist() == [1, 8, 1]
    assert torch.bincount(assign_groups(3, 3, [100, 1, 1])).tolist() == [1, 1, 1]


def test_groups_drawn_by_a_seed_keep_their_sizes() -> None:
    drawn, again, other = (assign_groups(99, 2, [20, 80], seed) for seed in (101, 101, 102))
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)
    assert torch.bincount(drawn).tolist() == torch.bincount(assign_groups(99, 2, [20, 80])).tolist() == [20, 79]


limit_lists = st.lists(st.integers(8, 10**6), min_size=1, max_size=30)


@given(limit_lists, st.sampled_from([1, 2, 8]))
def test_sizes_fit_nest_and_cannot_be_doubled(limits: list[int], unit: int) -> None:
    full_size = 500_000
    sizes = fit_sizes(limits, full_size, unit=unit)
    partial = [size for size in sizes if size < full_size]
    for limit, size in zip(limits, sizes, strict=True):
        assert size <= limit
        assert size == full_size if limit >= full_size else 2 * size > limit
    assert all(big % small == 0 for small in partial for big in partial if small <= big)
    assert all(size % unit == 0 for size in partial)


@given(limit_lists)
def test_the_fitted_base_is_the_best_of_all(limits: list[int]) -> None:
    """Against trying every base there is, on small limits."""
    limits = [limit % 90 + 8 for limit in limits]

    def used(base: int) -> float:
        return sum((base << ((limit // base).bit_length() - 1)) / limit for limit in limits)

    best = max(used(base) for base in range(min(limits) // 2 + 1, min(limits) + 1))
    chosen = sum(size / limit for size, limit in zip(fit_sizes(limits, 1_000), limits, strict=True))
    # Scaled limits are rounded down to whole numbers, which costs at most one coordinate of the base.
    assert chosen >= best - len(limits) / (min(limits) // 2)
    assert chosen <= best + 1e-9


@given(limit_lists)
def test_fitting_wastes_no_more_than_powers_of_two(limits: list[int]) -> None:
    limits = [limit + 1_000 for limit in limits]
    fitted, paper = fit_sizes(limits, 10**7), [1 << (limit.bit_length() - 1) for limit in limits]
    shares = [sum(size / limit for size, limit in zip(sizes, limits, strict=True)) for sizes in (fitted, paper)]
    assert shares[0] >= shares[1] - 0.002 * len(limits)


@pytest.mark.parametrize(("share", "powers"), [(20, [0, 1, 1, 1, 1]), (30, [0] * 3 + [1] * 7), (50, [0, 1])])
def test_the_authors_draw_is_that_of_their_code(share: int, powers: list[int]) -> None:
    sizes = [powers[user * len(powers) // 99] for user in range(99)]
    numpy.random.RandomState(101).shuffle(sizes)
    assert assign_groups(99, 2, [share, 100 - share], 101, "numpy").tolist() == sizes
    assert assign_groups(99, 2, [share, 100 - share], 101).tolist() != sizes
