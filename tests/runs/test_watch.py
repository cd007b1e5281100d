"""A run as its operator sees it: right figures, only for those who may look, in any browser."""

import asyncio
import importlib
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairfold.cli import app as commands
from fairfold.config import Settings
from fairfold.errors import InvalidState
from fairfold.flower.fleet.processes import Program, free_ports, stop_on_exit, wait_for_port
from fairfold.runs.events import NODES
from fairfold.runs.watch import MAX_ROUNDS, RunMonitor, _thin_out, make_app, to_prometheus
from tests.support.federations import tiny_data
from tests.support.nodes import in_process

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of six nodes in which one fails in round 2, and all do once in round 3."""
    place = tmp_path_factory.mktemp("run")
    lost = iter(range(6))
    settings = Settings(
        algorithm={"kind": "closed_form"}, model={"factors": 4},
        run={"rounds": 4, "evaluate_every": 2, "log_format": "json"},
        fleet={"capacities": "1x-2x-4x", "clients_per_round": None},
    )  # fmt: skip

    def fault(number: int, node: int) -> str | None:
        if number == 2 and next(lost, None) is not None:
            return "drop"
        return "nan" if number == 1 and node == 3 else None

    nodes = in_process(tiny_data(0, 12, 40), settings, 6, place / "devices", folder=place / "<b>run", fault=fault)
    nodes.strategy.start(nodes.grid)
    return place / "<b>run"


def ask(
    app: Any, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """One request, as a server would make it of bytes."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    given = {"host": "127.0.0.1:8050"} | (headers or {})
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(),
             "headers": [(key.encode(), value.encode()) for key, value in given.items()]}  # fmt: skip
    asyncio.run(app(scope, None, send))
    return sent[0]["status"], {key.decode(): value.decode() for key, value in sent[0]["headers"]}, sent[1]["body"]


def test_the_status_is_what_happened(run: Path) -> None:
    status = RunMonitor(run).status()
    assert (status["state"], status["done"], status["num_rounds"], status["failed_rounds"]) == ("finished", 4, 4, 1)
    assert [row["clients"] for row in status["rounds"]] == [6, 5, 6, 6]
    assert status["updates"] == 23
    assert status["tasks"] == 30
    assert status["reasons"] == {"NaN or infinity": 1, "no update in time": 6}
    assert status["failures"] == [{"round": 3, "why": "6 × no update in time"}]
    assert status["nodes"] == {
        "known": 6, "replied": 6, "last_round": 6, "refused": 0, "with_model": 6,
        "by_size": {"1x": 2, "2x": 2, "4x": 2},
    }  # fmt: skip
    assert status["privacy"]["level"] == "plain"
    assert "can read a user's history" in status["privacy_notes"][0]
    assert set(status["phases"]) == {"nodes", "tasks", "updates", "step", "saving"}
    assert [row["round"] for row in status["rounds"] if row["quality"] is not None] == [2, 4]
    assert status["bytes"]["bytes_up"] == sum(row["bytes_up"] for row in status["rounds"]) > 0
    assert any("no usable update" in json.loads(line)["message"] for line in status["log"])


def test_a_servers_status_has_its_devices_and_its_run_when_there_is_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[dict[str, int]]()

    def devices() -> dict[str, int]:
        asked.append({"online": 3, "offline": 1})
        if len(asked) == 2:
            raise InvalidState("a server that does not answer", "a running one", "Start it.")
        return asked[-1]

    monitor = RunMonitor(tmp_path / "fleet" / "run", devices)
    status = monitor.status()
    assert (status["name"], status["state"], status["problem"]) == ("fleet/run", "no run yet", "")
    assert status["devices"] == {"online": 3, "offline": 1}
    figures = to_prometheus(status)
    assert 'fairfold_devices{state="online"} 3' in figures
    assert "fairfold_rounds" not in figures
    shutil.copytree(run, tmp_path / "fleet" / "run")
    status = monitor.status()
    assert (status["state"], status["devices"]["offline"], len(asked)) == ("finished", 1, 1), "not asked every time"
    assert 'fairfold_devices{state="offline"} 1' in to_prometheus(status)
    monkeypatch.setattr("fairfold.runs.watch.SERVER_SECONDS", 0.0)
    status = monitor.status()
    assert (status["devices"], status["done"]) == ({}, 4)
    assert "a server that does not answer" in status["problem"]
    assert monitor.status()["problem"] == ""
    assert RunMonitor(run).status()["devices"] == {}


