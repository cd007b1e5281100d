"""Real programs killed at the worst moments, with sums that remember: they hold what each device last said."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from fairfold.algorithms.correlations import SUM, Correlations
from fairfold.algorithms.pair_architecture import ROWS
from fairfold.algorithms.pairs import items_of, pair_sums, size_of, weights_of
from fairfold.algorithms.said import SAID
from fairfold.algorithms.spoken import room_for
from fairfold.flower.books import Books
from fairfold.flower.client import name_of
from fairfold.flower.federate import Trial
from fairfold.flower.processes import stopping
from fairfold.flower.store import DeviceState, DeviceStore
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Public
from fairfold.runs import checkpoint
from fairfold.settings import Settings
from fairfold.settings.parts import SyntheticData
from fairfold.values import Weights
from tests.flower.common import assert_same
from tests.flower.test_processes import ended, log_of, made, started, wait_for

pytestmark = pytest.mark.slow

MORTAL_SERVER = """
import os, signal
from pathlib import Path
from fairfold.flower import record

true, marker = record.Record.round_done, Path({marker!r})


def round_done(self, progress):
    if progress.state.round_number == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)  # the answers are taken, and the checkpoint is not written
    true(self, progress)


record.Record.round_done = round_done
"""


def summed_words(settings: Settings, books: Books, words: Iterable[tuple[int, DeviceState]]) -> dict[str, Weights]:
    """The sum of some devices' words, each with the size in which it was said, by the name that the server has."""
    assert isinstance(settings.data, SyntheticData)
    plan = Plan.of(settings, Public(settings.data.items, survey=books.survey))
    assert isinstance(plan.algorithm, Correlations)
    head = plan.architecture.tables[ROWS][0]
    sums = torch.zeros(size_of(head)).double()
    for size, kept in words:
        if not kept.said.own:  # the sum holds no word of it yet
            continue
        offsets, marks = kept.history["offsets"], kept.said.own[SAID][:, 0] > 0
        said = items_of(plan.algorithm.spoken(plan, size).size)
        most = room_for(settings, plan.public, plan.capacities[size], head)
        for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            items = kept.history["items"][first:last][marks[first:last]]
            mine = items[items < head].sort().values
            if len(mine):
                packed = pair_sums([mine[mine < said][:most]], weights_of(torch.tensor([len(mine)])), said)
                sums[: len(packed)] += packed.double()
    return {SUM: {SUM: sums}}


def assert_exact(trial: Trial) -> None:
    """The server's sums of its last checkpoint are those of the words that it and its devices agree on."""
    state = checkpoint.require(trial.run_folder / "checkpoints").progress.state
    books = Books(state)
    homes = [trial.node(number) / "state" for number in range(len(trial.capacities))]
    words = [
        (books.sizes[name_of(home)], DeviceStore(home).load().agreed(books.run, books.held.get(name_of(home), 0)))
        for home in homes
    ]
    for moment, of in summed_words(trial.settings, books, words).items():
        assert_same({key: tensor.double() for key, tensor in state.moments[moment].items()}, of, 1e-6)


def sums(folder: Path, kinds: list[str], rounds: int) -> Trial:
    return made(folder, kinds, rounds, timeout=600, solver="correlations", choose=False)


def test_a_device_killed_between_training_and_sending(tmp_path: Path) -> None:
    trial = sums(tmp_path / "trial", ["good", "killed"], rounds=3)
    with stopping(trial.programs):
        ended(trial, started(trial))
    assert [answers for _, answers in trial.server.rounds_done()] == [2, 1, 2], log_of(trial)
    assert_exact(trial)


def test_a_server_killed_between_taking_answers_and_its_checkpoint(tmp_path: Path) -> None:
    trial = sums(tmp_path / "trial", ["good", "good"], rounds=3)
    app, marker = trial.server.app / "fairfold_app" / "server_app.py", tmp_path / "killed"
    app.write_text(app.read_text() + MORTAL_SERVER.replace("{marker!r}", repr(str(marker))))
    with stopping(trial.programs):
        job = started(trial)
        wait_for(marker.exists, job)
        for program in reversed(trial.programs):
            program.kill()
        trial.programs.clear()
        assert checkpoint.require(trial.run_folder / "checkpoints").progress.state.round_number == 1
        ended(trial, started(trial, "--resume"))
    assert [answers for _, answers in trial.server.rounds_done()] == [2, 2, 2], log_of(trial)
    assert_exact(trial)


def test_ten_devices_killed_at_random_moments_in_two_rounds(tmp_path: Path) -> None:
    trial = sums(tmp_path / "trial", ["good", "good", *["mortal"] * 10], rounds=4)
    with stopping(trial.programs):
        ended(trial, started(trial))
    assert len(list(trial.folder.rglob("killed-in-*"))) == 20
    answers = [answers for _, answers in trial.server.rounds_done()]
    assert answers[0] == answers[3] == 12, log_of(trial)
    assert answers[1] == answers[2] == 2, log_of(trial)
    assert_exact(trial)


OFTEN_MORTAL_SERVER = """
import os, random, signal, threading
from pathlib import Path
from fairfold.flower import record

true, marker, dice = record.Record.round_done, Path({marker!r}), random.Random(os.urandom(8))


def round_done(self, progress):
    kills = len(marker.read_text()) if marker.exists() else 0
    if kills < {kills} and dice.random() < 0.7:
        marker.write_text("x" * (kills + 1))
        moment = dice.uniform(0, 0.03)  # a checkpoint takes as long
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if dice.random() < 0.3:
            os.kill(os.getpid(), signal.SIGKILL)
    true(self, progress)


record.Record.round_done = round_done
"""


def test_a_server_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    kills, trial = 20, sums(tmp_path / "trial", ["good", "good"], rounds=40)
    app, marker = trial.server.app / "fairfold_app" / "server_app.py", tmp_path / "killed"
    app.write_text(
        app.read_text() + OFTEN_MORTAL_SERVER.replace("{marker!r}", repr(str(marker))).replace("{kills}", str(kills))
    )
    with stopping(trial.programs):
        for kill in range(kills + 1):
            job = started(trial, *(["--resume"] if kill else []))
            if kill == kills:
                ended(trial, job)
                break
            wait_for(lambda: marker.exists() and len(marker.read_text()) > kill, job)  # noqa: B023
            time.sleep(1)
            for program in reversed(trial.programs):
                program.kill()
            trial.programs.clear()
            if checkpoint.newest(trial.run_folder / "checkpoints")[0] is not None:  # it may not have come to one
                assert_exact(trial)
    assert len(marker.read_text()) == kills
    assert_exact(trial)
