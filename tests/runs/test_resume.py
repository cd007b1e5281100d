"""Going on with a run: the same end whatever the settings, and refusals that say why."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold import atomic_io as files
from fairfold.errors import CannotWrite, InvalidCheckpoint, InvalidSettings
from fairfold.federation.simulation import simulate
from fairfold.runs import checkpoint
from fairfold.runs.folder import read_run_settings
from fairfold.runs.report import read_run
from fairfold.runs.train import CheckpointSchedule, run
from tests.support.runs import GRADIENT, RANKED, Interrupted, StopAfter, assert_same_end, interrupted, resumed, small
from tests.support.settings import make_settings

ON_DISK = GRADIENT | {"aggregation": "delta", "server_optimizer": "sgd", "server_lr": 1.0, "table_storage": "disk"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rehash": True, "mapping": "element", "server_optimizer": "yogi"},
        {"server_optimizer": "momentum", "weighting": "data", "replacement": True},
        {"server_optimizer": "adagrad", "faults": {"drop": 0.2, "nan": 0.2}, "clients_per_round": None},
        GRADIENT | {"model": "neumf", "local_epochs": 2},
        GRADIENT | {"backend": "sequential", "local_optimizer": "adagrad"},
        GRADIENT | {"aggregation": "delta", "prox": 0.1},
        GRADIENT | {"method": "heterofl", "capacities": "1x-2x", "user_vectors": "uploaded"},
        {"algorithm": "central", "local_optimizer": "adam", "local_lr": 0.01, "batch_size": 4},
        {"algorithm": "central", "local_optimizer": "adagrad", "user_storage": "disk"},
        GRADIENT | {"user_storage": "disk", "model": "neumf"},
        ON_DISK,
        ON_DISK | {"capacities": "4x-16x", "server_optimizer": "adam", "faults": {"drop": 0.2}},
        GRADIENT | {"method": "fedhm", "capacities": "1x-2x", "model": "neumf"},
        GRADIENT | {"method": "inconsistent"},
        GRADIENT | {"objective": "squared", "item_bias": True, "aggregation": "delta"},
        RANKED,
        RANKED | {"faults": {"drop": 0.3}, "user_storage": "disk", "popularity": "counts"},
        {"backend": "sequential", "mapping": "chunk"},
    ],
)
def test_an_interrupted_run_ends_like_an_unbroken_one(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = small(**changes)
    interrupted(settings, tmp_path / "run")
    finished, messages = resumed(settings, tmp_path / "run")
    assert messages[0] == "Resuming after round 2."
    assert_same_end(finished.result, simulate(settings))


@pytest.mark.parametrize("changes", [{}, {"streamed": True, "faults": {"drop": 0.2}}, {"group_similar": False}])
def test_ratings_go_on_from_the_last_update_of_every_device(changes: dict[str, Any], tmp_path: Path) -> None:
    lines = [
        f"{user}\t{item}\t{1 + user * item % 5}\t0" for user in range(9) for item in range(20) if (user + item) % 3
    ]
    (tmp_path / "u.data").write_text("\n".join(lines) + "\n")
    chosen: dict[str, Any] = {"capacities": "1x-2x", "clients_per_round": 4, "rounds": 4, "evaluate_every": 2}
    settings = make_settings(data=str(tmp_path / "u.data"), algorithm="ratings", factors=3, **chosen, **changes)
    interrupted(settings, tmp_path / "run")
    finished, _ = resumed(settings, tmp_path / "run")
    assert finished.result.local_state["last_update"].abs().sum() > 0
    assert_same_end(finished.result, simulate(settings))


def test_a_finished_run_can_be_given_more_rounds(tmp_path: Path) -> None:
    run(small(rounds=2), tmp_path / "run")
    finished, messages = resumed(small(rounds=4, patience=9, threshold=0.99, evaluate_every=1), tmp_path / "run")
    assert messages == ["Resuming after round 2."]
    straight = simulate(small(rounds=4))
    assert torch.equal(finished.result.state.full["item.weight"], straight.state.full["item.weight"])
    assert read_run_settings(tmp_path / "run").run.rounds == 4


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = run(small(), tmp_path / "run")
    again, _ = resumed(small(), tmp_path / "run")
    assert again.stopped == first.stopped == "all 4 rounds are done"
    assert_same_end(again.result, first.result)


@pytest.mark.parametrize("holds", [None, "nothing", "something"])
def test_what_is_no_run_is_not_resumed(holds: str | None, tmp_path: Path) -> None:
    """Neither a mistyped name nor a run that was killed before its settings were written starts another one."""
    out = tmp_path / "run"
    if holds is not None:
        out.mkdir()
    if holds == "something":
        (out / "precious").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidSettings, match=r"holds no settings\.toml"):
        resumed(small(), out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted(small(), out, after=1)
    finished, messages = resumed(small(), out)
    assert messages == [f"No checkpoint in {out}: starting from the first round."]
    assert_same_end(finished.result, simulate(small()))


class Order(files.Disk):
    """Notes which files become durable, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def replace(self, old: Path, new: Path) -> None:
        super().replace(old, new)
        self.names.append(new.name)


