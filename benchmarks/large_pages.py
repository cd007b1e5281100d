"""What large pages give: reduce, recover and lookup without and with them, in turns, on one thread.

python benchmarks/large_pages.py
"""

import statistics
import time
from collections.abc import Callable

import torch

from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout, expand_seed
from fairfold.kernels.native import loader

CASES = ((2**25, 16, 16), (2**25, 4, 16), (10**8, 16, 16), (10**8, 4, 8))
ROWS, ROW_SIZE = 65_536, 64


def milliseconds(call: Callable[[], object], repeats: int = 7) -> float:
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found) * 1e3


def measure(layout: Layout, full: torch.Tensor, out: torch.Tensor) -> dict[str, float]:
    compact = torch.randn(layout.size)
    rows = layout.full_size // ROW_SIZE
    ops.recover_range(layout, compact, 0, out)  # moves the vector to large pages where they are asked for
    return {
        "reduce": milliseconds(lambda: ops.reduce(layout, full)),
        "recover": milliseconds(lambda: ops.recover_range(layout, compact, 0, out)),
        "lookup": milliseconds(lambda: ops.recover_rows(layout, compact, torch.randint(rows, (ROWS,)), ROW_SIZE), 15),
    }


def main() -> None:
    torch.set_num_threads(1)
    least = loader.MIN_HUGE_BYTES
    for n, compression, chunk in CASES:
        layout = Layout(n, 0, n // compression // chunk * chunk, chunk, expand_seed(1), True)
        full, out = torch.randn(n), torch.empty(n)
        for large in (False, True, False, True):
            loader.MIN_HUGE_BYTES = least if large else 2**62
            loader._advised.clear()
            shown = "  ".join(f"{name} {value:7.1f} ms" for name, value in measure(layout, full, out).items())
            print(f"n={n} c={compression} Z={chunk} {'large' if large else 'small'} pages: {shown}", flush=True)


if __name__ == "__main__":
    main()
