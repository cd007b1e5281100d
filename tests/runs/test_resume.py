"""Going on with a run: the same end whatever the settings, and refusals that say why."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold import files
from fairfold.errors import CannotWrite, InvalidCheckpoint, InvalidSettings
from fairfold.federation.settings import Settings
from fairfold.runs import checkpoint
from fairfold.runs.callbacks import Callback
from fairfold.runs.folder import RunFolder
from fairfold.runs.opened import open_run
from fairfold.runs.settings import load_settings
from fairfold.runs.summary import read_run
from fairfold.runs.train import Finished, run
from fairfold.simulate import simulate
from fairfold.simulate.result import RoundReport
from tests.runs.worlds import GRADIENT, assert_same_end, from_before, small, write_manifest


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


def resumed(settings: Settings, out: Path) -> tuple[Finished, list[str]]:
    told: list[str] = []
    return run(settings, out, resume=True, checkpoint_every=1, say=told.append), told


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rehash": True, "mapping": "element", "server_optimiser": "yogi"},
        {"server_optimiser": "momentum", "weighting": "data", "replacement": True},
        {"server_optimiser": "adagrad", "faults": {"drop": 0.2, "nan": 0.2}, "clients_per_round": None},
        GRADIENT | {"model": "neumf", "local_epochs": 2},
        GRADIENT | {"backend": "loop", "local_optimiser": "adagrad"},
        GRADIENT | {"aggregation": "delta", "prox": 0.1},
        GRADIENT | {"method": "heterofl", "capacities": "1x-2x", "user_vectors": "uploaded"},
        GRADIENT | {"method": "central", "local_optimiser": "adam"},
        GRADIENT | {"user_storage": "disk", "model": "neumf"},
        GRADIENT | {"method": "fedhm", "capacities": "1x-2x", "model": "neumf"},
        GRADIENT | {"method": "inconsistent"},
        GRADIENT | {"objective": "squared", "item_bias": True, "aggregation": "delta"},
    ],
)
def test_an_interrupted_run_ends_like_an_unbroken_one(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = small(**changes)
    interrupted(settings, tmp_path / "run")
    finished, told = resumed(settings, tmp_path / "run")
    assert told == ["Going on after round 2."]
    assert_same_end(finished.result, simulate(settings))


def test_a_finished_run_can_be_given_more_rounds(tmp_path: Path) -> None:
    run(small(rounds=2), tmp_path / "run")
    finished, told = resumed(small(rounds=4, patience=9, threshold=0.99, evaluate_every=1), tmp_path / "run")
    assert told == ["Going on after round 2."]
    straight = simulate(small(rounds=4))
    assert torch.equal(finished.result.state.full["item.weight"], straight.state.full["item.weight"])
    assert load_settings(tmp_path / "run" / "settings.toml", {}).rounds == 4


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = run(small(), tmp_path / "run")
    again, _ = resumed(small(), tmp_path / "run")
    assert again.stopped == first.stopped == "all 4 rounds are done"
    assert_same_end(again.result, first.result)


def test_resuming_nothing_starts_anew_and_says_so(tmp_path: Path) -> None:
    finished, told = resumed(small(), tmp_path / "run")
    assert told == [f"No checkpoint in {tmp_path / 'run'}: starting anew."]
    assert finished.result.state.round_number == 4


def test_a_folder_of_something_else_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(InvalidSettings, match="new or empty"):
        resumed(small(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, ["seed = 0, now 1"]),
        ({"factors": 5}, ["factors = 4, now 5"]),
        ({"method": "fedavg"}, ["method = 'fair', now 'fedavg'"]),
        ({"world": {"users": 13, "items": 60, "interactions_per_user": 10}}, ["world.users = 12, now 13"]),
        ({"server_step": 0.1, "capacities": "1x-2x"}, ["server_step = 0.03, now 0.1", "capacities = '1x-4x-16x'"]),
    ],
)
def test_other_settings_are_refused_by_name(changes: dict[str, Any], named: list[str], tmp_path: Path) -> None:
    run(small(rounds=1), tmp_path / "run")
    before = (tmp_path / "run" / "settings.toml").read_bytes()
    with pytest.raises(InvalidCheckpoint) as refused:
        resumed(small(**changes), tmp_path / "run")
    for text in named:
        assert text in str(refused.value)
    assert "rounds, patience, threshold, evaluate_every, user_storage may change" in str(refused.value)
    assert (tmp_path / "run" / "settings.toml").read_bytes() == before


NEWER = ("popularity", "support", "prox", "images.mean", "faults.late")


def test_a_run_from_before_some_settings_goes_on(tmp_path: Path) -> None:
    settings, out = small(), tmp_path / "run"
    interrupted(settings, out)
    from_before(out, *NEWER)
    finished, told = resumed(load_settings(out / "settings.toml", {}, recorded=True), out)
    assert told == ["Going on after round 2."]
    assert_same_end(finished.result, simulate(settings))
    assert load_settings(out / "settings.toml", {}) == settings


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"popularity": "none"}, "popularity = 'catalogue', now 'none'"), ({"prox": 0.5}, "prox = 0.0, now 0.5"),
     ({"faults": {"late": 0.1}}, "faults.late = 0.0, now 0.1")],
)  # fmt: skip
def test_before_a_setting_is_not_with_another_value_of_it(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    run(small(mapping="element"), tmp_path / "run")
    from_before(tmp_path / "run", *NEWER)
    with pytest.raises(InvalidCheckpoint, match=f"was trained with {re.escape(named)}; "):
        resumed(small(mapping="element", **changes), tmp_path / "run")


def test_what_a_solver_takes_by_now_is_not_what_it_took_before_the_setting(tmp_path: Path) -> None:
    squares: dict[str, Any] = {"solver": "least_squares", "chunk": 4, "support": 0}
    first = run(small(**squares, tail_share=None), tmp_path / "run")
    from_before(tmp_path / "run", "tail_share")
    assert small(**squares).tail_share is not None
    with pytest.raises(InvalidCheckpoint, match=r"trained with tail_share = None, now 0\.125"):
        resumed(small(**squares), tmp_path / "run")
    for settings in (open_run(tmp_path / "run").settings, read_run(tmp_path / "run").settings):
        assert settings == first.result.settings


def test_a_run_with_a_server_step_that_had_no_effect_still_serves(tmp_path: Path) -> None:
    """Before it was refused, a server's optimiser was taken along with least squares, and not used."""
    settings, out = small(solver="least_squares", chunk=4, support=0), tmp_path / "run"
    interrupted(settings, out)
    for path in (out / "checkpoints").glob("*.json"):
        write_manifest(path, settings=json.loads(path.read_text())["settings"] | {"server_optimiser": "sgd"})
    file = out / "settings.toml"
    assert 'server_optimiser = "adam"' in file.read_text()
    file.write_text(file.read_text().replace('server_optimiser = "adam"', 'server_optimiser = "sgd"'))
    assert open_run(out).settings == settings
    finished, _ = resumed(load_settings(file, {}, recorded=True), out)
    assert_same_end(finished.result, simulate(settings))
    assert read_run(out).settings == settings


