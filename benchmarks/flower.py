"""What a real federation costs: rounds a minute, bytes and peak memory, by the size of the compact vector.

    python benchmarks/flower.py                  # 10, 100 and 400 MB, full and half precision, one device over TLS
    python benchmarks/flower.py --sizes 10
    python benchmarks/flower.py --half-quality   # what half precision on the wire costs in quality: five seeds

A round is everything: reduce, encode, send, train on the device, send back, check, recover, update, write a checkpoint.
The device holds half of the model ("2x"), has one user and takes closed-form steps. A round's time is
the median of three. Peaks are of each program's own memory (VmHWM), so Linux only. The load is the machine's over the
last five minutes, this benchmark included: above the number of cores, others were at work.
"""

import argparse
import csv
import os
import re
import signal
import statistics
import tempfile
import threading
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import Context
from flwr.app.user_config import UserConfig

from fairfold.config import Settings
from fairfold.data import Dataset, Interactions
from fairfold.federation.federation import load_interactions
from fairfold.flower import FairStrategy, InProcessGrid, LocalData, make_client_app, node_partition
from fairfold.flower.fleet.local_fleet import LocalFleet
from fairfold.flower.fleet.processes import descendants
from fairfold.subspace import Capacity

RESULTS = Path(__file__).parent / "results"
ROLES = {
    "flwr-serverapp": "server app",
    "fairfold.flower.fleet.superlink": "SuperLink",
    "fairfold.flower.fleet.node_loop": "node",
    "fairfold.flower.fleet.worker": "worker",
}
FACTORS, ROUNDS = 64, 4
SIZES = ("1x", "4x", "16x", "64x")


class Peaks:
    """Watches a trial's programs and keeps the largest memory each kind has had."""

    def __init__(self, local_fleet: LocalFleet) -> None:
        self.found: dict[str, int] = {}
        self._trial, self._over = local_fleet, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peaks":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        known: set[int] = set()
        listed = 0.0
        while not self._over.wait(0.05):
            if time.monotonic() - listed > 0.5:  # listing all programs is dear, looking at known ones is not
                roots = [program.pid for program in list(self._trial.programs)]
                known, listed = set(roots) | set(descendants(roots)), time.monotonic()
            for pid in list(known):
                self._look(pid)

    def _look(self, pid: int) -> None:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            title = Path(f"/proc/{pid}/comm").read_text()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        for name, role in ROLES.items():
            if peak and (name in command or name[:15] in title):
                self.found[role] = max(self.found.get(role, 0), int(peak[1]) * 1024)


def measure(megabytes: int, half: bool) -> dict[str, object]:
    items = 2 * megabytes * 10**6 // 4 // FACTORS
    source = torch.Generator().manual_seed(0)
    mine = torch.randperm(items, generator=source)[:200]
    train = Interactions.from_pairs(torch.zeros(150, dtype=torch.long), mine[:150], 1, items)
    test = Interactions.from_pairs(torch.zeros(50, dtype=torch.long), mine[150:], 1, items)
    settings = Settings(
        model={"factors": FACTORS}, run={"rounds": ROUNDS, "evaluate_every": ROUNDS},
        algorithm={"kind": "closed_form", "server_optimizer": "sgd", "server_lr": 1.0},
        fleet={"capacities": "2x", "clients_per_round": None},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        local_fleet = LocalFleet(settings, [Capacity.parse("2x")], Path(folder), half=half, round_timeout=1800.0)
        local_fleet.prepare(Dataset("random", train, test))
        with Peaks(local_fleet) as peaks:
            local_fleet.run(
                lambda text: print(f"  {text}", flush=True), lambda done, _: print(f"  round {done}", flush=True)
            )
        (node,) = local_fleet.participants()
        log = (local_fleet.run_folder / "run.log").read_text()
    stamps = [datetime.fromisoformat(line[:19]) for line in log.splitlines() if " updates used" in line]
    seconds = statistics.median((after - before).total_seconds() for before, after in pairwise(stamps))
    # Training rounds and one evaluation were sent down, training rounds alone came up.
    down, up = node["bytes_down"] // (ROUNDS + 1), node["bytes_up"] // ROUNDS
    return {
        "compact_mb": node["bytes_held"] / 1e6,
        "precision": "half" if half else "full",
        "rounds_measured": len(stamps) - 1,
        "seconds_a_round": round(seconds, 1),
        "rounds_a_minute": round(60 / seconds, 2),
        "mb_down_a_round": down / 1e6,
        "mb_up_a_round": up / 1e6,
        "load": round(os.getloadavg()[1], 1),
    } | {f"peak_mb_{role.lower().replace(' ', '_')}": round(peaks.found.get(role, 0) / 1e6) for role in ROLES.values()}


def half_quality(seeds: int, rounds: int = 60, nodes: int = 24) -> list[dict[str, object]]:
    """NDCG@20 on the devices' held-back items after the same rounds with full and with half precision on the wire."""
    rows: list[dict[str, object]] = []
    for seed in range(seeds):
        for half in (False, True):
            settings = Settings(
                algorithm={"kind": "closed_form"}, fleet={"capacities": "-".join(SIZES), "clients_per_round": None},
                run={"seed": seed, "rounds": rounds, "evaluate_every": rounds},
            )  # fmt: skip
            data, _ = load_interactions(settings)

            def local(context: Context, _items: int, data: Dataset = data) -> LocalData:
                return node_partition(data, context)

            configs: list[UserConfig] = [
                {"partition-id": number, "num-partitions": nodes, "capacity": SIZES[number % 4]}
                for number in range(nodes)
            ]
            with tempfile.TemporaryDirectory() as folder:
                app = make_client_app(local, state=folder, repeatable=True)
                strategy = FairStrategy(settings, data.num_items, half=half)
                strategy.start(InProcessGrid(app, configs))
            last = strategy.progress.history[-1].quality
            assert last is not None
            sizes = zip((f"ndcg_{size}" for size in SIZES), last.groups, strict=True)
            task = sum(report.bytes_down + report.bytes_up for report in strategy.progress.history) / 1e6
            row: dict[str, object] = {"seed": seed, "precision": "half" if half else "full", "rounds": rounds}
            rows.append(row | {"nodes": nodes, "mb_moved": round(task, 2), "ndcg": last.server} | dict(sizes))
            print(rows[-1], flush=True)
    return rows


def write(name: str, rows: list[dict[str, object]], hardware: str) -> None:
    with (RESULTS / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "hardware"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"hardware": hardware} for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10, 100, 400], help="megabytes of the compact vector")
    parser.add_argument("--half-quality", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hardware", default="unnamed", help="what the figures are measured on")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whatever was started is stopped, however this ends
    if given.half_quality:
        rows = half_quality(given.seeds)
        write("flower_half.csv", rows, given.hardware)
        for precision in ("full", "half"):
            values = [float(str(row["ndcg"])) for row in rows if row["precision"] == precision]
            print(f"{precision}: NDCG@20 {statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}")
        return
    rows = list[dict[str, object]]()
    for megabytes in given.sizes:
        for half in (False, True):
            print(f"{megabytes} MB, {'half' if half else 'full'} precision", flush=True)
            rows.append(measure(megabytes, half))
            print(f"  {rows[-1]}", flush=True)
    write("flower.csv", rows, given.hardware)


if __name__ == "__main__":
    main()
