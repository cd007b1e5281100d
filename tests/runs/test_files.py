"""Files as safetensors reads them, settings as they were, a folder that can be read."""

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fairfold import atomic_io as files
from fairfold.checksums import file_checksum
from fairfold.config import Settings
from fairfold.config.files import load_settings, recipes, to_toml
from fairfold.errors import CannotWrite, InvalidSettings
from fairfold.federation.evaluation import Callback, Result, RoundReport
from fairfold.runs import tensors as tensors_on_disk
from fairfold.runs.train import run
from tests.support.runs import GRADIENT, RANKED, small
from tests.support.settings import make_settings


def test_tensors_are_read_back_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 24)
    tensors = {
        "a": torch.randn(7, 3),
        "empty": torch.empty(0, 4),
        "half": torch.randn(5).to(torch.bfloat16),
        "turned": torch.arange(12).view(3, 4).T,
        "one": torch.tensor(3.5, dtype=torch.float64),
        "yes": torch.tensor([True, False]),
    }
    described = tensors_on_disk.write_tensors(tmp_path / "file.safetensors", tensors, {"round": "3", "word": "ä"})
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "file.safetensors", "pt") as opened:
        assert opened.metadata() == {"round": "3", "word": "ä"}
    assert described["bytes"] == (tmp_path / "file.safetensors").stat().st_size
    assert described["sha256"] == file_checksum(tmp_path / "file.safetensors")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="No such file"):
        files.write_atomically(tmp_path / "missing" / "file", b"content")


def test_folders_are_made_durable_from_the_first_that_was_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut takes a device's folder, name and words, after its server has counted them."""
    flushed: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", flushed.append)
    files.make_private_folder(tmp_path / "a" / "b" / "c")
    assert set(flushed) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    files.make_private_folder(tmp_path / "a" / "b" / "c")
    assert len(flushed) == 3


def test_what_the_system_refuses_is_reported_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fcntl")
    with pytest.raises(CannotWrite, match="No such file"), files.locked(tmp_path / "missing"):
        pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(CannotWrite, match="folder"):
        files.remove(tmp_path / "folder")

    def refused(*_: object) -> None:
        raise RuntimeError("unable to open file: Input/output error (5)")  # in the library's own words

    monkeypatch.setattr(tensors_on_disk, "safe_open", refused)
    path = tmp_path / "own.safetensors"
    with pytest.raises(OSError, match="Input/output"), tensors_on_disk.open_tensors(path):
        pass


@pytest.mark.parametrize(
    "changes",
    [{}, {"clients_per_round": None}, {"patience": 3}, GRADIENT | {"data": "mine", "top_users": 5},
     RANKED | {"tail_share": None}, {"data": "mine", "algorithm": "ratings", "reference_factors": None},
     {"data": "mnist", "model": "mlp"}, {"algorithm": "central"}, {"faults": {"late": 0.5}}],
)  # fmt: skip
def test_settings_are_read_back_as_they_were(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = make_settings(**changes)
    (tmp_path / "settings.toml").write_text(to_toml(settings))
    assert load_settings(tmp_path / "settings.toml", {}) == settings


def test_the_paper_s_recipe() -> None:
    assert list(recipes()) == ["authors", "default", "fair", "paper", "ratings"]
    for name in ("authors", "paper"):
        settings = load_settings(None, {"run.rounds": 3}, name)
        assert (settings.model.kind, settings.algorithm.kind, settings.run.rounds) == ("neumf", "gradient", 3)
        assert (settings.plain()["algorithm"]["local_epochs"], settings.fleet.clients_per_round) == (5, 10)
    with pytest.raises(InvalidSettings, match="one of authors, default, fair, paper"):
        load_settings(None, {}, "papre")
    with pytest.raises(InvalidSettings, match="one of them"):
        load_settings(Path("some.toml"), {}, "paper")


class Listener(Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_start(self, settings: Settings, capacities: list[Any], first_round: int) -> None:
        self.messages.append(f"start {first_round} {len(capacities)}")

    def on_round(self, report: RoundReport) -> None:
        self.messages.append(f"round {report.round_number}")

    def on_end(self, result: Result) -> None:
        self.messages.append("end")

    def close(self) -> None:
        self.messages.append("close")


def test_callbacks_hear_everything(tmp_path: Path) -> None:
    listener = Listener()
    run(small(rounds=2), tmp_path / "run", callbacks=[listener, Callback()])
    assert listener.messages == ["start 1 3", "round 1", "round 2", "end", "close"]


def test_metrics_have_a_line_a_round_and_the_log_every_rejection(tmp_path: Path) -> None:
    before = list(logging.getLogger("fairfold").handlers)
    run(small(faults={"nan": 0.3}, method="full_trn", capacities="1x-4x"), tmp_path / "run")
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert [row["round"] for row in rows] == ["1", "2", "3", "4"]
    assert [bool(row["server"]) for row in rows] == [False, True, False, True]
    assert all(int(row["bytes_up"]) > 0 and float(row["seconds"]) > 0 for row in rows)
    assert [row["4x"] for row in rows] == ["", "", "", ""]
    assert float(rows[1]["1x"]) > 0
    text = (tmp_path / "run" / "run.log").read_text()
    assert "left out: NaN or infinity" in text
    assert "all 4 rounds are done" in text
    assert logging.getLogger("fairfold").handlers == before


def test_a_link_that_somebody_planted_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary names were those of the process's number, and opened whatever was there."""
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_text("mine")
    assert files.temporary_path(path) != files.temporary_path(path)
    monkeypatch.setattr("os.urandom", bytes)
    for plant in (Path.symlink_to, Path.hardlink_to):
        plant(files.temporary_path(path), other)
        with pytest.raises(CannotWrite, match="File exists"):
            files.write_atomically(path, b"new")
        assert other.read_text() == "mine"
        files.temporary_path(path).unlink(missing_ok=True)
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
