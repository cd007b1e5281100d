"""Scores of a co-occurrence model from histories alone, by what the server and clients hold."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import fairfold.data
from fairfold.algorithms.cooccurrence import cooccurrence, solver
from fairfold.algorithms.cooccurrence.cooccurrence import SUM
from fairfold.algorithms.cooccurrence.scorer import (
    NEIGHBORS,
    POPULARITY,
    ROWS,
    CoOccurrenceScorer,
)
from fairfold.algorithms.cooccurrence.solver import Precision, SolverSettings, popularity_curve
from fairfold.config import read_settings
from fairfold.data import Dataset, Interactions
from fairfold.federation.algorithm import CompactScoring, Tunable
from fairfold.federation.clients import Clients
from fairfold.federation.federation import number_items
from fairfold.federation.simulation import simulate
from fairfold.metrics.ranking import evaluate_ranking
from fairfold.subspace import Capacity
from fairfold.subspace.projection import Assignment
from tests.support.cooccurrence import co_occurrence_federation, dataset_of, dense_matrix, scores_of
from tests.support.federations import after_rounds, tiny_data


def test_a_score_needs_the_history_alone() -> None:
    federation = co_occurrence_federation(tiny_data(2, 30, 25))
    state = after_rounds(federation, federation.initial(), 1)
    assert federation.plan.algorithm.serves_new_users
    into, out, rows = torch.split(state.full[ROWS].view(-1, 6), [1, 1, 4], dim=1)
    mine = torch.tensor([2, 5, 7])
    new = Clients(federation.plan, Interactions.from_pairs(torch.zeros(3).long(), mine, 1, 25), {})
    score = federation.plan.algorithm.scorer(federation.plan, state.full, federation.plan.assignments(0), new)
    head = len(rows)
    wanted = out[:, 0] * (rows @ (into[mine] * rows[mine]).sum(0))
    for item, other, value in state.full[NEIGHBORS].view(-1, 3).tolist():
        wanted[int(item)] += value * (item != other and int(other) in mine.tolist())
    curve, places = state.full[POPULARITY].log().numpy(), np.log2(np.arange(head) + 1.0)
    wanted += torch.from_numpy(np.exp(np.interp(places, np.arange(len(curve)), curve))) / (1 + len(mine))
    torch.testing.assert_close(score(torch.tensor([0]))[0, :head], wanted)


def test_popularity_counts_less_the_longer_a_history_is() -> None:
    """At the items 0, 1, 3, … exactly, falling between them, in a (1 + n)-th part, and nothing without its setting."""
    counts = torch.tensor([40, 20, 18, 16, 11, 9, 8, 8, 3])
    chosen, places = SolverSettings(1, 2, 0.15, 0, len(counts), popularity_weight=2.0), torch.tensor([0, 1, 3, 7])
    curve = popularity_curve(counts, 50, chosen)
    wanted = 2 * (counts / counts.double().mean()) ** -0.15 * counts / 50
    torch.testing.assert_close(curve[:4], wanted[places])
    none, rows = torch.empty(0, 3), torch.rand(8, 5, generator=torch.Generator().manual_seed(0)) + 0.1
    model, plain = CoOccurrenceScorer(rows, none, 1.0, popularity=curve), CoOccurrenceScorer(rows, none, 1.0)
    items = torch.arange(8)
    assert model.popularity(places).tolist() == pytest.approx(wanted[places].tolist())
    assert model.popularity(items).diff().le(0).all()
    for history in (torch.tensor([], dtype=torch.int64), torch.tensor([2]), torch.tensor([0, 4, 5])):
        both = [one.scores(one.histories([history]), items)[0] for one in (model, plain)]
        torch.testing.assert_close(both[0] - both[1], model.popularity(items) / (1 + len(history)))
    without = CoOccurrenceScorer(
        rows, none, 1.0, popularity=popularity_curve(counts, 50, chosen._replace(popularity_weight=0.0))
    )
    mine = torch.tensor([1, 6])
    assert without.scores(without.histories([mine]), items).equal(plain.scores(plain.histories([mine]), items))


def test_users_with_short_histories_are_served_by_popularity() -> None:
    """Histories of two items by chance, of which most are popular: no pair says more than that."""
    source = torch.Generator().manual_seed(4)
    items = (200 * torch.rand(600, 3, generator=source) ** 2).long()
    users = torch.arange(600)[:, None].expand(-1, 3)
    train = Interactions.from_pairs(users[:, :2].flatten(), items[:, :2].flatten(), 600, 200)
    data = Dataset("short", train, Interactions.from_pairs(users[:, 2], items[:, 2], 600, 200))
    found = [
        simulate(
            read_settings({"algorithm": {"popularity_weight": popularity_weight}, "run": {"rounds": 1}}), data=data
        ).quality
        for popularity_weight in (0.0, 1.0)
    ]
    assert found[1] > 1.1 * found[0]


def test_items_outside_the_head_come_last_by_popularity() -> None:
    federation = co_occurrence_federation(tiny_data(2, 30, 25), max_items=10)
    found = scores_of(federation, after_rounds(federation, federation.initial(), 1))
    assert federation.plan.architecture.tables[ROWS] == (10, 6)
    assert bool((found[:, 10:].amax(1) < found[:, :10].amin(1)).all())
    assert bool((found[:, 10:-1] > found[:, 11:]).all())


def test_the_model_can_be_evaluated_at_any_time() -> None:
    federation = co_occurrence_federation(tiny_data(2, 30, 25), fleet={"capacities": "1x", "clients_per_round": 7})
    state = federation.initial()
    assert bool(
        (scores_of(federation, state)[:, :-1] > scores_of(federation, state)[:, 1:]).all()
    )  # nobody has uploaded: popularity
    assert bool(torch.isfinite(scores_of(federation, after_rounds(federation, state, 1))).all())


def test_pairs_make_up_for_what_rows_miss() -> None:
    """With every pair listed and counted in full, a table of few columns, or none, scores as all correlations do."""
    federation = co_occurrence_federation(tiny_data(2, 30, 9), pair_weight=1.0, model={"factors": 9})
    plan, state = federation.plan, after_rounds(federation, federation.initial(), 1)
    head = plan.architecture.tables[ROWS][0]
    gram = cooccurrence.unpack_triangle(state.algorithm_state[SUM][SUM])
    ridge = float(state.algorithm_state["solver"]["solver"][0])
    precision = Precision.of(gram, plan.public.statistics["counts"][:head], 0.15, ridge)
    table = state.full[ROWS].view(head, -1).clone()
    gram = cooccurrence.unpack_triangle(state.algorithm_state[SUM][SUM])
    again = Precision.of(gram, plan.public.statistics["counts"][:head], 0.15, ridge)
    listed = solver.strongest_pairs(again.correlations(), torch.ones(head), head * head)
    rarer, other = listed[:, :2].long().T
    listed[:, 2] *= table[rarer, 1] * table[other, 0]
    histories = [federation.clients.train.of(user) for user in range(30)]
    x = torch.from_numpy(dense_matrix(federation.clients.train))[:, :head]
    roots, scales = precision.roots.clone(), precision.scales
    wanted = (x * scales * roots) @ precision.correlations() / roots
    new = x == 0  # an item's own part is in the rows, and a regression leaves it out
    for columns in (0, 1, 4):
        model = CoOccurrenceScorer(table[:, : 2 + columns], listed.float(), 1.0)
        score = model.scores(model.histories(histories), torch.arange(head))
        torch.testing.assert_close(score.double()[new], wanted[new], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capacity", ["1x", "2x", "4x", "16x"])
def test_a_client_scores_by_its_bytes(capacity: str) -> None:
    federation = co_occurrence_federation(tiny_data(2, 30, 120), model={"factors": 70})
    plan, state = federation.plan, after_rounds(federation, federation.initial(), 1)
    projections, _, _ = plan.assignment_for(Capacity.parse(capacity), 0)
    compact = {name: held.reduce(state.full[name]) for name, held in projections.items()}
    stored = {name: held.packed(compact[name]) for name, held in projections.items()}
    full = {name: held.recover(compact[name]) for name, held in projections.items()}
    users = torch.arange(30)
    found = CompactScoring.of(plan.algorithm).compact_scorer(plan, projections, stored, federation.clients)(users)
    wanted = plan.algorithm.scorer(plan, full, [Assignment(projections)], federation.clients)(users)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


ODD = {
    "one item each": dataset_of([[0], [1], [2], [0]], 4),
    "an empty history": dataset_of([[0, 1], [], [1, 2]], 4),
    "items nobody has": dataset_of([[5], [5, 6]], 9),
    "one item in all": dataset_of([[0], [0]], 1),
    "all counts equal": dataset_of([[0, 1, 2]] * 4, 3),
    "a singular sum": dataset_of([[0, 1], [0, 1], [2, 3], [2, 3]], 4),
}


@pytest.mark.parametrize("support", [1, 3, 1000])
@pytest.mark.parametrize("name", ODD)
def test_odd_data_are_served(name: str, support: int) -> None:
    federation = co_occurrence_federation(ODD[name], support=support)
    state = after_rounds(federation, federation.initial(), 1)
    found, notes = (
        scores_of(federation, state),
        " ".join(Tunable.of(federation.plan.algorithm).notes(federation.plan, state)),
    )
    assert found.shape == (federation.clients.num_clients, federation.clients.train.num_items)
    assert bool(torch.isfinite(found).all())
    if support == 1000:  # one item at most is correlated, with nothing: the order of popularity is left
        assert bool((found[:, 1:-1] >= found[:, 2:]).all())
    assert ("order of popularity" in notes) == (federation.plan.architecture.tables[ROWS][0] == 1)


@pytest.mark.skipif(
    not (Path(os.environ.get("FAIRFOLD_DATA", "/nowhere")) / "ml-100k").is_dir(), reason="needs FAIRFOLD_DATA"
)
def test_better_than_ease_on_movielens() -> None:
    settings = read_settings(
        {"data": {"name": "ml-100k", "resplit": True}, "fleet": {"capacities": "1x-16x", "shares": [999, 1]},
         "algorithm": {"kind": "co_occurrence"}}
    )  # fmt: skip
    data = fairfold.data.load("ml-100k", resplit=True)
    x = dense_matrix(data.train)

    def ease(ridge: float) -> float:
        inverse = np.linalg.inv(x.T @ x + ridge * np.eye(x.shape[1]))
        weights = -inverse / np.diag(inverse)
        np.fill_diagonal(weights, 0)
        found = torch.from_numpy(x @ weights)
        return evaluate_ranking(lambda users: found[users], data.train, data.test).ndcg

    best = max(ease(ridge) for ridge in (100.0, 200.0, 400.0, 800.0))
    result = simulate(settings, data=number_items(data, settings))
    large, small = (group.everybody for group in result.groups)
    assert large is not None
    assert small is not None
    assert large > best
    assert small > 0.9 * best
    assert result.quality > best
