"""Asynchronous rounds over a network: late updates are aggregated or refused, and sums stay exact."""

import json
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from fairfold.errors import InvalidSettings
from fairfold.flower.fleet.processes import stop_on_exit
from fairfold.flower.strategy import FairStrategy
from fairfold.runs import events as node_log
from fairfold.runs.events import read_events
from tests.flower.test_acknowledged import ITEMS, KINDS, USERS, assert_exact
from tests.flower.test_kills import assert_exact as assert_exact_folder
from tests.flower.test_processes import ended, log_of, made, started
from tests.support.federations import tiny_data
from tests.support.nodes import FaultyGrid, Nodes, in_process
from tests.support.settings import make_settings

STALENESS = 3
ASYNCHRONOUS = {"buffer_size": 2, "max_staleness": STALENESS}
SLOWER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("ratings by counts", "ratings")]


def federation(
    kind: str, devices: Path, slow: dict[int, int], asynchronous: Any = None, rounds: int = 12, **options: Any
) -> Nodes:
    """Six nodes, of which some reply when the server has taken so many steps more."""
    keys = KINDS[kind] | {"rounds": rounds, "clients_per_round": None, "capacities": "1x-4x", "factors": 4}
    data = tiny_data(3, USERS, ITEMS, KINDS[kind]["algorithm"] == "ratings")
    fault = options.pop("fault", None)
    found = in_process(data, make_settings(**keys), USERS, devices, fault=fault)
    settings = make_settings(**keys, asynchronous=ASYNCHRONOUS if asynchronous is None else asynchronous)
    found.strategy = FairStrategy(settings, ITEMS, **{"evaluate": False, "round_timeout": 60.0} | options)
    slow_down(found, slow)
    return found


def slow_down(nodes: Nodes, slow: dict[int, int]) -> None:
    """Replies of slow nodes are not there until the server has taken so many steps more."""
    grid, asked_at = nodes.grid, dict[str, tuple[int, int]]()
    deliver, pull = grid._deliver, FaultyGrid.pull_messages

    def delivered(message: Message) -> str:
        name = deliver(message)
        if message.metadata.message_type == "train":
            node = int(grid.contexts[message.metadata.dst_node_id].node_config["partition-id"])
            asked_at[name] = int(message.metadata.group_id) - 1, slow.get(node, 0)
        return name

    def pulled(names: Iterable[str]) -> Iterable[Message]:
        done = nodes.strategy.progress.state.round_number
        return pull(grid, [name for name in names if sum(asked_at.get(name, (0, 0))) <= done])

    grid._deliver, grid.pull_messages = delivered, pulled  # type: ignore[method-assign, assignment]


def orders(nodes: Nodes) -> list[tuple[int, int]]:
    """Every task that goes out from now on: the round, and the node."""
    found: list[tuple[int, int]] = []

    def note(message: Message) -> None:
        if message.metadata.message_type == "train" and not message.metadata.reply_to_message_id:
            found.append((int(message.metadata.group_id), message.metadata.dst_node_id))

    nodes.grid.inspect = note
    return found


@pytest.mark.parametrize("kind", ["ratings streamed", *SLOWER])
def test_slow_clients_are_aggregated_later_and_sums_stay_exact(kind: str, tmp_path: Path) -> None:
    nodes = federation(kind, tmp_path / "devices", {4: 2, 5: STALENESS + 2}, folder=tmp_path / "run")
    task = orders(nodes)
    nodes.run()
    strategy = nodes.strategy
    assert [report.num_clients for report in strategy.progress.history] == [2] * 12
    late = strategy.progress.rejections.counts[f"too stale: more than {STALENESS} steps behind"]
    assert late > 0
    assert_exact(nodes)
    rounds = [event for event in read_events(tmp_path / "run") if event["event"] == node_log.ROUND]
    behind = [steps for event in rounds for steps in event.get("staleness", {}).values()]
    assert 2 in behind, "who is a little late counts"
    assert STALENESS + 2 in behind, "who is too late does not"
    assert sum("too stale" in reason for event in rounds for reason in event["left_out"].values()) == late
    for event in rounds:  # bytes are counted when they come, whether the update can be used or not
        late_ones = [node for node, reason in event["left_out"].items() if reason.startswith("too stale")]
        assert sorted(event["up"]) == sorted([*map(str, event["used"]), *late_ones])
    open_since: dict[int, int] = {}
    for number, node in task:  # a node is asked again once its update was used, or left out, in a round between
        if node in open_since:
            between = rounds[open_since[node] - 1 : number - 1]
            assert any(node in event["used"] or str(node) in event["left_out"] for event in between)
        open_since[node] = number
    notes = json.loads((tmp_path / "run" / "result.json").read_text())["notes"]
    assert any(note.startswith("Rounds did not wait: 24 ") for note in notes)
    assert strategy.network_state.staleness is not None
    assert strategy.network_state.staleness[-1] == late


