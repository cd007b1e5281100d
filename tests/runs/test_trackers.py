"""What trackers log, and that each service shows it, offline; skipped where it is not installed."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fairfold
from fairfold.errors import InvalidSettings
from fairfold.federation.simulation import simulate
from fairfold.runs.trackers import (
    KINDS,
    MLflow,
    SettingValue,
    TensorBoard,
    Tracker,
    WeightsAndBiases,
    find_tracker,
    flat_settings,
    metric_name,
)
from fairfold.runs.train import run
from tests.support.commands import TINY, fails, works
from tests.support.runs import Interrupted, StopAfter, small


class MemoryTracker(Tracker):
    """Logs to memory."""

    TITLE, MODULE, EXTRA = "MemoryTracker", "math", "tracker"

    def __init__(self, id_file: Path | None = None, broken_at: int = 0) -> None:
        super().__init__(id_file)
        self.calls: list[str] = []
        self.settings: dict[str, SettingValue] = {}
        self.values: dict[tuple[str, int], float] = {}
        self.broken_at = broken_at

    def start_run(self, settings: Mapping[str, SettingValue], first_round: int, run_id: str | None) -> str | None:
        self.settings = dict(settings)
        self.calls.append(f"open at {first_round}, id {run_id}")
        return "run-7"

    def log_metrics(self, values: Mapping[str, float], round_number: int) -> None:
        if round_number == self.broken_at:
            raise ConnectionError("no route")
        self.values |= {(name, round_number): value for name, value in values.items()}

    def end_run(self, *, finished: bool) -> None:
        self.calls.append("finished" if finished else "failed")


def test_settings_rounds_and_the_end_of_a_simulation_are_logged() -> None:
    tracker = MemoryTracker()
    result = simulate(small(rounds=4), callbacks=[tracker])
    assert tracker.calls == ["open at 1, id None", "finished"]
    assert tracker.settings["fleet.capacities"] == str(small().fleet.capacities)
    assert [number for name, number in tracker.values if name == "round/seconds"] == [1, 2, 3, 4]
    evaluated = [report for report in result.history if report.quality is not None]
    assert evaluated
    for report in evaluated:
        assert report.quality is not None
        assert tracker.values["quality/server", report.round_number] == report.quality.server
        assert tracker.values[f"quality/{result.groups[0].capacity}", report.round_number] == report.quality.groups[0]
    assert tracker.values["end/server", 4] == result.quality
    assert tracker.values["bytes_held/16x", 4] == result.groups[-1].bytes_held
    assert tracker.values["baseline/popularity", 4] == result.baselines["popularity"]


def test_a_fit_logs_the_same() -> None:
    tracker, world = MemoryTracker(), {"data.users": 30, "data.items": 60, "data.interactions_per_user": 10}
    model = fairfold.fit("synthetic", "1x-16x", settings=world, progress=False, rounds=2, callbacks=[tracker])
    assert tracker.values["end/server", 2] == model.result.quality
    assert tracker.calls[-1] == "finished"


def test_a_service_that_fails_loses_its_metrics_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    tracker = MemoryTracker(broken_at=2)
    with caplog.at_level(logging.WARNING):
        result = simulate(small(rounds=3), callbacks=[tracker])
    assert len(result.history) == 3
    assert {number for _, number in tracker.values} == {1}
    assert [record.getMessage() for record in caplog.records if "no route" in record.getMessage()] == [
        "MemoryTracker failed at round 2 and is not used any more; the run goes on: no route"
    ]


def test_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    id_file = tmp_path / "name.txt"
    first, second, third = MemoryTracker(id_file), MemoryTracker(id_file), MemoryTracker(id_file)
    with pytest.raises(Interrupted):
        run(small(), tmp_path / "run", checkpoint_every=1, callbacks=[first, StopAfter(3)])
    run(small(), tmp_path / "run", resume=True, callbacks=[second], echo=lambda _: None)
    run(small(), tmp_path / "new", callbacks=[third])
    assert first.calls == ["open at 1, id None", "failed"]
    assert second.calls == ["open at 3, id run-7", "finished"]
    assert third.calls[0] == "open at 1, id None"


def test_names_and_settings_are_plain() -> None:
    settings = flat_settings(small())
    assert settings["run.rounds"] == 4
    assert all(isinstance(value, str | int | float) for value in settings.values())
    assert metric_name("baseline/item-kNN (best)µ") == "baseline/item-kNN -best--"


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_package_is_refused_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, KINDS[name].MODULE, None)
    with pytest.raises(InvalidSettings, match=rf"pip install 'fairfold\[{name}\]'"):
        find_tracker(name)


def test_near_misses_are_suggested(tmp_path: Path) -> None:
    assert "did you mean 'mlflow'" in fails("train", "--track", "mlfow", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# -- the programs themselves, offline ----------------------------------------------------------------------------------


def needs(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} is not installed: pip install 'fairfold[{package}]'")


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_shows_it(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = simulate(small(), callbacks=[TensorBoard(tmp_path / "events")])
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("quality/16x")] == [2, 4]
    assert len(events.Scalars("round/seconds")) == 4
    assert events.Scalars("end/server")[0].value == pytest.approx(result.quality)
    assert "settings/text_summary" in events.Tags()["tensors"]
    works("train", *TINY, "--track", "tensorboard", "--out", str(tmp_path / "run"))
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = needs("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 wants a database, whose making takes seconds
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    client = mlflow.MlflowClient()
    id_file = tmp_path / "id.txt"
    with pytest.raises(Interrupted):
        run(small(), tmp_path / "run", checkpoint_every=1, callbacks=[MLflow(id_file=id_file), StopAfter(3)])
    name = id_file.read_text()
    assert client.get_run(name).info.status == "FAILED"
    finished = run(small(), tmp_path / "run", resume=True, callbacks=[MLflow(id_file=id_file)], echo=lambda _: None)
    assert id_file.read_text() == name
    found = client.get_run(name)
    assert found.info.status == "FINISHED"
    assert found.data.params["fleet.capacities"] == str(small().fleet.capacities)
    assert found.data.metrics["end/server"] == finished.result.quality
    assert sorted({one.step for one in client.get_metric_history(name, "round/seconds")}) == [1, 2, 3, 4]
    with mlflow.start_run() as mine:  # a run that is open already is used, and left open
        simulate(small(rounds=1), callbacks=[MLflow()])
        assert mlflow.active_run().info.run_id == mine.info.run_id
    assert "round/seconds" in client.get_run(mine.info.run_id).data.metrics
    works("train", *TINY, "--track", "mlflow", "--out", str(tmp_path / "typed"))
    assert client.get_run((tmp_path / "typed" / "mlflow.txt").read_text()).info.run_name == "typed"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at-all")
    with pytest.raises((InvalidSettings, mlflow.MlflowException)):
        simulate(small(rounds=1), callbacks=[MLflow()])


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = needs("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    mine = wandb.init(project="mine")  # a run that is open already is used, and left open
    result = simulate(small(), callbacks=[WeightsAndBiases()])
    assert wandb.run is mine
    assert mine.summary["end/server"] == pytest.approx(result.quality)
    assert mine.summary["round"] == 4
    assert mine.config["fleet.capacities"] == str(small().fleet.capacities)
    mine.finish()
    id_file = tmp_path / "id.txt"
    simulate(small(), callbacks=[WeightsAndBiases(folder=tmp_path, id_file=id_file)])
    assert wandb.run is None
    (path,) = tmp_path.glob(f"wandb/offline-run-*/run-{id_file.read_text()}.wandb")
    until = time.monotonic() + 30  # its own process writes the file, a moment later where the machine is busy
    while b"quality/16x" not in path.read_bytes() and time.monotonic() < until:
        time.sleep(0.1)
    assert b"quality/16x" in path.read_bytes()
    works("train", *TINY, "--track", "wandb", "--out", str(tmp_path / "typed"))
    assert list((tmp_path / "typed" / "wandb").glob("offline-run-*"))


def test_wandb_without_a_login_is_refused_before_any_work(tmp_path: Path) -> None:
    needs("wandb")
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    typed = [sys.executable, "-m", "fairfold", "train", *TINY, "--track", "wandb", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        typed, env=known | {"HOME": str(tmp_path)}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "WANDB_MODE=offline" in done.stderr
    assert ".;" not in done.stderr
    assert not (tmp_path / "run" / "result.json").exists()
