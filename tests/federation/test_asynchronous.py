"""Asynchronous rounds: updates count in the round in which they come, and the server's sums stay exact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.tuning import QUALITY
from fairfold.algorithms.rating_model import USERS
from fairfold.backends.batched import batched
from fairfold.config import Settings, read_settings
from fairfold.config.fleet import AsynchronousSettings
from fairfold.errors import InvalidSettings
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Backend, run_round, sequential
from fairfold.federation.scheduling import (
    CLOCK,
    TASK_PREFIX,
    InFlightTask,
    completed_before_step,
    in_flight_tasks,
    staleness_sentence,
)
from fairfold.federation.simulation import Progress, simulate
from fairfold.federation.updates import Aggregate, ClientTask, State, Update
from fairfold.runs import checkpoint
from tests.support.federations import tiny_data

PACE: dict[str, Any] = {"buffer_size": 3, "max_staleness": 4}
SLOW: dict[str, Any] = {"median_seconds": 1.0, "log_std": 0.3, "slow_share": 0.3, "slow_factor": 8.0}
KINDS = ["ratings", "co_occurrence", "gradient", "closed_form"]


def chosen(
    kind: str = "ratings", asynchronous: Any = None, latency: Any = None, rounds: int = 12, **fleet: Any
) -> Settings:
    tables: dict[str, Any] = {"algorithm": {"kind": kind}, "run": {"rounds": rounds, "evaluate_every": 100}}
    tables["fleet"] = {
        "capacities": "1x-2x",
        "clients_per_round": 8,
        "asynchronous": asynchronous or {},
        "latency": latency or {},
    } | fleet
    if kind == "gradient":  # a server that changes its vectors in place: what is still open must not change with them
        tables["algorithm"] |= {"server_optimizer": "sgd", "server_lr": 1.0, "local_lr": 0.1}
    if kind != "co_occurrence":
        tables["model"] = {"factors": 4}
        tables["subspace"] = {"tail_share": 0.5} | ({} if kind == "ratings" else {"support": 0})
    return read_settings(tables)


def asynchronous_federation(settings: Settings) -> Federation:
    return Federation.of(settings, tiny_data(3, 20, 60, ratings=settings.predicts_ratings))


def after(settings: Settings, backend: Backend = sequential) -> tuple[State, Federation, Rejections, list[State]]:
    federation, rejections, states = asynchronous_federation(settings), Rejections(), list[State]()
    state = federation.initial()
    for _ in range(settings.run.rounds):
        state = run_round(state, federation.sampler, federation.clients, rejections, backend)
        states.append(state.copy())
    return state, federation, rejections, states


def same(one: State, other: State, within: float = 0.0) -> None:
    for name, vector in other.full.items():
        torch.testing.assert_close(one.full[name], vector, rtol=within, atol=within)


@pytest.mark.parametrize("kind", KINDS)
def test_latency_alone_changes_nothing_but_the_time(kind: str) -> None:
    state, federation, _, states = after(chosen(kind, latency=SLOW, rounds=4))
    same(state, after(chosen(kind, rounds=4))[0])
    for number, one in enumerate(states):
        slowest = float(federation.sampler.seconds[federation.sampler.cohort(number)].max())
        assert float(one.algorithm_state[CLOCK]["seconds"]) == pytest.approx(slowest)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_busy_is_not_asked_and_what_is_behind_is_bounded(kind: str) -> None:
    state, _, rejections, states = after(chosen(kind, PACE, SLOW), batched)
    before = set[int]()
    for one in states:
        clock = one.algorithm_state[CLOCK]
        asked, completed_in, still = (set(clock[name].tolist()) for name in ("asked", "completed", "clients"))
        assert not before & asked, "one task at a time"
        assert len(before | asked) == 8, "as many are at work as the settings ask for"
        assert before | asked == completed_in | still
        assert not completed_in & still
        before = still
    staleness = state.algorithm_state[CLOCK]["staleness"].tolist()
    refused = sum(many for reason, many in rejections.counts.items() if reason.startswith("too stale"))
    assert staleness[-1] == refused if kind != "co_occurrence" else not refused  # these do not age
    assert sum(staleness[1:-1]) > 0, "some are stale"
    assert sum(staleness) == sum(len(one.algorithm_state[CLOCK]["completed"]) for one in states)


def test_the_sums_hold_what_every_device_keeps() -> None:
    """Whichever updates were refused as too stale, the server's sums are those that clients remember."""
    state, federation, rejections, _ = after(chosen("ratings", {"buffer_size": 2, "max_staleness": 1}, SLOW, rounds=25))
    assert any(reason.startswith("too stale") for reason in rejections.counts)
    kept = federation.clients.local_state[USERS].double()
    assert bool((kept.abs().sum(1) > 0).sum() > 10)
    torch.testing.assert_close(state.algorithm_state["sums"][USERS].double(), kept.sum(0), rtol=1e-5, atol=1e-6)


