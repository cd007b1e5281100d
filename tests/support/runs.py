"""Small runs for tests, and what it means that two of them are the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold.checksums import with_checksum
from fairfold.config import Settings, read_settings
from fairfold.federation.evaluation import Callback, Result, RoundReport
from fairfold.runs.train import FinishedRun, run
from tests.support.settings import make_tables

SMALL: dict[str, Any] = {
    "data": {"users": 12, "items": 60, "interactions_per_user": 10},
    "algorithm": "closed_form",
    "clients_per_round": 6,
    "factors": 4,
    "rounds": 4,
    "evaluate_every": 2,
}
GRADIENT: dict[str, Any] = {
    "algorithm": "gradient",
    "local_optimizer": "adam",
    "local_lr": 0.01,
    "aggregation": "paper",
    "batch_size": 4,
}
RANKED: dict[str, Any] = {"algorithm": "closed_form", "chunk": 4, "sign": False, "tail_share": 0.25}


def small(**changes: Any) -> Settings:
    """A run that takes no time: the closed form, unless another algorithm is named."""
    values = make_tables(**SMALL | changes)
    subspace = values.setdefault("subspace", {})
    hashed = subspace.get("method", "fair") in ("fair", "fair_hom", "inconsistent")
    if hashed and subspace.get("mapping") != "element" and values["algorithm"]["kind"] in ("closed_form", "gradient"):
        subspace.setdefault("chunk", 1)
    return read_settings(values)


def write_manifest(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    del content["checksum"]
    path.write_bytes(with_checksum(content))


def assert_same_end(first: Result, second: Result) -> None:
    """Equal to the last bit in everything but the time it took."""
    assert first.state.round_number == second.state.round_number
    pairs = [(first.state.full, second.state.full), (first.local_state, second.local_state)]
    assert first.state.algorithm_state.keys() == second.state.algorithm_state.keys()
    pairs += [
        (first.state.algorithm_state[name], second.state.algorithm_state[name]) for name in first.state.algorithm_state
    ]
    for one, other in pairs:
        assert list(one) == list(other)
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name
    assert [replace(report, seconds=0.0) for report in first.history] == [
        replace(report, seconds=0.0) for report in second.history
    ]
    assert dict(first.rejections) == dict(second.rejections)
    assert first.quality == second.quality


class Interrupted(Exception):
    pass


class StopAfter(Callback):
    def __init__(self, number: int) -> None:
        self.number = number

    def on_round(self, report: RoundReport) -> None:
        if report.round_number == self.number:
            raise Interrupted


def interrupted(settings: Settings, out: Path, after: int = 3) -> None:
    """A run that ends, between a round and its checkpoint, as if killed."""
    with pytest.raises(Interrupted):
        run(settings, out, checkpoint_every=1, callbacks=[StopAfter(after)])


def resumed(settings: Settings, out: Path) -> tuple[FinishedRun, list[str]]:
    messages: list[str] = []
    return run(settings, out, resume=True, checkpoint_every=1, echo=messages.append), messages
