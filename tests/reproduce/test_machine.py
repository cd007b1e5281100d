"""Results name the hardware that was used, not all that was there."""

from typing import Any

import pytest
import torch

from fairfold.kernels import gpu
from fairfold.reproduce.kinds import KINDS
from fairfold.reproduce.machine import machine

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
