"""A federation on this machine: what is written before it starts, programs that end with it, and the whole command."""

import os
import re
import signal
import ssl
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from fairfold.backends.batched import batched
from fairfold.cli import app
from fairfold.config import read_settings
from fairfold.config.files import read_toml
from fairfold.errors import InvalidSettings, InvalidState
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round
from fairfold.flower.fleet.credentials import make_certificates, make_node_key
from fairfold.flower.fleet.local_fleet import make_local_fleet
from fairfold.flower.fleet.processes import Program, descendants, free_ports, stop_on_exit, wait_for_port
from fairfold.flower.local_data import LocalFile
from fairfold.runs.checkpoint import load_newest
from fairfold.runs.events import participants, read_events
from fairfold.runs.folder import DATA
from fairfold.subspace import assign_groups
from tests.support.nodes import assert_same, catalogued
from tests.support.settings import make_settings

SMALL = make_settings(rounds=2, data={"users": 20, "items": 60, "interactions_per_user": 10})


def test_certificates_serve_the_hosts_they_name(tmp_path: Path) -> None:
    ca, certificate, key = make_certificates(tmp_path, ["127.0.0.1", "localhost"])
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    trusted = ssl.create_default_context(cafile=str(ca))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    for host, good in (("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("example.org", False)):
        assert handshake(trusted, server, host) is good
    make_certificates(other := make_folder(tmp_path / "other"), ["127.0.0.1"])
    assert not handshake(ssl.create_default_context(cafile=str(other / "ca.crt")), server, "127.0.0.1")
    assert x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc.timestamp() > time.time()


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> bool:
    """Whether a client that wants ``host`` trusts the server; both sides in memory."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=host)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [here, there]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
        if not waiting:
            return True
    return False


def test_node_keys_are_what_ssh_keygen_makes(tmp_path: Path) -> None:
    private, public = make_node_key(tmp_path / "node")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    key = load_ssh_private_key(private.read_bytes(), None)
    assert key.public_key() == load_ssh_public_key(public.read_bytes())
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")


def test_every_node_gets_a_file_of_its_own(tmp_path: Path) -> None:
    local_fleet, data = make_local_fleet(SMALL, "1x, 2x,1x", tmp_path / "trial")
    assert local_fleet.settings.fleet.capacities == "1x-2x"
    local_fleet.prepare(data)
    seen: set[str] = set()
    for number in range(3):
        home = local_fleet.node(number)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "train.csv").stat().st_mode) == 0o600
        local = LocalFile(home / "train.csv", test=home / "test.csv").load(60)
        assert seen.isdisjoint(local.names)
        seen |= set(local.names)
        for user, name in enumerate(local.names):
            assert local.train.of(user).tolist() == data.train.of(int(name)).tolist()
            assert local.test is not None
            assert local.test.of(user).tolist() == data.test.of(int(name)).tolist()
    assert len(seen) == 20
    assert local_fleet.server.items == 60
    assert local_fleet.server.settings().plain() | {"data": None} == local_fleet.settings.plain() | {"data": None}


def test_more_nodes_than_users_are_refused_with_as_many_as_there_are(tmp_path: Path) -> None:
    local_fleet, data = make_local_fleet(SMALL, "1x*19,4x,16x*2", tmp_path / "trial")
    with pytest.raises(InvalidSettings, match="20 users for 22 nodes") as refused:
        local_fleet.prepare(data)
    assert not (tmp_path / "trial").exists()
    found = re.search('--nodes "(.*)"', str(refused.value))
    assert found is not None
    local_fleet, data = make_local_fleet(SMALL, found[1], tmp_path / "trial")
    local_fleet.prepare(data)
    assert list(map(str, local_fleet.capacities)) == ["1x"] * 19 + ["4x"]


def test_the_server_has_the_threads_of_a_simulation_and_devices_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their number the last digits of a model go, and with these a choice at a knife's edge."""
    started = dict[str, dict[str, str]]()

    class Noted(Program):
        def __init__(self, name: str, _command: object, _log: object, environment: dict[str, str]) -> None:
            started[name] = environment

    monkeypatch.setattr("fairfold.flower.fleet.local_fleet.Program", Noted)
    monkeypatch.setattr("fairfold.flower.fleet.local_fleet.wait_for_port", lambda _port, _program: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    local_fleet, data = make_local_fleet(SMALL, "1x", tmp_path / "trial")
    local_fleet.prepare(data)
    local_fleet.start_server()
    local_fleet.start_node(0)
    assert "OMP_NUM_THREADS" not in started["server"]
    assert started["node-0"]["OMP_NUM_THREADS"] == "1"


def test_which_data_it_was_is_written_down_whatever_is_left_open(tmp_path: Path) -> None:
    """An audit replays it; TOML has no word for what settings leave open."""
    path = tmp_path / "mine.csv"
    path.write_text("user,item\n" + "".join(f"{user},{item}\n" for user in range(8) for item in range(user, user + 6)))
    local_fleet, data = make_local_fleet(make_settings(rounds=2, data=str(path)), "1x,4x", tmp_path / "trial")
    local_fleet.prepare(data)
    found = read_settings({"data": read_toml(local_fleet.folder / DATA)})
    assert found.plain()["data"] == local_fleet.settings.plain()["data"]
    assert None in found.plain()["data"].values()


@pytest.mark.parametrize(("nodes", "complaint"), [("", "what each node can hold"), ("1x,many", "many"), ("0x", "0x")])
def test_nodes_that_cannot_be_read_are_refused(nodes: str, complaint: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["federate", "--nodes", nodes, "--out", str(tmp_path / "out")])
    assert found.exit_code == 2
    assert complaint in found.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    found = CliRunner().invoke(app, ["federate", "--out", str(tmp_path)])
    assert found.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_settings_that_cannot_be_served_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="user_vectors"):
        make_local_fleet(make_settings(algorithm="gradient", user_vectors="uploaded"), "1x", tmp_path / "trial")
    assert not (tmp_path / "trial").exists()


# -- programs ----------------------------------------------------------------------------------------------------------

FAMILY = """
import subprocess, sys, time
nested = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
subprocess.Popen([sys.executable, "-c", nested + " start_new_session=True).wait()"], start_new_session=True)
print("ready", flush=True)
{tail}
"""


def wait_for(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "tail", ["time.sleep(600)", "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
)
def test_a_program_s_children_end_with_it_even_in_sessions_of_their_own(
    tail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairfold.flower.fleet.processes.TERMINATE_TIMEOUT", 1.0)
    with stop_on_exit([]) as programs:
        program = Program("family", [sys.executable, "-c", FAMILY.format(tail=tail)], tmp_path / "log", {})
        programs.append(program)
        wait_for(lambda: len(descendants([program.pid])) == 2)
        children = descendants([program.pid])
    assert program.status() is not None
    wait_for(lambda: not any(alive(pid) for pid in children))


def alive(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(listed.strip()) and not listed.strip().startswith("Z")


def test_a_program_that_ends_too_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    program = Program("server", [sys.executable, "-c", "print('no luck'); exit(3)"], tmp_path / "log", {})
    with pytest.raises(InvalidState, match="status 3"), stop_on_exit([program]):
        wait_for_port(free_ports(1)[0], program)
    assert "no luck" in program.tail()


# -- the whole ---------------------------------------------------------------------------------------------------------


def federate(out: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", "from fairfold.cli import app; app()", "federate", "--out", str(out), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"COLUMNS": "160"},
    )  # fmt: skip


def programs_of(out: Path) -> list[str]:
    """Running programs that name the folder in their command or were started with it as Flower's home."""
    listed = subprocess.run(["ps", "axeww", "-o", "stat=,command="], capture_output=True, text=True, check=False).stdout
    lines = [line for line in listed.splitlines() if str(out) in line and "fairfold.cli" not in line]
    return [line for line in lines if not line.startswith("Z") and "axeww" not in line]


@pytest.mark.slow
def test_the_command_ends_with_a_better_model_over_tls(tmp_path: Path) -> None:
    out = tmp_path / "trial"
    process = federate(out, "--nodes", "1x,4x,16x,64x", "--rounds", "5")
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    assert programs_of(out) == []
    assert "round 5/5: 4 of 4 nodes replied" in output
    nodes = participants(read_events(out / "server" / "run"))[0]
    assert sorted(node["capacity"] for node in nodes) == ["16x", "1x", "4x", "64x"]
    assert all(node["rounds"] == 5 for node in nodes)
    held = {node["capacity"]: node["bytes_held"] for node in nodes}
    assert held["1x"] > held["4x"] > held["16x"] > held["64x"]
    for before, after in ((node["first_quality"], node["last_quality"]) for node in nodes):
        assert after[0] / after[1] > before[0] / before[1]
    row = re.search(r"all .*?(0\.\d+) .*?(0\.\d+)", output)
    assert row is not None
    assert float(row[2]) > float(row[1])


@pytest.mark.slow
def test_sums_evaluations_and_model_are_those_of_the_simulation_to_the_last_bit(tmp_path: Path) -> None:
    """Over TLS, by processes of their own; the same users of every size."""
    settings = make_settings(
        algorithm="co_occurrence", method="truncated", factors=48, rounds=15, evaluate_every=15,
        data={"users": 90, "items": 900, "interactions_per_user": 60},
    )  # fmt: skip
    local_fleet, data = make_local_fleet(settings, "1x*2,4x", tmp_path / "trial")
    local_fleet.prepare(data)
    local_fleet.run(lambda _words: None)
    checkpoint = load_newest(local_fleet.run_folder / "checkpoints").progress.state
    world = Federation.of(local_fleet.settings, catalogued(data, local_fleet.settings))
    nodes = assign_groups(data.num_users, 3)
    fleet, state = replace(world.sampler, size=torch.tensor([0, 0, 1])[nodes]), world.initial()
    for _ in range(settings.run.rounds):
        state = run_round(state, fleet, world.clients, Rejections(), batched)
    for name in ("sum", "quality", "solver"):
        assert_same(checkpoint.algorithm_state[name], state.algorithm_state[name], 0.0)
    assert_same(checkpoint.full, state.full, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_program_behind(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "trial"
    process = federate(out, "--nodes", "1x,4x", "--rounds", "50")
    wait_for(lambda: (out / "server" / "run" / "metrics.csv").exists() and len(programs_of(out)) > 3, 300)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    wait_for(lambda: programs_of(out) == [], 30)
