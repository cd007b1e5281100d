"""Models truncated to bytes: what a budget holds, and the candidates for dividing it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fairfold.methods.truncated import BudgetSplit, candidate_splits, fit_to_budget
from fairfold.subspace.packed import QuantizedPairs, QuantizedRows, pair_bytes, row_bytes


@given(
    st.integers(1, 10**6), st.integers(1, 5_000), st.integers(1, 400), st.integers(1, 400), st.floats(0.1, 1.0),
    st.integers(1, 10**6),
)  # fmt: skip
def test_a_split_stays_within_its_bytes(
    budget: int, rows: int, columns: int, wide: int, share: float, users: int
) -> None:
    given = [BudgetSplit(wide, share), BudgetSplit(0, share), BudgetSplit(wide, share, 5)]
    for shape in (*given, *candidate_splits(budget, rows, columns, users)):
        cut = fit_to_budget(budget, rows, columns, shape)
        if cut is None:
            continue
        assert 1 <= cut.rows <= rows
        assert min(shape.columns, 1) <= cut.columns <= columns
        lists = [
            QuantizedPairs((many + 1, 3), (many, 3), rows, directed)
            for many, directed in ((cut.pairs, False), (cut.neighbors, True))
        ]
        table = QuantizedRows((rows, columns + 2), (cut.rows, cut.columns + 2), cut.bits)
        assert table.bytes + sum(listed.bytes for listed in lists) <= budget


def test_the_default_split_has_columns_by_users_and_enough_rows() -> None:
    plenty = 10**9
    wanted = {1: 192, 149: 192, 150: 24, 300: 24, 500: 48, 943: 48, 2_900: 96, 6_000: 192, 10**6: 384}
    assert {users: candidate_splits(plenty, 5_000, 384, users)[0].columns for users in wanted} == wanted
    for size in (1, 4, 16, 64):  # MovieLens 1M's budgets
        budget = 3_706 * 128 // size
        shapes = candidate_splits(budget, 3_450, 384, 6_040)
        assert len(shapes) == len(set(shapes)) >= 3
        first, *others = [fit_to_budget(budget, 3_450, 384, shape) for shape in shapes]
        assert first is not None
        assert first.rows / 3_450 >= first.columns / 192 or first.columns == 12
        wider = fit_to_budget(budget, 3_450, 384, replace(shapes[0], columns=2 * first.columns))
        assert first.columns == 192 or wider is None or wider.rows / 3_450 < wider.columns / 192
        assert all(other is not None and other.rows >= 3_450 / 16 for other in others)


def test_neighbors_are_the_default_beside_rows_of_all_items_and_else_a_candidate() -> None:
    rows = 1_400
    third = pair_bytes(5 * rows, rows, directed=True)
    assert third < 10 * rows
    for budget, near in ((4 * third, 5), (3 * third, 0), (3 * third - 1, 0)):
        first, *others = candidate_splits(budget, rows, 384, 943)
        assert first.neighbors == near
        assert {other.neighbors for other in others} >= {5 if budget >= 3 * third else 1}
        for split in (first, *others):  # they take the room of no row, unless nothing but they differs from the default
            cut = fit_to_budget(budget, rows, 384, split)
            assert cut is not None
            differs = split.columns not in (0, first.columns) and split.share == 1
            assert cut.rows == rows or not (differs and split.neighbors)
    assert not any(shape.neighbors for shape in candidate_splits(10**6, rows, 384, 943, 0))
    cut = fit_to_budget(
        rows, rows, 384, BudgetSplit(12, neighbors=5)
    )  # settled by larger devices: half of the bytes at the most
    assert cut is not None
    assert 0 < cut.neighbors < rows


@given(st.integers(1, 2_000), st.integers(1, 200), st.integers(1, 10**6))
def test_numbers_have_the_most_bits_with_which_all_rows_fit(rows: int, columns: int, budget: int) -> None:
    """From eight down to four; then four for a quarter of the rows or more, and three for fewer."""
    cut = fit_to_budget(budget, rows, columns, BudgetSplit(columns))
    if cut is None:
        return

    def held(bits: int) -> int:
        return min(rows, max(0, budget - 16) // row_bytes(columns, bits))

    whole = [bits for bits in range(4, 9) if held(bits) == rows]
    assert cut.bits == (max(whole) if whole else 4 if 4 * held(4) >= rows else 3)
    assert cut.rows == held(cut.bits)


def test_many_items_are_served_by_pairs_alone() -> None:
    """Beside neighbors where users are few; a split with columns is a candidate."""
    for rows, users, columns, near in ((11_584, 2_048, 96, 5), (11_585, 2_048, 0, 5), (11_585, 2_049, 0, 0)):
        first, second, third, *_ = candidate_splits(10**8, rows, 384, users)
        assert (first.columns, first.neighbors) == (columns, near)
        assert second == replace(first, neighbors=5 - near)
        assert third.columns > 0
