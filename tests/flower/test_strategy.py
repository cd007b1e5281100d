"""A server among nodes that fail: invalid ones are left out with the reason, and nothing wrong enters the model."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fairfold.config import Settings
from fairfold.config.files import load_settings
from fairfold.errors import InvalidCheckpoint, InvalidSettings
from fairfold.federation.plan import Plan
from fairfold.federation.updates import PublicStatistics
from fairfold.flower.grid import InProcessGrid
from fairfold.flower.protocol import ARRAYS, FACTS
from fairfold.flower.strategy import FairStrategy
from fairfold.runs import checkpoint
from fairfold.runs.events import participants, read_events
from fairfold.subspace import Capacity
from tests.support.federations import tiny_data, tiny_settings
from tests.support.nodes import Nodes, in_process
from tests.support.settings import make_settings

USERS, ITEMS = 12, 40


def network_settings(**changes: Any) -> Settings:
    base: dict[str, Any] = {"rounds": 4, "clients_per_round": None, "capacities": "1x-2x-4x", "evaluate_every": 4}
    return tiny_settings(
        **base | {"algorithm": "closed_form", "aggregation": "delta", "server_optimizer": "sgd"} | changes
    )


def made(settings: Settings, state: Path, **options: Any) -> Nodes:
    return in_process(tiny_data(0, USERS, ITEMS), settings, 6, state, **options)


def run(settings: Settings, state: Path, apply_fault: Callable[[int, Message, Message], Message] | None = None,
        **options: Any) -> tuple[FairStrategy, InProcessGrid]:  # fmt: skip
    """A whole run; ``apply_fault`` may change any reply, given the node, the message and the true reply."""
    nodes = made(settings, state, **options)
    grid = nodes.grid
    if apply_fault is not None:
        true = grid.app

        def spoiled(message: Message, context: Context) -> Message:
            return apply_fault(context.node_id, message, true(message, context))

        grid.app = spoiled  # type: ignore[assignment]
    nodes.run()
    return nodes.strategy, grid


def facts(reply: Message) -> ConfigRecord:
    found = reply.content[FACTS]
    assert isinstance(found, ConfigRecord)
    return found


def tensors(reply: Message) -> ArrayRecord:
    found = reply.content[ARRAYS]
    assert isinstance(found, ArrayRecord)
    return found


def with_values(reply: Message, change: Callable[[torch.Tensor], torch.Tensor]) -> Message:
    arrays = tensors(reply)
    for name in arrays:
        arrays[name] = Array(change(torch.from_numpy(arrays[name].numpy().copy())).numpy())
    return reply


def set_fact(key: str, value: Any) -> Callable[[Message], Message]:
    def change(reply: Message) -> Message:
        facts(reply)[key] = value
        return reply

    return change


def raises(_reply: Message) -> Message:
    raise RuntimeError("no electricity\n\x1b[31mred")


FAULTS: dict[str, tuple[Callable[[Message], Message], str]] = {
    "raises": (raises, "the device failed"),
    "NaN": (lambda reply: with_values(reply, lambda vector: vector * torch.nan), "NaN or infinity"),
    "infinity": (lambda reply: with_values(reply, lambda vector: vector + torch.inf), "NaN or infinity"),
    "huge": (lambda reply: with_values(reply, lambda vector: vector + 1e30), "values out of range"),
    "longer": (lambda reply: with_values(reply, lambda vector: torch.cat([vector, vector])), "wrong size"),
    "matrix": (lambda reply: with_values(reply, lambda vector: vector[None]), "wrong size"),
    "double": (lambda reply: with_values(reply, lambda vector: vector.double()), "wrong type"),
    "word": (set_fact("update_id", "9" * 16), "a reply to another round"),
    "run": (set_fact("run", "0" * 16), "a reply to another round"),
    "no id": (set_fact("update_id", -1), "no update_id"),
    "version": (set_fact("version", 1), "another version of the protocol"),
    "weight": (set_fact("weight", 1e9), "a weight out of range"),
    "empty": (lambda reply: Message(RecordDict(), reply_to=reply), "a message without facts"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_reply_is_left_out_with_its_reason(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    apply_fault, reason = FAULTS[fault]
    settings = network_settings(rounds=2, evaluate_every=10)

    def spoiled(node: int, message: Message, reply: Message) -> Message:
        if node != 2 or message.metadata.message_type != "train":
            return reply
        changed = apply_fault(reply)
        return changed if changed is reply else Message(changed.content, reply_to=message)

    with caplog.at_level(logging.WARNING, "fairfold"):
        strategy, _ = run(settings, tmp_path / "a", spoiled, evaluate=False)
    # The model is what it would be had node 2 never answered.
    silent, _ = run(settings, tmp_path / "b", lambda node, message, reply: (
        reply if node != 2 or message.metadata.message_type != "train" else raises(reply)), evaluate=False)  # fmt: skip
    for name, vector in silent.progress.state.full.items():
        assert torch.equal(strategy.progress.state.full[name], vector)
        assert bool(vector.isfinite().all())
    assert strategy.progress.rejections.counts == {reason: 2}
    assert f"round 1: client 2 left out: {reason}" in caplog.text
    assert "\x1b[31m" not in caplog.text, "a stranger's text does not reach the terminal as it came"


def test_nothing_in_a_message_becomes_a_path(tmp_path: Path) -> None:
    """Names of tensors, records and facts, texts: all of them lead out of the folder, and nothing goes there."""
    out = "../../escape"

    def spoiled(node: int, message: Message, reply: Message) -> Message:
        if node == 2 and message.metadata.message_type == "train":
            arrays = tensors(reply)
            for name in list(arrays):
                arrays[out] = arrays.pop(name)
            facts(reply)[out] = str(tmp_path / "escape")
            reply.content[str(tmp_path / "escape")] = ConfigRecord({out: out})
        if node == 3:
            facts(reply)["update_id"] = out
        if node == 4 and message.metadata.message_type == "query.capacity":
            facts(reply)["capacity"] = out
        return reply

    (tmp_path / "server").mkdir()
    strategy, _ = run(network_settings(rounds=2), tmp_path / "devices", spoiled, folder=tmp_path / "server" / "run")
    assert len(strategy.nodes.left_out) == 1
    assert sum(strategy.progress.rejections.counts.values()) >= 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["devices", "server"]
    assert [path.name for path in (tmp_path / "server").iterdir()] == ["run"]
    assert not list(tmp_path.rglob("*escape*"))


def test_unsolicited_and_repeated_replies_are_ignored(tmp_path: Path) -> None:
    nodes = made(network_settings(), tmp_path, evaluate=False)
    strategy, grid = nodes.strategy, nodes.grid
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    replies = list(grid.send_and_receive(messages))
    stranger = Message(replies[0].content, reply_to=messages[0])
    stranger.metadata.__dict__["_src_node_id"] = 77
    strategy.aggregate_train(1, [*replies, stranger, replies[3]])
    assert strategy.progress.history[-1].num_clients == 6
    assert all(node.rounds == 1 for node in strategy.nodes.usable.values())


def test_a_node_that_joins_late_takes_part(tmp_path: Path) -> None:
    nodes = made(network_settings(evaluate_every=1), tmp_path)
    strategy, grid = nodes.strategy, nodes.grid
    late = grid.contexts.pop(6)
    strategy.start(grid, num_rounds=2)
    assert [report.num_clients for report in strategy.progress.history] == [5, 5]
    grid.contexts[6] = late
    strategy.start(grid, num_rounds=2)
    assert [report.num_clients for report in strategy.progress.history] == [5, 5, 6, 6]
    assert strategy.nodes.usable[6].rounds == 2


def test_capacities_are_served_by_the_largest_size_that_fits(tmp_path: Path) -> None:
    settings = network_settings(capacities="1x-4x-16x", factors=8, mapping="element")
    plan = Plan.of(settings, PublicStatistics(1000))
    assert [plan.size_for(Capacity.parse(text)) for text in ("1x", "2x", "4x", "5x", "16x", "17x")] == [
        0, 1, 1, 2, 2, None,
    ]  # fmt: skip
    sizes = [held.size() * 4 for held in plan.assignments(0)]
    assert [plan.size_for(Capacity.parse(f"{size}B")) for size in sizes] == [0, 1, 2]
    assert [plan.size_for(Capacity.parse(f"{size - 1}B")) for size in sizes] == [1, 2, None]
    whole = Plan.of(network_settings(method="fedavg", capacities="1x-4x"), PublicStatistics(1000))
    assert whole.size_for(Capacity.parse("1x")) == 0
    assert whole.size_for(Capacity.parse("2x")) is None, "a device does not hold what it cannot"


@pytest.mark.parametrize("capacity", ["17x", "lots", "0x", "x" * 5000, 7, None, "-1MB"])
def test_a_node_without_a_usable_capacity_is_left_out(
    capacity: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoiled(node: int, message: Message, reply: Message) -> Message:
        if node == 3 and message.metadata.message_type.startswith("query"):
            record = facts(reply)
            del record["capacity"]
            if capacity is not None:
                record["capacity"] = capacity
        return reply

    with caplog.at_level(logging.WARNING, "fairfold"):
        strategy, _ = run(network_settings(rounds=1), tmp_path, spoiled)
    assert strategy.progress.history[-1].num_clients == 5
    assert "node 3 left out:" in caplog.text
    assert max(len(reason) for reason in strategy.nodes.left_out.values()) <= 200


def test_a_device_refuses_more_than_it_can_hold(tmp_path: Path) -> None:
    nodes = made(network_settings(rounds=1), tmp_path)
    strategy, grid = nodes.strategy, nodes.grid
    strategy.nodes.connected(grid)
    strategy.nodes.usable[6].size = 0  # a server that does not keep to what it sent
    strategy.start(grid)
    assert strategy.progress.rejections.counts["the device failed"] == 1
    assert strategy.nodes.usable[6].size == 2, "asked again before the next order"


def test_settings_that_cannot_be_served_are_refused() -> None:
    unserved: list[dict[str, Any]] = [
        {"algorithm": "central", "model": "mf"},
        {"algorithm": "gradient", "user_vectors": "uploaded"},
        {"data": "mnist", "model": "mlp"},
        {"faults": {"drop": 0.5}},
        {"replacement": True},
    ]
    for changes in unserved:
        with pytest.raises(InvalidSettings):
            FairStrategy(make_settings(**changes), ITEMS)
    with pytest.raises(InvalidSettings, match="num_items"):
        FairStrategy(make_settings())


def test_a_run_is_recorded_and_resumed(tmp_path: Path) -> None:
    settings = network_settings(server_optimizer="adam", server_lr=0.1)
    unbroken, _ = run(settings, tmp_path / "a")
    nodes = made(settings, tmp_path / "b", folder=tmp_path / "run")
    grid = nodes.grid
    killed = 0

    def dies(message: Message, context: Context) -> Message:
        nonlocal killed
        killed += message.metadata.message_type == "train" and message.metadata.group_id == "3"
        if killed == 2:
            raise KeyboardInterrupt  # the server's process goes in the middle of round 3
        return true(message, context)

    true = grid.app
    grid.app = dies  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        nodes.run()
    grid.app = true
    assert checkpoint.load_newest(tmp_path / "run" / "checkpoints").progress.state.round_number == 2
    again = FairStrategy(settings, ITEMS, folder=tmp_path / "run", resume=True, round_timeout=0.0)
    assert again.progress.state.round_number == 2
    result = again.start(grid)
    assert [report.round_number for report in again.progress.history] == [1, 2, 3, 4]
    for name, vector in unbroken.progress.state.full.items():
        torch.testing.assert_close(again.progress.state.full[name], vector, rtol=0, atol=0)
        assert torch.equal(torch.from_numpy(result.arrays[name].numpy()), vector)
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["round", "1", "2", "3", "4"]
    took_part, _ = participants(read_events(tmp_path / "run"))
    assert {node["capacity"] for node in took_part} == {"1x", "2x", "4x"}
    assert all(node["rounds"] == 4 for node in took_part)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 4
    assert (tmp_path / "run" / "run.log").read_text().count("updates used") == 4
    with pytest.raises(InvalidCheckpoint, match="factors"):
        FairStrategy(network_settings(server_optimizer="adam", server_lr=0.1, factors=4), ITEMS,
                     folder=tmp_path / "run", resume=True)  # fmt: skip
    with pytest.raises(InvalidSettings, match="new or empty"):
        FairStrategy(settings, ITEMS, folder=tmp_path / "run")


def test_a_run_whose_shapes_follow_from_statistics_is_resumed(tmp_path: Path) -> None:
    """The default recipe's tables have rows for items that enough users have, by the statistics."""
    changes = {"run.rounds": 1, "fleet.capacities": "1x-2x-4x", "fleet.clients_per_round": None}
    settings = load_settings(None, changes, "default")
    made(settings, tmp_path / "devices", folder=tmp_path / "run").run()
    again = FairStrategy(settings.with_changes({"run.rounds": 2}), ITEMS, folder=tmp_path / "run", resume=True)
    assert again.progress.state.round_number == 1
    with pytest.raises(InvalidCheckpoint, match="max_items"):
        FairStrategy(settings.with_changes({"algorithm.max_items": 4}), ITEMS, folder=tmp_path / "run", resume=True)


