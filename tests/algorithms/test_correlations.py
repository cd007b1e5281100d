"""Correlations: laws of the sum and of the model that follows from it, against an independent EASE; bad input."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fairfold.data
from fairfold.algorithms import pairs, spectrum
from fairfold.algorithms.correlations import ASKED, SUM, Correlations
from fairfold.algorithms.making import MAKINGS, Made, curve_of
from fairfold.algorithms.pair_architecture import NEAR, POPULAR, ROWS, PairArchitecture
from fairfold.algorithms.said import SAID
from fairfold.algorithms.served import Served
from fairfold.algorithms.spectrum import Precision
from fairfold.algorithms.trials import QUALITY, Schedule, Trials, said_first, verdict
from fairfold.data import Dataset, Interactions
from fairfold.errors import FairfoldError, InvalidSettings
from fairfold.methods.base import Shape
from fairfold.methods.leading import cut_to, shapes_for
from fairfold.metrics.ranking import evaluate_ranking
from fairfold.projections import Assignment, CodedRows, PairList, facts_of, projection_of
from fairfold.protocol.people import People
from fairfold.protocol.words import Answer, State
from fairfold.settings import Settings, read_settings
from fairfold.simulate import simulate
from fairfold.simulate.numbering import numbered
from fairfold.simulate.world import World
from fairfold.subspace import Capacity
from tests.federations import after_rounds, tiny_data

SECURE = {"level": "secure", "smallest_cohort": 2}


def settings_of(**algorithm: Any) -> Settings:
    tables = {
        key: algorithm.pop(key) for key in ("model", "subspace", "fleet", "run", "data", "privacy") if key in algorithm
    }
    chosen = {"kind": "correlations", "support": 1, "choose": False} | algorithm
    return read_settings({"model": {"factors": 4}, "fleet": {"capacities": "1x"}, "algorithm": chosen} | tables)


def world_of(data: Dataset, **algorithm: Any) -> World:
    settings = settings_of(**algorithm)
    return World.of(settings, numbered(data, settings))


def dataset(histories: list[list[int]], items: int) -> Dataset:
    users = torch.tensor([user for user, mine in enumerate(histories) for _ in mine])
    train = Interactions.from_pairs(
        users, torch.tensor([item for mine in histories for item in mine]), len(histories), items
    )
    return Dataset("few", train, train)


def dense(train: Interactions) -> np.ndarray:
    found = np.zeros((train.num_users, train.num_items))
    found[train.users.numpy(), train.items.numpy()] = 1
    return found


def scores(world: World, state: State) -> Tensor:
    plan = world.plan
    score = plan.algorithm.scorer(plan, state.full, plan.assignments(0), world.people)
    return score(torch.arange(world.people.num_clients))


# -- the sum -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.sets(st.integers(0, 30), max_size=31), min_size=1, max_size=12), st.integers(1, 31))
def test_the_sum_is_the_sum(histories: list[set[int]], items: int) -> None:
    mine = [torch.tensor(sorted(one), dtype=torch.int64) for one in histories]
    weights = pairs.weights_of(torch.tensor([len(one) for one in mine]))
    wanted = np.zeros((items, items))
    for history, weight in zip(mine, weights.tolist(), strict=True):
        x = np.zeros(31)
        x[history.numpy()] = 1
        wanted += weight * np.outer(x, x)[:items, :items]
    found = pairs.matrix_of(pairs.pair_sums(mine, weights, items)).numpy()
    assert np.array_equal(found, wanted)  # to the bit: multiples of the unit


@pytest.mark.parametrize("items", [1, 2, 7, 40])
def test_leading_blocks_are_prefixes(items: int) -> None:
    train = tiny_data(1, 9, 40).train
    histories, weights = [train.of(user) for user in range(9)], pairs.weights_of(train.counts_by_user)
    whole = pairs.pair_sums(histories, weights, 40)
    part = pairs.pair_sums(histories, weights, items)
    assert part.equal(whole[: len(part)])
    assert pairs.matrix_of(part).equal(pairs.matrix_of(whole)[:items, :items])
    assert pairs.items_of(len(part)) == items
    assert pairs.items_of(len(part) - 1) == items - 1


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 61))
def test_no_history_has_a_norm_above_one(history: set[int], items: int) -> None:
    mine = torch.tensor(sorted(history))
    packed = pairs.pair_sums([mine], pairs.weights_of(torch.tensor([len(mine)])), items)
    assert pairs.frobenius(packed) == pytest.approx(float(torch.linalg.norm(pairs.matrix_of(packed))), rel=1e-6)
    assert pairs.frobenius(packed) <= 1 + 1e-6
    if items > int(mine[-1]):
        assert pairs.frobenius(packed) == pytest.approx(1, abs=len(mine) / pairs.UNIT)


@pytest.mark.parametrize("cohort", [1, 3, None])
def test_cohorts_and_their_order_do_not_matter(cohort: int | None) -> None:
    data = tiny_data(2, 12, 30)
    fleet = {"capacities": "1x-4x", "clients_per_round": cohort}
    wanted = world_of(data, fleet=fleet | {"clients_per_round": None})
    expected = after_rounds(wanted, wanted.initial(), 1)
    world = world_of(data, fleet=fleet, run={"seed": 5})
    state, rounds = world.initial(), 0
    while not bool(world.people.private[SAID].all()):
        state = after_rounds(world, state, 1)
        rounds += 1
        assert rounds < 200
    assert state.moments[SUM][SUM].equal(expected.moments[SUM][SUM])
    assert all(state.full[name].equal(of) for name, of in expected.full.items())
    again = after_rounds(world, state, 2)  # whoever comes back adds nothing
    assert again.moments[SUM][SUM].equal(state.moments[SUM][SUM])
    assert all(again.full[name].equal(of) for name, of in state.full.items())


def test_small_devices_say_a_shorter_prefix_under_masks() -> None:
    world = world_of(tiny_data(2, 12, 30), fleet={"capacities": "1x-4x-16x"}, privacy=SECURE)
    plan, algorithm = world.plan, world.plan.algorithm
    assert isinstance(algorithm, Correlations)
    assert isinstance(plan.architecture, PairArchitecture)
    head, whole = plan.architecture.head, plan.architecture.whole
    for size, share in enumerate((1, 4, 16)):
        said = algorithm.spoken(plan, size).size
        assert said == pairs.size_of(min(head, pairs.items_of(pairs.size_of(whole) // share)))
        assert algorithm.traffic(plan, size)[1] == 4 * said


def test_small_devices_say_all_where_uploads_do_not_depend_on_their_size() -> None:
    world = world_of(tiny_data(2, 12, 30), fleet={"capacities": "1x-4x-16x"}, subspace={"uploads": "all"})
    plan, algorithm = world.plan, world.plan.algorithm
    assert isinstance(algorithm, Correlations)
    assert len({algorithm.spoken(plan, size).size for size in range(3)}) == 1
    assert len({held.bytes() for held in plan.assignments(0)}) > 1  # their models do


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_no_history_can_say_is_refused() -> None:
    world = world_of(tiny_data(2, 6, 20))
    plan, algorithm = world.plan, world.plan.algorithm
    (sent,) = algorithm.send(plan, world.initial(), [0])
    good, _ = algorithm.answer(plan, sent, world.people.client(1, 0))
    assert algorithm.problem(plan, sent, good) is None
    assert algorithm.problem(plan, sent, Answer({SUM: 1.01 * good.sums[SUM]}, 1.0)) == "a norm above that of its users"
    assert algorithm.problem(plan, sent, good + Answer({SUM: good.sums[SUM]}, 0.0)) is not None
    below = good.sums[SUM].to_dense()
    assert algorithm.problem(plan, sent, Answer({SUM: below * torch.nan}, 1.0)) == "NaN or infinity"
    assert algorithm.problem(plan, sent, Answer({SUM: below[:-1]}, 1.0)) == "wrong size"


def test_settings_that_do_not_go_together() -> None:
    for tables in (
        {"algorithm": {"kind": "correlations"}, "subspace": {"method": "fair"}},
        {"algorithm": {"kind": "correlations"}, "model": {"kind": "neumf"}},
        {"algorithm": {"kind": "correlations", "ridge": 0}},
    ):
        with pytest.raises(InvalidSettings):
            read_settings(tables)
    with pytest.raises(InvalidSettings, match="correlations"):
        simulate(read_settings({"algorithm": {"kind": "gradient"}, "subspace": {"method": "leading"}}))


# -- the model ---------------------------------------------------------------------------------------------------------


def test_all_of_the_spectrum_is_ease() -> None:
    """B = I − P / diag P, by numpy, on the same sum: b_j S_ij a_i is its scores, whatever the weights of items."""
    x = dense(tiny_data(4, 50, 20).train)
    gram = x.T @ x
    for beta in (0.0, 0.4):
        counts = x.sum(0).clip(1)
        scale = (counts / counts.mean()) ** -beta
        inverse = np.linalg.inv(scale[:, None] * gram * scale + 3 * np.eye(20))
        ease = -inverse / np.diag(inverse)
        np.fill_diagonal(ease, 0)
        found = Precision.of(torch.from_numpy(gram.copy()), torch.from_numpy(x.sum(0)), beta, 3.0)
        roots, scales = found.roots.clone(), found.scales
        values, vectors = found.spectrum(20)
        partial = found.correlations()
        np.testing.assert_allclose((x * (scales * roots).numpy()) @ partial.numpy() / roots.numpy(), x * scale @ ease)
        np.testing.assert_allclose((vectors * values @ vectors.T).numpy(), partial.numpy(), atol=1e-9)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_leading_eigenpairs_are_those_of_the_whole(dtype: torch.dtype, error: float) -> None:
    source = torch.Generator().manual_seed(1)
    half = torch.randn(500, 500, generator=source, dtype=torch.float64) * torch.linspace(3, 0.1, 500)
    matrix, roots = half @ half.T / 500 + torch.eye(500), torch.rand(500, generator=source, dtype=torch.float64) + 0.5
    values, vectors = spectrum.leading(matrix.to(dtype), roots, 10)  # a Krylov space
    whole = roots[:, None] * matrix * roots
    exact = torch.linalg.eigh(whole)
    torch.testing.assert_close(values.double(), exact.eigenvalues[-10:].flip(0), rtol=error, atol=0)
    left = (whole @ vectors.double() - vectors * values).norm(dim=0) / values
    assert float(left.max()) <= 2 * spectrum.TOLERANCE[dtype]
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(10, dtype=dtype), rtol=0, atol=100 * error)


@pytest.mark.parametrize("rank", [1, 40])
def test_a_spectrum_of_few_different_values_is_found(rank: int) -> None:
    """A Krylov space is exhausted after few products, and goes on with what chance brings."""
    source = torch.Generator().manual_seed(2)
    half = torch.randn(600, rank, generator=source)
    matrix = half @ half.T + torch.eye(600)
    values, vectors = spectrum.leading(matrix, torch.ones(600), 60)
    exact = torch.linalg.eigvalsh(matrix.double())[-60:].flip(0)
    torch.testing.assert_close(values.double(), exact, rtol=1e-3, atol=0)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(60), rtol=0, atol=1e-4)


def test_items_that_nobody_speaks_of_bring_no_false_eigenvalues() -> None:
    """All of theirs are 1: a space that is exhausted must not go on with rounding errors."""
    source = torch.Generator().manual_seed(3)
    half = torch.randn(100, 150, generator=source, dtype=torch.float64)
    matrix = torch.eye(2_000, dtype=torch.float64)
    matrix[:100, :100] += half @ half.T
    for dtype, error in ((torch.float32, 1e-3), (torch.float64, 1e-7)):
        values, vectors = spectrum.leading(matrix.to(dtype), torch.ones(2_000), 128)
        exact = torch.linalg.eigvalsh(matrix[:100, :100]).flip(0)
        torch.testing.assert_close(values[:100].double(), exact, rtol=error, atol=0)
        torch.testing.assert_close(values[100:], torch.ones(28, dtype=dtype), rtol=error, atol=0)
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(128, dtype=dtype), rtol=0, atol=error)


def test_single_precision_gives_the_correlations_of_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the sum is so large against the ridge that items which are always together could not be told apart."""
    train = tiny_data(4, 400, 60).train
    counts = train.counts_by_item
    packed = pairs.pair_sums([train.of(user) for user in range(400)], pairs.weights_of(train.counts_by_user), 60)
    whole = Precision.of(pairs.matrix_of(packed), counts, 0.15, 4.0)
    monkeypatch.setattr(spectrum, "SMALL", 0)
    single = Precision.of(pairs.matrix_of(packed), counts, 0.15, 4.0)
    assert whole.matrix.dtype == torch.float64
    assert single.matrix.dtype == torch.float32
    torch.testing.assert_close(single.roots, whole.roots, rtol=1e-5, atol=0)
    torch.testing.assert_close(single.correlations().double(), whole.correlations(), rtol=0, atol=1e-5)
    assert Precision.of(pairs.matrix_of(packed * 1e6), counts, 0.15, 4.0).matrix.dtype == torch.float64
    together = torch.full((400, 400), 2_000.0)  # all items always: the worst sum that single precision is trusted with
    found = Precision.of(together, torch.ones(400), 0.0, 1.0)
    assert found.matrix.dtype == torch.float32
    exact = torch.full((400, 400), 2_000.0, dtype=torch.float64) + torch.eye(400, dtype=torch.float64)
    torch.testing.assert_close(found.roots, torch.linalg.inv(exact).diagonal().sqrt(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("many", [1, 7, 100, 10_000])
def test_the_strongest_pairs_are_those_of_a_full_search(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(spectrum, "ROWS_AT_ONCE", 8)
    source = torch.Generator().manual_seed(3)
    matrix = torch.randn(30, 30, generator=source, dtype=torch.float64)
    matrix = (matrix + matrix.T).fill_diagonal_(0)
    counts = torch.arange(60, 30, -1)
    left = matrix.abs() * (counts[:, None] * counts) ** 0.25
    ranked = sorted(((float(left[i, j]), i, j) for i in range(30) for j in range(i)), reverse=True)[:many]
    found = spectrum.strongest(matrix, counts, many)
    assert found.shape == (many, 3)
    wanted = torch.tensor([[i, j, matrix[i, j]] for _, i, j in ranked])
    torch.testing.assert_close(found[: len(ranked)], wanted.double(), rtol=0, atol=1e-6)
    assert not bool(found[len(ranked) :].any())


def test_a_score_needs_the_history_alone() -> None:
    world = world_of(tiny_data(2, 30, 25))
    state = after_rounds(world, world.initial(), 1)
    assert world.plan.algorithm.from_history
    into, out, rows = torch.split(state.full[ROWS].view(-1, 6), [1, 1, 4], dim=1)
    mine = torch.tensor([2, 5, 7])
    new = People(world.plan, Interactions.from_pairs(torch.zeros(3).long(), mine, 1, 25), {})
    score = world.plan.algorithm.scorer(world.plan, state.full, world.plan.assignments(0), new)
    head = len(rows)
    wanted = out[:, 0] * (rows @ (into[mine] * rows[mine]).sum(0))
    for item, other, value in state.full[NEAR].view(-1, 3).tolist():
        wanted[int(item)] += value * (item != other and int(other) in mine.tolist())
    curve, places = state.full[POPULAR].log().numpy(), np.log2(np.arange(head) + 1.0)
    wanted += torch.from_numpy(np.exp(np.interp(places, np.arange(len(curve)), curve))) / (1 + len(mine))
    torch.testing.assert_close(score(torch.tensor([0]))[0, :head], wanted)


def test_popularity_adds_the_share_of_users_less_the_more_a_history_says() -> None:
    """At the items 0, 1, 3, … exactly, falling between them, in a (1 + n)-th part, and nothing without its setting."""
    counts = torch.tensor([40, 20, 18, 16, 11, 9, 8, 8, 3])
    made, places = Made(1, 2, 0.15, 0, len(counts), prior=2.0), torch.tensor([0, 1, 3, 7])
    curve = curve_of(counts, 50, made)
    wanted = 2 * (counts / counts.double().mean()) ** -0.15 * counts / 50
    torch.testing.assert_close(curve[:4], wanted[places])
    none, rows = torch.empty(0, 3), torch.rand(8, 5, generator=torch.Generator().manual_seed(0)) + 0.1
    served, plain = Served(rows, none, 1.0, popular=curve), Served(rows, none, 1.0)
    items = torch.arange(8)
    assert served.popular(places).tolist() == pytest.approx(wanted[places].tolist())
    assert served.popular(items).diff().le(0).all()
    for history in (torch.tensor([], dtype=torch.int64), torch.tensor([2]), torch.tensor([0, 4, 5])):
        both = [one.scores(one.histories([history]), items)[0] for one in (served, plain)]
        torch.testing.assert_close(both[0] - both[1], served.popular(items) / (1 + len(history)))
    without = Served(rows, none, 1.0, popular=curve_of(counts, 50, made._replace(prior=0.0)))
    mine = torch.tensor([1, 6])
    assert without.scores(without.histories([mine]), items).equal(plain.scores(plain.histories([mine]), items))


def test_who_has_little_is_served_by_what_everybody_has() -> None:
    """Histories of two items by chance, of which most are popular: no pair says more than that."""
    source = torch.Generator().manual_seed(4)
    items = (200 * torch.rand(600, 3, generator=source) ** 2).long()
    users = torch.arange(600)[:, None].expand(-1, 3)
    train = Interactions.from_pairs(users[:, :2].flatten(), items[:, :2].flatten(), 600, 200)
    data = Dataset("short", train, Interactions.from_pairs(users[:, 2], items[:, 2], 600, 200))
    found = [
        simulate(read_settings({"algorithm": {"prior": prior}, "run": {"rounds": 1}}), data=data).quality
        for prior in (0.0, 1.0)
    ]
    assert found[1] > 1.1 * found[0]


def test_items_outside_the_head_come_last_by_popularity() -> None:
    world = world_of(tiny_data(2, 30, 25), head=10)
    found = scores(world, after_rounds(world, world.initial(), 1))
    assert world.plan.architecture.tables[ROWS] == (10, 6)
    assert bool((found[:, 10:].amax(1) < found[:, :10].amin(1)).all())
    assert bool((found[:, 10:-1] > found[:, 11:]).all())


def test_the_model_may_be_asked_for_at_any_time() -> None:
    world = world_of(tiny_data(2, 30, 25), fleet={"capacities": "1x", "clients_per_round": 7})
    state = world.initial()
    assert bool((scores(world, state)[:, :-1] > scores(world, state)[:, 1:]).all())  # nobody has spoken: popularity
    assert bool(torch.isfinite(scores(world, after_rounds(world, state, 1))).all())


# -- sizes -------------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 10**6), st.integers(1, 5_000), st.integers(1, 400), st.integers(1, 400), st.floats(0.1, 1.0),
    st.integers(1, 10**6),
)  # fmt: skip
def test_a_cut_keeps_within_its_bytes(
    budget: int, rows: int, columns: int, wide: int, share: float, users: int
) -> None:
    given = [Shape(wide, share), Shape(0, share), Shape(wide, share, 5)]
    for shape in (*given, *shapes_for(budget, rows, columns, users)):
        cut = cut_to(budget, rows, columns, shape)
        if cut is None:
            continue
        assert 1 <= cut.rows <= rows
        assert min(shape.columns, 1) <= cut.columns <= columns
        lists = [PairList((many + 1, 3), (many, 3), rows) for many in (cut.pairs, cut.near)]
        table = CodedRows((rows, columns + 2), (cut.rows, cut.columns + 2), cut.bits)
        assert table.bytes + sum(listed.bytes for listed in lists) <= budget


def test_the_longer_histories_are_the_smaller_is_the_penalty() -> None:
    """In the model that is made, as well: one of twice as long histories has 1/√2 of the other's λ."""
    assert spectrum.penalty(4.0, 75) == 4.0
    assert spectrum.penalty(3.0, 300) == 1.5
    assert spectrum.penalty(1.0, 0.0) == spectrum.penalty(1.0, 1.0)
    histories = [[user % 8 + place for place in range(4)] for user in range(16)]
    found = []
    for mine in (histories, [items + [item + 11 for item in items] for items in histories]):
        world = world_of(dataset(mine, 22))
        found.append(float(after_rounds(world, world.initial(), 1).moments["made"]["made"][0]))
    assert found[0] == pytest.approx(4.0 * (75 / 4) ** 0.5)
    assert found[1] == pytest.approx(found[0] / 2**0.5)


def test_what_is_tried_first_has_columns_by_users_and_rows_enough() -> None:
    plenty = 10**9
    wanted = {1: 192, 149: 192, 150: 24, 300: 24, 500: 48, 943: 48, 2_900: 96, 6_000: 192, 10**6: 384}
    assert {users: shapes_for(plenty, 5_000, 384, users)[0].columns for users in wanted} == wanted
    for size in (1, 4, 16, 64):  # MovieLens 1M's budgets
        budget = 3_706 * 128 // size
        shapes = shapes_for(budget, 3_450, 384, 6_040)
        assert len(shapes) == len(set(shapes)) >= 3
        first, *others = [cut_to(budget, 3_450, 384, shape) for shape in shapes]
        assert first is not None
        assert first.rows >= 0.3 * 3_450 or first.columns == 12
        assert all(other is not None and other.rows >= 3_450 / 16 for other in others)


def test_no_row_is_of_an_item_that_no_device_speaks_of() -> None:
    """Where the largest devices are 16x: what they hold is then all that there is, with as many columns as fit."""
    data = tiny_data(40, 12, 200)
    seen, whole = (world_of(data, **of).plan.architecture.head for of in ({}, {"privacy": SECURE}))  # type: ignore[attr-defined]
    for capacities, share in (("4x-64x", 4), ("16x", 16)):
        assert world_of(data, fleet={"capacities": capacities}).plan.architecture.head == seen  # type: ignore[attr-defined]
        world = world_of(data, fleet={"capacities": capacities}, privacy=SECURE)
        head = world.plan.architecture.head  # type: ignore[attr-defined]
        assert head == pairs.items_of(pairs.size_of(whole) // share) < whole
        assert world.plan.algorithm.spoken(world.plan, 0).size == pairs.size_of(head)  # type: ignore[attr-defined]
    assert shapes_for(7_412, 437, 384, 6_040, whole=3_503)[0].columns == 24  # 437 rows of 24 columns in 4 bits
    assert shapes_for(7_412, 437, 384, 6_040)[0].columns == 96


def test_neighbours_are_held_where_they_leave_room_and_tried_where_they_do_not() -> None:
    rows = 1_400
    for budget, near in ((16 * rows * 3 + 12, 5), (16 * rows * 3 + 11, 0)):  # 16 bytes per item, and 4 for all
        first, *others = shapes_for(budget, rows, 384, 943)
        assert first.near == near
        assert {other.near for other in others} == {near, 1 - min(near, 1)}
    assert not any(shape.near for shape in shapes_for(10**6, rows, 384, 943, 0))
    cut = cut_to(rows, rows, 384, Shape(12, near=5))  # settled by larger devices: half of the bytes at the most
    assert cut is not None
    assert 0 < cut.near < rows


def test_rows_without_columns_are_their_factors() -> None:
    table = torch.rand(20, 12, generator=torch.Generator().manual_seed(0)) + 0.1
    held = CodedRows((20, 12), (9, 2), 8)
    compact = held.reduce(table.view(-1))
    stored = held.packed(compact)
    assert len(stored) == held.bytes == 18
    assert held.unpacked(stored).equal(compact)
    torch.testing.assert_close(compact.view(9, 2), table[:9, :2], rtol=np.exp(1 / 32) - 1, atol=0)
    assert projection_of(facts_of(held)) == held
    given, hidden = [torch.tensor([1, 4])], torch.arange(9)
    listed = torch.tensor([[5, 1, 0.5], [7, 4, 0.25], [8, 5, 0.1]])
    scores = []
    for rows in (compact.view(9, 2), held.table(stored)):
        served = Served(rows, listed, 1.0)
        scores.append(served.scores(served.histories(given), hidden)[0])
    assert scores[0].equal(scores[1])
    assert scores[0].argsort(descending=True, stable=True)[:3].tolist() == [5, 7, 0]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_what_is_stored_is_what_is_held(bits: int) -> None:
    table = torch.randn(20, 12, generator=torch.Generator().manual_seed(0))
    table[:, :2] = table[:, :2].abs() + 0.1
    table[3, 2:] = 0
    held = CodedRows((20, 12), (9, 7), bits)
    compact = held.reduce(table.view(-1))
    stored = held.packed(compact)
    assert stored.dtype == torch.uint8
    assert len(stored) == held.bytes
    assert held.unpacked(stored).equal(compact)
    assert projection_of(facts_of(held)) == held
    # Every product b_j ⟨w_j, w_i⟩ a_i is what the table's is, to what its bits and its factors' bytes allow.
    rows, wanted = compact.view(9, 7).double(), table[:9, :7].double()
    found, exact = ((of[:, 1:2] * of[:, 2:]) @ (of[:, :1] * of[:, 2:]).T for of in (rows, wanted))
    step = wanted[:, 2:].abs().amax(1) / (2 ** (bits - 1) - 1) / 2
    size = wanted[:, 2:].abs().sum(1)
    off = step[:, None] * size + step * size[:, None] + 5 * step[:, None] * step
    allowed = wanted[:, 1:2] * wanted[:, :1].T * off + (np.exp(1 / 16) - 1) * exact.abs() * 1.1
    assert bool(((found - exact).abs() <= allowed + 1e-3 * off).all())


def test_a_list_of_pairs_is_stored_as_it_is_held() -> None:
    rows = torch.tensor([[5, 3, 0.5], [4, 1, -0.25], [5, 0, 0.1], [2, 1, 0.2], [7999, 4000, 0.3]])
    for items in (2, 8_000):  # counted, or listed
        for many in (0, 2, 3, 5):
            mine = rows.clone()
            mine[:, :2] %= items
            held = PairList((5, 3), (many, 3), items)
            compact = held.reduce(mine.view(-1))
            assert len(held.packed(compact)) == held.bytes
            torch.testing.assert_close(held.unpacked(held.packed(compact)), compact)
            wanted = sorted(mine[:many].tolist(), key=lambda row: row[:2])
            torch.testing.assert_close(compact.view(-1, 3)[:, :2], torch.tensor(wanted).view(-1, 3)[:, :2])
            torch.testing.assert_close(compact.view(-1, 3)[:, 2].sum(), mine[:many, 2].sum(), rtol=0, atol=0.01)
            assert projection_of(facts_of(held)) == held


@pytest.mark.parametrize(
    "facts", [{"kept": [2, 3], "bits": 9}, {"kept": [2, 3], "bits": True}, {"kept": [9, 3]}, {"kept": [2, 1]}]
)
def test_facts_of_no_block_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        projection_of({"kind": "coded rows", "shape": [4, 4], "bits": 8} | facts)
    with pytest.raises((ValueError, KeyError)):
        projection_of({"kind": "pair list", "shape": [4, 4], "items": 4} | facts)


def test_pairs_make_up_for_what_rows_miss() -> None:
    """With every pair listed and counted in full, a table of few columns, or none, scores as all correlations do."""
    world = world_of(tiny_data(2, 30, 9), pair_weight=1.0, model={"factors": 9})
    plan, state = world.plan, after_rounds(world, world.initial(), 1)
    head = plan.architecture.tables[ROWS][0]
    gram = pairs.matrix_of(state.moments[SUM][SUM])
    ridge = float(state.moments["made"]["made"][0])
    precision = Precision.of(gram, plan.public.survey["counts"][:head], 0.15, ridge)
    table = state.full[ROWS].view(head, -1).clone()
    listed = spectrum.strongest(Precision.of(
        pairs.matrix_of(state.moments[SUM][SUM]), plan.public.survey["counts"][:head], 0.15, ridge
    ).correlations(), torch.ones(head), head * head)  # fmt: skip
    rarer, other = listed[:, :2].long().T
    listed[:, 2] *= table[rarer, 1] * table[other, 0]
    histories = [world.people.train.of(user) for user in range(30)]
    x = torch.from_numpy(dense(world.people.train))[:, :head]
    roots, scales = precision.roots.clone(), precision.scales
    wanted = (x * scales * roots) @ precision.correlations() / roots
    new = x == 0  # what an item says of itself, the rows tell and a regression leaves out
    for columns in (0, 1, 4):
        served = Served(table[:, : 2 + columns], listed.float(), 1.0)
        score = served.scores(served.histories(histories), torch.arange(head))
        torch.testing.assert_close(score.double()[new], wanted[new], rtol=1e-4, atol=1e-5)


# -- trials ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", range(1, 30))
def test_a_schedule_asks_before_and_after_its_trials(rounds: int) -> None:
    schedule = Schedule.of(rounds, 8)
    tried = [schedule.trial(number) for number in range(rounds)]
    assert [trial for trial in tried if trial is not None] == list(range(min(8, max(0, rounds - 2))))
    assert tried[-1] is None
    assert tried[0] is None


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=60, unique=True), min_size=1, max_size=8))
def test_what_is_held_back_follows_from_a_history_alone(histories: list[list[int]]) -> None:
    mine = [torch.tensor(sorted(one), dtype=torch.int64) for one in histories]
    lengths = torch.tensor([len(one) for one in mine])
    together = torch.split(said_first(torch.cat(mine), lengths), lengths.tolist())
    for history, first in zip(mine, together, strict=True):
        assert first.equal(said_first(history, torch.tensor([len(history)])))
        held = int((~first).sum())
        assert held == (max(1, round(len(history) / 10)) if len(history) >= 3 else 0)


