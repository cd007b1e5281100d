"""Real programs killed at the worst moments: the aggregate holds each device's last update."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.cooccurrence import (
    SUM,
    SYNC_STATE,
    history_weights,
    max_uploaded_items,
    triangle_items,
    triangle_size,
)
from fairfold.algorithms.cooccurrence.scorer import ROWS
from fairfold.config import Settings
from fairfold.config.tables import SyntheticData
from fairfold.device.store import load_device_id
from fairfold.federation.plan import Plan
from fairfold.federation.updates import PublicStatistics
from fairfold.flower.client_store import ClientState, ClientStore
from fairfold.flower.fleet.local_fleet import LocalFleet
from fairfold.flower.fleet.processes import stop_on_exit
from fairfold.flower.persistence import NetworkState
from fairfold.runs import checkpoint
from fairfold.typing import Weights
from tests.flower.test_processes import ended, log_of, made, started, wait_for
from tests.support.nodes import assert_same, cooccurrence_sums

pytestmark = pytest.mark.slow

MORTAL_SERVER = """
import os, signal
from pathlib import Path
from fairfold.flower import persistence

true, marker = persistence.RunRecorder.save_checkpoint, Path({marker!r})


def round_done(self, progress):
    if progress.state.round_number == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)  # the updates are taken, and the checkpoint is not written
    true(self, progress)


persistence.RunRecorder.save_checkpoint = round_done
"""


def summed_words(
    settings: Settings, network_state: NetworkState, words: Iterable[tuple[int, ClientState]]
) -> dict[str, Weights]:
    """The sum of some devices' updates, each with its size, by the device's id."""
    assert isinstance(settings.data, SyntheticData)
    plan = Plan.of(settings, PublicStatistics(settings.data.items, statistics=network_state.statistics))
    assert isinstance(plan.algorithm, CoOccurrence)
    head = plan.architecture.tables[ROWS][0]
    sums = torch.zeros(triangle_size(head)).double()
    for size, kept in words:
        if not kept.acknowledged.local_state:  # the sum holds no word of it yet
            continue
        offsets, marks = kept.history["offsets"], kept.acknowledged.local_state[SYNC_STATE][:, 0] > 0
        num_items = triangle_items(plan.algorithm.upload_projection(plan, size).size)
        most = max_uploaded_items(settings, plan.public, plan.capacities[size], head)
        for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            items = kept.history["items"][first:last][marks[first:last]]
            mine = items[items < head].sort().values
            if len(mine):
                weights = history_weights(torch.tensor([len(mine)]), 0.5)
                packed = cooccurrence_sums([mine[mine < num_items][:most]], weights, num_items)
                sums[: len(packed)] += packed.double()
    return {SUM: {SUM: sums}}


def assert_exact(local_fleet: LocalFleet) -> None:
    """The server's sums of its last checkpoint are those of the words that it and its devices agree on."""
    state = checkpoint.load_newest(local_fleet.run_folder / "checkpoints").progress.state
    network_state = NetworkState(state)
    homes = [local_fleet.node(number) / "state" for number in range(len(local_fleet.capacities))]
    words = [
        (
            network_state.sizes[load_device_id(home)],
            ClientStore(home)
            .load()
            .reconcile(network_state.run, network_state.acknowledged.get(load_device_id(home), 0)),
        )
        for home in homes
    ]
    for moment, of in summed_words(local_fleet.settings, network_state, words).items():
        assert_same({key: tensor.double() for key, tensor in state.algorithm_state[moment].items()}, of, 1e-6)


def sums(folder: Path, kinds: list[str], rounds: int) -> LocalFleet:
    return made(folder, kinds, rounds, timeout=600, algorithm="co_occurrence", tune=False)


def test_a_device_killed_between_training_and_sending(tmp_path: Path) -> None:
    local_fleet = sums(tmp_path / "trial", ["good", "killed"], rounds=3)
    with stop_on_exit(local_fleet.programs):
        ended(local_fleet, started(local_fleet))
    assert [updates for _, updates in local_fleet.server.completed_rounds()] == [2, 1, 2], log_of(local_fleet)
    assert_exact(local_fleet)


def test_a_server_killed_between_aggregation_and_its_checkpoint(tmp_path: Path) -> None:
    local_fleet = sums(tmp_path / "trial", ["good", "good"], rounds=3)
    app, marker = local_fleet.server.app / "fairfold_app" / "server_app.py", tmp_path / "killed"
    app.write_text(app.read_text() + MORTAL_SERVER.replace("{marker!r}", repr(str(marker))))
    with stop_on_exit(local_fleet.programs):
        job = started(local_fleet)
        wait_for(marker.exists, job)
        for program in reversed(local_fleet.programs):
            program.kill()
        local_fleet.programs.clear()
        assert checkpoint.load_newest(local_fleet.run_folder / "checkpoints").progress.state.round_number == 1
        ended(local_fleet, started(local_fleet, "--resume"))
    assert [updates for _, updates in local_fleet.server.completed_rounds()] == [2, 2, 2], log_of(local_fleet)
    assert_exact(local_fleet)


def test_ten_devices_killed_at_random_moments_in_two_rounds(tmp_path: Path) -> None:
    local_fleet = sums(tmp_path / "trial", ["good", "good", *["mortal"] * 10], rounds=4)
    with stop_on_exit(local_fleet.programs):
        ended(local_fleet, started(local_fleet))
    assert len(list(local_fleet.folder.rglob("killed-in-*"))) == 20
    updates = [updates for _, updates in local_fleet.server.completed_rounds()]
    assert updates[0] == updates[3] == 12, log_of(local_fleet)
    assert updates[1] == updates[2] == 2, log_of(local_fleet)
    assert_exact(local_fleet)


OFTEN_MORTAL_SERVER = """
import os, random, signal, threading
from pathlib import Path
from fairfold.flower import persistence

true, marker, dice = persistence.RunRecorder.save_checkpoint, Path({marker!r}), random.Random(os.urandom(8))


def round_done(self, progress):
    kills = len(marker.read_text()) if marker.exists() else 0
    if kills < {kills} and dice.random() < 0.7:
        marker.write_text("x" * (kills + 1))
        moment = dice.uniform(0, 0.03)  # a checkpoint takes as long
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if dice.random() < 0.3:
            os.kill(os.getpid(), signal.SIGKILL)
    true(self, progress)


persistence.RunRecorder.save_checkpoint = round_done
"""


def test_a_server_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    kills, local_fleet = 20, sums(tmp_path / "trial", ["good", "good"], rounds=40)
    app, marker = local_fleet.server.app / "fairfold_app" / "server_app.py", tmp_path / "killed"
    app.write_text(
        app.read_text() + OFTEN_MORTAL_SERVER.replace("{marker!r}", repr(str(marker))).replace("{kills}", str(kills))
    )
    with stop_on_exit(local_fleet.programs):
        for kill in range(kills + 1):
            job = started(local_fleet, *(["--resume"] if kill else []))
            if kill == kills:
                ended(local_fleet, job)
                break
            wait_for(lambda: marker.exists() and len(marker.read_text()) > kill, job)  # noqa: B023
            time.sleep(1)
            for program in reversed(local_fleet.programs):
                program.kill()
            local_fleet.programs.clear()
            if (
                checkpoint.find_newest(local_fleet.run_folder / "checkpoints")[0] is not None
            ):  # it may not have come to one
                assert_exact(local_fleet)
    assert len(marker.read_text()) == kills
    assert_exact(local_fleet)
