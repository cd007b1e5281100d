"""Networks on images, as a person meets them: train, resume, report, export; from IDX files and from LEAF's."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from typer.testing import CliRunner

from fairfold.cli import app
from fairfold.config.files import load_settings
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidSettings
from fairfold.federation.federation import load_interactions
from fairfold.runs.device_model import read_device_model
from fairfold.runs.loaded import load_run
from fairfold.runs.train import run
from tests.data.test_images import idx
from tests.support.pictures import pictures
from tests.support.runs import assert_same_end

runner = CliRunner()
SMALL = ["--set", "data.clients=5", "--set", "fleet.clients_per_round=3", "--set", "algorithm.local_epochs=5",
         "--rounds", "8", "--set", "run.evaluate_every=2"]  # fmt: skip


def works(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def fails(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 2, done.output
    return done.output.replace("\n", " ")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures in the form of MNIST."""
    data, found = pictures(side=8, count=150), tmp_path / "pictures"
    found.mkdir()
    for prefix, split in (("train", data.train), ("t10k", data.test)):
        (found / f"{prefix}-images-idx3-ubyte").write_bytes(idx(split.images.numpy(), 8))
        (found / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(split.labels.numpy().astype(numpy.uint8), 8))
    return found


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """Pictures in the form of LEAF's FEMNIST: two files to train on, one to test on; one user has no images."""
    data, found = pictures(side=28, count=90, writers=6), tmp_path / "femnist"
    for name, split in (("train", data.train), ("test", data.test)):
        (found / name).mkdir(parents=True)
        assert split.writers is not None
        for part in range(2 if name == "train" else 1):
            users = [f"f{number:04d}" for number in range(part, 6, 2 if name == "train" else 1)]
            content: dict[str, Any] = {
                "users": [*users, f"empty{part}"],
                "user_data": {f"empty{part}": {"x": [], "y": []}},
            }
            for user in users:
                rows = (split.writers == int(user[1:])).nonzero().flatten()
                pixels = (split.images[rows].view(len(rows), -1) / 255).tolist()
                content["user_data"][user] = {"x": pixels, "y": split.labels[rows].tolist()}
            (found / name / f"part{part}.json").write_text(json.dumps(content))
    return found


def test_train_report_export(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for method in ("fair", "fedhm", "heterofl"):
        shown = works("train", "--data", str(folder), "--model", "mlp", "--capacities", "2x-4x", "--method", method,
                      *SMALL, "--out", str(runs / method))  # fmt: skip
        assert "accuracy by device size" in shown
    result = json.loads((runs / "fair" / "result.json").read_text())
    assert result["metric"] == "accuracy"
    assert result["server"]["quality"] > 0.9  # patterns under noise are easy
    assert [group["capacity"] for group in result["groups"]] == ["2x", "4x"]
    table = works("report", str(runs), "--out", str(tmp_path / "page"))
    assert "best accuracy" in table
    assert (tmp_path / "page" / "report.html").is_file()
    for method in ("fair", "fedhm", "heterofl"):
        file = tmp_path / f"{method}.safetensors"
        shown = works("export", str(runs / method), "--capacity", "4x", "--out", str(file))
        assert "on all test images" in shown
        device, metadata = read_device_model(file)
        opened = load_run(runs / method)
        assert device.size <= opened.progress.state.full["hidden.weight"].numel() / 4 * 1.2
        network = opened.plan.architecture.model_of(device.recovered(), {})
        assert isinstance(opened.federation.data, ImageDataset)
        test = opened.federation.data.test
        with torch.no_grad():
            right = network(test.images / 255).argmax(1) == test.labels
        assert float(right.double().mean()) == pytest.approx(metadata["quality"]["device"])
    assert "nothing to recommend" in fails("recommend", str(runs / "fair"), "--user", "#0")


def test_a_run_in_two_sittings_is_one_run(folder: Path, tmp_path: Path) -> None:
    changes = {"data.name": str(folder), "model.kind": "mlp", "data.clients": 5, "fleet.clients_per_round": 3}
    settings = load_settings(None, changes | {"algorithm.local_epochs": 1, "run.rounds": 4, "subspace.rehash": True})
    unbroken = run(settings, tmp_path / "unbroken")
    run(settings.with_changes({"run.rounds": 2}), tmp_path / "broken")
    resumed = run(settings, tmp_path / "broken", resume=True)
    assert resumed.result.state.round_number == 4
    assert torch.equal(unbroken.result.state.full["hidden.weight"], resumed.result.state.full["hidden.weight"])
    assert unbroken.result.quality == resumed.result.quality
    assert_same_end(unbroken.result, run(settings, tmp_path / "again").result)


def test_leaf_by_writer(leaf: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shown = works("train", "--data", str(leaf), "--model", "lenet", "--capacities", "2x-4x", "--rounds", "1",
                  "--set", "data.split=writer", "--set", "fleet.clients_per_round=4",
                  "--set", "algorithm.local_epochs=1", "--out", str(out))  # fmt: skip
    assert "accuracy by device size" in shown
    assert load_run(out).federation.clients.num_clients == 6


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "mlp"], "name images, e.g. --data mnist"),
        (["--model", "mlp", "--data", "FOLDER", "--set", "data.client=3"], "did you mean 'clients'"),
        (["--model", "mlp", "--data", "FOLDER", "--set", "data.split=writer"], "does not name its writers"),
        (["--model", "lenet", "--data", "FOLDER"], "28 × 28"),
        (["--model", "mlp", "--data", "FOLDER", "--set", "subspace.compress=tables"], "no item tables"),
        (["--model", "mlp", "--data", "FOLDER", "--set", "subspace.mapping=ranked"], "no order of popularity"),
        (["--model", "mlp", "--data", "FOLDER", "--set", "algorithm.kind=closed_form"], "use 'images'"),
        (["--model", "mlp", "--data", "FOLDER", "--method", "fedhm", "--set", "subspace.compress=model"], "compress"),
        (
            ["--model", "mlp", "--data", "FOLDER", "--method", "fedhm", "--set", "algorithm.aggregation=delta"],
            "averages",
        ),
        (["--model", "mlp", "--data", "FOLDER", "--method", "full_trn"], "no device can hold the full model"),
        (["--model", "mlp", "--data", "FOLDER", "--method", "central"], "use 'images'"),
        (["--model", "mf", "--data", "FOLDER"], "holds images"),
        (["--set", "algorithm.kind=gradient", "--set", "subspace.compress=model"], "for models of images"),
    ],
)
def test_refusals(arguments: list[str], reason: str, folder: Path) -> None:
    given = [str(folder) if argument == "FOLDER" else argument for argument in arguments]
    scheme = ["--capacities", "2x-4x", "--set", "fleet.clients_per_round=3"]
    assert reason in fails("train", *scheme, *given)


def test_where_only_recommenders_are_served() -> None:
    with pytest.raises(InvalidSettings, match="which reads images"):
        load_interactions(load_settings(None, {"data.name": "mnist", "model.kind": "mlp"}))