def newest_manifest(out: Path) -> Path:
    return max((out / "checkpoints").glob("*.json"))


def test_another_format_is_refused(tmp_path: Path) -> None:
    run(small(), tmp_path / "run")
    write_manifest(newest_manifest(tmp_path / "run"), format=99)
    with pytest.raises(InvalidCheckpoint, match="format 99"):
        resumed(small(), tmp_path / "run")


def test_other_versions_are_told(tmp_path: Path) -> None:
    run(small(), tmp_path / "run")
    write_manifest(newest_manifest(tmp_path / "run"), versions={"fairfold": "0.0.1", "torch": torch.__version__})
    _, told = resumed(small(), tmp_path / "run")
    assert "Written by fairfold 0.0.1" in told[0]


def test_other_data_of_the_same_name_is_refused(tmp_path: Path) -> None:
    run(small(), tmp_path / "run")
    path = newest_manifest(tmp_path / "run")
    facts = json.loads(path.read_text())["data"]
    write_manifest(path, data=facts | {"interactions": 7})
    with pytest.raises(InvalidCheckpoint, match="interactions 7, now 84"):
        resumed(small(), tmp_path / "run")


def test_another_model_is_refused(tmp_path: Path) -> None:
    found = run(small(), tmp_path / "run").folder
    saved = checkpoint.require(found.checkpoints)
    with pytest.raises(InvalidCheckpoint, match=r"item\.weight of 240 numbers, now 250"):
        checkpoint.refuse_other_shapes(saved, {"item.weight": 250}, found.path)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "a list":
        path.write_bytes(b"[]")
    else:
        path.unlink()


