"""Who is not meant to be there does not get in, and is told why; nothing that is read can run code."""

import ast
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from fairfold.flower import link
from fairfold.flower.federate import HOST, Trial, trial_of
from fairfold.flower.keys import make_certificates, make_node_key
from fairfold.flower.link import Link, Refused, read_key
from fairfold.flower.processes import Program, stopping, tool
from tests.flat import flat

SMALL = flat(rounds=2, world={"users": 20, "items": 60, "interactions_per_user": 10})
SOURCE = Path(__file__).parents[2] / "src" / "fairfold"


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """A server that knows node 0, and nobody else."""
    folder = tmp_path_factory.mktemp("security")
    trial, data = trial_of(SMALL, "1x,1x", folder / "trial")
    trial.prepare(data)
    make_certificates(folder / "other", ["127.0.0.1"])
    make_node_key(folder / "unknown")
    with stopping(trial.programs):
        trial.start_server()
        trial.enrol(0)
        yield trial


class Slow:
    """A clock that is ten minutes behind."""

    @staticmethod
    def now(zone: tzinfo) -> datetime:
        return datetime.now(zone) - timedelta(minutes=10)


def refused(line: Link) -> Refused:
    with pytest.raises(Refused) as found:
        line.activate()
    line.close()
    return found.value


@pytest.mark.slow
def test_a_device_that_may_not_come_in_is_told_why(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ca, address = trial.folder.parent, trial.server.authority, f"{HOST}:{trial.port}"
    known = read_key(trial.node(0) / "key")
    found = {
        "unregistered": refused(Link(address, ca, read_key(folder / "unknown"))),
        "authority": refused(Link(address, folder / "other" / "ca.crt", known)),
        "unreachable": refused(Link(f"{HOST}:9", ca, known)),
    }
    monkeypatch.setattr(link, "datetime", Slow)
    monkeypatch.setattr("fairfold.flower.link.time.time", lambda: datetime.now().timestamp() - 600)
    found["clock"] = refused(Link(address, ca, known))
    monkeypatch.undo()
    first = Link(address, ca, known)
    number = first.activate()
    found["early"] = refused(Link(address, ca, known))
    assert first.beat(number)
    first.deactivate(number)  # whoever says goodbye may come back at once
    assert first.activate() == number
    first.deactivate(number)
    first.close()
    for kind, one in found.items():
        assert one.kind == kind
    assert re.search(r"(59\d|600) s behind", str(found["clock"]))
    assert trial.server.online() == (0, 1)


def flower(trial: Trial, *options: str) -> list[str]:
    """Flower's own SuperNode."""
    address = f"{HOST}:{trial.port}"
    return [tool("flower-supernode"), "--superlink", address, "--max-retries", "2", "--max-wait-time", "20", *options]


INTRUDERS: dict[str, tuple[Callable[[Trial], list[str]], str]] = {
    "no key": (lambda trial: ["--root-certificates", str(trial.server.authority)], "2001"),
    "public authorities": (
        lambda trial: ["--auth-supernode-private-key", str(trial.node(0) / "key")], "CERTIFICATE_VERIFY_FAILED"
    ),
    "no TLS": (lambda _: ["--insecure"], "Exit Code: 305"),
    "key but no TLS": (
        lambda trial: ["--auth-supernode-private-key", str(trial.node(0) / "key"), "--insecure"], "Exit Code: 303"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTRUDERS)
def test_flower_s_own_node_without_key_or_authority_is_refused(kind: str, trial: Trial) -> None:
    options, reason = INTRUDERS[kind]
    log = trial.folder / "logs" / f"{kind.replace(' ', '-')}.log"
    program = Program(kind, flower(trial, *options(trial)), log, trial.environment)
    trial.programs.append(program)
    assert program.wait(300) not in (None, 0)
    assert reason in log.read_text()
    assert trial.server.online() == (0, 1), "nobody is connected"


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
