"""The Triton kernels on a GPU: checked against the plain torch body, then timed against nn.Embedding and a plain copy.

    python benchmarks/kernels_gpu.py --out benchmarks/results/kernels_gpu.csv      # minutes on an NVIDIA H200
    python benchmarks/kernels_gpu.py --tune                                        # also try tile sizes

Needs torch, Triton and this repository; nothing is installed. Times are medians of ``triton.testing.do_bench``. What
can be captured is timed as a CUDA graph of calls with fresh ids each, on both sides, so that neither the launch from
Python nor a warm cache enters; what cannot (torch's sparse step) is timed as it is called, on both sides.
"""

import argparse
import csv
import subprocess
import sys
import types
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
try:
    import fairfold  # noqa: F401
except ImportError:  # a machine with torch and Triton only: the kernels need nothing else of the package
    bare = types.ModuleType("fairfold")
    bare.__path__ = [str(ROOT / "src" / "fairfold")]
    sys.modules["fairfold"] = bare

from triton.testing import do_bench

from fairfold.kernels.gpu import calls, launch
from fairfold.kernels.hashing import Layout, expand_seed
from tests.kernels.gpu_checks import Check, golden_checks, layout_checks

FULL = 2**28
"""Coordinates of the full vector: 1 GiB of float32, well beyond any cache."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU the checks can still be run, slowly: TRITON_INTERPRET=1 ... --no-bench."""

FIELDS = ["benchmark", "baseline", "dtype", "chunk", "compression", "row_size", "batch", "size", "seconds", "ratio"]
Row = dict[str, Any]
TILES = [
    launch.Tile(elements, warps)
    for elements in (512, 1024, 2048, 4096)
    for warps in (2, 4, 8)
    if elements >= 128 * warps
]
"""What ``--tune`` tries."""


# -- checks ------------------------------------------------------------------------------------------------------------


def check_all() -> list[str]:
    """Run and print every check; the names of those that failed."""
    key = expand_seed(int(torch.randint(2**31, (1,))))
    shapes = [  # full_size, head, tail, chunk, signed, row_size
        (1_000_003, 0, 6_000, 1, True, 1),
        (640_000, 0, 10_000, 8, True, 64),
        (640_000, 5_000, 5_000, 8, True, 32),
        (500_000, 0, 4_800, 48, True, 50),
        (480_000, 960, 4_800, 48, True, 50),
        (640_000, 0, 1_280_000, 8, True, 64),
        (500_000, 1_001, 4_999, 1, False, 20),
        (6_400_000_000, 0, 100_000, 1, True, 64),
        (640_000, 640_000, 0, 1, True, 64),
    ]
    cases = [(Layout(*shape[:4], key, shape[4]), shape[5], torch.float32) for shape in shapes]
    cases += [(cases[1][0], 64, dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)]
    failed = []
    every = [golden_checks(DEVICE), *(layout_checks(*case, 3_001, DEVICE) for case in cases)]
    for check in chain.from_iterable([*every, stops_at_bad_id()]):
        print(f"{'PASS' if check.passed else 'FAIL'}  {check.name} {check.detail}", flush=True)
        failed += [] if check.passed else [check.name]
    return failed


def stops_at_bad_id() -> list[Check]:
    """In a process of its own, because a CUDA process is of no use after a failed assertion."""
    if DEVICE == "cpu":
        return []
    done = subprocess.run([sys.executable, __file__, "--bad-id"], capture_output=True, text=True, check=False)
    stopped = done.returncode != 0 and "a row that the table does not have" in done.stderr
    return [Check("an id outside of the table stops the program", stopped, "" if stopped else done.stderr[-300:])]


def use_bad_id() -> None:
    layout = Layout(640, 0, 64, 8, expand_seed(0), True)
    calls.recover_rows(layout, torch.zeros(64, device=DEVICE), torch.tensor([10], device=DEVICE), 64)
    torch.cuda.synchronize()


# -- timing ------------------------------------------------------------------------------------------------------------