@pytest.mark.parametrize("ending", ["json", "safetensors"])
@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "a list", "gone"])
def test_a_damaged_checkpoint_is_passed_over(how: str, ending: str, tmp_path: Path) -> None:
    settings = small()
    interrupted(settings, tmp_path / "run", after=4)
    out = tmp_path / "run"
    damage(out / "checkpoints" / f"round-00000003.{ending}", how)
    finished, told = resumed(settings, out)
    assert told[-1] == "Going on after round 2."
    assert len(told) == (1 if (how, ending) == ("gone", "json") else 2)  # without a manifest there is no checkpoint
    assert_same_end(finished.result, simulate(settings))
    for path in (out / "checkpoints").glob(f"*.{ending}"):
        damage(path, how)
    if (how, ending) == ("gone", "json"):
        return
    with pytest.raises(InvalidCheckpoint, match="no checkpoint can be read"):
        resumed(settings, out)


class FullDisk(files.Disk):
    """A disk that takes so many bytes and no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, piece: memoryview) -> int:
        if self.room < len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(piece)
        return super().write(descriptor, piece)


def test_a_full_disk_says_how_much_was_needed_and_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, needs = small(), []
    unbroken = simulate(settings)
    for room in range(0, 60_000, 4_000):
        out = tmp_path / f"run-{room}"
        monkeypatch.setattr(files, "disk", FullDisk(room))
        try:
            run(settings, out, checkpoint_every=1)
        except CannotWrite as error:
            needs.append(str(error))
        monkeypatch.setattr(files, "disk", files.Disk())
        assert not list(out.rglob("*.tmp"))
        assert not checkpoint.newest(out / "checkpoints").damaged
        finished, _ = resumed(settings, out)
        assert_same_end(finished.result, unbroken)
        shutil.rmtree(out)
    assert all("No space left" in text and "bytes for this file" in text for text in needs)
    assert len(needs) > 5
    assert len(needs) < 15, "the last runs have room enough"


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    folder = RunFolder.create(small(), tmp_path / "run")
    with folder.locked(), pytest.raises(InvalidSettings, match="another process"):
        resumed(small(), tmp_path / "run")


def test_early_stopping_says_why_and_resumes_to_the_same_end(tmp_path: Path) -> None:
    settings = small(rounds=30, evaluate_every=1, faults={"drop": 1.0}, patience=2)
    finished = run(settings, tmp_path / "run")
    assert finished.stopped.startswith("no better quality for 2 evaluations (best")
    again, _ = resumed(settings, tmp_path / "run")
    assert again.result.state.round_number == finished.result.state.round_number == 3
    reached = run(small(rounds=30, evaluate_every=1, threshold=0.001), tmp_path / "reached")
    assert "has reached the threshold of 0.001" in reached.stopped
    assert json.loads((tmp_path / "reached" / "result.json").read_text())["stopped"] == reached.stopped


def test_checkpoints_keep_to_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("fairfold.runs.checkpoint.time.monotonic", lambda: now[0])
    pace = checkpoint.Pace(None)
    assert pace.due(1)
    pace.wrote(2.0)
    now[0] += 19
    assert not pace.due(2)
    now[0] += 1
    assert pace.due(3)
    assert [number for number in range(1, 8) if checkpoint.Pace(3).due(number)] == [3, 6]
