"""Large federations on one machine: seconds and peak memory of a round.

    python benchmarks/scale.py model     # 15,600,000 items × 64 factors (10^9 parameters), 16 devices at 64x
    python benchmarks/scale.py clients   # 1,000,000 clients registered, 1,000 drawn a round
    python benchmarks/scale.py disk      # 10^6, 10^7 and 10^8 items × 16 factors on disk, 100 devices a round:
                                         # of 1 MB, and of 1 MB beside some that hold the whole table

Each is run in a process of its own, so that the peak is that of the round. ``disk`` writes results/scale.json; files
(6.4 GB for 10^8 items) lie in a temporary folder (TMPDIR) and are removed.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fairfold.backends.batched import batched
from fairfold.config import read_settings
from fairfold.data import Dataset, Interactions
from fairfold.federation.architecture import Storage
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


ITEMS, SCHEMES, ROUNDS = (1_000_000, 10_000_000, 100_000_000), ("1MB", "1MB-1x"), 20


def resident_gigabytes() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


def measure_disk(items: int, scheme: str) -> None:
    """Print, as JSON, seconds and memory of rounds on a table that lies on disk."""
    chosen = read_settings({
        "model": {"kind": "mf", "factors": 16},
        "algorithm": {
            "kind": "gradient", "local_optimizer": "adam", "local_lr": 1e-3, "server_optimizer": "sgd",
            "server_lr": 1.0,
        },
        "subspace": {"mapping": "ranked", "chunk": 8},
        "fleet": {"capacities": scheme, "clients_per_round": 100},
        "run": {"table_storage": "disk", "device": "cpu"},
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        world = Federation.of(chosen, random_data(2_000, items, 50))
        started = time.perf_counter()
        state = world.initial(Storage(Path(folder)))
        filled = time.perf_counter() - started
        peak_filled, seconds, resident = peak_gigabytes(), [], []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            state = run_round(state, world.sampler, world.clients, Rejections(), batched)
            seconds.append(time.perf_counter() - started)
            resident.append(resident_gigabytes())
        found = {
            "items": items, "factors": 16, "scheme": scheme, "clients_per_round": 100,
            "file_gigabytes": sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e9,
            "seconds_to_fill": round(filled, 2),
            "seconds_per_round": round(statistics.median(seconds), 4), "slowest_round": round(max(seconds), 4),
            "peak_gigabytes": round(peak_gigabytes(), 3), "peak_gigabytes_filled": round(peak_filled, 3),
            "resident_gigabytes": round(max(resident), 3),
        }  # fmt: skip
        print(json.dumps(found), flush=True)


def disk() -> None:
    """Measure all sizes and schemes; keep the results."""
    rows = []
    for scheme in SCHEMES:
        for items in ITEMS:
            command = [sys.executable, __file__, "--measure", "disk", str(items), scheme]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(printed))
            row = rows[-1]
            print(
                f"  {scheme:7} {items:>11,} items: {row['seconds_per_round']:.3f} s a round (slowest"
                f" {row['slowest_round']:.3f}), resident {row['resident_gigabytes']:.2f} GB, peak"
                f" {row['peak_gigabytes']:.2f} GB, file {row['file_gigabytes']:.2f} GB filled in"
                f" {row['seconds_to_fill']:.0f} s",
                flush=True,
            )
    content = {"hardware": f"{os.cpu_count()}-core {platform_name()}", "torch": torch.__version__, "rows": rows}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


RESULTS = Path(__file__).parent / "results" / "scale.json"


def platform_name() -> str:
    """The processor's model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor")


def main() -> None:
    if len(sys.argv) >= 3 and sys.argv[1] == "--measure":
        if sys.argv[2] == "disk":
            measure_disk(int(sys.argv[3]), sys.argv[4])
        else:
            measure(sys.argv[2])
        return
    for case in sys.argv[1:] or ["model", "clients", "disk"]:
        print(case, flush=True)
        if case == "disk":
            disk()
        else:
            subprocess.run([sys.executable, __file__, "--measure", case], check=True)


if __name__ == "__main__":
    main()
