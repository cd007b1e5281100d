"""Results name the hardware that was used, not all that was there."""

from typing import Any

import pytest
import torch

from experiments.kinds import KINDS
from experiments.records import machine
from fairfold.kernels import gpu

NEUMF: dict[str, Any] = {"model": {"kind": "neumf"}}


@pytest.mark.parametrize(
    ("kind", "values", "used"),
    [
        ("federated", NEUMF | {"subspace": {"method": "fedhm"}, "algorithm": {"aggregation": "paper"}}, True),
        ("federated", {"data": {"name": "mnist"}, "model": {"kind": "mlp"}}, True),
        ("federated", NEUMF | {"algorithm": {"kind": "central"}}, False),
        ("federated", NEUMF | {"run": {"device": "cpu"}}, False),
        ("federated", {}, False),
        ("convex", {}, False),
    ],
)
def test_a_gpu_is_named_where_it_is_used(
    kind: str, values: dict[str, Any], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    machine.cache_clear()
    try:
        assert machine(gpu=KINDS[kind].on_gpu(values)).startswith("NVIDIA H200, ") == used
    finally:
        machine.cache_clear()
