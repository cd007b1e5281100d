"""Folders and commands of servers and nodes."""

import contextlib
import json
import socket
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairfold.cli import app
from fairfold.config import Settings
from fairfold.errors import InvalidData, InvalidSettings, InvalidState
from fairfold.flower.fleet import node_loop
from fairfold.flower.fleet.connection import (
    public_pem,
    read_key,
)
from fairfold.flower.fleet.control import control_command, read_secret
from fairfold.flower.fleet.credentials import (
    Token,
    fingerprint,
    make_certificates,
    make_node_key,
)
from fairfold.flower.fleet.node import NodeFolder, enrol
from fairfold.flower.fleet.processes import bind_port, free_ports
from fairfold.flower.fleet.server import ServerFolder, read_catalogue
from fairfold.flower.protocol import STATISTICS
from fairfold.privacy.accounting import sigma_for, sigma_for_share
from fairfold.privacy.ledger import LEDGER, Ledger, LedgerEntry
from tests.support.fleet import AUTHORITY, FakeServer
from tests.support.settings import make_settings


def test_a_device_enrols_only_with_the_server_its_token_names(
    fake_server: tuple[type[FakeServer], str], tmp_path: Path
) -> None:
    mine, address = fake_server
    mine.body = (tmp_path / "server-keys" / "ca.crt").read_bytes()
    (tmp_path / "mine.csv").write_text("item\n1\n")
    node = NodeFolder(tmp_path / "node", address, str(tmp_path / "mine.csv"), "1x")
    with pytest.raises(InvalidState, match="wrong authority"):
        enrol(node, Token(b"s" * 16, AUTHORITY))
    assert not (tmp_path / "node" / "key").exists()
    assert b"secret" not in mine.asked, "the secret is not shown to a stranger"  # type: ignore[attr-defined]
    with pytest.raises(InvalidSettings, match="no file"):
        enrol(NodeFolder(tmp_path / "node", address, str(tmp_path / "nothing.csv"), "1x"), Token(b"s" * 16, AUTHORITY))
    (tmp_path / "other.csv").write_text("user;thing\n1;2\n")
    with pytest.raises(InvalidData, match="a column 'item'"):
        enrol(NodeFolder(tmp_path / "node", address, str(tmp_path / "other.csv"), "1x"), Token(b"s" * 16, AUTHORITY))
    (tmp_path / "other.csv").write_text("")
    with pytest.raises(InvalidData, match=r"is empty.*`fairfold node enrol TOKEN --server"):
        enrol(NodeFolder(tmp_path / "node", address, str(tmp_path / "other.csv"), "1x"), Token(b"s" * 16, AUTHORITY))
    with pytest.raises(InvalidState, match="cannot be reached"):
        enrol(NodeFolder(tmp_path / "node", "localhost:9", node.data, "1x"), Token(b"s" * 16, AUTHORITY))


def test_a_node_s_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    node = NodeFolder(tmp_path, "a.example:8000", "/mine.csv", "40MB", holdout=0.25, model="mine:Model")
    node.save()
    assert NodeFolder.open(tmp_path) == node
    assert node.status()["state"] == "stopped"
    make_node_key(node.key)
    assert public_pem(read_key(node.key)).startswith(b"-----BEGIN PUBLIC KEY")
    for content in ("", "format = 1", "format = 2\nunknown = 7", "format = 2\nserver = 'x'", "]"):
        (tmp_path / "node.toml").write_text(content)
        with pytest.raises(InvalidState, match=r"node\.toml"):
            NodeFolder.open(tmp_path)


