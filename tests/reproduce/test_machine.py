"""Results name the hardware that was used, not all that was there."""

import pytest
import torch

from fairfold.kernels import gpu
from fairfold.reproduce.kinds import KINDS
from fairfold.reproduce.machine import machine


@pytest.mark.parametrize(
    ("kind", "values", "used"),
    [
        ("federated", {"solver": "gradient", "model": "neumf", "method": "fedhm", "aggregation": "paper"}, True),
        ("federated", {"solver": "gradient", "model": "neumf", "method": "central"}, False),
        ("federated", {"solver": "gradient", "model": "neumf", "device": "cpu"}, False),
        ("convex", {}, False),
    ],
)
def test_a_gpu_is_named_where_it_is_used(
    kind: str, values: dict[str, str], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    machine.cache_clear()
    try:
        assert machine(gpu=KINDS[kind].on_gpu(values)).startswith("NVIDIA H200, ") == used
    finally:
        machine.cache_clear()
