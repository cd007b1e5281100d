"""A day of churn in a few minutes, with real programs; `python -m tests.flower.churn` has longer ones."""

from pathlib import Path

import pytest

from tests.flower.churn import cleared, evaluate, prepared

pytestmark = pytest.mark.slow


def test_a_day_of_churn_costs_open_rounds_and_nothing_else(tmp_path: Path) -> None:
    day = prepared(tmp_path / "day", minutes=5, real=2, steady=1, light=5, kills=3, calm=0.4, seed=1)
    try:
        day.run(lambda _words: None)
    finally:
        cleared(day)
    report = evaluate(day)
    assert (
        sum(count for what, count in report["events"].items() if what.startswith("kill of") and "train" not in what)
        == 3
    )
    assert {"join", "die", "stop", "size", "disk", "clock"} <= report["events"].keys()
    assert {"SuperLink", "server start", "run", "device 0", "light devices"} <= report["memory"].keys()
    for what, life in report["memory"].items():
        assert life.get("flat", True), (what, life)
