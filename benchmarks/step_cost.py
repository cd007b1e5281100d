"""Does a training step cost the same whatever the size of the compact vector? Both sides in one run, over m.

python benchmarks/step_cost.py [--out results.csv]

A table of m = 1 million to 64 million slots is trained on batches of 512 fresh ids of a round's 4,096: with torch's
optimisers on the whole vector, dense and sparse, and with what fairfold offers in place of them. Times are medians of
interleaved repetitions; the growth of a process's peak memory is measured by ``fairfold plan --measure``.
"""

import argparse
import csv
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from fairfold.nn import FairEmbedding
from fairfold.nn.lookup import FusedSGD

COMPRESSION = 16
DIM = 32
BATCH = 512
ROUND_ROWS = 4096
Step = Callable[[torch.Tensor], None]


def table(size: int, chunk: int, sparse: bool = False) -> FairEmbedding:
    return FairEmbedding(size * COMPRESSION // DIM, DIM, size=size, chunk=chunk, sparse=sparse)


def stepper(layer: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer | None) -> Step:
    def step(ids: torch.Tensor) -> None:
        loss = layer(ids).square().mean()
        torch.autograd.backward(loss)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def ways(size: int, chunk: int, round_ids: torch.Tensor) -> dict[tuple[str, str], Step]:
    """(optimiser, way) to a step."""
    found: dict[tuple[str, str], Step] = {}
    for name, dense, takes_sparse in (
        ("sgd", torch.optim.SGD, torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad, torch.optim.Adagrad),
        ("adam", torch.optim.Adam, torch.optim.SparseAdam),
    ):
        whole = table(size, chunk)
        found[name, "dense torch"] = stepper(whole, dense(whole.parameters(), lr=0.01))
        sparse = table(size, chunk, sparse=True)
        found[name, "sparse torch"] = stepper(sparse, takes_sparse(sparse.parameters(), lr=0.01))
        active = table(size, chunk).activate(round_ids)
        found[name, "active set"] = stepper(active, dense(active.parameters(), lr=0.01))
    fused = table(size, chunk)
    fused.update_in_backward(FusedSGD(0.01))
    found["sgd", "in the backward"] = stepper(fused, None)
    return found


def measure(size: int, chunk: int, repetitions: int) -> dict[tuple[str, str], float]:
    """Median milliseconds a step, interleaved so that a busy moment of the machine strikes all alike."""
    rows = size * COMPRESSION // DIM
    round_ids = torch.randint(0, rows, (ROUND_ROWS,))
    steps = ways(size, chunk, round_ids)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for repetition in range(repetitions + 2):
        ids = round_ids[torch.randint(0, ROUND_ROWS, (BATCH,))]
        for key, step in steps.items():
            start = time.perf_counter()
            step(ids)
            if repetition >= 2:
                times[key].append(1000 * (time.perf_counter() - start))
    return {key: median(found) for key, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,4,16,64", help="millions of slots")
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, help="CSV file for the results")
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = []
    for millions in options.sizes.split(","):
        size = int(float(millions) * 2**20)
        for (optimizer, way), milliseconds in measure(size, options.chunk, options.repetitions).items():
            print(f"m = {size:>11,}  {optimizer:<8} {way:<16} {milliseconds:9.3f} ms a step", flush=True)
            lines.append([size, options.chunk, optimizer, way, f"{milliseconds:.4f}"])
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            hardware = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
            writer.writerow([f"# {hardware}, torch {torch.__version__}, Python {sys.version.split()[0]}"])
            writer.writerow(["size", "chunk", "optimizer", "way", "milliseconds"])
            writer.writerows(lines)


if __name__ == "__main__":
    main()
