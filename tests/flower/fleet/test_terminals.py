"""What the operator's terminal shows: quality per round and size, a status that takes no torch, and a quiet server."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fairfold.cli import app
from fairfold.device import offline, stored_model
from fairfold.flower.fleet import device_command, node_loop
from fairfold.flower.fleet import node as node_module
from fairfold.flower.fleet.credentials import FINGERPRINT_BYTES, SECRET_BYTES, Token
from fairfold.flower.fleet.node import NodeFolder
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


# -- what devices show -------------------------------------------------------------------------------------------------

HOSTILE = "a\x1b[2Jb\u202ec"


def enrolled(folder: Path, **options: Any) -> NodeFolder:
    """The folder of a device that has enrolled somewhere."""
    folder.mkdir()
    (folder / "mine.csv").write_text("user,item\n1,3\n1,5\n")
    node = NodeFolder(folder, "https://localhost:8000", str(folder / "mine.csv"), "1x", **options)
    node.save()
    return node


@pytest.mark.parametrize(("words", "warned"), [(["--secure"], True), ([], False), (["--secure", "--roster"], False)])
def test_a_secure_device_without_a_roster_is_told_what_a_lying_server_could_do(
    words: list[str], warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.csv").write_text("user,item\n1,3\n1,5\n")
    monkeypatch.setattr(node_module, "enrol", lambda *_: 60)
    given = [*words, str(tmp_path / "roster")] if "--roster" in words else words
    place = ["--server", "https://localhost:8000", "--data", str(tmp_path / "mine.csv"), "--capacity", "1x"]
    token = str(Token(b"0" * SECRET_BYTES, b"0" * FINGERPRINT_BYTES))
    shown = CliRunner().invoke(app, ["node", "enrol", token, *place, "--folder", str(tmp_path / "node"), *given])
    assert shown.exit_code == 0, shown.output
    assert ("a lying server could invent all others, and read this device's data" in shown.output) == warned


def test_the_status_of_a_device_says_that_it_has_no_roster(tmp_path: Path) -> None:
    warning = "none: a lying server could invent all other devices"
    for name, options, warned in (
        ("a", {"privacy": "secure"}, True),
        ("b", {"privacy": "secure", "roster": "all.pub"}, False),
        ("c", {}, False),
    ):
        node = enrolled(tmp_path / name, **options)
        shown = CliRunner().invoke(app, ["node", "status", str(node.folder)])
        assert (warning in shown.output) == warned, shown.output


def test_a_small_device_writes_what_a_terminal_would_obey_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of a catalogue, and errors that hold a name."""
    node = enrolled(tmp_path / "node")
    node.catalogue.write_text(f"{HOSTILE}\nother\n", encoding="utf-8")
    (node.folder / "mine.csv").write_text("user,item\n1,other\n")
    model = SimpleNamespace(items=2, kind="co_occurrence")
    monkeypatch.setattr(stored_model, "read_model", lambda _: model)
    monkeypatch.setattr(offline, "recommend", lambda *_: [(0, 1.0)])
    assert device_command.main(["recommend", "--user", "1", "--folder", str(node.folder)]) == 0
    assert device_command.main(["recommend", "--user", HOSTILE, "--folder", str(node.folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "a\\x1b[2Jb\\u202ec\n"
    assert "u202e" in err
    assert not set("\x1b\u202e") & set(out + err)


def test_a_node_s_program_writes_errors_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["node_loop", str(tmp_path / HOSTILE)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        node_loop.main()
    node_loop._say(HOSTILE)
    err = capsys.readouterr().err
    assert r"\x1b" in err
    assert not set("\x1b\u202e") & set(err)
