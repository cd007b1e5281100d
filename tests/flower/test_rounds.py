"""Rounds over a network: failed ones do not count, only the cohort is asked, and all is recorded."""

import logging
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message

from fairfold.config import Settings
from fairfold.errors import InvalidSettings, InvalidState
from fairfold.flower.strategy import FairStrategy
from fairfold.runs import events as node_log
from fairfold.runs.events import participants, read_events
from tests.flower.test_strategy import ITEMS, made, network_settings, raises
from tests.support.federations import tiny_data
from tests.support.nodes import Nodes, in_process
from tests.support.settings import make_settings

QUERIES: dict[str, Any] = {"evaluate": False}


def failing(nodes: Nodes, fails: Any) -> None:
    """Nodes raise where ``fails`` (of node and message) is true."""
    true = nodes.grid.app

    def app(message: Message, context: Context) -> Message:
        return raises(message) if fails(context.node_id, message) else true(message, context)

    nodes.grid.app = app  # type: ignore[assignment]


def asked(nodes: Nodes) -> list[tuple[int, str]]:
    """Every message that goes out from now on: the node, and what it is."""
    found: list[tuple[int, str]] = []

    def note(message: Message) -> None:
        if not message.metadata.reply_to_message_id:
            found.append((message.metadata.dst_node_id, message.metadata.message_type))

    nodes.grid.inspect = note
    return found


def test_a_round_without_updates_does_not_count_and_logs_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tried = 0

    def fails(_node: int, message: Message) -> bool:
        nonlocal tried
        second = message.metadata.message_type == "train" and message.metadata.group_id == "2"
        tried += second
        return second and tried <= 12  # all six, twice

    nodes = made(network_settings(), tmp_path / "devices", folder=tmp_path / "run", **QUERIES)
    failing(nodes, fails)
    with caplog.at_level(logging.WARNING, "fairfold"):
        nodes.run()
    unbroken = made(network_settings(), tmp_path / "others", **QUERIES)
    unbroken.run()
    for name, vector in unbroken.strategy.progress.state.full.items():
        torch.testing.assert_close(nodes.strategy.progress.state.full[name], vector)
    assert [report.num_clients for report in nodes.strategy.progress.history] == [6, 6, 6, 6]
    assert "round 2: no usable update (6 were asked: 6 × the device failed)" in caplog.text
    rounds = [event for event in read_events(tmp_path / "run") if event["event"] == node_log.ROUND]
    assert [(event["round"], event["counted"]) for event in rounds] == [
        (1, True), (2, False), (2, False), (2, True), (3, True), (4, True),
    ]  # fmt: skip
    assert rounds[1]["left_out"] == {str(node): "the device failed" for node in range(1, 7)}
    assert set(rounds[0]["phases"]) == {"nodes", "tasks", "updates", "step", "saving"}


def test_a_run_without_updates_ends_and_can_be_resumed(tmp_path: Path) -> None:
    settings = network_settings(network={"max_failed_rounds": 3})
    nodes = made(settings, tmp_path / "devices", folder=tmp_path / "run", **QUERIES)
    true = nodes.grid.app
    failing(nodes, lambda _node, message: message.metadata.message_type == "train" and message.metadata.group_id > "1")
    with pytest.raises(InvalidState, match="round 2, tried 3 times"):
        nodes.run()
    assert nodes.strategy.progress.state.round_number == 1
    nodes.grid.app = true
    again = FairStrategy(settings, ITEMS, folder=tmp_path / "run", resume=True, round_timeout=0.0, **QUERIES)
    again.start(nodes.grid)
    assert [report.round_number for report in again.progress.history] == [1, 2, 3, 4]
    assert sum(not event.get("counted", True) for event in read_events(tmp_path / "run")) == 3


def test_a_run_without_nodes_ends_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = made(network_settings(network={"max_failed_rounds": 2}), tmp_path, wait_timeout=0.0)
    nodes.grid.contexts.clear()
    with pytest.raises(InvalidState, match="no node is there that takes part"):
        nodes.run()
    assert nodes.strategy.progress.state.round_number == 0


