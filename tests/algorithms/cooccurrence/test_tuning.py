"""Federated tuning: schedule, held-out items, validation reports, and what is chosen."""

import math
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.cooccurrence import REQUEST, SUM, SYNC_STATE
from fairfold.algorithms.cooccurrence.parts import TuningSchedule
from fairfold.algorithms.cooccurrence.scorer import (
    ROWS,
    CoOccurrenceArchitecture,
)
from fairfold.algorithms.cooccurrence.solver import SolverSettings
from fairfold.algorithms.cooccurrence.tuning import (
    MIN_PANEL,
    QUALITY,
    SOLVER_CANDIDATES,
    Tuning,
    select_candidate,
    training_mask,
)
from fairfold.data import Interactions
from fairfold.data.synthetic import SyntheticDataset
from fairfold.federation.clients import Clients
from fairfold.federation.simulation import simulate
from fairfold.federation.updates import State, Update
from fairfold.metrics.ranking import evaluate_ranking
from tests.support.cooccurrence import co_occurrence_federation, dataset_of
from tests.support.federations import after_rounds, tiny_data


@pytest.mark.parametrize("rounds", range(1, 30))
def test_a_schedule_uploads_before_and_after_its_candidates(rounds: int) -> None:
    schedule = TuningSchedule.of(rounds, 8)
    tried = [schedule.candidate(number) for number in range(rounds)]
    assert [trial for trial in tried if trial is not None] == list(range(min(8, max(0, rounds - 2))))
    assert tried[-1] is None
    assert tried[0] is None


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=60, unique=True), min_size=1, max_size=8))
def test_held_out_items_follow_from_a_history_alone(histories: list[list[int]]) -> None:
    mine = [torch.tensor(sorted(one), dtype=torch.int64) for one in histories]
    lengths = torch.tensor([len(one) for one in mine])
    together = torch.split(training_mask(torch.cat(mine), lengths), lengths.tolist())
    for history, first in zip(mine, together, strict=True):
        assert first.equal(training_mask(history, torch.tensor([len(history)])))
        held = int((~first).sum())
        assert held == (max(1, round(len(history) / 10)) if len(history) >= 2 else 0)


def test_a_candidate_must_be_better_by_more_than_its_error_and_with_few_users_by_more() -> None:
    few = torch.tensor([0.1, 0.3, -0.1, 0.2], dtype=torch.float64)
    better = few.repeat(100)

    def tally(*differences: torch.Tensor) -> torch.Tensor:
        rows = [[len(of), 0.5, float(of.sum()), float((of**2).sum())] for of in (0 * differences[0], *differences)]
        return torch.tensor(rows, dtype=torch.float64)

    found = select_candidate(tally(better, better * 0.5), [0, 1, 2], 1.0)
    assert found.chosen == 1
    assert found.better == pytest.approx(float(better.mean()))
    assert found.error == pytest.approx(float(better.std() / 20))
    assert (
        select_candidate(tally(better - 0.1175), [0, 1], 1.0).chosen == 0
    )  # +0.0075 ± 0.0074; 400 users need 1.075 errors
    assert select_candidate(tally(better - 0.1175), [0, 1], 0.9).chosen == 1
    assert select_candidate(tally(few), [0, 1], 1.0).chosen == 0  # +0.125 ± 0.085, of four users
    assert select_candidate(torch.zeros(3, 4), [0, 1, 2], 1.0).chosen == 0  # nobody judged