def test_what_does_not_depend_on_the_model_is_never_too_late() -> None:
    """Co-occurrence: the slowest is added too, and the sum is that of rounds that wait."""

    def everybody(asynchronous: dict[str, Any], rounds: int) -> Settings:
        settings = chosen("co_occurrence", asynchronous, SLOW, rounds, clients_per_round="none")
        return settings.with_changes({"algorithm.tune": False})

    asynchronous = {"buffer_size": 2, "max_staleness": 0}
    waited = after(everybody({}, 2))[0]
    state, _, rejections, states = after(everybody(asynchronous, 90))
    assert not rejections.counts
    assert float(states[-1].algorithm_state[CLOCK]["now"]) > SLOW["slow_factor"], "the slowest have sent their update"
    assert int(states[-1].algorithm_state[CLOCK]["staleness"][-1]) > 0, "some were beyond the bound"
    assert torch.equal(state.algorithm_state["sum"]["sum"], waited.algorithm_state["sum"]["sum"])
    notes = simulate(everybody(asynchronous, 9), data=tiny_data(3, 20, 60)).notes
    assert any("updates do not depend here on the model that was sent" in note for note in notes)


@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree(kind: str) -> None:
    settings = chosen(kind, {"step_seconds": 1.5, "max_staleness": 2}, SLOW, faults={"nan": 0.1, "drop": 0.1})
    one, other = after(settings), after(settings, batched)
    same(one[0], other[0], 1e-4)
    assert one[2].counts == other[2].counts


def test_a_step_comes_after_so_many_updates_or_seconds_but_not_before_one() -> None:
    def in_flight(client: int, due: float, asked: int = 5) -> InFlightTask:
        return InFlightTask(client, ClientTask(asked, 0, {}, {}), due)

    waiting = [in_flight(0, 9.0), in_flight(1, 2.0), in_flight(2, 4.0), in_flight(3, 3.0, asked=1)]

    def completed_in(depends_on_model: bool = True, **asynchronous: Any) -> tuple[list[int], float]:
        found, then = completed_before_step(
            waiting, AsynchronousSettings(**asynchronous), 5, 1.0, depends_on_model=depends_on_model
        )
        return [one.client for one in found], then

    assert completed_in(buffer_size=1) == ([1], 2.0)
    assert completed_in(buffer_size=2) == ([1, 3], 3.0)
    assert completed_in(buffer_size=2, max_staleness=3) == ([1, 3, 2], 4.0), "a stale one does not count"
    assert completed_in(depends_on_model=False, buffer_size=2, max_staleness=3) == ([1, 3], 3.0), (
        "unless it does not matter"
    )
    assert completed_in(step_seconds=2.5) == ([1, 3], 3.5)
    assert completed_in(step_seconds=0.5) == ([1], 2.0), "not before one has come"
    assert completed_in(buffer_size=3, step_seconds=2.5) == ([1, 3], 3.5)
    assert completed_in(buffer_size=9) == ([1, 3, 2, 0], 9.0)


