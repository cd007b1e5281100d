"""Rounds that do not wait: answers count in the round in which they come, and the server's sums stay exact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold.algorithms.correlations import Correlations
from fairfold.algorithms.rating_rows import USERS
from fairfold.algorithms.trials import QUALITY
from fairfold.backends.batched import batched
from fairfold.errors import InvalidSettings
from fairfold.protocol.faults import Rejections
from fairfold.protocol.round import Backend, in_turn, run_round
from fairfold.protocol.turns import CLOCK, ORDER, Open, before_step, behind_words, opened
from fairfold.protocol.words import Answer, Sent, State, Totals
from fairfold.runs import checkpoint
from fairfold.settings import Settings, read_settings
from fairfold.settings.pace import PaceSettings
from fairfold.simulate.run import Progress, simulate
from fairfold.simulate.world import World
from tests.federations import tiny_data

PACE: dict[str, Any] = {"answers": 3, "staleness": 4}
SLOW: dict[str, Any] = {"seconds": 1.0, "spread": 0.3, "slow": 0.3, "slower": 8.0}
KINDS = ["ratings", "correlations", "gradient", "closed_form"]


def chosen(kind: str = "ratings", pace: Any = None, clock: Any = None, rounds: int = 12, **fleet: Any) -> Settings:
    tables: dict[str, Any] = {"algorithm": {"kind": kind}, "run": {"rounds": rounds, "evaluate_every": 100}}
    tables["fleet"] = {"capacities": "1x-2x", "clients_per_round": 8, "pace": pace or {}, "clock": clock or {}} | fleet
    if kind == "gradient":  # a server that changes its vectors in place: what is still open must not change with them
        tables["algorithm"] |= {"server_optimiser": "sgd", "server_step": 1.0, "local_step": 0.1}
    if kind != "correlations":
        tables["model"] = {"factors": 4}
        tables["subspace"] = {"tail_share": 0.5} | ({} if kind == "ratings" else {"support": 0})
    return read_settings(tables)


def world_of(settings: Settings) -> World:
    return World.of(settings, tiny_data(3, 20, 60, ratings=settings.predicts_ratings))


def after(settings: Settings, backend: Backend = in_turn) -> tuple[State, World, Rejections, list[State]]:
    world, rejections, states = world_of(settings), Rejections(), list[State]()
    state = world.initial()
    for _ in range(settings.run.rounds):
        state = run_round(state, world.fleet, world.people, rejections, backend)
        states.append(state.copy())
    return state, world, rejections, states


def same(one: State, other: State, within: float = 0.0) -> None:
    for name, vector in other.full.items():
        torch.testing.assert_close(one.full[name], vector, rtol=within, atol=within)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clock_alone_changes_nothing_but_the_time(kind: str) -> None:
    state, world, _, states = after(chosen(kind, clock=SLOW, rounds=4))
    same(state, after(chosen(kind, rounds=4))[0])
    for number, one in enumerate(states):
        slowest = float(world.fleet.seconds[world.fleet.cohort(number)].max())
        assert float(one.moments[CLOCK]["seconds"]) == pytest.approx(slowest)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_busy_is_not_asked_and_what_is_behind_is_bounded(kind: str) -> None:
    state, _, rejections, states = after(chosen(kind, PACE, SLOW), batched)
    before = set[int]()
    for one in states:
        clock = one.moments[CLOCK]
        asked, heard, still = (set(clock[name].tolist()) for name in ("asked", "heard", "clients"))
        assert not before & asked, "one order at a time"
        assert len(before | asked) == 8, "as many are at work as the settings say"
        assert before | asked == heard | still
        assert not heard & still
        before = still
    behind = state.moments[CLOCK]["behind"].tolist()
    refused = sum(many for reason, many in rejections.counts.items() if reason.startswith("too stale"))
    assert behind[-1] == refused if kind != "correlations" else not refused  # these do not age
    assert sum(behind[1:-1]) > 0, "some are behind"
    assert sum(behind) == sum(len(one.moments[CLOCK]["heard"]) for one in states)


def test_the_sums_hold_what_every_device_keeps() -> None:
    """Whoever was refused as too stale: the server's sums are those of the words that devices know to be held."""
    state, world, rejections, _ = after(chosen("ratings", {"answers": 2, "staleness": 1}, SLOW, rounds=25))
    assert any(reason.startswith("too stale") for reason in rejections.counts)
    kept = world.people.private[USERS].double()
    assert bool((kept.abs().sum(1) > 0).sum() > 10)
    torch.testing.assert_close(state.moments["sums"][USERS].double(), kept.sum(0), rtol=1e-5, atol=1e-6)


def test_what_does_not_depend_on_the_model_is_never_too_late() -> None:
    """Pairs that a device has together: the slowest is heard too, and the sum is that of rounds that wait."""

    def everybody(pace: dict[str, Any], rounds: int) -> Settings:
        settings = chosen("correlations", pace, SLOW, rounds, clients_per_round="none")
        return settings.with_changes({"algorithm.choose": False})

    pace = {"answers": 2, "staleness": 0}
    waited = after(everybody({}, 2))[0]
    state, _, rejections, states = after(everybody(pace, 90))
    assert not rejections.counts
    assert float(states[-1].moments[CLOCK]["now"]) > SLOW["slower"], "the slowest have answered"
    assert int(states[-1].moments[CLOCK]["behind"][-1]) > 0, "some were beyond the bound"
    assert torch.equal(state.moments["sum"]["sum"], waited.moments["sum"]["sum"])
    told = simulate(everybody(pace, 9), data=tiny_data(3, 20, 60)).told
    assert any("does not depend on the model that they were sent" in words for words in told)


