"""Spoiled messages are refused by the small device, or harmless; ``tests/device/fuzz.py`` runs any number."""

from tests.device.fuzz import fuzz, fuzz_objects


def test_spoiled_messages_are_refused_or_harmless() -> None:
    outcomes = fuzz(150, 3, gradient=False)
    assert outcomes.total() == 150
    assert sum(times for what, times in outcomes.items() if "Invalid" in what) > 30


def test_spoiled_objects_are_refused_or_read() -> None:
    assert fuzz_objects(300, 3)["refused"] > 100
