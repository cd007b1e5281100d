"""One of several processes that share small federations: ``python -m tests.federation.ranks FOLDER CASE …``, with
torchrun's variables. What the first of them ends with is written to the folder."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fairfold.backends.distributed import ranks_here
from fairfold.config import Settings
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.federation.aggregation import ONE, Ranks
from fairfold.federation.simulation import simulate
from tests.support.federations import tiny_data
from tests.support.pictures import SMALL, pictures
from tests.support.settings import make_settings

CLOCK: dict[str, Any] = {"median_seconds": 1.0, "log_std": 0.3, "slow_share": 0.3, "slow_factor": 6.0}
STEPS: dict[str, Any] = {"local_lr": 0.05, "batch_size": 4, "server_optimizer": "sgd", "chunk": 1}
CASES: dict[str, dict[str, Any]] = {
    "ratings, faults": {
        "algorithm": "ratings", "tail_share": 0.5,
        "faults": {"drop": 0.2, "nan": 0.2, "wrong_size": 0.1, "out_of_range": 0.1},
    },
    "closed form by counts": {
        "algorithm": "closed_form", "server_optimizer": "sgd", "tail_share": 0.5, "support": 2, "popularity": "counts",
    },
    "ratings": {"algorithm": "ratings", "tail_share": 0.5},
    "ratings, streamed": {"algorithm": "ratings", "tail_share": 0.5, "streamed": True, "faults": {"nan": 0.2}},
    "closed form": {"algorithm": "closed_form", "server_optimizer": "sgd", "chunk": 1, "replacement": True},
    "closed form, another hash every round": {
        "algorithm": "closed_form", "server_optimizer": "sgd", "rehash": True, "mapping": "element",
    },
    "gradient": {"algorithm": "gradient"} | STEPS,
    "gradient, the paper's rule": {
        "algorithm": "gradient", "aggregation": "paper", "weighting": "data", "local_lr": 0.05, "chunk": 1,
        "backend": "sequential", "faults": {"drop": 0.2, "infinite": 0.2},
    },
    "neumf": {"algorithm": "gradient", "model": "neumf"} | STEPS,
    "a hash for each": {"algorithm": "gradient", "method": "inconsistent"} | STEPS,
    "fedhm": {"algorithm": "gradient", "method": "fedhm", "aggregation": "paper", "local_lr": 0.05},
    "heterofl": {"algorithm": "gradient", "method": "heterofl", "local_lr": 0.05, "server_optimizer": "sgd"},
    "asynchronous": {
        "algorithm": "ratings", "tail_share": 0.5, "asynchronous": {"buffer_size": 3, "max_staleness": 2},
        "latency": CLOCK, "rounds": 8,
    },
    "images": SMALL,
}  # fmt: skip
TABLES: dict[str, dict[str, Any]] = {
    "co_occurrence": {"algorithm": {"kind": "co_occurrence", "support": 1}, "run": {"rounds": 10, "evaluate_every": 3}},
    "co_occurrence under masks": {
        "algorithm": {"kind": "co_occurrence", "support": 1}, "run": {"rounds": 9, "evaluate_every": 9},
        "privacy": {"level": "secure", "min_cohort": 4}, "fleet": {"faults": {"drop": 0.2}},
    },
    "ratings under masks": {
        "algorithm": "ratings", "model": {"factors": 3},
        "privacy": {"level": "secure", "min_cohort": 3}, "fleet": {"clients_per_round": 8},
        "run": {"rounds": 4, "evaluate_every": 2},
    },
    "a sum that is too thin": {
        "algorithm": "ratings", "model": {"factors": 3},
        "privacy": {"level": "secure", "min_cohort": 4}, "run": {"rounds": 3, "evaluate_every": 3},
        "fleet": {"clients_per_round": "none", "faults": {"drop": 0.6}},
    },
    "private co_occurrence": {
        "algorithm": {"kind": "co_occurrence"}, "privacy": {"level": "private", "epsilon": 8, "min_cohort": 4},
    },
}  # fmt: skip
BASE: dict[str, Any] = {"factors": 3, "clients_per_round": 7, "rounds": 4, "evaluate_every": 2, "capacities": "1x-2x"}
EXACT = {"co_occurrence", "co_occurrence under masks", "private co_occurrence", "ratings under masks",
         "a sum that is too thin"}  # fmt: skip
"""Where sums are of whole numbers, or of one: the same bits however clients are shared out."""


QUICK = ["ratings, faults", "closed form by counts", "gradient", "asynchronous", "co_occurrence", "ratings under masks"]
"""Of each kind of sum one."""


def case_settings(case: str) -> Settings:
    if case in TABLES:
        tables = TABLES[case]
        return Settings(**tables | {"fleet": {"capacities": "1x-2x"} | tables.get("fleet", {})})
    return make_settings(**(BASE if case != "images" else {}) | CASES[case])


def data_of(settings: Settings) -> Dataset | ImageDataset:
    return pictures() if settings.model.reads_images else tiny_data(3, 17, 40, settings.predicts_ratings)


def outcome(case: str, ranks: Ranks = ONE, device: str = "auto") -> dict[str, Any]:
    """All that is left of a run."""
    settings = case_settings(case).with_changes({"run.device": device})
    checkpoints = list[Any]()

    def watch(report: Any, progress: Any) -> None:
        if report.round_number == 3:  # as a checkpoint does
            progress.gather()
            checkpoints.append({name: of.clone() for name, of in progress.local_state.items()})

    result = simulate(settings, watch, data=data_of(settings), ranks=ranks)
    return {
        "full": result.state.full, "algorithm_state": result.state.algorithm_state, "local_state": result.local_state,
        "saved": checkpoints, "rejections": dict(result.rejections), "notes": result.notes,
        "quality": [report.quality for report in result.history], "groups": result.groups,
        "moved": [(report.num_clients, report.bytes_down, report.bytes_up) for report in result.history],
        "baselines": dict(result.baselines), "differences": dict(result.differences),
    }  # fmt: skip


def start(folder: Path, processes: int, *command_line: str, cases: Iterable[str] = ()) -> list[subprocess.Popen[str]]:
    """So many processes of a program on this machine, the first one first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        variables: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
        }
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        with (folder / f"rank-{rank}.log").open("w") as log:
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            command = [sys.executable, *(command_line or ("-m", "tests.federation.ranks", str(folder), *cases))]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True))
    return started


def main() -> None:
    torch.set_default_dtype(torch.float64)  # a mistake shows to the last digits
    with ranks_here() as ranks:
        found = {case: outcome(case, ranks) for case in sys.argv[2:]}
        if ranks.first:
            torch.save(found, Path(sys.argv[1]) / "outcomes.pt")


if __name__ == "__main__":
    main()