def test_a_verdict_needs_more_than_its_error_and_of_few_users_more_than_that() -> None:
    few = torch.tensor([0.1, 0.3, -0.1, 0.2], dtype=torch.float64)
    better = few.repeat(100)

    def tally(*differences: torch.Tensor) -> torch.Tensor:
        rows = [[len(of), 0.5, float(of.sum()), float((of**2).sum())] for of in (0 * differences[0], *differences)]
        return torch.tensor(rows, dtype=torch.float64)

    found = verdict(tally(better, better * 0.5), [0, 1, 2], 1.0)
    assert found.chosen == 1
    assert found.better == pytest.approx(float(better.mean()))
    assert found.error == pytest.approx(float(better.std() / 20))
    assert verdict(tally(better - 0.117), [0, 1], 1.0).chosen == 0  # +0.008 ± 0.0074; 400 users need 1.25 errors
    assert verdict(tally(better - 0.117), [0, 1], 0.8).chosen == 1
    assert verdict(tally(few), [0, 1], 1.0).chosen == 0  # +0.125 ± 0.085, of four users
    assert verdict(torch.zeros(3, 4), [0, 1, 2], 1.0).chosen == 0  # nobody judged


def test_sizes_that_hold_the_same_model_judge_it_together() -> None:
    """Two sizes of more bytes than there is to hold: what neither is sure of alone, both are; not a third."""
    held = PairArchitecture(50_000, 1, 2_000, 384, 6_000)
    trials = Trials.of([10**8, 10**7, 100_000], held, 16)
    assert trials.cuts[0] == trials.cuts[1]
    assert trials.cuts[0][0] != trials.cuts[2][0]
    tally = torch.zeros(len(trials.shapes[0]) + len(MAKINGS) - 1, 4, dtype=torch.float64)
    tally[:, 0] = 1000
    tally[1] = torch.tensor([1000.0, 300.0, 4.5, 10.0])  # +0.0045 ± 0.0032, where 1.65 errors are asked for
    alone = [found.chosen for found in trials.verdicts({"0": tally.view(-1)})[0]]
    assert alone == [0, 0, 0]
    both, _ = trials.verdicts({"0": tally.view(-1), "1": tally.view(-1)})
    assert [found.chosen for found in both] == [1, 1, 0]
    assert [found.users for found in both] == [2000, 2000, 0]
    other, _ = trials.verdicts({"0": tally.view(-1), "2": tally.view(-1)})
    assert [found.users for found in other] == [1000, 1000, 1000]