def test_a_run_of_one_machine_is_shown_as_well(tmp_path: Path) -> None:
    done = CliRunner().invoke(commands, [
        "train", "--out", str(tmp_path / "run"), "--rounds", "2", "--set", "data.users=20", "--set", "data.items=60",
        "--set", "data.interactions_per_user=8", "--set", "run.baselines=false",
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    status = RunMonitor(tmp_path / "run").status()
    assert (status["state"], status["done"], status["nodes"]["known"], status["phases"]) == ("finished", 2, 0, {})
    to_prometheus(status)


def test_only_new_events_are_read_and_a_run_that_starts_over_is_noticed(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    whole = (folder / NODES).read_bytes()
    lines = whole.splitlines(keepends=True)
    monitor = RunMonitor(folder)
    for length in (3, 9, len(lines), 4):
        (folder / NODES).write_bytes(b"".join(lines[:length]) + lines[length % len(lines)][:7])
        fresh = RunMonitor(folder).status()
        found = monitor.status()
        assert {key: found[key] for key in ("nodes", "reasons", "failures", "phases")} == {
            key: fresh[key] for key in ("nodes", "reasons", "failures", "phases")
        }
    (folder / NODES).write_bytes(whole.replace(b'"size":"1x"', b'"size":"9x"', 1))
    status = RunMonitor(folder).status()
    assert status["state"] == "damaged"
    assert NODES in status["problem"]
    assert to_prometheus(status).endswith("fairfold_readable 0\n")


def test_figures_for_prometheus_have_its_form(run: Path) -> None:
    status, headers, body = ask(make_app(RunMonitor(run)), "/metrics")
    assert status == 200
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    seen = dict[str, str]()
    label = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
    for line in body.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in seen, "a family once"
            seen[name] = kind
            assert kind in ("gauge", "counter")
            assert (kind == "counter") == name.endswith("_total")
        elif not line.startswith("# HELP "):
            found = re.fullmatch(rf"(fairfold_[a-z_]+)(?:\{{{label}(?:,{label})*\}})? (\S+)", line)
            assert found is not None, line
            assert found[1] == list(seen)[-1]
            assert math.isfinite(float(found[2]))
    text = body.decode()
    assert 'fairfold_left_out_total{reason="no update in time"} 6\n' in text
    assert "fairfold_failed_rounds_total 1\n" in text
    assert 'fairfold_nodes{size="4x"} 2\n' in text
    odd = to_prometheus(RunMonitor(run).status() | {"reasons": {'a "b"\\\n': 1}})
    assert 'fairfold_left_out_total{reason="a \\"b\\"\\\\\\n"} 1' in odd
    if importlib.util.find_spec("prometheus_client") is not None:
        parser = importlib.import_module("prometheus_client.parser")
        assert len(list(parser.text_string_to_metric_families(text))) == len(seen)


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics"])
def test_who_may_look(run: Path, path: str) -> None:
    free, guarded = make_app(RunMonitor(run)), make_app(RunMonitor(run), "secret")
    assert ask(free, path)[0] == 200
    for host in ("127.0.0.1", "localhost:1", "[::1]:8050"):
        assert ask(free, path, {"host": host})[0] == 200
    for host in ("evil.example", "evil.example:8050", "127.0.0.1.evil.example", "", "localhost:1:2"):
        assert ask(free, path, {"host": host})[0] == 403, "another site's page in a browser on this machine"
    assert ask(guarded, path)[0] == 401
    assert ask(guarded, path, {"authorization": "Bearer wrong"})[0] == 401
    assert ask(guarded, f"{path}?token=secre")[0] == 401
    assert ask(guarded, path, {"authorization": "Bearer secret", "host": "server.example.org"})[0] == 200
    assert ask(guarded, f"{path}?token=secret")[0] == 200
    assert ask(free, path, method="POST")[0] == 405
    assert ask(free, path, method="HEAD")[2] == b""
    assert ask(free, "/../../etc/passwd")[0] == 404
    assert "default-src 'self'" in ask(free, path)[1]["content-security-policy"]


def test_an_open_address_needs_a_token(run: Path) -> None:
    done = CliRunner().invoke(commands, ["watch", str(run), "--host", "0.0.0.0"])
    assert done.exit_code == 2
    assert "--token" in done.output
    assert CliRunner().invoke(commands, ["watch", str(run.parent)]).exit_code == 2


def test_very_many_rounds_are_thin_out_and_the_last_is_there() -> None:
    rounds = [{"round": number, "quality": 0.5 if number % 100 == 0 else None} for number in range(1, 10_001)]
    found = _thin_out(rounds)
    assert len(found) <= MAX_ROUNDS + 101
    assert found[-1]["round"] == 10_000
    assert sum(row["quality"] is not None for row in found) == 100


# -- in a browser ------------------------------------------------------------------------------------------------------


def opened(profile: Path, address: str, *options: str) -> str:
    """The page in a browser after six seconds of its clock."""
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000",
               "--enable-logging=stderr", f"--user-data-dir={profile}", *options, address]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)")
def test_a_server_serves_the_page_before_its_first_run(tmp_path: Path) -> None:
    port, page = free_ports(2)
    folder = tmp_path / "fleet"
    made = CliRunner().invoke(
        commands, ["server", "init", str(folder), "--host", "127.0.0.1", "--port", str(port), "--items", "60"]
    )
    assert made.exit_code == 0, made.output
    command = [sys.executable, "-m", "fairfold", "server", "start", str(folder), "--watch", str(page)]
    with stop_on_exit([]) as programs:
        programs.append(Program("server", command, tmp_path / "log", {}))
        wait_for_port(port, programs[0])
        wait_for_port(page, programs[0])
        time.sleep(3.0)
        shown = opened(tmp_path / "profile", f"http://127.0.0.1:{page}/", "--dump-dom")
        assert "no run yet" in shown
        assert "None has enrolled." in shown
        programs[0].terminate()
        assert programs[0].wait(30.0) is not None
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{page}/", timeout=5)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_in_a_browser(run: Path, width: int, scheme: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from fairfold.cli import app; app()", "watch", str(run), "--port", "0",
               "--token", "secret"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                try:
                    urllib.request.urlopen(f"{address}page.js", timeout=5).read()
                    break
                except OSError:
                    time.sleep(0.2)
            look = [f"--window-size={width},1800"]
            look += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
            page = opened(tmp_path / "profile", f"{address}?token=secret", *look, "--dump-dom")
            assert re.search(r'data-looked="[2-9]"', page), "it goes along"
            assert 'data-wide="false"' in page, "nothing is wider than the screen"
            assert "4 of 4" in page
            assert "Privacy: plain." in page
            assert "INFO round 4: 6 updates used" in page, "lines of JSON as a person reads them"
            assert "6 × no update in time" in page
            assert "&lt;b&gt;run</h1>" in page, "what comes from a run is text"
            assert page.count("<path") == 5, "the server and three sizes, and the updates"
            picture = tmp_path / "page.png"
            opened(
                tmp_path / "profile", f"{address}?token=secret", *look, "--hide-scrollbars", f"--screenshot={picture}"
            )
            assert picture.stat().st_size > 20_000
            profile = f"--user-data-dir={tmp_path / 'profile'}"
            refused = subprocess.run([str(CHROMIUM), "--headless=new", "--no-sandbox", profile, "--dump-dom", address],
                                     capture_output=True, text=True, timeout=120, check=True).stdout  # fmt: skip
            assert "needs its token" in refused
        finally:
            server.terminate()
