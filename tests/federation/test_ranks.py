"""Clients shared out over processes: the same numbers with one, two and three of them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairfold.backends.distributed import TorchRanks, leave
from fairfold.errors import InvalidSettings
from fairfold.federation.aggregation import Ranks
from fairfold.federation.simulation import simulate
from fairfold.runs import checkpoint
from tests.federation.ranks import CASES, EXACT, QUICK, TABLES, outcome, start
from tests.support.federations import tiny_data
from tests.support.settings import make_settings

SMALL = [
    "train", "--set", "algorithm.kind=closed_form", "--set", "data.users=40", "--set", "data.items=80",
    "--set", "data.interactions_per_user=12", "--set", "fleet.clients_per_round=9", "--set", "run.baselines=false",
]  # fmt: skip


def shared(folder: Path, many: int, cases: list[str]) -> dict[str, Any]:
    """What so many processes end with."""
    folder.mkdir()
    for rank, process in enumerate(start(folder, many, cases=cases)):
        assert process.wait(600) == 0, (folder / f"rank-{rank}.log").read_text()
    found: dict[str, Any] = torch.load(folder / "outcomes.pt", weights_only=False)
    return found


def same(one: Any, other: Any, exact: bool, where: str) -> None:
    if isinstance(one, torch.Tensor):
        if exact or not one.is_floating_point():
            assert torch.equal(one, other), where
        else:
            most = float(one.abs().max()) if one.numel() else 0.0
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * most, msg=where)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            same(value, other[key], exact, f"{where} {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for value, beside in zip(one, other, strict=True):
            same(value, beside, exact, where)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=0 if exact else 1e-6, nan_ok=True), where
    elif hasattr(one, "__dataclass_fields__"):
        same(vars(one), vars(other), exact, where)
    else:
        assert one == other, where


def check(cases: list[str], found: dict[int, dict[str, Any]]) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        alone = {case: outcome(case) for case in cases}
    finally:
        torch.set_default_dtype(before)
    for case, expected in alone.items():
        for many, ends in found.items():
            same(expected, ends[case], case in EXACT, f"{case}, {many} processes:")
        assert expected["rejections"] or "faults" not in {**CASES, **TABLES}[case], "some were refused"


def test_the_same_numbers_with_two_processes(tmp_path: Path) -> None:
    check(QUICK, {2: shared(tmp_path / "two", 2, QUICK)})


@pytest.mark.slow
def test_the_same_numbers_with_one_two_and_three_processes(tmp_path: Path) -> None:
    cases = [*CASES, *TABLES]
    check(cases, {many: shared(tmp_path / str(many), many, cases) for many in (2, 3)})


class OneOfTwo(Ranks):
    """A process whose neighbor contributes nothing."""

    num_ranks = 2


class GroupOfOne(TorchRanks):
    """The same, with sums that go through torch.distributed: NCCL takes one process per GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ranks = 2

    def all_gather(self, values: list[Any]) -> list[Any]:
        return values


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


@pytest.mark.parametrize(
    ("device", "case"),
    [
        ("cpu", "ratings, faults"),
        ("cpu", "co_occurrence"),
        ("cpu", "gradient"),
        pytest.param("cuda", "gradient", marks=ON_GPU),  # nothing else works on a GPU
    ],
)
def test_sums_pass_through_a_group_as_they_are(case: str, device: str, tmp_path: Path) -> None:
    kind = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(kind, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        found = outcome(case, GroupOfOne(), device)
    finally:
        leave()
    expected = outcome(case, OneOfTwo(), device)
    for key in ("full", "algorithm_state", "moved", "rejections"):  # the local state of others is not gathered
        same(expected[key], found[key], device == "cpu", f"{case}, {device}, {key}:")


def finished(folder: Path, many: int, *arguments: str) -> list[int]:
    return [process.wait(120) for process in start(folder, many, "-m", "fairfold", *arguments)]


@pytest.mark.slow
def test_a_run_of_two_processes_is_written_once_and_goes_on(tmp_path: Path) -> None:
    paths = {"one": tmp_path / "one", "two": tmp_path / "two"}
    for many, path in enumerate(paths.values(), 1):
        assert finished(tmp_path, many, *SMALL, "--rounds", "3", "--out", str(path)) == [0] * many
    assert finished(tmp_path, 1, "train", "--out", str(paths["one"]), "--rounds", "5", "--resume") == [0]
    assert finished(tmp_path, 2, "train", "--out", str(paths["two"]), "--rounds", "5", "--resume") == [0, 0]
    assert not (tmp_path / "rank-1.log").read_text(), "only the first one prints"
    assert "Resuming after round 3" in (tmp_path / "rank-0.log").read_text()
    ends = [checkpoint.load_newest(path / "checkpoints").progress for path in paths.values()]
    for part in ("full", "private"):
        one, other = (end.local_state if part == "private" else end.state.full for end in ends)
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)
    results = [json.loads((path / "result.json").read_text()) for path in paths.values()]
    assert results[0]["server"]["quality"] == pytest.approx(results[1]["server"]["quality"], abs=1e-6)


def test_where_there_is_one_client_nothing_is_shared() -> None:
    two = Ranks()
    two.num_ranks = 2
    with pytest.raises(InvalidSettings, match="leave torchrun out"):
        simulate(make_settings(algorithm="central", local_optimizer="adam"), data=tiny_data(), ranks=two)


@pytest.mark.slow
def test_an_error_of_one_process_ends_all_with_its_reason(tmp_path: Path) -> None:
    began = time.monotonic()
    refused = finished(tmp_path, 2, *SMALL, "--set", "fleet.asynchronous.buffer_size=3", "--out", str(tmp_path / "run"))
    assert refused == [2, 2]
    for rank in range(2):
        assert (
            "fleet.asynchronous in a simulation, in which devices take no time"
            in (tmp_path / f"rank-{rank}.log").read_text()
        )
    (tmp_path / "failing.py").write_text(FAILING)
    arguments = (str(tmp_path / "failing.py"), *SMALL, "--rounds", "3", "--out", str(tmp_path / "other"))
    assert [process.wait(120) for process in start(tmp_path, 2, *arguments)] == [2, 1]
    assert "no electricity" in (tmp_path / "rank-1.log").read_text()
    assert "rank 1 of 2: ValueError: no electricity" in (tmp_path / "rank-0.log").read_text()
    assert time.monotonic() - began < 240, "no process waits for one that has ended"


FAILING = """
import os
from fairfold.algorithms.closed_form import ClosedForm
from fairfold.cli import app

if os.environ["RANK"] == "1":
    true = ClosedForm._updates_of_size

    def fails(self, plan, clients, task, client_ids):
        if task.round_number == 1:
            raise ValueError("no electricity")
        return true(self, plan, clients, task, client_ids)

    ClosedForm._updates_of_size = fails
app()
"""