def test_settings_come_first_and_the_closing_table_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Order()
    monkeypatch.setattr(files, "disk", disk)
    run(small(), tmp_path / "run")
    assert disk.names[0] == "settings.toml"
    assert disk.names[-1] == "result.json"


def test_a_finished_run_that_goes_on_is_unfinished_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(small(rounds=2), out)
    assert read_run(out).state == "finished"
    with pytest.raises(Interrupted):
        run(small(rounds=4), out, resume=True, callbacks=[StopAfter(3)])
    assert read_run(out).state == "unfinished"
    assert read_run(out).settings.run.rounds == 4
    resumed(small(rounds=4), out)
    assert (read_run(out).state, read_run(out).rounds) == ("finished", 4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, ["run.seed = 0, now 1"]),
        ({"factors": 5}, ["model.factors = 4, now 5"]),
        ({"method": "fedavg"}, ["subspace.method = 'fair', now 'fedavg'"]),
        ({"data": {"users": 13, "items": 60, "interactions_per_user": 10}}, ["data.users = 12, now 13"]),
        ({"server_lr": 0.1, "capacities": "1x-2x"}, ["server_lr = 0.03, now 0.1", "capacities = '1x-4x-16x'"]),
        (
            {"algorithm": "co_occurrence", "factors": 384, "method": "truncated"},
            ["algorithm.kind = 'closed_form', now 'co_occurrence'"],
        ),
        ({"faults": {"late": 0.1}}, ["fleet.faults.late = None, now 0.1"]),
    ],
)
def test_other_settings_are_refused_by_name(changes: dict[str, Any], named: list[str], tmp_path: Path) -> None:
    run(small(rounds=1), tmp_path / "run")
    before = (tmp_path / "run" / "settings.toml").read_bytes()
    with pytest.raises(InvalidCheckpoint) as refused:
        resumed(small(**changes), tmp_path / "run")
    for text in named:
        assert text in str(refused.value)
    free = "rounds, patience, threshold, evaluate_every, baselines, user_storage, log_format"
    assert ", ".join(f"run.{key}" for key in free.split(", ")) + " may" in str(refused.value)
    assert (tmp_path / "run" / "settings.toml").read_bytes() == before


class FullDisk(files.Disk):
    """A disk that takes so many bytes and no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, piece: memoryview) -> int:
        if self.room < len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(piece)
        return super().write(descriptor, piece)


def test_a_full_disk_says_how_much_was_needed_and_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, needs = small(), []
    unbroken = simulate(settings)
    for room in range(0, 60_000, 4_000):
        out = tmp_path / f"run-{room}"
        monkeypatch.setattr(files, "disk", FullDisk(room))
        try:
            run(settings, out, checkpoint_every=1)
        except CannotWrite as error:
            needs.append(str(error))
        monkeypatch.setattr(files, "disk", files.Disk())
        assert not list(out.rglob("*.tmp"))
        assert not checkpoint.find_newest(out / "checkpoints")[1]
        # Without room for the settings there is no run yet: it is begun, not resumed.
        finished = run(settings, out, resume=(out / "settings.toml").exists(), echo=lambda _: None)
        assert_same_end(finished.result, unbroken)
        shutil.rmtree(out)
    assert all("No space left" in text and "bytes for this file" in text for text in needs)
    assert len(needs) > 5
    assert len(needs) < 15, "the last runs have room enough"


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    folder = run(small(), tmp_path / "run").folder
    with folder.locked(), pytest.raises(InvalidSettings, match="another process"):
        resumed(small(), tmp_path / "run")


def test_early_stopping_says_why_and_resumes_to_the_same_end(tmp_path: Path) -> None:
    settings = small(rounds=30, evaluate_every=1, faults={"drop": 1.0}, patience=2)
    finished = run(settings, tmp_path / "run")
    assert finished.stopped.startswith("no better quality for 2 evaluations (best")
    again, _ = resumed(settings, tmp_path / "run")
    assert again.result.state.round_number == finished.result.state.round_number == 3
    reached = run(small(rounds=30, evaluate_every=1, threshold=0.001), tmp_path / "reached")
    assert "has reached the threshold of 0.001" in reached.stopped
    assert json.loads((tmp_path / "reached" / "result.json").read_text())["stopped"] == reached.stopped


def test_checkpoints_keep_to_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("fairfold.runs.train.time.monotonic", lambda: now[0])
    pace = CheckpointSchedule(None)
    assert pace.due(1)
    pace.wrote(2.0)
    now[0] += 19
    assert not pace.due(2)
    now[0] += 1
    assert pace.due(3)
    assert [number for number in range(1, 8) if CheckpointSchedule(3).due(number)] == [3, 6]