@pytest.mark.parametrize("kind", ["ratings", "co_occurrence", "gradient"])
def test_a_resumed_run_continues_with_its_tasks_in_flight(kind: str, tmp_path: Path) -> None:
    settings, whole = chosen(kind, PACE, SLOW, rounds=9), list[Progress]()

    def keep(report: Any, progress: Progress) -> None:
        if report.round_number == 4:
            checkpoint.save(tmp_path, progress, settings, {}, 0.0)

    data = tiny_data(3, 20, 60, ratings=settings.predicts_ratings)
    unbroken = simulate(settings, keep, data=data)
    found, _ = checkpoint.find_newest(tmp_path)
    assert found is not None
    assert any(name.startswith(TASK_PREFIX) for name in found.progress.state.algorithm_state), "tasks are in flight"
    assert in_flight_tasks(found.progress.state.algorithm_state)[1]
    again = simulate(settings, lambda _report, progress: whole.append(progress), data=data, progress=found.progress)
    same(again.state, unbroken.state)
    assert again.history[-1].seconds == unbroken.history[-1].seconds
    assert again.notes == unbroken.notes


def test_updates_to_tasks_of_different_rounds_are_different_sums() -> None:
    aggregate = Aggregate()
    for asked, value in ((3, 1.0), (4, 2.0), (3, 5.0)):
        aggregate.add(ClientTask(asked, 0, {}, {}), Update({"x": torch.tensor([value])}, 1.0))
    found = {task.round_number: update for task, update in aggregate.parts()}
    assert {asked: (update.weight, update.sums["x"].tolist()) for asked, update in found.items()} == {
        3: (2.0, [6.0]), 4: (1.0, [2.0]),
    }  # fmt: skip


def test_a_judgement_counts_for_what_was_tried_when_it_was_asked_for() -> None:
    federation = asynchronous_federation(chosen("co_occurrence", rounds=9))
    algorithm, state = federation.plan.algorithm, federation.initial()
    assert isinstance(algorithm, CoOccurrence)
    first = algorithm.tuning(federation.plan).schedule.first
    asked, later = replace(state, round_number=first), replace(state, round_number=first + 2)
    (task,), aggregate = algorithm.tasks(federation.plan, asked, [0]), Aggregate()
    aggregate.add(task, Update({QUALITY: torch.tensor([3.0, 2.0, 0.0, 0.0])}, 3.0))
    tally = algorithm.server_update(federation.plan, later, aggregate).algorithm_state[QUALITY]["0"].view(-1, 4)
    assert tally[:, 0].tolist() == [3.0, *[0.0] * (len(tally) - 1)]


def test_notes_on_staleness() -> None:
    result = simulate(chosen("ratings", PACE, SLOW), data=tiny_data(3, 20, 60, ratings=True))
    (note,) = [reason for reason in result.notes if reason.startswith("Rounds did not wait")]
    assert "more than 4 steps stale" in note
    assert staleness_sentence(
        [5, 3, 2, 1], AsynchronousSettings(buffer_size=1, max_staleness=2), depends_on_model=True
    ) == (
        "Rounds did not wait: 10 updates counted, 0.7 steps stale on average and 2 at most; 1 were refused, "
        "being more than 2 steps stale."
    )
    assert all(report.num_clients <= 8 for report in result.history)


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        (
            {"fleet": {"asynchronous": {"max_staleness": 3}}},
            "fleet.asynchronous.buffer_size or fleet.asynchronous.step_seconds",
        ),
        ({"fleet": {"latency": {"slow_share": 0.3}}}, "fleet.latency.median_seconds"),
        ({"fleet": {"latency": {"median_seconds": 1, "slow_factor": 3}}}, "fleet.latency.slow_share"),
        ({"fleet": {"asynchronous": {"buffer_size": 3}}, "privacy": {"level": "secure"}}, "masks cancel"),
        ({"fleet": {"asynchronous": {"buffer_size": 3}, "replacement": True}}, "one task at a time"),
        ({"fleet": {"asynchronous": {"buffer_size": 3}}, "algorithm": {"kind": "central"}}, "no clients to wait for"),
    ],
)
def test_what_has_no_effect_or_does_not_go_together_is_refused(tables: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSettings, match=reason):
        read_settings(tables)


def test_asynchronous_simulations_need_a_latency() -> None:
    with pytest.raises(InvalidSettings, match=r"fleet\.latency\.median_seconds"):
        asynchronous_federation(chosen("ratings", PACE))