def test_sizes_with_the_same_model_validate_it_together() -> None:
    """Two sizes of more bytes than there is to hold: what neither is sure of alone, both are; not a third."""
    held = CoOccurrenceArchitecture(50_000, 1, 2_000, 384, 6_000)
    tuning = Tuning.of([10**8, 10**7, 100_000], held, 16)
    assert tuning.sizes[0] == tuning.sizes[1]
    assert tuning.sizes[0][0] != tuning.sizes[2][0]
    tally = torch.zeros(len(tuning.splits[0]) + len(SOLVER_CANDIDATES) - 1, 4, dtype=torch.float64)
    tally[:, 0] = 1000
    tally[1] = torch.tensor([1000.0, 300.0, 4.5, 10.0])  # +0.0045 ± 0.0032, where 1.545 errors are asked for
    alone = [found.chosen for found in tuning.results({"0": tally.view(-1)})[0]]
    assert alone == [0, 0, 0]
    both, _ = tuning.results({"0": tally.view(-1), "1": tally.view(-1)})
    assert [found.chosen for found in both] == [1, 1, 0]
    assert [found.users for found in both] == [2000, 2000, 0]
    other, _ = tuning.results({"0": tally.view(-1), "2": tally.view(-1)})
    assert [found.users for found in other] == [1000, 1000, 1000]


