"""Every message of a run is opened: beside the sums that the server is owed there are known facts, and no names.

What the sums themselves give away is measured by attacks (tests/audit): bytes that are not there prove nothing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord

from fairfold.errors import InvalidState
from fairfold.flower.client import make_client_app
from fairfold.flower.client_store import ClientStore
from fairfold.flower.grid import InProcessGrid
from fairfold.flower.protocol import ARRAYS, FACTS, FILE, MODEL
from fairfold.flower.strategy import FairStrategy
from tests.support.federations import tiny_settings

ITEMS = 60
UP = {"query.capacity": {"version", "capacity", "number", "name"},
      "query.model": {"version"},
      "train": {"version", "run", "update_id", "weight", "scales", "quality", "evaluated"},
      "evaluate": {"version", "run", "update_id", "weight", "scales", "quality", "evaluated"}}  # fmt: skip
"""All facts that a reply may have beside its tensors."""


def parts(message: Message) -> Iterator[tuple[str, str, bytes]]:
    """Record, key and content of everything in a message, as bytes."""
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                yield name, key, array.data
        elif isinstance(record, ConfigRecord | MetricRecord):
            for key, value in record.items():
                yield name, key, value if isinstance(value, bytes) else repr(value).encode()


def secrets_of(folder: Path, names: list[str]) -> list[bytes]:
    """What no reply may contain: names of users, and the seed of the device's own draws."""
    secret = ClientStore(folder).load().secret
    return [name.encode() for name in names] + [str(secret).encode(), f"{secret:x}".encode()]


def check(messages: list[Message], forbidden: list[bytes], tensors: set[str]) -> None:
    for message in messages:
        kind = message.metadata.message_type
        is_reply = message.metadata.reply_to_message_id != ""
        for record, key, content in parts(message):
            if is_reply and record == FACTS:
                assert key in UP[kind], f"{kind} replies with {key}"
                assert key != "scales" or set(json.loads(content)) <= {1.0}, "at full precision scales say nothing"
            if record == ARRAYS:
                assert key in ({FILE} if kind == MODEL else tensors), f"{kind} carries a tensor {key}"
                assert not is_reply or kind == "train"
            assert record in (ARRAYS, FACTS)
            assert not any(secret in content for secret in forbidden), f"{kind} carries something private in {key}"


@pytest.mark.parametrize("changes", [{"algorithm": "closed_form"}, {"model": "neumf"}, {"local_optimizer": "adam"}])
@pytest.mark.parametrize("leaky", [False, True])
def test_no_name_and_no_unknown_fact_enters_a_message(changes: dict[str, Any], leaky: bool, tmp_path: Path) -> None:
    settings = tiny_settings(**{"rounds": 2, "clients_per_round": None, "capacities": "1x-4x", "aggregation": "delta",
                                "evaluate_every": 1, "factors": 8} | changes)  # fmt: skip
    source, names = torch.Generator().manual_seed(3), ["Anna-Karenina", "Pierre-Besuchow", "Natascha-Rostowa"]
    for number in range(4):
        drawn = [torch.randperm(ITEMS, generator=source)[:12].tolist() for _ in names]
        lines = [f"{name},{item}" for name, mine in zip(names, drawn, strict=True) for item in mine]
        (tmp_path / f"{number}.csv").write_text("user,item\n" + "\n".join(lines))
    app = make_client_app(state=tmp_path / "state")
    configs: list[Any] = [
        {"partition-id": number, "data": str(tmp_path / f"{number}.csv"), "capacity": ("1x", "4x")[number % 2]}
        for number in range(4)
    ]
    messages: list[Message] = []
    tensors = set(FairStrategy(settings, ITEMS).progress.state.full)

    def inspect(message: Message) -> None:
        if message.has_content():
            messages.append(message)

    def leaking(message: Message, context: Context) -> Message:
        reply = true(message, context)
        facts = reply.content[FACTS]
        assert isinstance(facts, ConfigRecord)
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 2:
            facts["run"] = names[1]
        return reply

    grid = InProcessGrid(app, configs, inspect=inspect)
    true = grid.app
    if leaky:
        grid.app = leaking  # type: ignore[assignment]
    FairStrategy(settings, ITEMS).start(grid)
    assert len(messages) >= 4 * 2 * (1 + 2 + 2) - leaky
    folders = [tmp_path / "state" / f"node-{number}" for number in range(4)]
    forbidden = list({secret for folder in folders for secret in secrets_of(folder, names)})
    assert len(forbidden) == 3 + 2 * 4
    if leaky:
        with pytest.raises(AssertionError, match="something private"):
            check(messages, forbidden, tensors)
    else:
        check(messages, forbidden, tensors)


def test_a_device_that_fails_does_not_reveal_on_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error quotes what was given. The device's own log may have it; the message may not."""
    (tmp_path / "anna.csv").write_text("user,item\nAnna,A-Secret-Book\n")
    config: Any = {"partition-id": 0, "data": str(tmp_path / "anna.csv"), "capacity": "1x", "state": str(tmp_path)}
    reasons: list[str] = []

    def inspect(message: Message) -> None:
        if message.has_error():
            reasons.append(str(message.error.reason))

    settings = tiny_settings(rounds=1, clients_per_round=None, capacities="1x", network={"max_failed_rounds": 1})
    with pytest.raises(InvalidState):
        FairStrategy(settings, ITEMS, evaluate=False).start(InProcessGrid(make_client_app(), [config], inspect=inspect))
    assert len(reasons) == 1
    assert "InvalidData" in reasons[0]
    assert not any(word in reasons[0] for word in ("A-Secret-Book", "Anna", "anna", str(tmp_path)))
    assert "A-Secret-Book" in caplog.text
