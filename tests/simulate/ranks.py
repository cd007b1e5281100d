"""One of several processes that share small federations: ``python -m tests.simulate.ranks FOLDER CASE …``, with
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
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.protocol.ranks import ONE, Ranks
from fairfold.settings import Settings
from fairfold.simulate.run import simulate
from tests.federations import tiny_data
from tests.flat import flat
from tests.pictures import SMALL, pictures

CLOCK: dict[str, Any] = {"seconds": 1.0, "spread": 0.3, "slow": 0.3, "slower": 6.0}
STEPS: dict[str, Any] = {"local_step": 0.05, "batch_size": 4, "server_optimiser": "sgd", "chunk": 1}
CASES: dict[str, dict[str, Any]] = {
    "ratings, faults": {
        "solver": "ratings", "tail_share": 0.5,
        "faults": {"drop": 0.2, "nan": 0.2, "wrong_size": 0.1, "out_of_range": 0.1},
    },
    "closed form by counts": {
        "solver": "closed_form", "server_optimiser": "sgd", "tail_share": 0.5, "support": 2, "popularity": "counts",
    },
    "ratings": {"solver": "ratings", "tail_share": 0.5},
    "ratings, streamed": {"solver": "ratings", "tail_share": 0.5, "streamed": True, "faults": {"nan": 0.2}},
    "closed form": {"solver": "closed_form", "server_optimiser": "sgd", "chunk": 1, "replacement": True},
    "closed form, another hash every round": {
        "solver": "closed_form", "server_optimiser": "sgd", "rehash": True, "mapping": "element",
    },
    "gradient": {"solver": "gradient"} | STEPS,
    "gradient, the paper's rule": {
        "solver": "gradient", "aggregation": "paper", "weighting": "data", "local_step": 0.05, "chunk": 1,
        "backend": "loop", "faults": {"drop": 0.2, "infinite": 0.2},
    },
    "neumf": {"solver": "gradient", "model": "neumf"} | STEPS,
    "a hash for each": {"solver": "gradient", "method": "inconsistent"} | STEPS,
    "fedhm": {"solver": "gradient", "method": "fedhm", "aggregation": "paper", "local_step": 0.05},
    "heterofl": {"solver": "gradient", "method": "heterofl", "local_step": 0.05, "server_optimiser": "sgd"},
    "by a clock": {
        "solver": "ratings", "tail_share": 0.5, "pace": {"answers": 3, "staleness": 2},
        "clock": CLOCK, "rounds": 8,
    },
    "images": SMALL,
}  # fmt: skip
TABLES: dict[str, dict[str, Any]] = {
    "correlations": {"algorithm": {"kind": "correlations", "support": 1}, "run": {"rounds": 10, "evaluate_every": 3}},
    "correlations under masks": {
        "algorithm": {"kind": "correlations", "support": 1}, "run": {"rounds": 9, "evaluate_every": 9},
        "privacy": {"level": "secure", "smallest_cohort": 4}, "fleet": {"faults": {"drop": 0.2}},
    },
    "ratings under masks": {
        "algorithm": "ratings", "model": {"factors": 3},
        "privacy": {"level": "secure", "smallest_cohort": 3}, "fleet": {"clients_per_round": 8},
        "run": {"rounds": 4, "evaluate_every": 2},
    },
    "a sum that is too thin": {
        "algorithm": "ratings", "model": {"factors": 3},
        "privacy": {"level": "secure", "smallest_cohort": 4}, "run": {"rounds": 3, "evaluate_every": 3},
        "fleet": {"clients_per_round": "none", "faults": {"drop": 0.6}},
    },
    "private correlations": {
        "algorithm": {"kind": "correlations"}, "privacy": {"level": "private", "epsilon": 8, "smallest_cohort": 4},
    },
}  # fmt: skip
BASE: dict[str, Any] = {"factors": 3, "clients_per_round": 7, "rounds": 4, "evaluate_every": 2, "capacities": "1x-2x"}
EXACT = {"correlations", "correlations under masks", "private correlations", "ratings under masks",
         "a sum that is too thin"}  # fmt: skip
"""Where sums are of whole numbers, or of one: the same bits however clients are shared out."""


QUICK = ["ratings, faults", "closed form by counts", "gradient", "by a clock", "correlations", "ratings under masks"]
"""Of each kind of sum one."""


def settings_of(case: str) -> Settings:
    if case in TABLES:
        tables = TABLES[case]
        return Settings(**tables | {"fleet": {"capacities": "1x-2x"} | tables.get("fleet", {})})
    return flat(**(BASE if case != "images" else {}) | CASES[case])


def data_of(settings: Settings) -> Dataset | ImageDataset:
    return pictures() if settings.model.reads_images else tiny_data(3, 17, 40, settings.predicts_ratings)


def outcome(case: str, ranks: Ranks = ONE, device: str = "auto") -> dict[str, Any]:
    """All that is left of a run."""
    settings = settings_of(case).with_changes({"run.device": device})
    checkpoints = list[Any]()

    def watch(report: Any, progress: Any) -> None:
        if report.round_number == 3:  # as a checkpoint does
            progress.gather()
            checkpoints.append({name: of.clone() for name, of in progress.private.items()})

    result = simulate(settings, watch, data=data_of(settings), ranks=ranks)
    return {
        "full": result.state.full, "moments": result.state.moments, "private": result.private,
        "saved": checkpoints, "rejections": dict(result.rejections), "told": result.told,
        "quality": [report.quality for report in result.history], "groups": result.groups,
        "moved": [(report.clients, report.bytes_down, report.bytes_up) for report in result.history],
        "references": dict(result.references), "differences": dict(result.differences),
    }  # fmt: skip


def start(folder: Path, many: int, *words: str, cases: Iterable[str] = ()) -> list[subprocess.Popen[str]]:
    """So many processes of a program on this machine, the first one first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(many):
        variables: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": many, "LOCAL_WORLD_SIZE": many}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        with (folder / f"rank-{rank}.log").open("w") as log:
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            command = [sys.executable, *(words or ("-m", "tests.simulate.ranks", str(folder), *cases))]
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