def test_an_idle_device_is_light() -> None:
    script = (
        "import sys, fairfold.flower.fleet.node_loop as w; print({'torch', 'numpy', 'flwr', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_a_server_s_folder_is_read_as_it_was_written_and_not_overwritten(server: ServerFolder, tmp_path: Path) -> None:
    assert ServerFolder.open(server.folder) == server
    assert server.listen == "127.0.0.1"
    with pytest.raises(InvalidSettings, match="not empty"):
        ServerFolder.create(server.folder, make_settings(rounds=2), "localhost", items=60)
    assert ServerFolder.open(server.folder) == server
    with pytest.raises(InvalidState, match="server init"):
        ServerFolder.open(tmp_path)
    with pytest.raises(InvalidSettings, match="num_items"):
        ServerFolder.create(tmp_path / "new", make_settings(rounds=2), "localhost", items=0)
    assert not (tmp_path / "new").exists()
    status = server.status()
    assert (status["running"], status["run"]["rounds"]) == (False, 0)


def test_the_secret_of_a_server_is_its_account_s_alone_and_in_nobody_s_environment(server: ServerFolder) -> None:
    secret = read_secret(server.control)
    assert server.control.stat().st_mode & 0o777 == 0o600
    assert secret not in " ".join([*server.environment.values(), *server.superlink_command(), *control_command("flwr")])
    other = ServerFolder.create(server.folder.parent / "other", make_settings(rounds=2), "localhost", items=60)
    assert read_secret(other.control) != secret
    for content in ("", "5" * 63, "x" * 64):
        server.control.write_text(content)
        with pytest.raises(InvalidState, match="server's own account"):
            read_secret(server.control)


def test_a_run_asks_no_index_for_anything(server: ServerFolder) -> None:
    from flwr.supercore.superexec.dependency_installer import _exclude_flwr_dependencies

    content = tomllib.loads((server.app / "pyproject.toml").read_text())
    assert _exclude_flwr_dependencies(content["project"]["dependencies"]) == []
    assert "--disable-runtime-dependency-installation" in server.superlink_command()
    assert server.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    example = tomllib.loads((Path(__file__).parents[3] / "examples" / "flower" / "pyproject.toml").read_text())
    assert _exclude_flwr_dependencies(example["project"]["dependencies"]) == []


def test_the_commands_say_what_is_missing(server: ServerFolder, tmp_path: Path) -> None:
    def output(*words: str) -> str:
        found = CliRunner().invoke(app, list(words))
        assert found.exit_code == 2, found.output
        return " ".join(found.output.split())

    assert "server init" in output("server", "start", str(tmp_path))
    assert "one of them" in output("server", "init", str(tmp_path / "x"), "--host", "a")
    assert "does not respond" in output("server", "train", str(server.folder))
    assert "node enrol" in output("node", "start", str(tmp_path))
    assert "typing error" in output("node", "enrol", "x", "--server", "a", "--data", "b", "--capacity", "1x")
    assert "30 days" in output("server", "invite", str(server.folder), "--valid", "1y")
    token = CliRunner().invoke(app, ["server", "invite", str(server.folder)]).stdout  # the link is in stderr
    assert Token.parse(token).authority == fingerprint(server.authority.read_bytes())
    status = CliRunner().invoke(app, ["server", "status", str(server.folder), "--json"])
    assert json.loads(status.output)["running"] is False


def test_a_port_that_another_program_uses_is_refused_before_anything_starts(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_program(*_arguments: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr("fairfold.flower.fleet.server.Program", no_program)
    monkeypatch.setattr("fairfold.flower.fleet.server.PORT_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = f"port {port} of 127.0.0.1, which another program uses"
        with pytest.raises(InvalidState, match=taken):
            replace(server, listen="127.0.0.1", port=port).start(print, [])
        free = replace(server, listen="127.0.0.1", port=free_ports(1)[0])
        with pytest.raises(InvalidState, match=f"{taken}.*--watch"):
            free.start(print, [], page=port)
        found = CliRunner().invoke(app, ["watch", str(server.folder), "--port", str(port)])
        assert found.exit_code == 2
        assert taken in " ".join(found.output.split())
    with pytest.raises(InvalidState, match=r"192\.0\.2\.1, which cannot be listened on"):
        bind_port("192.0.2.1", 0, "")
    with bind_port("127.0.0.1", 0, "") as mine:
        assert mine.getsockname()[1]


def test_a_server_that_falls_again_while_it_starts_is_started_again(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time it is refused with words; later whatever keeps it down may pass."""

    class Falling:
        started = 0

        def __init__(self, *_arguments: object) -> None:
            Falling.started += 1
            self.number, self.pid = Falling.started, -1

        def wait(self, _seconds: float) -> int:
            if self.number == 4:
                raise KeyboardInterrupt
            return 1

        def status(self) -> int:
            return 1

        def stop(self) -> None:
            pass

    def wait_for_port(_port: int, program: Falling) -> None:
        if program.number == bad:
            raise InvalidState("the SuperLink ended", "a running program", "See above.")

    monkeypatch.setattr("fairfold.flower.fleet.server.Program", Falling)
    monkeypatch.setattr("fairfold.flower.fleet.server.stop_on_exit", contextlib.nullcontext)
    monkeypatch.setattr("fairfold.flower.fleet.server.wait_for_port", wait_for_port)
    monkeypatch.setattr("fairfold.flower.fleet.server.MAX_RESTART_SECONDS", 0.0)
    mine, bad, shown = replace(server, listen="127.0.0.1", port=free_ports(1)[0]), 2, list[str]()
    with pytest.raises(KeyboardInterrupt):
        mine.start(shown.append, [])
    assert [words.split()[1] for words in shown if "listens" in words] == ["server"] * 3
    bad, Falling.started = 1, 0
    with pytest.raises(InvalidState, match="ended"):
        mine.start(shown.append, [])
    assert Falling.started == 1


@pytest.mark.parametrize(
    "host", ["https://a.example.org", "a.example.org:8000", "two words", "", "-a", "a.example.org/"]
)
def test_what_is_no_name_of_a_machine_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="the name or the address of a machine alone"):
        ServerFolder.create(tmp_path / "server", Settings(), host, items=10)
    assert not (tmp_path / "server").exists()


def words_of(table: str) -> str:
    """Without the lines of the table."""
    return " ".join(table.replace("│", " ").split())


def test_enrolling_warns_of_items_that_are_not_in_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairfold.flower.fleet.node.enrol", lambda *_: 10)
    token = Token(b"s" * 16, AUTHORITY)
    for content, refused in (("item\n3\n", False), ("item\n12\n", True)):
        (tmp_path / "mine.csv").write_text(content)
        command = ["node", "enrol", str(token), "--server", "a.example", "--data", str(tmp_path / "mine.csv")]
        found = CliRunner().invoke(app, [*command, "--capacity", "1x", "--folder", str(tmp_path / "node")])
        assert found.exit_code == 0, found.output
        assert ("cannot reply yet" in found.output) is refused


def test_the_owner_sees_why_a_device_failed_and_the_server_only_the_kind_of_error(tmp_path: Path) -> None:
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fairfold.flower.fleet.worker import Worker

    node = NodeFolder(tmp_path, "a.example:8000", str(tmp_path / "gone.csv"), "1x")
    make_node_key(node.key)
    node.authority.write_bytes(make_certificates(tmp_path / "keys", ["a.example"])[0].read_bytes())
    node.save()
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's runtime does
    message = Message(RecordDict({"mine": ConfigRecord({"film": "secret"})}), 1, STATISTICS)
    reply, problem = Worker(node)._run_app(message)
    assert reply.has_error()
    assert "InvalidMessage on the device" in str(reply.error.reason)
    assert problem.startswith("InvalidMessage: ")
    assert "on the device" not in problem
    device = node_loop.NodeLoop(node, lambda _: None)
    device._report("connected", problem, failures=1)
    device._report("connected", "replied", replies=1)
    shown = words_of(CliRunner().invoke(app, ["node", "status", str(tmp_path)]).output)
    assert "last failure" in shown
    assert "ago: InvalidMessage: " in shown


def test_a_device_shows_its_owner_the_spent_privacy_budget(tmp_path: Path) -> None:
    def status(*more: str) -> str:
        return words_of(CliRunner().invoke(app, ["node", "status", str(tmp_path), *more]).output)

    NodeFolder(tmp_path, "a.example:8000", "/mine.csv", "1x").save()
    assert "none: it replies to every request" in status()
    assert "ε spent" not in status()
    node = NodeFolder(tmp_path, "a.example:8000", "/mine.csv", "1x", privacy="private", epsilon=4, min_cohort=150)
    node.save()
    assert "noisy sums, of 150 devices or more" in status()
    assert "0.000 of 4 (δ = 1e-05), in 0 sums" in status()
    account = Ledger(node.state / LEDGER, 4, 1e-5, 150)
    account.spend(LedgerEntry("a", "statistics", sigma_for_share(sigma_for(4, 1e-5), 0.1), 200))
    assert f"{account.spent():.3f} of 4" in status()
    assert "takes no further part" not in status()
    account.spend(LedgerEntry("a", "train 0", sigma_for_share(sigma_for(4, 1e-5), 0.9), 200))
    assert "4.000 of 4 (δ = 1e-05), in 2 sums; it takes no further part" in status()
    budget = json.loads(status("--json"))["privacy"]
    assert (budget["sums"], budget["epsilon"], budget["min cohort"]) == (2, 4, 150)
    (node.state / LEDGER / "ledger.json").write_text("{}")
    assert "not known: " in status()


def test_a_server_shows_the_privacy_of_its_run(server: ServerFolder, tmp_path: Path) -> None:
    def status(folder: Path) -> str:
        return words_of(CliRunner().invoke(app, ["server", "status", str(folder)]).output)

    assert "privacy plain. The server sees the update of every device" in status(server.folder)
    open_yet = ServerFolder.create(tmp_path / "open", make_settings(rounds=2), "localhost", items=60, privacy=False)
    assert "decided when a run begins" in status(open_yet.folder)
    settings = Settings(algorithm={"kind": "co_occurrence"}, privacy={"level": "private", "epsilon": 4.0})
    private = ServerFolder.create(tmp_path / "private", settings, "localhost", items=60)
    assert "ε = 4, δ = 1e-05" in status(private.folder)
    assert "Nothing of it is spent yet" in status(private.folder)
    private.run.mkdir()
    assert "Being spent" in status(private.folder)
    (private.run / "result.json").write_text("{}")
    assert "Spent; every device has a ledger of its own" in status(private.folder)


@pytest.mark.parametrize("text", ["item,title\na,A\nb,B\n", "a\nb\n", "\ufeffitem\na\nb\n", "title;item\nA;a\nB;b"])
def test_catalogues(text: str, tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(text, encoding="utf-8")
    assert read_catalogue(tmp_path / "items.csv") == ["a", "b"]


@pytest.mark.parametrize("text", ["", "item\n", "a\n\nb\n", "a\na\n", "item,x\n,1\n"])
def test_catalogues_without_a_name_for_every_item_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(text)
    with pytest.raises(InvalidData, match="name"):
        read_catalogue(tmp_path / "items.csv")


@pytest.mark.parametrize(
    ("options", "every"),
    [
        ([], 2),  # of 16 rounds
        (["--set", "run.rounds=5"], 1),
        (["--set", "run.evaluate_every=16"], 16),
        (["--recipe", "paper"], 10),  # its own are more
        (["--set", "privacy.level=private"], 1),  # one round, which the algorithm decides
    ],
)
def test_a_new_fleet_is_evaluated_often_enough_to_be_watched(tmp_path: Path, options: list[str], every: int) -> None:
    words = ["server", "init", str(tmp_path / "x"), "--host", "localhost", "--items", "60", *options]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert ServerFolder.open(tmp_path / "x").settings().run.evaluate_every == every
