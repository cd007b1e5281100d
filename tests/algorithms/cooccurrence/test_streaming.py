"""Streamed encoding: sums of histories from rows that pass by, and what devices do with them."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.scorer import HISTORY_SUM, ROWS, CoOccurrenceScorer
from fairfold.algorithms.cooccurrence.streaming import encode, row_blocks
from fairfold.config import read_settings
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidMessage
from fairfold.estimator.recommendations import top_items
from fairfold.federation.algorithm import Tunable
from fairfold.federation.federation import Federation
from fairfold.federation.plan import STREAM, Plan
from fairfold.federation.simulation import simulate
from fairfold.federation.updates import State
from fairfold.metrics.ranking import recommend
from fairfold.runs.loaded import load_run
from fairfold.subspace import Capacity
from fairfold.subspace.packed import FACTORS, QuantizedRows
from fairfold.subspace.projection import Projection
from tests.support.federations import after_rounds
from tests.support.runs import assert_same_end, interrupted, resumed
from tests.support.settings import make_settings

WORLD = SyntheticDataset(users=60, items=90, interactions_per_user=12)
NO_PAIRS = torch.empty(0, 3)


def table(seed: int, items: int, columns: int) -> Tensor:
    """Rows (a, b, w) with positive factors."""
    rows = torch.randn(items, FACTORS + columns, generator=torch.Generator().manual_seed(seed)).double()
    rows[:, :FACTORS] = rows[:, :FACTORS].abs() + 0.1
    return rows


def solved(scheme: str = "1x-64x", **algorithm: Any) -> tuple[Federation, Plan, State]:
    """A world after its uploads, and its resolved plan."""
    keys = {"kind": "co_occurrence", "support": 1, "tune": False, "streamed": True} | algorithm
    world = Federation.of(make_settings(algorithm=keys, capacities=scheme, factors=12), WORLD.dataset())
    state = after_rounds(world, world.initial())
    return world, Tunable.of(world.plan.algorithm).resolve(world.plan, state), state


@given(st.integers(0, 99), st.lists(st.integers(1, 7), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_neither_the_order_of_blocks_nor_their_sizes_matter(seed: int, sizes: list[int], order: Any) -> None:
    rows = table(seed, sum(sizes), 3)
    histories = [torch.tensor(order.sample(range(len(rows)), order.randint(0, len(rows)))).long() for _ in range(4)]
    blocks = list(zip([sum(sizes[:place]) for place in range(len(sizes))], torch.split(rows, sizes), strict=True))
    order.shuffle(blocks)
    wanted = torch.stack([(rows[items, :1] * rows[items, FACTORS:]).sum(0) for items in histories])
    torch.testing.assert_close(encode(histories, blocks), wanted)
    torch.testing.assert_close(encode(histories, row_blocks(rows)), wanted)


def test_of_what_passes_by_only_the_sums_are_kept() -> None:
    """When the next block comes, nothing holds the last one; what is left does not grow with the catalogue."""
    alive = list[Any]()

    def passing(blocks: int) -> Iterator[tuple[int, Tensor]]:
        for place in range(blocks):
            gc.collect()
            assert sum(one() is not None for one in alive) <= 1  # the one whose name the loop still has
            rows = table(place, 8, 5)
            alive.append(weakref.ref(rows))
            yield 8 * place, rows
            del rows

    histories = [torch.tensor([1, 9, 17]), torch.tensor([30])]
    found = [encode(histories, passing(blocks)) for blocks in (4, 40)]
    assert found[0].equal(found[1])
    assert [one.untyped_storage().nbytes() for one in found] == [2 * 5 * 8] * 2


@pytest.mark.parametrize("bits", [8, 4])
def test_a_client_that_holds_all_rows_at_full_bits_scores_as_it_would_without(bits: int) -> None:
    full = table(3, 30, 6).view(-1)
    own = QuantizedRows((30, 8), (30, 8), bits).reduce(full).view(30, 8)
    passing = QuantizedRows((30, 8), (30, 8), 8).reduce(full).view(30, 8)
    histories, items = [torch.tensor([0, 4, 29]), torch.tensor([7])], torch.arange(30)
    plain, streamed = CoOccurrenceScorer(own, NO_PAIRS, 1.0), CoOccurrenceScorer(own, NO_PAIRS, 1.0, encoding=passing)
    one, other = (model.scores(model.histories(histories), items) for model in (plain, streamed))
    assert torch.allclose(one, other) == (bits == 8)


def test_all_of_a_history_counts_where_a_client_holds_few_rows() -> None:
    rows, few = table(5, 30, 6), 4
    whole, cut = (CoOccurrenceScorer(rows[:known], NO_PAIRS, 1.0) for known in (30, few))
    streamed = CoOccurrenceScorer(rows[:few], NO_PAIRS, 1.0, encoding=rows)
    histories = [torch.tensor([1, 12, 25])]
    sums = [model.histories(histories)[HISTORY_SUM] for model in (whole, streamed, cut)]
    torch.testing.assert_close(sums[1], sums[0])
    assert not torch.allclose(sums[2], sums[0])
    items = torch.arange(few)
    torch.testing.assert_close(
        streamed.scores(streamed.histories(histories), items), whole.scores(whole.histories(histories), items)
    )


def test_the_same_rows_pass_by_all_clients_of_a_size_and_none_who_hold_all() -> None:
    world, plan, state = solved()
    whole, small = plan.algorithm.tasks(plan, state, [0, 1])
    rows, width = plan.architecture.tables[ROWS]
    assert STREAM not in whole.vectors
    held = small.projections[ROWS]
    assert isinstance(held, QuantizedRows)
    assert 0 < held.kept[0] < rows
    passing = QuantizedRows((rows, width), (rows, held.kept[1]), 8)
    assert small.context[STREAM] == passing
    torch.testing.assert_close(small.vectors[STREAM], passing.reduce(state.full[ROWS]))
    off = solved(streamed=False)[1]
    for size, more in ((0, 0), (1, passing.bytes)):
        assert plan.algorithm.traffic(plan, size)[0] == plan.assignments(0)[size].bytes() + more
        assert off.algorithm.traffic(off, size)[0] == off.assignments(0)[size].bytes()
    assert world.plan.algorithm.update_shapes(plan, small).keys() == {"sum"}


def test_a_task_without_the_rows_that_have_to_pass_by_is_refused() -> None:
    _, plan, state = solved()
    (task,) = plan.algorithm.tasks(plan, state, [1])
    assert isinstance(plan.algorithm, CoOccurrence)
    plan.algorithm.task_scorer(task)
    other: dict[str, Projection] = {STREAM: QuantizedRows((90, 14), (5, 3), 8)}
    for context in (dict[str, Projection](), other):
        with pytest.raises(InvalidMessage, match="rows that pass by"):
            plan.algorithm.task_scorer(replace(task, context=context))


def test_small_clients_rank_better_and_the_largest_as_before() -> None:
    """Of planted tastes, whose items are not the popular ones alone; the report counts what passed by."""
    data = SyntheticDataset(users=300, items=200, interactions_per_user=25, seed=2).dataset()
    keys: dict[str, Any] = {"capacities": "1x-64x", "rounds": 1, "evaluate_every": 1, "factors": 12}
    plain, streamed = (
        simulate(make_settings(algorithm={"kind": "co_occurrence", "streamed": way}, **keys), data=data)
        for way in (False, True)
    )
    assert streamed.groups[0] == plain.groups[0]
    small, before = streamed.groups[1], plain.groups[1]
    assert small.everybody is not None
    assert before.everybody is not None
    assert small.everybody > before.everybody + 0.01
    assert small.bytes_down > small.bytes_held
    assert before.bytes_down == before.bytes_held
    assert small.bytes_up == before.bytes_up


def test_what_a_client_measures_is_what_its_size_is_evaluated_by() -> None:
    """The scores of a task, of the server's evaluation and of a recommendation are the same."""
    world, plan, state = solved()
    (task,) = plan.algorithm.tasks(plan, state, [1])
    assert isinstance(plan.algorithm, CoOccurrence)
    users, items = torch.arange(5), torch.arange(plan.public.num_items)
    model = plan.algorithm.task_scorer(task)
    wanted = model.scores(model.histories([world.clients.train.of(user) for user in users]), items)
    held = plan.assignments(0)[1]
    assert held.projections is not None
    passing = plan.algorithm.encoding_rows(plan, state.full, held.projections)
    full = {name: one.recover(task.vectors[name]) for name, one in held.projections.items()}
    scored = plan.algorithm.scorer(plan, full | passing, [held], world.clients)(users)
    stored = {name: one.packed(task.vectors[name]) for name, one in held.projections.items()}
    compact = plan.algorithm.compact_scorer(plan, held.projections, stored | passing, world.clients)(users)
    for found in (scored, compact):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        plan.algorithm.scorer(plan, full, [held], world.clients)(users), wanted, rtol=1e-4, atol=1e-5
    )


