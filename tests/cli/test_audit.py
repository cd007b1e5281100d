"""``fairfold audit``: its table, its file, its place in reports, and what it refuses."""

import json
from pathlib import Path

import pytest

from fairfold.runs.folder import AUDIT, read_json
from tests.support.commands import WORLD, fails, works
from tests.support.runs import write_manifest

TINY = [*WORLD, "--set", "fleet.clients_per_round=6", "--rounds", "2", "--set", "run.baselines=false"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audited") / "run"
    works("train", *TINY, "--set", "algorithm.kind=closed_form", "--capacities", "1x", "--out", str(folder))
    return folder


def test_an_audit_is_shown_written_and_reported(run_folder: Path) -> None:
    shown = works("audit", str(run_folder), "--users", "4", "--rounds", "1")
    assert "plain: the server sees each" in shown
    assert "user's vector" in shown
    assert "the sum of 5 *" in shown
    content = read_json(run_folder / AUDIT)
    assert content["level"] == "plain"
    vector = next(one for one in content["findings"] if one["attack"].startswith("user's vector"))
    assert vector["value"] < 1e-4
    reported = works("report", str(run_folder), "--no-page")
    assert "What a curious server can find out" in reported
    page = run_folder.parent / "page"
    works("report", str(run_folder), "--out", str(page))
    assert "what a curious server can find out" in (page / "report.html").read_text()


def test_json_is_all_that_is_printed(run_folder: Path) -> None:
    printed = works("audit", str(run_folder), "--users", "2", "--rounds", "1", "--no-compare", "--json")
    assert {one["seen"] for one in json.loads(printed)["findings"]} == {"one update"}
    assert read_json(run_folder / AUDIT)["rows"] == json.loads(printed)["rows"]


def test_a_damaged_file_is_noticed(run_folder: Path) -> None:
    works("audit", str(run_folder), "--users", "2", "--rounds", "1", "--no-compare", "--json")
    path = run_folder / AUDIT
    path.write_text(path.read_text().replace('"plain"', '"private"', 1))
    assert "another checksum" in fails("report", str(run_folder), "--no-page")
    path.unlink()


def test_what_cannot_be_replayed_is_refused_with_what_helps(run_folder: Path, tmp_path: Path) -> None:
    assert "holds no settings.toml" in fails("audit", str(tmp_path))
    manifest = max((run_folder / "checkpoints").glob("*.json"))
    content = json.loads(manifest.read_text())
    data = content["data"]
    write_manifest(manifest, data={"name": "devices", "items": data["items"]})
    assert "--data" in fails("audit", str(run_folder))
    assert "no-such-data" in fails("audit", str(run_folder), "--data", "no-such-data")
    write_manifest(manifest, data=data | {"sha256": "0"})
    assert "trained on other data" in fails("audit", str(run_folder))
    write_manifest(manifest, data=data)


def test_data_in_one_place_is_no_federation(tmp_path: Path) -> None:
    folder = tmp_path / "central"
    works("train", *TINY, "--method", "central", "--out", str(folder))
    assert "everybody's data" in fails("audit", str(folder))
