"""Tables on disk: the ordinary server's numbers, at the cost of what clients hold and touch; back to a checkpoint."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold.backends.batched import batched
from fairfold.checksums import Damaged
from fairfold.config import read_settings
from fairfold.config.settings import Settings
from fairfold.errors import InvalidSettings
from fairfold.federation import updates
from fairfold.federation.federation import Federation
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round
from fairfold.federation.simulation import simulate
from fairfold.federation.updates import State, reduce_per_size
from fairfold.runs.loaded import load_run
from fairfold.subspace.stored_table import StoredTable
from fairfold.subspace.table_file import RECORD, TableFile
from tests.support.federations import tiny_data
from tests.support.runs import assert_same_end, interrupted, resumed

GRADIENT = {
    "kind": "gradient", "aggregation": "delta", "local_optimizer": "adam", "local_lr": 0.02, "server_optimizer": "sgd",
    "server_lr": 0.8, "batch_size": 8,
}  # fmt: skip


def settings_of(storage: str, changes: dict[str, Any] | None = None) -> Settings:
    base = read_settings({
        "model": {"kind": "mf", "factors": 4},
        "algorithm": GRADIENT,
        "subspace": {"mapping": "ranked"},
        "fleet": {"capacities": "1x-4x-16x", "clients_per_round": 9},
        "run": {"table_storage": storage, "baselines": False},
    })  # fmt: skip
    return base.with_changes(changes or {})


def plan_of(changes: dict[str, Any]) -> Plan:
    return Federation.of(settings_of("disk", changes), tiny_data(1, 24, 160)).plan


def trained(storage: str, rounds: int = 4, changes: dict[str, Any] | None = None, users: int = 24) -> State:
    federation = Federation.of(settings_of(storage, changes), tiny_data(1, users, 160))
    state = federation.initial()
    for _ in range(rounds):
        state = run_round(state, federation.sampler, federation.clients, Rejections(), batched)
    return state


CASES: list[dict[str, Any]] = [
    {},
    {"subspace.mapping": "chunk", "subspace.sign": False},
    {"subspace.mapping": "element", "fleet.capacities": "2x-4x-8x"},
    {"model.kind": "neumf", "algorithm.local_optimizer": "sgd", "algorithm.local_lr": 0.5},
    {"fleet.capacities": "1x"},
    {"fleet.capacities": "4x-16x", "fleet.faults.drop": 0.3},
    {"algorithm.step_per": "client", "algorithm.server_lr": 0.1},
    *({"fleet.capacities": "4x-16x", "algorithm.server_optimizer": name} for name in ("momentum", "adam", "adagrad")),
    {"fleet.capacities": "4x-8x-32x", "algorithm.server_optimizer": "yogi"},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_table_is_the_ordinary_server_s(changes: dict[str, Any]) -> None:
    """Same start, bit for bit; after some rounds the same up to rounding."""
    start, on_disk = trained("memory", 0, changes), trained("disk", 0, changes)
    for name, vector in start.full.items():
        assert torch.equal(vector, on_disk.full[name].clone())
    expected, found = trained("memory", 4, changes), trained("disk", 4, changes)
    tables = [name for name, vector in found.full.items() if isinstance(vector, StoredTable)]
    assert tables
    for name, vector in expected.full.items():
        moved = (vector - start.full[name]).abs().max()
        assert moved > 1e-4 or name not in tables
        torch.testing.assert_close(found.full[name].clone(), vector, rtol=0, atol=float(moved) * 2e-4)
    sizes = plan_of(changes).assignments(0)
    whole = {name: vector.clone() for name, vector in found.full.items()}
    for sent, reduced in zip(reduce_per_size(found.full, sizes), reduce_per_size(whole, sizes), strict=True):
        assert sent is not None
        assert reduced is not None
        for name, vector in reduced.items():  # empty slots are 0 in both
            torch.testing.assert_close(sent[name].clone(), vector, rtol=0, atol=1e-6)


def test_a_round_reads_single_coordinates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(table: StoredTable) -> torch.Tensor:
        raise AssertionError(f"a pass over all {len(table)} numbers")

    monkeypatch.setattr(StoredTable, "whole", refuse)
    changes = {"model.kind": "neumf", "fleet.faults.nan": 0.2, "fleet.faults.drop": 0.2}
    assert trained("disk", 3, changes).round_number == 3


def test_sums_too_long_to_be_dense_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in double precision; the table stays as it is."""
    expected = trained("disk", 2).full["item.weight"].clone()
    monkeypatch.setattr(updates, "MAX_DENSE", 10)
    found = trained("disk", 2).full["item.weight"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.clone(), expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": {"kind": "closed_form"}}, "algorithm.kind='closed_form', which reads the whole table"),
    ({"algorithm": {"kind": "co_occurrence"}, "subspace": {"method": "truncated"}}, "algorithm.kind='co_occurrence'"),
    ({"algorithm": GRADIENT | {"server_optimizer": "adam"}}, "'adam' and devices that hold the whole table.*'sgd'"),
    ({"algorithm": {"kind": "gradient", "aggregation": "paper"}}, "aggregation='paper'; needed: 'delta'"),
    ({"algorithm": GRADIENT | {"prox": 0.1}}, "prox=0.1"),
    ({"subspace": {"mapping": "element", "rehash": True}}, "rehash=true; needed: one hash for the whole run"),
    ({"subspace": {"method": "heterofl"}}, "method='heterofl'; needed: subspaces"),
    ({"subspace": {"method": "inconsistent"}}, "method='inconsistent'"),
    ({"run": {"table_storage": "disk", "backend": "sequential"}}, "backend='sequential'"),
    ({"fleet": {"clients_per_round": 9, "asynchronous": {"buffer_size": 4}}}, "fleet.asynchronous"),
]  # fmt: skip


