"""Who is not meant to be there does not get in, and gets the reason; nothing that is read can run code."""

import ast
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from fairfold.flower.fleet import connection as link
from fairfold.flower.fleet.connection import NodeConnection, RefusedByServer, read_key
from fairfold.flower.fleet.control import control_command
from fairfold.flower.fleet.credentials import make_certificates, make_node_key
from fairfold.flower.fleet.local_fleet import HOST, LocalFleet, make_local_fleet
from fairfold.flower.fleet.processes import Program, find_command, stop_on_exit
from tests.support.settings import make_settings

SMALL = make_settings(rounds=2, data={"users": 20, "items": 60, "interactions_per_user": 10})
SOURCE = Path(__file__).parents[2] / "src" / "fairfold"


@pytest.fixture(scope="module")
def local_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    """A server that knows node 0, and nobody else."""
    folder = tmp_path_factory.mktemp("security")
    local_fleet, data = make_local_fleet(SMALL, "1x,1x", folder / "trial")
    local_fleet.prepare(data)
    make_certificates(folder / "other", ["127.0.0.1"])
    make_node_key(folder / "unknown")
    with stop_on_exit(local_fleet.programs):
        local_fleet.start_server()
        local_fleet.enrol(0)
        yield local_fleet


class Slow:
    """A clock that is ten minutes behind."""

    @staticmethod
    def now(zone: tzinfo) -> datetime:
        return datetime.now(zone) - timedelta(minutes=10)


def refused(line: NodeConnection) -> RefusedByServer:
    with pytest.raises(RefusedByServer) as found:
        line.activate()
    line.close()
    return found.value


@pytest.mark.slow
def test_a_refused_device_learns_why(local_fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ca, address = local_fleet.folder.parent, local_fleet.server.authority, f"{HOST}:{local_fleet.port}"
    known = read_key(local_fleet.node(0) / "key")
    found = {
        "unregistered": refused(NodeConnection(address, ca, read_key(folder / "unknown"))),
        "authority": refused(NodeConnection(address, folder / "other" / "ca.crt", known)),
        "unreachable": refused(NodeConnection(f"{HOST}:9", ca, known)),
    }
    monkeypatch.setattr(link, "datetime", Slow)
    monkeypatch.setattr("fairfold.flower.fleet.connection.time.time", lambda: datetime.now().timestamp() - 600)
    found["clock"] = refused(NodeConnection(address, ca, known))
    monkeypatch.undo()
    first = NodeConnection(address, ca, known)
    number = first.activate()
    found["early"] = refused(NodeConnection(address, ca, known))
    assert first.send_heartbeat(number)
    first.deactivate(number)  # a node that says goodbye may come back at once
    assert first.activate() == number
    first.deactivate(number)
    first.close()
    for kind, one in found.items():
        assert one.kind == kind
    assert re.search(r"(59\d|600) s behind", str(found["clock"]))
    assert local_fleet.server.count_online() == (0, 1)


@pytest.mark.slow
def test_an_account_of_the_server_s_machine_without_the_secret_starts_nothing(local_fleet: LocalFleet) -> None:
    """Flower's control API asks for no credentials: who reached it ran code as the server."""
    app, environment = str(local_fleet.server.app), os.environ | local_fleet.server.environment

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    words = ["run", app, "fleet", "-c", "rounds=1 resume=false", "--format", "json"]
    assert "only for the server's own account" in run(find_command("flwr"), *words).stdout
    assert not local_fleet.server.request("runs")["runs"]
    known = run(*control_command("flwr", *words))
    assert json.loads(known.stdout)["success"], known
    assert len(local_fleet.server.request("runs")["runs"]) == 1


def flower(local_fleet: LocalFleet, *options: str) -> list[str]:
    """Flower's own SuperNode."""
    address = f"{HOST}:{local_fleet.port}"
    limits = ["--max-retries", "2", "--max-wait-time", "20"]
    return [find_command("flower-supernode"), "--superlink", address, *limits, *options]


INTRUDERS: dict[str, tuple[Callable[[LocalFleet], list[str]], str]] = {
    "no key": (lambda fleet: ["--root-certificates", str(fleet.server.authority)], "2001"),
    "public authorities": (
        lambda fleet: ["--auth-supernode-private-key", str(fleet.node(0) / "key")], "CERTIFICATE_VERIFY_FAILED"
    ),
    "no TLS": (lambda _: ["--insecure"], "Exit Code: 305"),
    "key but no TLS": (
        lambda fleet: ["--auth-supernode-private-key", str(fleet.node(0) / "key"), "--insecure"], "Exit Code: 303"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTRUDERS)
def test_flower_s_own_node_without_key_or_authority_is_refused(kind: str, local_fleet: LocalFleet) -> None:
    options, reason = INTRUDERS[kind]
    log = local_fleet.folder / "logs" / f"{kind.replace(' ', '-')}.log"
    program = Program(kind, flower(local_fleet, *options(local_fleet)), log, local_fleet.environment)
    local_fleet.programs.append(program)
    assert program.wait(300) not in (None, 0)
    assert reason in log.read_text()
    assert local_fleet.server.count_online() == (0, 1), "nobody is connected"


def test_no_pickle_is_read_anywhere() -> None:
    """Nothing in the package imports pickle or loads with it; torch.load is not called."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert forbidden.isdisjoint(alias.name.split(".")[0] for alias in node.names), path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) != "torch.load", path
                assert all(word.arg != "allow_pickle" for word in node.keywords), path  # numpy's default is not to