def test_a_run_goes_on_where_it_stopped_and_recommends_as_its_devices_do(tmp_path: Path) -> None:
    world = {"users": 60, "items": 90, "interactions_per_user": 12}
    settings = read_settings(
        {
            "data": world,
            "fleet": {"capacities": "1x-64x"},
            "run": {"rounds": 13, "evaluate_every": 13},
            "algorithm": {"kind": "co_occurrence", "support": 1, "streamed": True},
        }
    )
    interrupted(settings, tmp_path / "run", 5)
    finished, _ = resumed(settings, tmp_path / "run")
    assert_same_end(finished.result, simulate(settings))
    run = load_run(tmp_path / "run")
    small, state = run.assignments[1], run.progress.state
    assert small.projections is not None
    algorithm = run.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    full = {name: one.recover(one.reduce(state.full[name])) for name, one in small.projections.items()}
    users, wanted = torch.arange(20), dict[bool, Tensor]()
    for streamed in (True, False):
        passing = algorithm.encoding_rows(run.plan, state.full, small.projections) if streamed else {}
        scores = run.scorer(full | passing, [small])(users)
        wanted[streamed] = recommend(scores.__getitem__, users, run.interactions.train, 5)
    found = top_items(run, users.tolist(), 5, capacity=Capacity.parse("64x")).items
    assert found.equal(wanted[True])
    assert not found.equal(wanted[False])
