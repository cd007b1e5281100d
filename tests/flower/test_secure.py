"""Secure sums over messages: the same sums as in the simulation, and no answer of one device in any message."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message

from fairfold.data import Dataset
from fairfold.flower.protocol import FACTS, SECURE
from fairfold.secure.folder import ROUND
from fairfold.settings import Settings
from tests.federations import tiny_data
from tests.flower.common import Nodes, as_devices, assert_same, in_process, simulated

USERS = 8
ALGORITHMS: dict[str, dict[str, Any]] = {
    "correlations": {"algorithm": {"kind": "correlations", "support": 1}},
    "least_squares": {"algorithm": "least_squares", "subspace": {"support": 0}},
    "gradient": {"algorithm": {"kind": "gradient", "aggregation": "delta", "server_optimiser": "sgd"}},
    "paper": {"algorithm": {"kind": "gradient", "aggregation": "paper", "weighting": "data"}},
}


def settings_of(case: str, smallest: int = 3, capacities: str = "1x-2x", rounds: int = 2) -> Settings:
    model = {} if case == "correlations" else {"model": {"kind": "mf", "factors": 3}}
    return Settings(
        **ALGORITHMS[case],
        **model,
        fleet={"capacities": capacities, "clients_per_round": None},
        run={"rounds": rounds, "evaluate_every": rounds},
        privacy={"level": "secure", "smallest_cohort": smallest},
    )


def data() -> Dataset:
    """Users with something to be guessed."""
    return Dataset("tiny", tiny_data(3, USERS, 30).train, tiny_data(4, USERS, 30).train)


def federation(case: str, folder: Path, **options: Any) -> Nodes:
    more = {key: options.pop(key) for key in ("smallest", "capacities", "rounds") if key in options}
    return in_process(data(), settings_of(case, **more), USERS, folder, **options)


@pytest.mark.parametrize("case", list(ALGORITHMS))
def test_the_sums_are_those_of_the_simulation(case: str, tmp_path: Path) -> None:
    messages: list[Message] = []
    nodes = federation(case, tmp_path, inspect=messages.append)
    state = nodes.run()
    expected, _, _ = simulated(data(), settings_of(case), as_devices)
    assert_same(state.full, expected.full)
    assert not nodes.strategy.progress.rejections.counts
    assert nodes.strategy.progress.history[-1].clients == USERS
    quality = nodes.strategy.progress.history[-1].quality
    assert quality is not None
    assert 0 < quality.server <= 1
    assert all(node.last_quality is None for node in nodes.strategy.nodes.usable.values())  # nobody's own is known
    no_answer_is_seen(messages)
    assert not list(tmp_path.glob(f"*/secure/{ROUND}"))  # what was secret in a round is gone


def no_answer_is_seen(messages: Iterable[Message]) -> None:
    """Answers have a vector under masks, and nothing beside it that is a device's."""
    for message in messages:
        if message.metadata.reply_to_message_id == "" or message.metadata.message_type == "query.capacity":
            continue
        facts = message.content[FACTS]
        assert set(facts) <= {"version", SECURE}, message.metadata.message_type
        for name, record in message.content.items():
            assert name == FACTS or (name == SECURE and isinstance(record, ArrayRecord) and list(record) == [SECURE])
