"""What the operator's terminal shows: quality per round and size, a status that takes no torch, and a quiet server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairfold.cli import app
from fairfold.flower.fleet.server import ServerFolder
from tests.support.settings import make_settings

METRICS = (
    "round,seconds,clients,bytes_down,bytes_up,server,1x,16x,check\n"
    "1,0.5,3,10,10,,,,aa\n2,0.5,3,10,10,0.25,0.5,,bb\n3,0.5,3,10,10,0.375,0.5,0.25,cc\n"
)


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    made = ServerFolder.create(tmp_path / "server", make_settings(rounds=3), "localhost", items=60)
    made.run.mkdir()
    (made.run / "metrics.csv").write_text(METRICS)
    return made


def test_quality_is_shown_by_size(server: ServerFolder) -> None:
    assert server.qualities() == {2: {"server": 0.25, "1x": 0.5}, 3: {"server": 0.375, "1x": 0.5, "16x": 0.25}}
    (server.run / "result.json").write_text(json.dumps({"metric": "NDCG@20", "server": {"quality": 0.375}}))
    shown = CliRunner().invoke(app, ["server", "status", str(server.folder)])
    text = " ".join(shown.output.replace("│", " ").split())
    assert "0.3750 (1x 0.5000, 16x 0.2500)" in text
    assert "3 rounds, ended, NDCG@20 0.3750" in text


def test_a_run_that_was_not_evaluated_has_no_quality(server: ServerFolder) -> None:
    (server.run / "metrics.csv").write_text(METRICS.splitlines()[0] + "\n1,0.5,3,10,10,,,,aa\n")
    assert server.qualities() == {}
    (server.run / "metrics.csv").write_text("cut sho")
    assert server.qualities() == {}
    assert server.status()["run"]["quality_by_size"] == {}


def test_the_status_loads_no_torch_unless_settings_have_changed(server: ServerFolder) -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom fairfold.cli import app\n"
        f"shown = CliRunner().invoke(app, ['server', 'status', {str(server.folder)!r}, '--json'])\n"
        "print('torch' in sys.modules, shown.output)"
    )

    def status() -> tuple[str, list[str]]:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
        loaded, _, text = done.stdout.partition(" ")
        return loaded, json.loads(text)["privacy"]

    (first, notes), (second, again) = status(), status()
    assert (first, second) == ("True", "False")
    assert notes == again
    path = server.folder / "settings.toml"
    path.write_text(path.read_text().split("[privacy]")[0])
    assert server.cached_privacy_notes() == ["decided when a run begins, by the number of connected devices"] != notes


def test_what_flower_prints_goes_to_a_file(server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = []

    class Ended:
        pid = -1

        def __init__(self, _name: str, _command: object, log: Path, _environment: object) -> None:
            logs.append(log)
            log.write_text("new")

        def wait(self, _seconds: float) -> int:
            raise KeyboardInterrupt

        terminate = kill = status = lambda *_: None

    server.log.write_text("old")
    monkeypatch.setattr("fairfold.flower.fleet.server.Program", Ended)
    monkeypatch.setattr("fairfold.flower.fleet.server.wait_for_port", lambda *_: None)
    shown = CliRunner().invoke(app, ["server", "start", str(server.folder), "--quiet"])
    assert shown.output == ""
    assert logs == [server.log]
    assert (server.folder / "server.log.1").read_text() == "old"