@pytest.mark.parametrize(("tables", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_needs_whole_tables_is_refused_with_the_command_that_works(tables: dict[str, Any], reason: str) -> None:
    base: dict[str, Any] = {
        "model": {"kind": "mf"}, "algorithm": GRADIENT, "fleet": {"capacities": "1x-4x"}, "subspace": {},
        "run": {"table_storage": "disk"},
    }  # fmt: skip
    settings = read_settings(base | tables)
    with pytest.raises(InvalidSettings, match=f"run.table_storage='disk' with .*{reason}") as refused:
        Federation.of(settings, tiny_data(1, 24, 160))
    assert "--set run.table_storage=memory" in str(refused.value)


def random_changes(file: TableFile, count: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for _ in range(count):
        places = torch.randperm(len(file.values), generator=source)[:7]
        file.add(places, torch.randn(7, generator=source))


def test_a_file_goes_back_to_each_of_its_checkpoints(tmp_path: Path) -> None:
    """Bit for bit, from a process that was killed between rounds or in the middle of a record."""
    path = tmp_path / "table"
    file = TableFile.create(path, 50, torch.float32)
    random_changes(file, 3, 0)  # before the first checkpoint: nothing to go back to
    known = {}
    for number in (2, 5, 9):
        file.checkpoint(number)
        known[number] = file.values.clone()
        random_changes(file, 4, number)
    journal = tmp_path / "table.undo-00000009"
    journal.write_bytes(journal.read_bytes() + RECORD.pack(3, 1) + b"cut")
    for number in (9, 5, 2):
        again = TableFile(path, 50, torch.float32)
        assert not torch.equal(again.values, known[number])
        again.go_back(number)
        assert torch.equal(again.values, known[number])
        random_changes(again, 2, number)
    assert not journal.exists()


def test_a_journal_that_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table"
    file = TableFile.create(path, 50, torch.float32)
    file.checkpoint(1)
    random_changes(file, 3, 1)
    file.checkpoint(4)
    file.forget(before=4)
    with pytest.raises(Damaged, match="no journal of round 1"):
        file.go_back(1)
    random_changes(file, 3, 1)
    journal = tmp_path / "table.undo-00000004"
    content = bytearray(journal.read_bytes())
    content[RECORD.size + 2] ^= 1
    journal.write_bytes(content)
    with pytest.raises(Damaged, match="another checksum"):
        TableFile(path, 50, torch.float32).go_back(4)
    path.write_bytes(b"short")
    with pytest.raises(Damaged, match="5 bytes, not 200"):
        TableFile(path, 50, torch.float32)


def test_a_killed_run_goes_on_from_the_older_checkpoint_where_the_newest_is_damaged(tmp_path: Path) -> None:
    changes = {"run.rounds": 5, "run.evaluate_every": 5, "data.users": 24, "data.items": 160}
    settings = settings_of("disk", changes)
    expected = simulate(settings)
    interrupted(settings, tmp_path / "run", after=4)
    newest = max((tmp_path / "run" / "checkpoints").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:-9])
    finished, messages = resumed(settings, tmp_path / "run")
    assert "Resuming after round 2." in messages
    assert_same_end(finished.result, expected)


def test_a_run_is_read_as_it_was_at_its_checkpoint_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted(settings_of("disk", {"run.rounds": 5}), out, after=2)
    before = {path: path.read_bytes() for path in out.glob("table-1.blocks*")}
    assert len(before) == 2
    found = load_run(out).progress.state
    assert found.round_number == 1
    expected = simulate(settings_of("disk", {"run.rounds": 1})).state
    assert torch.equal(found.full["item.weight"], expected.full["item.weight"])
    assert {path: path.read_bytes() for path in before} == before


PROGRAM = """
import sys
from pathlib import Path
import torch
from fairfold.backends.batched import batched
from fairfold.config import read_settings
from fairfold.data import Dataset, Interactions
from fairfold.federation.architecture import Storage
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round

torch.set_num_threads(1)
settings = read_settings({
    "model": {"factors": 16},
    "algorithm": {"kind": "gradient", "server_optimizer": "sgd", "server_lr": 1.0, "local_lr": 0.1},
    "fleet": {"capacities": "400kB-1x", "clients_per_round": 20}, "run": {"table_storage": sys.argv[3]}})

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

def rounds(items, users=200):
    chosen = torch.randint(items, (users * 20,), generator=torch.Generator().manual_seed(0))
    train = Interactions.from_pairs(torch.arange(users).repeat_interleave(20), chosen, users, items)
    federation = Federation.of(settings, Dataset("many", train, train))
    state = federation.initial(Storage(Path(sys.argv[1])))
    for _ in range(3):
        state = run_round(state, federation.sampler, federation.clients, Rejections(), batched)

rounds(20_000)  # what any run needs
before = peak()
rounds(int(sys.argv[2]))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from a file of Linux")
@pytest.mark.parametrize(
    ("items", "storage"),
    [
        (1_000_000, "disk"),
        pytest.param(10_000_000, "disk", marks=pytest.mark.slow),
        pytest.param(1_000_000, "memory", marks=pytest.mark.slow),
    ],
)
def test_a_table_on_disk_needs_no_memory_of_its_length(items: int, storage: str, tmp_path: Path) -> None:
    """The peak above that of a small table stays below a bound that does not depend on the length (64 or 640 MB)."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(items), storage]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (grown < 40e6) == (storage == "disk"), grown