def test_trials_end_in_the_sum_and_the_model_of_all_histories() -> None:
    """Nine tenths, trials, the rest: together they are what devices say at once, and so is the model that is chosen."""
    data = tiny_data(2, 40, 60)
    fleet = {"capacities": "1x-4x"}
    world = world_of(data, fleet=fleet, choose=True, model={"factors": 48}, run={"rounds": 10})
    algorithm = world.plan.algorithm
    assert isinstance(algorithm, Correlations)
    trials = algorithm.trials(world.plan)
    first, state = trials.schedule.first, after_rounds(world, world.initial(), trials.schedule.first)
    at_once = world_of(data, fleet=fleet, model={"factors": 48})
    expected = after_rounds(at_once, at_once.initial(), 1)
    assert not state.moments[SUM][SUM].equal(expected.moments[SUM][SUM])
    assert 0.5 < float(world.people.private[SAID].mean()) < 1
    for trial in range(trials.schedule.trials):
        (sent, *_) = algorithm.send(world.plan, state, [0, 1])
        assert float(sent.vectors[ASKED][1]) == trial
        assert set(sent.context) == {QUALITY}
        state = after_rounds(world, state, 1)
        for size in (0, 1):
            users, quality, apart, squares = state.moments[QUALITY][str(size)].view(-1, 4)[trial].tolist()
            assert 0 < users <= 20
            assert 0 <= quality <= users
            assert (apart == squares == 0) or trial > 0
    state = after_rounds(world, state, 10 - first - trials.schedule.trials)
    assert state.round_number == 10
    assert state.moments[SUM][SUM].equal(expected.moments[SUM][SUM])
    making, columns = trials.wanted(10, state.moments[QUALITY])
    length = len(data.train) / data.num_users  # all items have support here
    made = Made(*state.moments["made"]["made"].tolist())
    assert made.ridge == pytest.approx(4.0 * making.ridge * (75 / length) ** 0.5)
    assert made[1:4] == (columns, 0.15 * making.beta, 0.05 * making.near)
    wanted = algorithm.model(world.plan, state.moments[SUM][SUM], made)
    torch.testing.assert_close(state.full[ROWS], wanted[ROWS].float().view(-1), rtol=1e-4, atol=1e-5)


