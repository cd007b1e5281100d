"""Speed of a simulation whose clients are shared out over processes, and what adding up their sums costs.

    python benchmarks/ranks.py --ranks 1 2 --clients 100 1000 --rounds 5
    python benchmarks/ranks.py --ranks 1 2 4 8 16 --clients 1000 10000 --users 20000 --threads 1      # 16 cores
    python benchmarks/ranks.py --ranks 1 2 --device cuda --algorithm gradient               # two GPUs

Each number of processes is started anew as torchrun does, with as many threads each as the cores leave, or as are given
(`--threads 1` shows what sharing out gains by itself); the sides take turns, so that a busy machine slows down all of
them. Shown is the median time of a round after the first, on the first process, by the clock and by all processes'
processor time, and the time spent in adding up and waiting for others.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairfold import Settings
from fairfold.backends.distributed import ranks_here
from fairfold.data.synthetic import SyntheticDataset
from fairfold.federation.aggregation import Ranks
from fairfold.federation.simulation import simulate


class Timed:
    """Counts what is added up over the ranks, and how long that takes with the waiting."""

    def __init__(self, ranks: Ranks) -> None:
        self.seconds, self.bytes, true = 0.0, 0, ranks.all_reduce

        def all_reduce(tensors: Sequence[Tensor]) -> None:
            began = time.perf_counter()
            true(tensors)
            self.seconds += time.perf_counter() - began
            self.bytes += sum(tensor.nbytes for tensor in tensors)

        ranks.all_reduce = all_reduce  # type: ignore[method-assign]


def work(chosen: argparse.Namespace) -> None:
    """One rank."""
    world = SyntheticDataset(users=chosen.users, items=chosen.items, interactions_per_user=chosen.interactions)
    data, clients = world.dataset(), chosen.clients[0]
    settings = Settings(
        algorithm={"kind": chosen.algorithm},
        data={"users": chosen.users, "items": chosen.items, "interactions_per_user": chosen.interactions},
        fleet={"clients_per_round": clients, "capacities": "1x-4x-16x"},
        run={"rounds": chosen.rounds, "evaluate_every": 10_000, "device": chosen.device},
    )
    rounds, spent, began = list[dict[str, float]](), time.process_time(), time.perf_counter()
    with ranks_here() as ranks:
        timed = Timed(ranks)

        def watch(report: Any, _progress: Any) -> None:
            nonlocal spent
            now = time.process_time()
            rounds.append({"seconds": report.seconds, "cpu": now - spent, "sums": timed.seconds, "bytes": timed.bytes})
            spent, timed.seconds, timed.bytes = now, 0.0, 0

        quality = simulate(settings, watch, data=data, ranks=ranks).quality
        gathered = ranks.all_gather([rounds])
    if ranks.first:
        later = range(1, chosen.rounds)
        alone = {key: statistics.median(gathered[0][at][key] for at in later) for key in ("seconds", "sums", "bytes")}
        cpu = statistics.median(sum(of[at]["cpu"] for of in gathered) for at in later)
        print(json.dumps(alone | {"cpu": cpu, "quality": quality, "all": time.perf_counter() - began}))


def measured(chosen: argparse.Namespace, many: int, clients: int) -> dict[str, float]:
    """One number of processes, started as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = chosen.threads or max(1, (os.cpu_count() or 1) // many)
    command = [sys.executable, __file__, "--work", "--clients", str(clients)]
    for key in ("users", "items", "interactions", "rounds", "algorithm", "device"):
        command += [f"--{key}", str(getattr(chosen, key))]
    started = []
    for rank in range(many):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": many, "LOCAL_WORLD_SIZE": many}
        variables |= {"MASTER_PORT": port, "OMP_NUM_THREADS": threads}
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1"} | {key: str(of) for key, of in variables.items()}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in started]
    found: dict[str, float] = json.loads(outputs[0].strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000])
    parser.add_argument("--users", type=int, default=4_000)
    parser.add_argument("--items", type=int, default=4_000)
    parser.add_argument("--interactions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=0, help="of each process; as many as the cores leave if 0")
    parser.add_argument("--repeats", type=int, default=1, help="the best of so many is shown")
    parser.add_argument("--algorithm", default="gradient")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        work(chosen)
        return
    print(f"{chosen.algorithm}, {chosen.users:,} users, {chosen.items:,} items, {os.cpu_count()} cores, torch "
          f"{torch.__version__}, device {chosen.device}")  # fmt: skip
    print("clients  ranks   s per round   faster   processor s   adding up and waiting, s   MB added up    quality")
    for clients in chosen.clients:
        found: dict[int, list[dict[str, float]]] = {many: [] for many in chosen.ranks}
        for _ in range(chosen.repeats):
            for many in chosen.ranks:
                found[many].append(measured(chosen, many, clients))
        first = min(one["seconds"] for one in found[chosen.ranks[0]])
        for many, runs in found.items():
            best = min(runs, key=lambda one: one["seconds"])
            print(f"{clients:7}{many:7}{best['seconds']:14.3f}{first / best['seconds']:9.2f}{best['cpu']:14.3f}"
                  f"{best['sums']:27.3f}{best['bytes'] / 1e6:14.2f}{best['quality']:11.4f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