@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree(kind: str) -> None:
    settings = chosen(kind, {"seconds": 1.5, "staleness": 2}, SLOW, faults={"nan": 0.1, "drop": 0.1})
    one, other = after(settings), after(settings, batched)
    same(one[0], other[0], 1e-4)
    assert one[2].counts == other[2].counts


def test_a_step_comes_after_so_many_answers_or_seconds_but_not_before_one() -> None:
    def order(client: int, due: float, asked: int = 5) -> Open:
        return Open(client, Sent(asked, 0, {}, {}), due)

    waiting = [order(0, 9.0), order(1, 2.0), order(2, 4.0), order(3, 3.0, asked=1)]

    def heard(ages: bool = True, **pace: Any) -> tuple[list[int], float]:
        found, then = before_step(waiting, PaceSettings(**pace), 5, 1.0, ages=ages)
        return [one.client for one in found], then

    assert heard(answers=1) == ([1], 2.0)
    assert heard(answers=2) == ([1, 3], 3.0)
    assert heard(answers=2, staleness=3) == ([1, 3, 2], 4.0), "who is too far behind does not count"
    assert heard(ages=False, answers=2, staleness=3) == ([1, 3], 3.0), "unless it does not matter"
    assert heard(seconds=2.5) == ([1, 3], 3.5)
    assert heard(seconds=0.5) == ([1], 2.0), "not before one has come"
    assert heard(answers=3, seconds=2.5) == ([1, 3], 3.5)
    assert heard(answers=9) == ([1, 3, 2, 0], 9.0)


@pytest.mark.parametrize("kind", ["ratings", "correlations", "gradient"])
def test_a_run_goes_on_with_its_open_orders(kind: str, tmp_path: Path) -> None:
    settings, whole = chosen(kind, PACE, SLOW, rounds=9), list[Progress]()

    def keep(report: Any, progress: Progress) -> None:
        if report.round_number == 4:
            checkpoint.save(tmp_path, progress, settings, {}, 0.0)

    data = tiny_data(3, 20, 60, ratings=settings.predicts_ratings)
    unbroken = simulate(settings, keep, data=data)
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None
    assert any(name.startswith(ORDER) for name in found.progress.state.moments), "orders are open"
    assert opened(found.progress.state.moments)[1]
    again = simulate(settings, lambda _report, progress: whole.append(progress), data=data, progress=found.progress)
    same(again.state, unbroken.state)
    assert again.history[-1].seconds == unbroken.history[-1].seconds
    assert again.told == unbroken.told


def test_answers_to_different_rounds_are_different_sums() -> None:
    totals = Totals()
    for asked, value in ((3, 1.0), (4, 2.0), (3, 5.0)):
        totals.add(Sent(asked, 0, {}, {}), Answer({"x": torch.tensor([value])}, 1.0))
    found = {sent.round_number: answer for sent, answer in totals.parts()}
    assert {asked: (answer.weight, answer.sums["x"].tolist()) for asked, answer in found.items()} == {
        3: (2.0, [6.0]), 4: (1.0, [2.0]),
    }  # fmt: skip


def test_a_judgement_counts_for_what_was_tried_when_it_was_asked_for() -> None:
    world = world_of(chosen("correlations", rounds=9))
    algorithm, state = world.plan.algorithm, world.initial()
    assert isinstance(algorithm, Correlations)
    first = algorithm.trials(world.plan).schedule.first
    asked, later = replace(state, round_number=first), replace(state, round_number=first + 2)
    (sent,), totals = algorithm.send(world.plan, asked, [0]), Totals()
    totals.add(sent, Answer({QUALITY: torch.tensor([3.0, 2.0, 0.0, 0.0])}, 3.0))
    tally = algorithm.apply(world.plan, later, totals).moments[QUALITY]["0"].view(-1, 4)
    assert tally[:, 0].tolist() == [3.0, *[0.0] * (len(tally) - 1)]


def test_what_is_told() -> None:
    result = simulate(chosen("ratings", PACE, SLOW), data=tiny_data(3, 20, 60, ratings=True))
    (told,) = [words for words in result.told if words.startswith("Rounds did not wait")]
    assert "more than 4 behind" in told
    assert behind_words([5, 3, 2, 1], PaceSettings(answers=1, staleness=2), ages=True) == (
        "Rounds did not wait: 10 answers counted, 0.7 steps behind on the average and 2 at the most; 1 were refused, "
        "being more than 2 behind."
    )
    assert all(report.clients <= 8 for report in result.history)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"fleet": {"pace": {"staleness": 3}}}, "fleet.pace.answers or fleet.pace.seconds"),
        ({"fleet": {"clock": {"slow": 0.3}}}, "fleet.clock.seconds"),
        ({"fleet": {"clock": {"seconds": 1, "slower": 3}}}, "fleet.clock.slow"),
        ({"fleet": {"pace": {"answers": 3}}, "privacy": {"level": "secure"}}, "masks cancel"),
        ({"fleet": {"pace": {"answers": 3}, "replacement": True}}, "one order at a time"),
        ({"fleet": {"pace": {"answers": 3}}, "algorithm": {"kind": "central"}}, "nobody to wait for"),
    ],
)
def test_what_has_no_effect_or_does_not_go_together_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        read_settings(tables)


def test_a_pace_needs_a_clock_in_a_simulation() -> None:
    with pytest.raises(InvalidSettings, match=r"fleet\.clock\.seconds"):
        world_of(chosen("ratings", PACE))