def test_every_making_is_tried_and_tells_what_it_is() -> None:
    """λ, β, neighbours and support: each is what its round is about, and the one that is surely better is kept."""
    data = tiny_data(2, 40, 60)
    world = world_of(data, choose=True, model={"factors": 48}, run={"rounds": 30}, support=2)
    plan, algorithm = world.plan, world.plan.algorithm
    assert isinstance(algorithm, Correlations)
    trials, counts = algorithm.trials(plan), plan.public.survey["counts"]
    own = 4.0 * (75 / plan.architecture.length) ** 0.5  # type: ignore[attr-defined]
    many = len(trials.shapes[0])
    assert trials.schedule.trials == many + len(MAKINGS) - 1
    for place, making in enumerate(MAKINGS):
        number = trials.schedule.first + (many + place - 1 if place else 0)
        made = algorithm.made(plan, State({}, number, {}))
        assert made.ridge == pytest.approx(own * making.ridge)
        assert (made.beta, made.near) == pytest.approx((0.15 * making.beta, 0.05 * making.near))
        assert made.prior == making.prior
        assert made.items == int((counts >= 2 * making.support).sum())
    for place in range(1, len(MAKINGS)):
        tally = torch.zeros(many + len(MAKINGS) - 1, 4, dtype=torch.float64)
        tally[:, 0] = 1000
        tally[many + place - 1] = torch.tensor([1000.0, 300.0, 50.0, 5.0])  # +0.05 ± 0.0016
        tallies = {"0": tally.view(-1)}
        assert trials.wanted(trials.schedule.end, tallies)[0] == MAKINGS[place]
        state = State(
            {},
            30,
            {QUALITY: tallies, "made": {"made": torch.tensor(algorithm.made(plan, State({}, 30, {QUALITY: tallies})))}},
        )
        assert f"best of {len(MAKINGS)} (+0.0500 ± 0.0016" in algorithm.told(plan, state)[0]