def test_only_the_cohort_is_asked_for_capacities_and_once(tmp_path: Path) -> None:
    settings = network_settings(clients_per_round=2, rounds=3, network={"push_model": False})
    nodes = made(settings, tmp_path / "devices", folder=tmp_path / "run", **QUERIES)
    sent = asked(nodes)
    nodes.run()
    trained = [node for node, kind in sent if kind == "train"]
    queried = [node for node, kind in sent if kind == "query.capacity"]
    assert len(trained) == 6
    assert sorted(queried) == sorted(set(trained)), "each of those drawn once, and nobody else"
    again = FairStrategy(settings.with_changes({"run.rounds": 6}), ITEMS, folder=tmp_path / "run", resume=True,
                         round_timeout=0.0, **QUERIES)  # fmt: skip
    before = len(sent)
    again.start(nodes.grid)
    later = [node for node, kind in sent[before:] if kind == "query.capacity"]
    assert not set(later) & set(queried), "what a node can hold is known after a resume"


def test_a_device_that_changed_its_size_is_asked_again(tmp_path: Path) -> None:
    nodes = made(network_settings(rounds=3), tmp_path / "devices", folder=tmp_path / "run", **QUERIES)
    nodes.grid.contexts[1].node_config["capacity"] = "1x"
    true = nodes.grid.app

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and message.metadata.group_id == "2" and context.node_id == 1:
            context.node_config["capacity"] = "4x"  # less memory than it had
        return true(message, context)

    nodes.grid.app = app  # type: ignore[assignment]
    nodes.run()
    assert [report.num_clients for report in nodes.strategy.progress.history] == [6, 5, 6]
    took_part, _ = participants(read_events(tmp_path / "run"))
    assert next(node for node in took_part if node["node"] == 1)["size"] == "4x"


def test_what_came_is_counted_whether_it_can_be_used_or_not(tmp_path: Path) -> None:
    sizes = []
    for spoiled in (False, True):
        place = tmp_path / str(spoiled)
        nodes = made(network_settings(rounds=1), place / "devices", folder=place / "run", **QUERIES)
        nodes.grid.fault = lambda _round, node, bad=spoiled: "nan" if bad and node == 2 else None  # type: ignore[misc]
        nodes.run()
        sizes.append(nodes.strategy.progress.history[0].bytes_up)
        took_part, _ = participants(read_events(place / "run"))
        assert sum(node["bytes_up"] for node in took_part) == sizes[-1]
        assert [node["rounds"] for node in took_part].count(0) == spoiled
    assert sizes[0] == sizes[1]


def test_what_is_known_of_nodes_is_appended_to_and_not_written_anew(tmp_path: Path) -> None:
    nodes = made(network_settings(clients_per_round=2), tmp_path / "devices", folder=tmp_path / "run", **QUERIES)
    path, seen, places = tmp_path / "run" / node_log.NODES, [b""], set[int]()

    def look(_message: Message) -> None:
        if path.exists() and (content := path.read_bytes()) != seen[-1]:
            seen.append(content)
            places.add(path.stat().st_ino)

    nodes.grid.inspect = look
    nodes.run()
    seen.append(path.read_bytes())
    assert len(seen) > 4, "it grows while the run goes"
    assert all(later.startswith(before) for before, later in pairwise(seen))
    assert places == {path.stat().st_ino}, "the same file, from the first line to the last"


def test_damaged_events_are_logged_and_a_run_goes_on_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, folder = network_settings(rounds=2), tmp_path / "run"
    nodes = made(settings, tmp_path / "devices", folder=folder, **QUERIES)
    nodes.run()
    path = folder / node_log.NODES
    right = path.read_bytes()
    for place in range(0, len(right) - 1, 7):
        broken = bytearray(right)
        broken[place] ^= 1 << (place % 8)
        path.write_bytes(broken)
        with pytest.raises(InvalidSettings, match="damaged"):
            read_events(folder)
    path.write_bytes(right[:-5])
    assert len(read_events(folder)) == right.count(b"\n") - 1, "a line that a kill cut short is no line"
    path.write_bytes(right.replace(b'"node":2,', b'"node":9,', 1))
    more = settings.with_changes({"run.rounds": 3})
    with caplog.at_level(logging.WARNING, "fairfold"):
        again = FairStrategy(more, ITEMS, folder=folder, resume=True, round_timeout=0.0, **QUERIES)
    assert "is asked again" in caplog.text
    sent = asked(nodes)
    again.start(nodes.grid)
    assert [node for node, kind in sent if kind == "query.capacity"] == [2]
    assert again.progress.history[-1].num_clients == 6
    read_events(folder)