def test_a_server_reports_damaged_checkpoints_and_does_not_start_anew_over_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, folder = network_settings(), tmp_path / "run"
    made(settings, tmp_path / "devices", folder=folder).run()
    newest, before = sorted((folder / "checkpoints").glob("*.json"), reverse=True)
    newest.write_bytes(b"{}")
    with caplog.at_level(logging.WARNING, "fairfold"):
        again = FairStrategy(settings, ITEMS, folder=folder, resume=True, round_timeout=0.0)
    assert again.progress.state.round_number == 3
    assert f"Passed over a damaged checkpoint, {newest.name}" in caplog.text
    before.write_bytes(b"{}")
    with pytest.raises(InvalidCheckpoint, match="no whole checkpoint"):
        FairStrategy(settings, ITEMS, folder=folder, resume=True)
    assert newest.read_bytes() == before.read_bytes() == b"{}"


def test_half_precision_moves_half_the_bytes_to_nearly_the_same_end(tmp_path: Path) -> None:
    whole, _ = run(network_settings(), tmp_path / "a")
    half, _ = run(network_settings(), tmp_path / "b", half=True)
    assert [report.bytes_down for report in half.progress.history] == [
        report.bytes_down // 2 for report in whole.progress.history
    ]
    for name, vector in whole.progress.state.full.items():
        torch.testing.assert_close(half.progress.state.full[name], vector, rtol=1e-2, atol=1e-3)
