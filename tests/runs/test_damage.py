"""Runs whose files are damaged, of another format or of something else: reported, passed over or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold.errors import InvalidCheckpoint, InvalidSettings
from fairfold.federation.simulation import simulate
from fairfold.runs import checkpoint
from fairfold.runs.checkpoint import FORMAT
from fairfold.runs.folder import read_metrics, read_result, read_run_settings
from fairfold.runs.loaded import load_run
from fairfold.runs.report import read_run
from fairfold.runs.tensors import read_checked_tensors
from fairfold.runs.train import run
from tests.support.runs import Interrupted, StopAfter, assert_same_end, interrupted, resumed, small, write_manifest


def newest_manifest(out: Path) -> Path:
    return max((out / "checkpoints").glob("*.json"))


@pytest.mark.parametrize("number", [1, 99])
def test_another_format_is_refused(number: int, tmp_path: Path) -> None:
    run(small(), tmp_path / "run")
    write_manifest(newest_manifest(tmp_path / "run"), format=number)
    with pytest.raises(InvalidCheckpoint, match=f"format {number}.*train again"):
        resumed(small(), tmp_path / "run")


def test_a_flipped_format_is_damage_and_not_another_format(tmp_path: Path) -> None:
    run(small(), tmp_path / "run", checkpoint_every=1)
    path = newest_manifest(tmp_path / "run")
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    _, messages = resumed(small(), tmp_path / "run")
    assert "another checksum" in messages[0]
    assert messages[1] == "Resuming after round 3."


def test_a_folder_from_before_there_were_tables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('data = "synthetic"\nrounds = 4\n')
    for read in (read_run, read_run_settings):
        with pytest.raises(InvalidCheckpoint, match=r"format 1.*train again"):
            read(tmp_path)


def test_other_versions_are_reported(tmp_path: Path) -> None:
    run(small(), tmp_path / "run")
    write_manifest(newest_manifest(tmp_path / "run"), versions={"fairfold": "0.0.1", "torch": torch.__version__})
    _, messages = resumed(small(), tmp_path / "run")
    assert "Written by fairfold 0.0.1" in messages[0]


def test_other_data_of_the_same_name_is_refused(tmp_path: Path) -> None:
    run(small(), tmp_path / "run")
    path = newest_manifest(tmp_path / "run")
    facts = json.loads(path.read_text())["data"]
    write_manifest(path, data=facts | {"interactions": 7})
    with pytest.raises(InvalidCheckpoint, match="interactions 7, now 84"):
        resumed(small(), tmp_path / "run")


def test_another_model_is_refused(tmp_path: Path) -> None:
    found = run(small(), tmp_path / "run").folder
    saved = checkpoint.load_newest(found.checkpoints)
    with pytest.raises(InvalidCheckpoint, match=r"item\.weight of 240 numbers, now 250"):
        checkpoint.require_same_shapes(saved, {"item.weight": (25, 10)}, found.path)


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
    finished, messages = resumed(settings, out)
    assert messages[-1] == "Resuming after round 2."
    assert len(messages) == (1 if (how, ending) == ("gone", "json") else 2)  # without a manifest there is no checkpoint
    assert_same_end(finished.result, simulate(settings))
    for path in (out / "checkpoints").glob(f"*.{ending}"):
        damage(path, how)
    if (how, ending) == ("gone", "json"):
        return
    with pytest.raises(InvalidCheckpoint, match="no whole checkpoint"):
        resumed(settings, out)


def test_an_older_checkpoint_is_reported_and_can_be_refused(tmp_path: Path) -> None:
    out, messages = tmp_path / "run", list[str]()
    run(small(), out, checkpoint_every=1)
    damage(out / "checkpoints" / "round-00000004.safetensors", "flipped")
    assert load_run(out, messages.append).progress.state.round_number == 3
    assert len(messages) == 1
    assert "round-00000004" in messages[0]
    assert "this is round 3" in messages[0]
    with pytest.raises(InvalidCheckpoint, match=r"the newest is damaged.*another checksum"):
        load_run(out, newest=True)
    damage(out / "checkpoints" / "round-00000003.json", "gone")
    with pytest.raises(InvalidCheckpoint, match="no whole checkpoint"):
        load_run(out)


def test_damaged_checkpoints_do_not_push_a_good_one_out(tmp_path: Path) -> None:
    """Two newer ones are damaged: neither what tidies up nor the next checkpoint takes the one that is whole."""
    out = tmp_path / "run"
    run(small(rounds=2), out, checkpoint_every=1)
    for number in (3, 4):
        (out / "checkpoints" / f"round-0000000{number}.json").write_bytes(b"{}")
    checkpoint.remove_incomplete(out / "checkpoints", 2)
    assert load_run(out).progress.state.round_number == 2
    with pytest.raises(Interrupted):
        run(small(), out, resume=True, checkpoint_every=1, callbacks=[StopAfter(4)], echo=lambda _: None)
    assert load_run(out).progress.state.round_number == 3
    assert (out / "checkpoints" / "round-00000002.json").exists()
    finished, messages = resumed(small(), out)
    assert messages[-1] == "Resuming after round 3."
    assert_same_end(finished.result, simulate(small()))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no disk that is always full")
def test_a_log_that_cannot_be_written_costs_its_lines_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    interrupted(small(), tmp_path / "run")
    (tmp_path / "run" / "run.log").unlink()
    (tmp_path / "run" / "run.log").symlink_to("/dev/full")
    finished, _ = resumed(small(), tmp_path / "run")
    assert_same_end(finished.result, simulate(small()))
    assert "Traceback" not in "".join(capfd.readouterr())


READERS: dict[str, Any] = {
    "settings.toml": read_run_settings,
    "result.json": read_result,
    "metrics.csv": lambda out: read_metrics(out, small(), 4),
    "model.safetensors": lambda folder: read_checked_tensors(folder / "model.safetensors", "Restore it."),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("how", ["truncated", "empty", "a list"])
def test_a_damaged_file_of_a_run_is_named(name: str, how: str, tmp_path: Path) -> None:
    out = run(small(), tmp_path / "run").folder.path
    damage(out / name, how)
    with pytest.raises((InvalidSettings, InvalidCheckpoint), match=name):
        READERS[name](out)