def test_where_all_reply_at_once_it_is_the_synchronous_run(tmp_path: Path) -> None:
    asynchronous = {"buffer_size": USERS}
    one = federation("ratings", tmp_path / "one", {}, asynchronous, rounds=4).run()
    other = federation("ratings", tmp_path / "other", {}, {}, rounds=4).run()
    for name, vector in other.full.items():
        assert vector.equal(one.full[name])


def test_a_server_goes_on_and_nobody_is_counted_twice(tmp_path: Path) -> None:
    nodes = federation("ratings", tmp_path / "devices", {3: 1, 4: 2, 5: 4}, rounds=5, folder=tmp_path / "run")
    nodes.run()
    assert nodes.strategy._training_round.pending, "some are still at work when the server ends"
    more = nodes.strategy.settings.with_changes({"run.rounds": 11})
    staleness = nodes.strategy.network_state.staleness
    nodes.strategy = FairStrategy(more, ITEMS, folder=tmp_path / "run", resume=True, round_timeout=60.0, evaluate=False)
    assert nodes.strategy.network_state.staleness == staleness
    nodes.run()
    assert nodes.strategy.progress.state.round_number == 11
    assert sum(nodes.strategy.network_state.staleness or []) > sum(staleness or [])
    assert_exact(nodes)


def test_a_client_that_never_replies_gets_another_task_after_its_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = {"node": 1}

    def fault(number: int, node: int) -> str | None:
        return "drop" if node == lost["node"] and number < 3 else None

    nodes = federation("ratings", tmp_path, {}, {"step_seconds": 0.2}, rounds=9, fault=fault, round_timeout=0.5)
    task = orders(nodes)
    with caplog.at_level(logging.WARNING, "fairfold"):
        nodes.run()
    assert nodes.strategy.progress.rejections.counts["no update in time"] >= 1
    assert len([number for number, node in task if node == 2]) >= 2
    assert_exact(nodes)


def test_quality_is_asked_of_those_who_are_free(tmp_path: Path) -> None:
    asked = list[tuple[int, int]]()
    nodes = federation("ratings", tmp_path / "devices", {5: 4}, evaluate=True)

    def note(message: Message) -> None:
        if message.metadata.message_type == "evaluate" and not message.metadata.reply_to_message_id:
            asked.append((nodes.strategy.progress.state.round_number, message.metadata.dst_node_id))

    nodes.grid.inspect = note
    settings = nodes.strategy.settings.with_changes({"run.evaluate_every": 2})
    nodes.strategy.settings = settings
    nodes.run()
    first = [node for number, node in asked if number == 2]
    assert 6 not in first
    assert 6 in [node for number, node in asked if number == 12], "at the end everybody is"
    assert nodes.strategy.progress.history[-1].quality is not None


def test_a_clock_is_for_simulations() -> None:
    with pytest.raises(InvalidSettings, match="take the time they take"):
        FairStrategy(make_settings(latency={"median_seconds": 1.0}), ITEMS)


@pytest.mark.slow
def test_real_programs_do_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    """Two clients reply at once and one takes fifteen seconds: it is aggregated some steps later."""
    local_fleet = made(
        tmp_path / "trial", ["good", "slow", "good"], rounds=16, timeout=600, algorithm="co_occurrence", tune=False,
        asynchronous={"buffer_size": 1, "max_staleness": 14}, clients_per_round=None,
    )  # fmt: skip
    with stop_on_exit(local_fleet.programs):
        ended(local_fleet, started(local_fleet))
    assert [updates for _, updates in local_fleet.server.completed_rounds()] == [1] * 16, log_of(local_fleet)
    rounds = [event for event in read_events(local_fleet.run_folder) if event["event"] == node_log.ROUND]
    used = Counter(node for event in rounds for node in event["used"])
    behind = {node: steps for event in rounds for node, steps in event.get("staleness", {}).items()}
    assert len(used) == 3, "the slow one's updates are used as well"
    slow = min(used, key=lambda node: used[node])
    assert behind[str(slow)] >= 2, "while the others went on"
    assert_exact_folder(local_fleet)