def seconds(functions: Iterable[Callable[[], object]], rep: int = 40) -> float:
    """Median device time of one call: all of them in one CUDA graph."""
    functions = list(functions)
    for function in functions[:2]:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return float(do_bench(graph.replay, warmup=10, rep=rep, return_mode="median")) / 1e3 / len(functions)


def eager_seconds(function: Callable[[], object]) -> float:
    """Median time of a call as Python makes it."""
    return float(do_bench(function, warmup=20, rep=60, return_mode="median")) / 1e3


def id_sets(table_rows: int, batch: int, row_size: int) -> list[Tensor]:
    """Enough sets of ids that their rows do not fit the cache together."""
    number = min(32, max(2, 2**28 // (batch * row_size * 4)))
    return [torch.randint(table_rows, (batch,), device=DEVICE) for _ in range(number)]


def bench_lookup(full: Tensor, quick: bool) -> Iterable[Row]:
    shapes = product((32, 64, 128), (65_536, 262_144, 1_048_576))
    for row_size, batch in [(64, 262_144)] if quick else shapes:
        sets = id_sets(FULL // row_size, batch, row_size)
        table = full.view(-1, row_size)
        base = seconds(partial(F.embedding, ids, table) for ids in sets)
        common = {"baseline": "nn.Embedding", "row_size": row_size, "batch": batch, "dtype": "float32"}
        yield {"benchmark": "nn.Embedding", **common, "seconds": base, "ratio": 1.0}
        for chunk, compression in product((1, 8, 16), (2, 16, 64)):
            layout = Layout(FULL, 0, FULL // compression, chunk, expand_seed(1), True)
            compact = full[: layout.size]
            spent = seconds(partial(calls.recover_rows, layout, compact, ids, row_size) for ids in sets)
            fields = {"chunk": chunk, "compression": compression, "size": layout.size}
            yield {"benchmark": "lookup", **common, **fields, "seconds": spent, "ratio": spent / base}
            if chunk == 1:  # the floor: the same cache lines by a stored index, without a hash or a sign
                spent = seconds(stored_lookups(layout, compact, sets, row_size))
                yield {"benchmark": "by stored index", **common, **fields, "seconds": spent, "ratio": spent / base}


def stored_lookups(layout: Layout, compact: Tensor, sets: list[Tensor], row_size: int) -> list[Callable[[], object]]:
    """Single values by slots that were computed and stored beforehand."""
    lanes = torch.arange(row_size, device=DEVICE)
    slots = (calls.slots_and_signs(layout, (ids[:, None] * row_size + lanes).view(-1))[0] for ids in sets[:4])
    return [partial(torch.index_select, compact, 0, found) for found in slots]


def accumulate(layout: Layout, full: Tensor, sums: Tensor) -> None:
    """The sums alone: most of a reduction."""
    sums.zero_()
    calls.accumulate_range(layout, full, 0, sums)


def first_reduce(layout: Layout, full: Tensor) -> None:
    """What a server does to send by a hash for the first time: count chunks, and add up by atomics."""
    calls._reduction_cache.cache_clear()
    calls.reduce(layout, full)


def atomics_seconds(layout: Layout, full: Tensor) -> float:
    """Reductions of a layout that keeps its counts, also where an order would be kept."""
    usual, calls.MAX_COUNTED_SLOTS = calls.MAX_COUNTED_SLOTS, layout.size
    calls._reduction_cache.cache_clear()
    spent = eager_seconds(partial(calls.reduce, layout, full))
    calls.MAX_COUNTED_SLOTS = usual
    return spent


def bench_ranges(full: Tensor, quick: bool) -> Iterable[Row]:
    out = torch.empty_like(full)
    base = seconds([lambda: out.copy_(full)])
    common = {"baseline": "copy", "dtype": "float32"}
    yield {"benchmark": "copy", **common, "seconds": base, "ratio": 1.0}
    for chunk, compression in product((8,) if quick else (1, 8, 16, 32), (16,) if quick else (2, 16, 64)):
        layout = Layout(FULL, 0, FULL // compression, chunk, expand_seed(1), True)
        compact = torch.randn(layout.size, device=DEVICE)
        fields = {**common, "chunk": chunk, "compression": compression, "size": layout.size}
        times = {
            "recover": seconds([partial(calls.recover_range, layout, compact, 0, out)]),
            "accumulate": seconds([partial(accumulate, layout, full, compact)]),
            # No graphs for these: while one is captured, nothing is kept. What is timed is from the third call on.
            "reduce": eager_seconds(partial(calls.reduce, layout, full)),
            "reduce, first": eager_seconds(partial(first_reduce, layout, full)),
        }
        if chunk >= 8:  # both ways whatever the rule of kernels/gpu/calls.py, so that the rule can be judged
            order = calls.make_order(layout, full.device)
            times["reduce by order"] = seconds([partial(calls.segment_means, layout, full, order)])
            times["making the order"] = eager_seconds(partial(calls.make_order, layout, full.device))
            del order
            times["reduce by atomics"] = atomics_seconds(layout, full)
        calls._reduction_cache.cache_clear()
        for name, spent in times.items():
            yield {"benchmark": name, **fields, "seconds": spent, "ratio": spent / base}


def step(layout: Layout, compact: Tensor, gradient: Tensor, ids: Tensor) -> None:
    """Look up, and step with the gradient that a loss would have given."""
    calls.recover_rows(layout, compact, ids, gradient.shape[1])
    calls.accumulate_rows(layout, gradient, ids, compact, -1e-6)


def bench_steps(batch: int = 65_536, row_size: int = 64, rows: int = 2**22) -> Iterable[Row]:
    """Whole steps of SGD on compact vectors of a 256th of the table's size up to all of it."""
    gradient = torch.randn(batch, row_size, device=DEVICE)
    sets = id_sets(rows, batch, row_size)
    common = {"dtype": "float32", "row_size": row_size, "batch": batch}
    table = torch.nn.Embedding(rows, row_size, sparse=True, device=DEVICE)
    optimizer = torch.optim.SGD(table.parameters(), lr=1e-6)

    def sparse() -> None:
        table(sets[0]).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    base = eager_seconds(sparse)
    yield {**common, "benchmark": "sparse sgd step, called", "size": table.weight.numel(), "seconds": base}
    smallest = 0.0
    for compression in (256, 64, 16, 4, 1):
        size = rows * row_size // compression
        layout = Layout(rows * row_size, 0, size, 8, expand_seed(1), True)
        compact = torch.randn(size, device=DEVICE)
        spent = seconds(partial(step, layout, compact, gradient, ids) for ids in sets)
        smallest = smallest or spent
        fields = {**common, "chunk": 8, "compression": compression, "size": size}
        ratio = {"baseline": "smallest size", "seconds": spent, "ratio": spent / smallest}
        yield {**fields, "benchmark": "sgd step", **ratio}
        called = eager_seconds(partial(step, layout, compact, gradient, sets[0]))
        fields |= {"benchmark": "sgd step, called", "baseline": "nn.Embedding sparse"}
        yield {**fields, "seconds": called, "ratio": called / base}


# -- tuning and output -------------------------------------------------------------------------------------------------


def bench_tiles(full: Tensor, batch: int = 262_144, row_size: int = 64) -> Iterable[Row]:
    """Each candidate of each kernel at c = 16; prints the best for every chunk."""
    sets = id_sets(FULL // row_size, batch, row_size)
    out, gradient = torch.empty_like(full), torch.randn(batch, row_size, device=DEVICE)
    for chunk in (1, 8, 16):
        layout = Layout(FULL, 0, FULL // 16, chunk, expand_seed(1), True)
        compact = torch.randn(layout.size, device=DEVICE)
        work: dict[str, list[Callable[[], object]]] = {
            "recover_range": [partial(calls.recover_range, layout, compact, 0, out)],
            "accumulate_range": [partial(calls.accumulate_range, layout, full, 0, compact)],
            "recover_rows": [partial(calls.recover_rows, layout, compact, ids, row_size) for ids in sets],
            "accumulate_rows": [partial(calls.accumulate_rows, layout, gradient, ids, compact) for ids in sets],
        }
        if chunk > 1:
            order = calls.make_order(layout, full.device)
            work["segment_mean"] = [partial(calls.segment_means, layout, full, order)]
        for name, functions in work.items():
            kept, times = launch.TILES[name], {}
            for tile in TILES:
                launch.TILES[name] = tile
                times[tile] = seconds(functions, rep=20)
                fields = {"benchmark": f"tile {tile.elements}/{tile.warps} {name}", "chunk": chunk}
                yield {**fields, "seconds": times[tile], "ratio": times[tile] / min(times.values())}
            launch.TILES[name] = kept
            ranked = sorted(times, key=lambda tile: times[tile])
            best = ", ".join(f"{t.elements}/{t.warps} {times[t] * 1e6:.1f} µs" for t in ranked[:3])
            print(f"  tune Z={chunk:<3}{name:<17} best {best}; now {times.get(kept, 0) * 1e6:.1f} µs", flush=True)


def show_targets(rows: list[Row]) -> None:
    def worst(name: str, test: Callable[[Row], bool]) -> str:
        chosen = [row for row in rows if row["benchmark"] == name and test(row)]
        if not chosen:
            return "not run"
        by_c: dict[Any, float] = {}
        for row in chosen:
            key = row.get("compression") or row.get("size")
            by_c[key] = max(row["ratio"], by_c.get(key, 0.0))
        return "  ".join(f"{key}: {value:.2f}" for key, value in by_c.items())

    print("\ntime / baseline, the worst of each compression (or size)")
    print(f"  lookup Z>=8   target 1.2   {worst('lookup', lambda row: row['chunk'] >= 8)}")
    print(f"  lookup Z=1    target 2.0   {worst('lookup', lambda row: row['chunk'] == 1)}")
    print(f"  by stored index            {worst('by stored index', lambda _: True)}")
    for name in ("recover", "accumulate", "reduce", "reduce, first", "reduce by order", "reduce by atomics"):
        print(f"  {name:<17} Z>=8 target 1.67  {worst(name, lambda row: row['chunk'] >= 8)}")
    print(f"  making the order  Z>=8              {worst('making the order', lambda _: True)}")
    for name in ("sgd step", "sgd step, called"):
        print(f"  {name:<22}{worst(name, lambda _: True)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the CSV goes")
    parser.add_argument("--tune", action="store_true", help="also try other tiles for kernels/gpu/launch.py")
    parser.add_argument("--quick", action="store_true", help="one shape of each")
    parser.add_argument("--no-check", action="store_true", help="timing alone")
    parser.add_argument("--no-bench", action="store_true", help="checks (and tuning) alone")
    parser.add_argument("--bad-id", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bad_id:
        use_bad_id()
        return
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "Triton's interpreter"
    hardware = {"hardware": name, "torch": torch.__version__, "triton": triton.__version__}
    print(hardware)
    torch.manual_seed(0)
    failures = [] if options.no_check else check_all()
    rows: list[Row] = []
    full = torch.randn(FULL if options.tune or not options.no_bench else 0, device=DEVICE)
    parts: list[Iterable[Row]] = [bench_tiles(full)] if options.tune else []
    if not options.no_bench:
        parts += [bench_lookup(full, options.quick), bench_ranges(full, options.quick), bench_steps()]
    for part in parts:
        for row in part:
            rows.append(row)
            if not str(row["benchmark"]).startswith("tile"):
                print("  " + "  ".join(_shown(row, field) for field in FIELDS if field in row), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*hardware, *FIELDS])
            writer.writeheader()
            writer.writerows({**hardware, **row} for row in rows)
    show_targets(rows)
    print(f"{len(failures)} checks failed" + "".join(f"\n  {name}" for name in failures))
    sys.exit(bool(failures))


def _shown(row: Row, field: str) -> str:
    value = row[field]
    if field == "seconds":
        return f"{value * 1e6:.1f} µs"
    return f"× {value:.2f}" if field == "ratio" else f"{field} {value}"


if __name__ == "__main__":
    main()
