"""Kernel calls from eight threads at once, over more layouts than are remembered: each has the numbers it has alone.

python -m tests.kernels.fuzz_threads --count 10000000 --seed 1
"""

import argparse
import random
import sys
import threading
import time

import torch

from fairfold.kernels import native, ops, reference
from fairfold.kernels.hashing import Layout, expand_seed

THREADS, LAYOUTS, ROWS, ROW_SIZE = 8, 3000, 4, 8


def fuzz(count: int, seed: int) -> tuple[int, list[str]]:
    """Make so many calls, shared among the threads; how many were made, and which of them were wrong."""
    # No two layouts are of one size, so that a call that reads another's is wrong, or refused.
    layouts = [Layout(800, 0, 8 * (16 + number), 8, expand_seed(seed + number), True) for number in range(LAYOUTS)]
    rows = torch.arange(ROWS, dtype=torch.int64) * 20
    values, compact = torch.ones(ROWS, ROW_SIZE), torch.arange(layouts[-1].size, dtype=torch.float32)
    recovered, summed = [], []
    for layout in layouts:
        recovered.append(reference.recover_rows(layout, compact[: layout.size], rows, ROW_SIZE))
        sums = torch.zeros(layout.size)
        reference.accumulate_rows(layout, values, rows, sums)
        places = sums.nonzero().flatten()
        summed.append((places, sums[places]))
    failures: list[str] = []
    done = [0] * THREADS

    def work(worker: int) -> None:
        chance = random.Random(f"{seed} {worker}")
        sums = torch.zeros(layouts[-1].size)
        while done[worker] < count // THREADS and len(failures) < 20:
            number = chance.randrange(LAYOUTS)
            layout = layouts[number]
            done[worker] += 2
            try:
                if not torch.equal(ops.recover_rows(layout, compact[: layout.size], rows, ROW_SIZE), recovered[number]):
                    failures.append(f"recover_rows of layout {number}")
                mine = sums[: layout.size]
                ops.accumulate_rows(layout, values, rows, mine)
                places, expected = summed[number]
                if not torch.equal(mine[places], expected):
                    failures.append(f"accumulate_rows of layout {number}")
                mine[places] = 0
                if done[worker] % 1000 == 0 and bool(sums.any()):
                    failures.append(f"a call of worker {worker} wrote where it should not")
            except Exception as error:
                failures.append(f"layout {number}: {error!r}")

    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(THREADS)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return sum(done), failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not native.status().available:
        sys.exit(native.status().reason)
    torch.set_num_threads(1)
    began = time.monotonic()
    calls, wrong = fuzz(given.count, given.seed)
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    summary = f"{calls} calls by {THREADS} threads over {LAYOUTS} layouts, seed {given.seed}: {len(wrong)} failures"
    sys.stdout.write(f"{summary}, {time.monotonic() - began:.0f} s\n")
    sys.exit(len(wrong) > 0)
