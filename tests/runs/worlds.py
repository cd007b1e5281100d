"""Small runs for tests, and what it means that two of them are the same."""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fairfold.federation.settings import Settings, read_settings
from fairfold.runs import checkpoint
from fairfold.simulate.result import Result

SMALL: dict[str, Any] = {
    "world": {"users": 12, "items": 60, "interactions_per_user": 10},
    "chunk": 1,
    "clients_per_round": 6,
    "factors": 4,
    "rounds": 4,
    "evaluate_every": 2,
}
GRADIENT: dict[str, Any] = {
    "solver": "gradient",
    "local_optimiser": "adam",
    "local_step": 0.01,
    "aggregation": "paper",
    "batch_size": 4,
}


def small(**changes: Any) -> Settings:
    return read_settings(SMALL | changes)


def write_manifest(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    del content["checksum"]
    content["checksum"] = checkpoint._checksum(content)
    path.write_text(json.dumps(content))


def from_before(out: Path, *keys: str) -> None:
    """Make a run's folder one of a version that did not know these settings."""
    manifests = list((out / "checkpoints").glob("*.json"))
    assert manifests
    for path in manifests:
        write_manifest(path, settings=_without(json.loads(path.read_text())["settings"], keys))
    file = out / "settings.toml"
    file.write_text(tomli_w.dumps(_without(tomllib.loads(file.read_text()), keys)))


def _without(values: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    for key in keys:
        *tables, name = key.split(".")
        table = values
        for part in tables:
            table = table[part]
        del table[name]
    return values


def assert_same_end(first: Result, second: Result) -> None:
    """Equal to the last bit in everything but the time it took."""
    assert first.state.round_number == second.state.round_number
    pairs = [(first.state.full, second.state.full), (first.private, second.private)]
    assert first.state.moments.keys() == second.state.moments.keys()
    pairs += [(first.state.moments[name], second.state.moments[name]) for name in first.state.moments]
    for one, other in pairs:
        assert list(one) == list(other)
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name
    assert [replace(report, seconds=0.0) for report in first.history] == [
        replace(report, seconds=0.0) for report in second.history
    ]
    assert dict(first.rejections) == dict(second.rejections)
    assert first.quality == second.quality