def test_a_size_is_not_worse_than_a_smaller_one() -> None:
    """16x ranks much worse than 64x, and takes its split; only beyond what chance explains."""
    held = CoOccurrenceArchitecture(3_706, 1, 3_450, 384, 6_000)
    budgets = [3_706 * 128 // size for size in (4, 64, 16)]
    tuning = Tuning.of(budgets, held, 16)
    many = len(tuning.splits[1]) - 1

    def reports(*qualities: float, users: int = 400) -> dict[str, torch.Tensor]:
        found = {}
        for size, quality in enumerate(qualities):
            tally = torch.zeros(tuning.schedule.num_candidates, 4, dtype=torch.float64)
            tally[0] = torch.tensor([users, users * quality, 0, 0])
            if size == 1:  # 64x is best by its last candidate
                tally[many] = torch.tensor([users, users * (quality + 0.1), users * 0.1, users * 0.02])
            found[str(size)] = tally.view(-1)
        return found

    worse = reports(0.6, 0.2, 0.1)
    assert tuning.sources(worse) == [0, 1, 1]
    assert tuning.splits_in(16, worse)[budgets[2]] == tuning.splits[1][many] == tuning.splits_in(16, worse)[budgets[1]]
    assert tuning.splits_in(16, worse)[budgets[0]] == tuning.splits[0][0]
    assert tuning.sources(reports(0.1, 0.2, 0.1)) == [1, 1, 1]  # through 16x
    assert tuning.sources(reports(0.6, 0.2, 0.28)) == [0, 1, 2]  # +0.02, where chance may be 0.08
    assert tuning.sources(reports(0.6, 0.2, 0.1, users=20)) == [0, 1, 2]
    assert tuning.sources({}) == [0, 1, 2]
    wanted = tuning.splits[1][many].columns
    assert tuning.solver_in(16, reports(0.1, 0.2, 0.1))[1] == wanted
    assert wanted != tuning.splits[2][0].columns


def test_tuning_ends_with_the_sum_and_the_model_of_all_histories() -> None:
    """Nine tenths, trials, the rest: together they are what devices say at once, and so is the model that is chosen."""
    data = tiny_data(2, 40, 60)
    fleet = {"capacities": "1x-4x"}
    federation = co_occurrence_federation(data, fleet=fleet, tune=True, model={"factors": 48}, run={"rounds": 10})
    algorithm = federation.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    tuning = algorithm.tuning(federation.plan)
    first, state = tuning.schedule.first, after_rounds(federation, federation.initial(), tuning.schedule.first)
    at_once = co_occurrence_federation(data, fleet=fleet, model={"factors": 48})
    expected = after_rounds(at_once, at_once.initial(), 1)
    assert not state.algorithm_state[SUM][SUM].equal(expected.algorithm_state[SUM][SUM])
    assert 0.5 < float(federation.clients.local_state[SYNC_STATE].mean()) < 1
    for trial in range(tuning.schedule.num_candidates):
        (task, *_) = algorithm.tasks(federation.plan, state, [0, 1])
        assert float(task.vectors[REQUEST][1]) == trial
        assert set(task.context) == {QUALITY}
        state = after_rounds(federation, state, 1)
        for size in (0, 1):
            users, quality, apart, squares = state.algorithm_state[QUALITY][str(size)].view(-1, 4)[trial].tolist()
            assert 0 < users <= 20
            assert 0 <= quality <= users
            assert (apart == squares == 0) or trial > 0
    state = after_rounds(federation, state, 10 - first - tuning.schedule.num_candidates)
    assert state.round_number == 10
    assert state.algorithm_state[SUM][SUM].equal(expected.algorithm_state[SUM][SUM])
    scaling, columns = tuning.solver_in(10, state.algorithm_state[QUALITY])
    chosen = SolverSettings(*state.algorithm_state["solver"]["solver"].tolist())
    assert chosen.ridge == pytest.approx(4.0 * 75**0.5 * scaling.ridge)
    assert chosen[1:4] == (columns, 0.15 * scaling.beta, 0.05 * scaling.neighbor_weight)
    wanted = algorithm.solve(federation.plan, state.algorithm_state[SUM][SUM], chosen)
    torch.testing.assert_close(state.full[ROWS], wanted[ROWS].float().view(-1), rtol=1e-4, atol=1e-5)


def test_every_solver_candidate_is_tried_and_noted() -> None:
    """λ, β, neighbours and support: each is what its round is about, and the one that is surely better is kept."""
    data = tiny_data(2, 40, 60)
    federation = co_occurrence_federation(data, tune=True, model={"factors": 48}, run={"rounds": 30}, support=2)
    plan, algorithm = federation.plan, federation.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    tuning, counts = algorithm.tuning(plan), plan.public.statistics["counts"]
    many = len(tuning.splits[0])
    assert tuning.schedule.num_candidates == many + len(SOLVER_CANDIDATES) - 1
    for place, scaling in enumerate(SOLVER_CANDIDATES):
        number = tuning.schedule.first + (many + place - 1 if place else 0)
        chosen = algorithm.solver_settings(plan, State({}, number, {}))
        assert chosen.ridge == pytest.approx(4.0 * 75**0.5 * scaling.ridge)
        assert (chosen.beta, chosen.neighbor_weight) == pytest.approx(
            (0.15 * scaling.beta, 0.05 * scaling.neighbor_weight)
        )
        assert chosen.popularity_weight == pytest.approx((1 + 100 / 40) * scaling.popularity_weight)
        assert chosen.items == int((counts >= 2 * scaling.support).sum())
    for place in range(1, len(SOLVER_CANDIDATES)):
        tally = torch.zeros(many + len(SOLVER_CANDIDATES) - 1, 4, dtype=torch.float64)
        tally[:, 0] = 1000
        tally[many + place - 1] = torch.tensor([1000.0, 300.0, 50.0, 5.0])  # +0.05 ± 0.0016
        tallies = {"0": tally.view(-1)}
        assert tuning.solver_in(tuning.schedule.end, tallies)[0] == SOLVER_CANDIDATES[place]
        state = State(
            {},
            30,
            {
                QUALITY: tallies,
                "solver": {"solver": torch.tensor(algorithm.solver_settings(plan, State({}, 30, {QUALITY: tallies})))},
            },
        )
        assert f"best of {len(SOLVER_CANDIDATES)} (+0.0500 ± 0.0016" in algorithm.notes(plan, state)[0]


def test_a_report_is_the_ndcg_of_held_out_items() -> None:
    """A report is the NDCG of the metrics, of held-out items by uploaded ones."""
    data = tiny_data(2, 40, 60)
    federation = co_occurrence_federation(data, tune=True, model={"factors": 48}, run={"rounds": 10, "top": 5})
    plan, clients = federation.plan, federation.clients
    algorithm = plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    state = after_rounds(federation, federation.initial(), algorithm.tuning(plan).schedule.first)
    (task,) = algorithm.tasks(plan, state, [0])
    train, uploaded = clients.train, clients.local_state[SYNC_STATE][:, 0] > 0
    parts = [
        Interactions.from_pairs(train.users[of], train.items[of], train.num_users, train.num_items)
        for of in (uploaded, ~uploaded)
    ]
    full = {name: held.recover(task.vectors[name]) for name, held in task.projections.items()}
    resolved = algorithm.resolve(plan, state)
    score = algorithm.scorer(resolved, full, resolved.assignments(0), Clients(resolved, parts[0], {}))
    wanted = evaluate_ranking(score, parts[0], parts[1], 5)
    for place, user in enumerate(wanted.users.tolist()):
        update, local_state = algorithm.client_update(plan, task, clients.client(user, state.round_number))
        quality = float(wanted.ndcg_by_user[place])
        assert update.sums[QUALITY].tolist() == pytest.approx([1, quality, 0, 0], abs=2**-17)  # in fixed point
        assert float(local_state["default_quality"]) == pytest.approx(1 + float(wanted.ndcg_by_user[place]), abs=1e-6)
    assert isinstance(algorithm.tuning(plan), Tuning)


def test_a_report_has_the_difference_from_the_default() -> None:
    histories = [[*range(user, 60, user % 5 + 2)] for user in range(30)] + [[2], [3]]
    federation = co_occurrence_federation(
        dataset_of(histories, 60), tune=True, model={"factors": 48}, run={"rounds": 10, "top": 5}
    )
    plan, clients = federation.plan, federation.clients
    algorithm = plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    state, notes = federation.initial(), list[list[list[float]]]()
    for _ in range(algorithm.tuning(plan).schedule.end):
        (task,) = algorithm.tasks(plan, state, [0])
        if QUALITY in task.context:
            client_ids = [clients.client(user, state.round_number) for user in range(32)]
            notes.append([algorithm.client_update(plan, task, one)[0].sums[QUALITY].tolist() for one in client_ids])
        state = after_rounds(federation, state, 1)
    first, *others = notes
    assert first[30] == first[31] == [0, 0, 0, 0]  # who holds nothing back does not judge
    for other in others:
        for before, after in zip(first[:30], other[:30], strict=True):
            apart = after[1] - before[1]
            assert after == pytest.approx([1, after[1], apart, apart**2], abs=4 * 2**-16)
    assert any(abs(after[2]) > 0.01 for other in others for after in other)


def test_reports_out_of_range_are_refused() -> None:
    federation = co_occurrence_federation(tiny_data(2, 40, 60), tune=True, model={"factors": 48}, run={"rounds": 10})
    plan, algorithm = federation.plan, federation.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    state = after_rounds(federation, federation.initial(), algorithm.tuning(plan).schedule.first)
    (task,) = algorithm.tasks(plan, state, [0])
    for notes in ([2.0, 0, 0, 0], [1, 1.5, 0, 0], [1, 0.5, -1.2, 0], [1, 0.5, 0, -0.1], [-1.0, 0, 0, 0]):
        update = Update({QUALITY: torch.tensor(notes)}, 1.0)
        assert algorithm.validate_update(plan, task, update) == "reports that no users have"
    assert algorithm.validate_update(plan, task, Update({QUALITY: torch.tensor([1, 1, 0.5, 0.25])}, 1.0)) is None


def test_candidates_go_to_a_sample_and_at_most_three_models_to_a_client_on_the_average() -> None:
    for users, capacities in ((60, "1x-4x"), (2_000, "1x-4x-16x-64x")):
        data = SyntheticDataset(users=users, items=60, interactions_per_user=8).dataset()
        fleet = {"capacities": capacities}
        federation = co_occurrence_federation(data, tune=True, run={"rounds": 16}, fleet=fleet)
        plan, sampler = federation.plan, federation.sampler
        assert isinstance(plan.algorithm, CoOccurrence)
        schedule = plan.algorithm.tuning(plan).schedule
        cohorts = [sampler.cohort(number) for number in range(16)]
        tuning = plan.algorithm.tuning(plan)
        tried = [cohort.sort().values for cohort in cohorts[schedule.first : schedule.end]]
        of_splits, of_solver = tried[: tuning.num_splits], tried[tuning.num_splits :]
        assert len(of_splits) == max(map(len, tuning.splits))
        assert all(one.equal(of_splits[0]) for one in of_splits)  # who has judged the default judges all others
        assert all(one.equal(of_solver[0]) for one in of_solver)
        assert set(of_solver[0].tolist()) <= set(of_splits[0].tolist())
        assert len(cohorts[0]) == len(cohorts[schedule.end]) == users  # all upload, and upload the rest
        wanted = users / (len(of_splits) + 0.5 * (14 - len(of_splits)))  # half as many for the solver: all sizes report
        assert len(of_splits[0]) == min(users, max(MIN_PANEL, math.ceil(wanted)))
        assert len(of_solver[0]) == min(users, max(MIN_PANEL, math.ceil(wanted / 2)))
        sizes = torch.bincount(sampler.size[tried[0]])
        assert int(sizes.max() - sizes.min()) <= 2
        if users > MIN_PANEL * 14:
            assert sum(map(len, cohorts)) / users < 3.02
        masked = co_occurrence_federation(
            data, tune=True, run={"rounds": 16}, fleet=fleet, privacy={"level": "secure", "min_cohort": 20}, support=2
        )
        counts = torch.bincount(masked.sampler.size[masked.sampler.cohort(schedule.first)])
        schedule, least = masked.plan.algorithm.tuning(masked.plan).schedule, 2 * 20 * len(plan.capacities)  # type: ignore[attr-defined]
        assert min(users, least) <= len(masked.sampler.cohort(schedule.first)) <= max(least, math.ceil(users / 7))
        assert len(masked.sampler.cohort(schedule.end - 1)) >= min(users, least)
        assert users < 100 or int(counts.min()) >= 20
    everybody = co_occurrence_federation(data, tune=True, run={"rounds": 16}, fleet={"clients_per_round": 30})
    assert len(everybody.sampler.cohort(schedule.first)) == 30


def test_few_users_are_served_more_by_popularity() -> None:
    found = []
    for users in (20, 200):
        federation = co_occurrence_federation(
            SyntheticDataset(users=users, items=60, interactions_per_user=8).dataset()
        )
        algorithm = federation.plan.algorithm
        assert isinstance(algorithm, CoOccurrence)
        found.append(algorithm.solver_settings(federation.plan, State({}, 0, {})).popularity_weight)
    assert found == pytest.approx([6.0, 1.5])


@pytest.mark.parametrize(("items", "each"), [(100, 15), (200, 30)])
def test_twenty_users_are_served_no_worse_than_by_popularity(items: int, each: int) -> None:
    """The mean over five small worlds, of the default recipe with its tuning."""
    ours, popular = list[float](), list[float]()
    for seed in range(5):
        data = SyntheticDataset(users=20, items=items, interactions_per_user=each, seed=seed).dataset()
        fleet = {"capacities": "1x-4x", "clients_per_round": "none"}
        model, run = {"factors": 384}, {"rounds": 16, "evaluate_every": 16}
        federation = co_occurrence_federation(data, tune=True, support=3, fleet=fleet, model=model, run=run)
        ours.append(simulate(federation.plan.settings, federation=federation).quality)
        train, test = federation.interactions.train, federation.interactions.test
        by_popularity = train.counts_by_item.float().repeat(20, 1)
        popular.append(evaluate_ranking(by_popularity.__getitem__, train, test, 20).ndcg)
    assert mean(ours) >= mean(popular)
