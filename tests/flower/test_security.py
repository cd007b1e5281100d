"""Who is not meant to be there does not get in; nothing that is read can run code. Real programs on loopback."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairfold.flower.federate import CONNECTION, Trial, trial_of
from fairfold.flower.keys import make_certificates
from fairfold.flower.processes import search_path, stopping, tool
from tests.flat import flat

SMALL = flat(rounds=2, world={"users": 20, "items": 60, "interactions_per_user": 10})
SOURCE = Path(__file__).parents[2] / "src" / "fairfold"


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """A SuperLink that knows node 0's key and no other."""
    folder = tmp_path_factory.mktemp("security")
    trial, data = trial_of(SMALL, "1x,1x", folder / "trial")
    trial.prepare(data)
    (folder / "other").mkdir()
    make_certificates(folder / "other", ["127.0.0.1"])
    with stopping(trial.programs):
        trial.start_superlink()
        trial.register(0)
        yield trial


def without(command: list[str], name: str) -> list[str]:
    place = command.index(name)
    return command[:place] + command[place + 2 :]


def intruders(trial: Trial) -> dict[str, tuple[list[str], str]]:
    other = str(trial.folder.parent / "other" / "ca.crt")
    known, unknown = trial.supernode_command(0), trial.supernode_command(1)
    plain = without(without(known, "--root-certificates"), "--auth-supernode-private-key")
    return {
        "no key": (without(known, "--auth-supernode-private-key"), "2001"),
        "unregistered key": (unknown, "2004"),
        "wrong CA": ([other if word.endswith("ca.crt") else word for word in known], "CERTIFICATE_VERIFY_FAILED"),
        "public CAs": (without(known, "--root-certificates"), "CERTIFICATE_VERIFY_FAILED"),
        "no TLS": ([*plain, "--insecure"], "Exit Code: 305"),
        "key but no TLS": ([*without(known, "--root-certificates"), "--insecure"], "Exit Code: 303"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no key", "unregistered key", "wrong CA", "public CAs", "no TLS", "key but no TLS"])
def test_a_node_that_is_not_meant_to_be_there_is_refused(kind: str, trial: Trial) -> None:
    command, reason = intruders(trial)[kind]
    program = trial.start(kind.replace(" ", "-"), [*command, "--max-retries", "2", "--max-wait-time", "20"])
    assert program.wait(300) not in (None, 0)
    assert reason in program.log.read_text()
    said = subprocess.run(
        [tool("flwr"), "supernode", "list", CONNECTION, "--format", "json"],
        capture_output=True, text=True, check=True, timeout=120, env=trial.environment | {"PATH": search_path()},
    ).stdout  # fmt: skip
    assert '"online"' not in said.lower().replace("offline", ""), "nobody is connected"


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
