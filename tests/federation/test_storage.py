"""Private vectors on disk: the same numbers, in memory of what a round touches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairfold import atomic_io
from fairfold.errors import CannotWrite
from fairfold.federation.architecture import Storage
from fairfold.runs.train import run
from tests.support.runs import GRADIENT, assert_same_end, small

PROGRAM = """
import os, resource, sys
from pathlib import Path
import torch
from fairfold.data import Dataset, Interactions
from fairfold.backends.batched import batched
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round
from fairfold.federation.architecture import Storage
from fairfold.config import read_settings
from fairfold.federation.federation import Federation

torch.set_num_threads(1)
users = 400_000
owners = torch.arange(users)
train = Interactions.from_pairs(owners, owners % 50, users, 100)
steps = {"kind": "gradient", "local_optimizer": "adam", "local_lr": 0.01, "aggregation": "paper"}
settings = read_settings({"model": {"factors": 256}, "algorithm": steps, "fleet": {"clients_per_round": 100}})
federation = Federation.of(settings, Dataset("many", train, train))
used = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + 200_000_000,) * 2)  # the vectors are 410 MB
try:
    state = federation.initial(Storage(Path(sys.argv[1]), sys.argv[2]))
    for _ in range(3):
        state = run_round(state, federation.sampler, federation.clients, Rejections(), batched)
except (MemoryError, RuntimeError) as error:
    print("no memory", type(error).__name__)
else:
    print("done", state.round_number)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited by a means of Linux")
def test_vectors_on_disk_need_no_memory_of_their_own(tmp_path: Path) -> None:
    """Under a limit on memory that the vectors alone exceed: fails in memory, passes on disk."""
    found = {
        choice: subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), choice], capture_output=True, text=True, check=True
        ).stdout.split()[0]
        for choice in ("memory", "disk")
    }
    assert found == {"memory": "no", "disk": "done"}
    assert not list(tmp_path.iterdir())


def test_the_same_numbers_in_memory_and_on_disk(tmp_path: Path) -> None:
    changes = GRADIENT | {"model": "neumf", "rounds": 3}
    assert_same_end(*(run(small(**changes, user_storage=kind), tmp_path / kind).result for kind in ("memory", "disk")))


def test_as_many_items_as_users(tmp_path: Path) -> None:
    """Item tables of the shape of a user table stay in memory, with the numbers they always have."""
    changes = GRADIENT | {"rounds": 2, "data": {"users": 60, "items": 60, "interactions_per_user": 10}}
    assert_same_end(*(run(small(**changes, user_storage=kind), tmp_path / kind).result for kind in ("memory", "disk")))


def test_large_tables_go_to_disk_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Storage(tmp_path, "auto")
    asked: list[Path] = []

    def reserve(path: Path, size: int) -> None:
        asked.append(path)
        path.write_bytes(bytes(size))

    monkeypatch.setattr(atomic_io, "reserve", reserve)
    chosen.empty("small", (10, 2), torch.float32)
    assert not asked
    monkeypatch.setattr(os, "sysconf", lambda _: 8)  # a machine of 64 bytes
    table = chosen.empty("large", (10, 2), torch.float32)
    assert len(asked) == 1
    table.fill_(3)
    assert table.sum() == 60


def test_a_full_disk_is_reported_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CannotWrite, match="No space left"):
        Storage(tmp_path, "disk").empty("users", (10, 2), torch.float32)
