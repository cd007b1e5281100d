"""Large federations on one machine: seconds and peak memory of a round.

    python benchmarks/scale.py model     # 15,600,000 items × 64 factors (10^9 parameters), 16 devices at 64x
    python benchmarks/scale.py clients   # 1,000,000 clients registered, 1,000 drawn a round

Each is run in a process of its own, so that the peak is that of the round.
"""

import resource
import subprocess
import sys
import time
from typing import Any

import torch

from fairfold.backends.batched import batched
from fairfold.config import read_settings
from fairfold.data import Dataset, Interactions
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round


def random_data(users: int, items: int, each: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(items, (users, each), generator=generator)
    owners = torch.arange(users).repeat_interleave(each)
    train = Interactions.from_pairs(owners, chosen.view(-1), users, items)
    return Dataset("random", train, train)


def peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(case: str) -> None:
    if case == "model":
        data, factors = random_data(16, 15_600_000, 2_000), 64
        fleet: dict[str, Any] = {"capacities": "64x", "clients_per_round": None}
    else:
        data, factors = random_data(1_000_000, 100_000, 30), 16
        fleet = {"capacities": "1x-4x-16x", "clients_per_round": 1_000}
    chosen = read_settings({
        "model": {"kind": "mf", "factors": factors},
        "algorithm": {
            "kind": "gradient", "local_optimizer": "adam", "local_lr": 1e-3, "server_optimizer": "sgd",
            "server_lr": 1.0,
        },
        "subspace": {"mapping": "ranked", "chunk": 8},
        "fleet": fleet,
    })  # fmt: skip
    world = Federation.of(chosen, data)
    state = world.initial()
    before = peak_gigabytes()
    for number in range(3):
        started = time.perf_counter()
        state = run_round(state, world.sampler, world.clients, Rejections(), batched)
        print(
            f"  round {number + 1}: {time.perf_counter() - started:.2f} s, peak {peak_gigabytes():.2f} GB", flush=True
        )
    parameters = sum(tensor.numel() for tensor in state.full.values())
    held = world.plan.assignments(0)[-1].size() * 4 / 1e6
    size = f"{parameters:,} parameters ({parameters * 4 / 1e9:.2f} GB)"
    print(f"  {size}, {data.num_users:,} clients, smallest device {held:.1f} MB")
    print(f"  peak before the first round {before:.2f} GB, at the end {peak_gigabytes():.2f} GB")


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--measure":
        measure(sys.argv[2])
        return
    for case in sys.argv[1:] or ["model", "clients"]:
        print(case, flush=True)
        subprocess.run([sys.executable, __file__, "--measure", case], check=True)


if __name__ == "__main__":
    main()