def test_more_support_is_the_leading_block_of_the_same_sum() -> None:
    world = world_of(tiny_data(2, 30, 25))
    plan, state = world.plan, after_rounds(world, world.initial(), 1)
    algorithm, sums = plan.algorithm, state.moments[SUM][SUM]
    assert isinstance(algorithm, Correlations)
    part = algorithm.model(plan, sums, Made(4.0, 4, 0.15, 0.05, 10))
    small = world_of(tiny_data(2, 30, 25), head=10)
    after = after_rounds(small, small.initial(), 1)
    few = Correlations.model(small.plan.algorithm, small.plan, sums[: pairs.size_of(10)], Made(4.0, 4, 0.15, 0.05, 10))  # type: ignore[arg-type]
    assert len(after.moments[SUM][SUM]) == pairs.size_of(10)
    torch.testing.assert_close(part[ROWS][:10, :6], few[ROWS])
    assert not bool(part[ROWS][10:].any())
    near = part[NEAR].view(5, -1, 3)
    assert bool((near[:, :10, :2] < 10).all())
    assert bool((near[:, 10:, 0] == near[:, 10:, 1]).all())


def test_neighbours_are_the_most_alike_and_speak_one_way() -> None:
    """By counts of pairs, where histories are of one length: Jaccard; and a score is the rows', and their sum."""
    histories = [sorted({(user * 7 + step * step) % 23 for step in range(30)})[:6] for user in range(50)]
    x = dense(dataset(histories, 23).train)
    both, counts = x.T @ x, x.sum(0)
    alike = both / np.maximum(counts[:, None] + counts - both, 1)
    np.fill_diagonal(alike, 0)
    found = spectrum.neighbours(torch.from_numpy(both / 6), torch.from_numpy(counts), 3).numpy().reshape(3, 23, 3)
    for item in range(23):
        best = np.sort(alike[item])[::-1][:3]
        np.testing.assert_allclose(found[:, item, 2], best, atol=1e-12)
        real = best > 0
        np.testing.assert_allclose(alike[item, found[real, item, 1].astype(int)], best[real])
        assert (found[~real, item, 1] == item).all()
    rows, listed = torch.rand(23, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(0, 3)
    near = torch.from_numpy(found.reshape(-1, 3)).float()
    alone, with_near = Served(rows, listed, 1.0), Served(rows, listed, 1.0, near)
    mine, everything = [torch.tensor([1, 4, 9])], torch.arange(23)
    added = with_near.scores(with_near.histories(mine), everything) - alone.scores(alone.histories(mine), everything)
    wanted = torch.zeros(23)
    for item, other, value in near.tolist():
        wanted[int(item)] += value * (item != other and int(other) in (1, 4, 9))
    torch.testing.assert_close(added[0], wanted, rtol=1e-4, atol=1e-5)
    assert float(added.abs().max()) > 0.05


def test_a_judgement_is_the_ranking_quality_on_what_was_held_back() -> None:
    """What a device tells of a trial is NDCG as the metrics have it, from what it has said to what it has not."""
    data = tiny_data(2, 40, 60)
    world = world_of(data, choose=True, model={"factors": 48}, run={"rounds": 10, "top": 5})
    plan, people = world.plan, world.people
    algorithm = plan.algorithm
    assert isinstance(algorithm, Correlations)
    state = after_rounds(world, world.initial(), algorithm.trials(plan).schedule.first)
    (sent,) = algorithm.send(plan, state, [0])
    train, said = people.train, people.private[SAID][:, 0] > 0
    parts = [
        Interactions.from_pairs(train.users[of], train.items[of], train.num_users, train.num_items)
        for of in (said, ~said)
    ]
    full = {name: held.recover(sent.vectors[name]) for name, held in sent.projections.items()}
    settled = algorithm.settled(plan, state)
    score = algorithm.scorer(settled, full, settled.assignments(0), People(settled, parts[0], {}))
    wanted = evaluate_ranking(score, parts[0], parts[1], 5)
    for place, user in enumerate(wanted.users.tolist()):
        answer, own = algorithm.answer(plan, sent, people.client(user, state.round_number))
        quality = float(wanted.ndcg_by_user[place])
        assert answer.sums[QUALITY].tolist() == pytest.approx([1, quality, 0, 0], abs=2**-17)  # on the grid of pairs
        assert float(own["judged"]) == pytest.approx(1 + float(wanted.ndcg_by_user[place]), abs=1e-6)
    assert isinstance(algorithm.trials(plan), Trials)


def test_a_judgement_tells_how_much_better_a_model_is_than_the_first() -> None:
    histories = [[*range(user, 60, user % 5 + 2)] for user in range(30)] + [[0, 1], [3]]
    world = world_of(dataset(histories, 60), choose=True, model={"factors": 48}, run={"rounds": 10, "top": 5})
    plan, people = world.plan, world.people
    algorithm = plan.algorithm
    assert isinstance(algorithm, Correlations)
    state, told = world.initial(), list[list[list[float]]]()
    for _ in range(algorithm.trials(plan).schedule.end):
        (sent,) = algorithm.send(plan, state, [0])
        if QUALITY in sent.context:
            clients = [people.client(user, state.round_number) for user in range(32)]
            told.append([algorithm.answer(plan, sent, one)[0].sums[QUALITY].tolist() for one in clients])
        state = after_rounds(world, state, 1)
    first, *others = told
    assert first[30] == first[31] == [0, 0, 0, 0]  # who holds nothing back does not judge
    for other in others:
        for before, after in zip(first[:30], other[:30], strict=True):
            apart = after[1] - before[1]
            assert after == pytest.approx([1, after[1], apart, apart**2], abs=4 * 2**-16)
    assert any(abs(after[2]) > 0.01 for other in others for after in other)


def test_judgements_out_of_range_are_refused() -> None:
    world = world_of(tiny_data(2, 40, 60), choose=True, model={"factors": 48}, run={"rounds": 10})
    plan, algorithm = world.plan, world.plan.algorithm
    assert isinstance(algorithm, Correlations)
    state = after_rounds(world, world.initial(), algorithm.trials(plan).schedule.first)
    (sent,) = algorithm.send(plan, state, [0])
    for told in ([2.0, 0, 0, 0], [1, 1.5, 0, 0], [1, 0.5, -1.2, 0], [1, 0.5, 0, -0.1], [-1.0, 0, 0, 0]):
        answer = Answer({QUALITY: torch.tensor(told)}, 1.0)
        assert algorithm.problem(plan, sent, answer) == "judgements above one per user"
    assert algorithm.problem(plan, sent, Answer({QUALITY: torch.tensor([1, 1, 0.5, 0.25])}, 1.0)) is None


@pytest.mark.parametrize("capacity", ["1x", "2x", "4x", "16x"])
def test_a_device_scores_by_its_bytes(capacity: str) -> None:
    world = world_of(tiny_data(2, 30, 120), model={"factors": 70})
    plan, state = world.plan, after_rounds(world, world.initial(), 1)
    projections, _, _ = plan.at(Capacity.parse(capacity), 0)
    compact = {name: held.reduce(state.full[name]) for name, held in projections.items()}
    stored = {name: held.packed(compact[name]) for name, held in projections.items()}
    full = {name: held.recover(compact[name]) for name, held in projections.items()}
    users = torch.arange(30)
    found = plan.algorithm.stored_scorer(plan, projections, stored, world.people)(users)
    wanted = plan.algorithm.scorer(plan, full, [Assignment(projections)], world.people)(users)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# -- bad input ---------------------------------------------------------------------------------------------------------

ODD = {
    "one item each": dataset([[0], [1], [2], [0]], 4),
    "an empty history": dataset([[0, 1], [], [1, 2]], 4),
    "items nobody has": dataset([[5], [5, 6]], 9),
    "one item in all": dataset([[0], [0]], 1),
    "all counts equal": dataset([[0, 1, 2]] * 4, 3),
    "a singular sum": dataset([[0, 1], [0, 1], [2, 3], [2, 3]], 4),
}


@pytest.mark.parametrize("support", [1, 3, 1000])
@pytest.mark.parametrize("name", ODD)
def test_odd_worlds_are_served(name: str, support: int) -> None:
    world = world_of(ODD[name], support=support)
    state = after_rounds(world, world.initial(), 1)
    found, told = scores(world, state), " ".join(world.plan.algorithm.told(world.plan, state))
    assert found.shape == (world.people.num_clients, world.people.train.num_items)
    assert bool(torch.isfinite(found).all())
    if support == 1000:  # one item at most is correlated, with nothing: the order of popularity is left
        assert bool((found[:, 1:-1] >= found[:, 2:]).all())
    assert ("order of popularity" in told) == (world.plan.architecture.tables[ROWS][0] == 1)


def test_a_capacity_without_a_row_is_refused() -> None:
    with pytest.raises(FairfoldError, match="leading"):
        world_of(tiny_data(), fleet={"capacities": "1x-3B"})


# -- quality -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not (Path(os.environ.get("FAIRFOLD_DATA", "/nowhere")) / "ml-100k").is_dir(), reason="needs FAIRFOLD_DATA"
)
def test_better_than_ease_on_movielens() -> None:
    settings = read_settings(
        {"data": {"name": "ml-100k", "resplit": True}, "fleet": {"capacities": "1x-16x", "shares": [999, 1]},
         "algorithm": {"kind": "correlations"}}
    )  # fmt: skip
    data = fairfold.data.load("ml-100k", resplit=True)
    x = dense(data.train)

    def ease(ridge: float) -> float:
        inverse = np.linalg.inv(x.T @ x + ridge * np.eye(x.shape[1]))
        weights = -inverse / np.diag(inverse)
        np.fill_diagonal(weights, 0)
        found = torch.from_numpy(x @ weights)
        return evaluate_ranking(lambda users: found[users], data.train, data.test).ndcg

    best = max(ease(ridge) for ridge in (100.0, 200.0, 400.0, 800.0))
    result = simulate(settings, data=numbered(data, settings))
    large, small = (group.everybody for group in result.groups)
    assert large is not None
    assert small is not None
    assert large > best
    assert small > 0.9 * best
    assert result.quality > best