class ManyNodes:
    """A grid on which very many nodes are registered, of which the first few reply for all."""

    def __init__(self, grid: Any, many: int) -> None:
        self._grid, self._nodes, self.looked = grid, list(range(1, many + 1)), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> Iterable[int]:
        self.looked += 1
        time.sleep(0.02)
        return list(self._nodes)


def test_looking_who_is_connected_takes_a_tenth_of_the_time_at_most(tmp_path: Path) -> None:
    nodes = in_process(tiny_data(0, 12, ITEMS), network_settings(clients_per_round=2, rounds=8), 6, tmp_path, **QUERIES)
    grid = ManyNodes(nodes.grid, 6)
    began = time.monotonic()
    nodes.strategy.start(grid)  # type: ignore[arg-type]
    assert grid.looked * 0.02 <= 0.1 * (time.monotonic() - began) + 0.04


def test_what_a_server_waits_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    nodes = made(network_settings(rounds=1), tmp_path / "devices", folder=tmp_path / "run")
    nodes.run()
    other = network_settings(rounds=1, network={"wait_timeout": 5, "round_timeout": 7, "min_nodes": 2})
    again = FairStrategy(other, ITEMS, folder=tmp_path / "run", resume=True)
    assert (again.wait_timeout, again.round_timeout, again.min_nodes) == (5, 7, 2)
    assert make_settings().plain()["fleet"].keys().isdisjoint({"network", "faults"}), "not where nobody changed it"


def test_a_run_whose_model_follows_from_statistics_is_resumed(tmp_path: Path) -> None:
    """Which rows there are is known from the statistics, and not from the settings alone."""
    settings = Settings(
        fleet={"capacities": "1x-4x"}, run={"rounds": 1, "evaluate_every": 9}, algorithm={"kind": "co_occurrence"}
    )
    nodes = in_process(tiny_data(0, 12, 200), settings, 6, tmp_path / "devices", folder=tmp_path / "run", **QUERIES)
    nodes.strategy.start(nodes.grid)
    more = settings.with_changes({"run.rounds": 2})
    again = FairStrategy(more, 200, folder=tmp_path / "run", resume=True, round_timeout=0.0, **QUERIES)
    again.start(nodes.grid)
    assert [report.num_clients for report in again.progress.history] == [6, 6]


@pytest.mark.parametrize("algorithm", ["co_occurrence", "ratings"])
def test_statistics_without_replies_are_tried_again(
    algorithm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = {"capacities": "1x", "clients_per_round": None}
    settings = Settings(algorithm={"kind": algorithm}, fleet=network, run={"rounds": 2, "evaluate_every": 9})
    data = tiny_data(0, 12, 60, algorithm == "ratings")
    nodes = in_process(data, settings, 6, tmp_path / "devices", folder=tmp_path / "run", **QUERIES)
    tried = iter(range(12))  # all six, twice
    failing(
        nodes,
        lambda _node, message: message.metadata.message_type == "query.statistics" and next(tried, None) is not None,
    )
    nodes.strategy.start(nodes.grid)
    assert [report.num_clients for report in nodes.strategy.progress.history] == [6, 6]
    assert caplog.text.count("the statistics before it are lost: none of 6 devices replied") == 2
    assert sum(not event.get("counted", True) for event in read_events(tmp_path / "run")) == 2


def test_a_client_without_the_numbers_of_its_items_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, its file has gone since the statistics."""
    settings = Settings(
        fleet={"capacities": "1x"}, run={"rounds": 1, "evaluate_every": 9}, algorithm={"kind": "co_occurrence"}
    )
    nodes = in_process(tiny_data(0, 12, 200), settings, 6, tmp_path / "devices", folder=tmp_path / "run", **QUERIES)

    deliver = nodes.grid._deliver

    def delivered(message: Message) -> str:
        if message.metadata.message_type == "query.numbering" and message.metadata.dst_node_id == 3:
            message.content.clear()  # it cannot be answered
        return deliver(message)

    nodes.grid._deliver = delivered  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "fairfold"):
        nodes.strategy.start(nodes.grid)
    assert "round 1: client 3 left out: it did not receive the numbers of its items" in caplog.text
    assert nodes.strategy.progress.history[-1].num_clients == 5
    (noted,) = [event for event in read_events(tmp_path / "run") if event["event"] == "round"]
    assert list(noted["left_out"]) == ["3"]
