"""CPU kernels against nn.Embedding and a plain copy.

Both sides of every ratio are measured in one run, call by call in turn, on fresh ids, and the medians are compared:
what else the machine does falls on both. Memory that is freed is kept for the next call, on both sides: otherwise a
result of some megabytes costs page faults in one call and none in the next, as the allocator pleases. Writes
``results/kernels_cpu.csv`` beside this file and prints which of the targets hold.

    python benchmarks/kernels_cpu.py [--only lookup,step,range,aggregate,threads] [--seconds 0.4] [--out FILE]
    python benchmarks/kernels_cpu.py --only threads --threads 2,4,8,16 --hardware "16-core ..." --out FILE
"""

import argparse
import contextlib
import csv
import ctypes
import datetime
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairfold.kernels import native, ops
from fairfold.kernels.hashing import Layout, expand_seed
from fairfold.nn import FairEmbedding
from fairfold.nn.lookup import FusedSGD
from fairfold.subspace import Subspace, Sums

HARDWARE = "2-core Zen 4 (AMD EPYC)"
LAST_CACHE = 32 * 2**20
ITEMS = 1_000_000
Call = Callable[[], object]


@dataclass
class Row:
    """One comparison: a ratio below 1 means that we are faster than what we compare with."""

    question: str
    against: str
    n: int
    d: int
    chunk: int
    compression: int
    batch: int
    threads: int
    ours_us: float
    other_us: float
    ratio: float
    target: str = ""
    holds: str = ""
    stored_us: float | None = None  # lookups: the same pieces by a stored index, without a hash or a sign


def measure(calls: list[Call], seconds: float, least: int = 7) -> list[float]:
    """Median microseconds of each, called in turn for about ``seconds`` altogether."""
    times: list[list[float]] = [[] for _ in calls]
    stop = time.perf_counter() + seconds
    for call in calls:
        call()
    while time.perf_counter() < stop or len(times[0]) < least:
        for call, own in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            own.append(time.perf_counter() - begin)
    return [statistics.median(own) * 1e6 for own in times]


def keep_freed_memory() -> None:
    """Ask glibc not to give memory back to the system between calls; elsewhere this does nothing."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


def layout_of(n: int, chunk: int, compression: int) -> Layout:
    return Layout(n, 0, n // compression // chunk * chunk, chunk, expand_seed(1), True)


def fresh_ids(batch: int) -> Callable[[], Tensor]:
    """Batches that were not seen just before, drawn in advance so that drawing is not timed."""
    pool = [torch.randint(0, ITEMS, (batch,)) for _ in range(max(2, min(64, 2**21 // batch)))]
    state = {"next": 0}

    def draw() -> Tensor:
        state["next"] = (state["next"] + 1) % len(pool)
        return pool[state["next"]]

    return draw


def against_target(row: Row, limit: float | None, text: str) -> Row:
    if limit is not None:
        row.target, row.holds = text, "yes" if row.ratio <= limit else "no"
    return row


def lookup_limit(chunk: int, compression: int, d: int, size: int) -> float | None:
    """Target 1 of the kernels' design."""
    if chunk == 8:
        return 0.7 if compression >= 16 and d <= 32 else 1.2
    if chunk == 16:
        return 0.75
    return 2.5 if size * 4 <= LAST_CACHE else None


def bench_lookup(seconds: float) -> Iterator[Row]:
    torch.set_num_threads(1)
    for d in (8, 32, 64):
        table = nn.Embedding(ITEMS, d)
        for chunk in (1, 8, 16):
            for compression in (2, 16, 64):
                layout = layout_of(ITEMS * d, chunk, compression)
                compact = torch.randn(layout.size)
                for batch in (512, 8192, 65536, 1_000_000):
                    mine, theirs = fresh_ids(batch), fresh_ids(batch)
                    least = 7 if batch < 1_000_000 else 3
                    ours, other = measure(
                        [
                            lambda: ops.recover_rows(layout, compact, mine(), d),  # noqa: B023
                            lambda: table(theirs()),  # noqa: B023
                        ],
                        seconds,
                        least,
                    )
                    # Apart: what it stores would push the others' numbers out of the caches.
                    (stored,) = measure([by_stored_index(layout, compact, batch, d)], seconds / 4, least)
                    row = Row(
                        *("lookup", "nn.Embedding", ITEMS, d, chunk, compression, batch, 1),
                        *(ours, other, ours / other),
                        stored_us=stored,
                    )
                    limit = lookup_limit(chunk, compression, d, layout.size)
                    yield against_target(row, limit, f"<= {limit}")


def by_stored_index(layout: Layout, compact: Tensor, batch: int, d: int) -> Call:
    """What no hash can beat by much: the pieces of fresh rows, their numbers computed and stored beforehand."""
    unit = min(layout.chunk, d)
    pool = []
    for _ in range(max(2, min(8, 2**19 // batch))):
        first = torch.randint(0, ITEMS, (batch, 1)) * d + torch.arange(0, d, unit)
        pool.append(ops.slots_and_signs(layout, first.view(-1))[0] // unit)
    state, pieces = {"next": 0}, compact.view(-1, unit)

    def look_up() -> Tensor:
        state["next"] = (state["next"] + 1) % len(pool)
        return pieces.index_select(0, pool[state["next"]])

    return look_up


class FusedLookup(torch.autograd.Function):
    """A lookup whose backward is the whole step, as a module would run it."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, step: "FusedStep", rows: Tensor) -> Tensor:
        """Look the rows up; the anchor is what makes autograd call us back."""
        ctx.step, ctx.rows = step, rows
        return ops.recover_rows(step.layout, step.compact, rows, step.d)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        """Take the step instead of handing a gradient on."""
        ctx.step.update(gradients[0], ctx.rows)
        return None, None, None


@dataclass
class FusedStep:
    """A compact table that is trained in place."""

    layout: Layout
    compact: Tensor
    d: int

    def __post_init__(self) -> None:
        self.fused = FusedSGD(0.01)
        self.anchor = torch.zeros((), requires_grad=True)

    def update(self, values: Tensor, rows: Tensor) -> None:
        """One step of the optimiser, given the gradient of the rows."""
        with torch.no_grad():
            self.fused.apply(self.layout, self.compact, rows, values)


def fused_step(step: FusedStep, draw: Callable[[], Tensor], gradient: Tensor) -> Call:
    return lambda: FusedLookup.apply(step.anchor, step, draw()).backward(gradient)  # type: ignore[no-untyped-call]


def module_step(compression: int, chunk: int, d: int, draw: Callable[[], Tensor], gradient: Tensor) -> Call:
    """The same step as a user writes it."""
    layer = FairEmbedding(ITEMS, d, capacity=1 / compression, mapping="chunk", chunk=chunk)
    layer.update_in_backward(FusedSGD(0.01))
    return lambda: layer(draw()).backward(gradient)


def bare_step(step: FusedStep, draw: Callable[[], Tensor], gradient: Tensor) -> Call:
    """The two operations alone."""

    def run() -> None:
        rows = draw()
        ops.recover_rows(step.layout, step.compact, rows, step.d)
        step.update(gradient, rows)

    return run


def torch_step(table: nn.Embedding, draw: Callable[[], Tensor], gradient: Tensor) -> Call:
    optimizer = torch.optim.SGD(table.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        table(draw()).backward(gradient)
        optimizer.step()

    return step


def bench_step(seconds: float) -> Iterator[Row]:
    torch.set_num_threads(1)
    d = 32
    sparse, dense = nn.Embedding(ITEMS, d, sparse=True), nn.Embedding(ITEMS, d)
    for batch in (512, 8192):
        gradient = torch.randn(batch, d)
        for chunk, compression in ((1, 16), (8, 4), (8, 16), (8, 64), (16, 16)):
            layout = layout_of(ITEMS * d, chunk, compression)
            step = FusedStep(layout, torch.randn(layout.size), d)
            call, bare = fused_step(step, fresh_ids(batch), gradient), bare_step(step, fresh_ids(batch), gradient)
            others: list[Call] = [torch_step(sparse, fresh_ids(batch), gradient)]
            if chunk >= 8:
                others.append(module_step(compression, chunk, d, fresh_ids(batch), gradient))
            ours, alone, other, *module = measure([call, bare, *others], seconds)
            shape = (ITEMS, d, chunk, compression, batch, 1)
            row = Row("step SGD", "nn.Embedding sparse", *shape, ours, other, ours / other)
            yield against_target(row, 0.5 if chunk >= 8 else None, "<= 0.5")
            yield Row("step SGD, no autograd", "nn.Embedding sparse", *shape, alone, other, alone / other)
            for taken in module:
                yield Row("step SGD, FairEmbedding", "nn.Embedding sparse", *shape, taken, other, taken / other)
    # Last and alone: a dense step passes over the whole table and would empty the caches of the others.
    gradient, layout = torch.randn(512, d), layout_of(ITEMS * d, 8, 16)
    call = fused_step(FusedStep(layout, torch.randn(layout.size), d), fresh_ids(512), gradient)
    ours, other = measure([call, torch_step(dense, fresh_ids(512), gradient)], seconds * 4)
    yield Row("step SGD", "nn.Embedding dense", ITEMS * d, d, 8, 16, 512, 1, ours, other, ours / other)
    yield from bench_step_by_size(seconds, gradient)


def bench_step_by_size(seconds: float, gradient: Tensor) -> Iterator[Row]:
    """The same step on ever larger compact vectors, each against the smallest."""
    d = gradient.shape[1]
    layouts = [layout_of(ITEMS * d, 8, compression) for compression in (128, 32, 8, 2)]
    steps = [FusedStep(layout, torch.randn(layout.size), d) for layout in layouts]
    times = measure([bare_step(step, fresh_ids(len(gradient)), gradient) for step in steps], seconds * 2)
    for layout, taken in zip(layouts, times, strict=True):
        compression = layout.full_size // layout.size
        shape = (layout.full_size, d, 8, compression, len(gradient), 1)
        yield Row(
            "step SGD, no autograd", f"the same at m={layouts[0].size}", *shape, taken, times[0], taken / times[0]
        )


def bench_range(seconds: float) -> Iterator[Row]:
    torch.set_num_threads(1)
    for n in (2**25, 10**8):
        full, out = torch.randn(n), torch.zeros(n)
        for chunk in (1, 8, 16):
            for compression in (2, 16, 64):
                layout = layout_of(n, chunk, compression)
                compact = torch.randn(layout.size)
                reduced, recovered, copied = measure(
                    [
                        lambda: ops.reduce(layout, full),  # noqa: B023
                        lambda: ops.recover_range(layout, compact, 0, out),  # noqa: B023
                        lambda: out.copy_(full),  # noqa: B023
                    ],
                    seconds,
                    least=3,
                )
                for question, ours, share in (
                    ("reduce", reduced, 0.60 if n == 2**25 else 0.45),
                    ("recover", recovered, 0.90 if n == 2**25 else 0.65),
                ):
                    row = Row(question, "copy", n, 1, chunk, compression, 0, 1, ours, copied, ours / copied)
                    limit = 1 / share if chunk == 16 and compression >= 16 else None
                    yield against_target(row, limit, f">= {share:.0%} of copy speed")


def bench_aggregate(seconds: float) -> Iterator[Row]:
    torch.set_num_threads(1)
    n, chunk = 2**25, 16
    spaces = [Subspace(n, n // compression, mapping="chunk", chunk=chunk) for compression in (4, 8, 16, 32, 64, 128)]
    layouts = [space.layout for space in spaces]
    devices = [layouts[i % len(layouts)] for i in range(100)]
    distinct = {layout: [torch.randn(layout.size) for _ in range(3)] for layout in layouts}
    vectors = [distinct[layout][i % 3] for i, layout in enumerate(devices)]
    weights = [0.01] * len(devices)
    out, total = torch.empty(n), torch.zeros(n)

    def ours() -> None:
        sums = Sums()
        for number, (vector, weight) in enumerate(zip(vectors, weights, strict=True)):
            sums.add(spaces[number % len(spaces)], vector, weight)
        sums.recover()

    def each_expanded() -> None:
        for layout in layouts:  # one device of each size; scaled below
            ops.recover_range(layout, distinct[layout][0], 0, out)
            total.add_(out, alpha=0.01)

    mine, six = measure([ours, each_expanded], max(seconds, 4), least=3)
    other = six * len(devices) / len(layouts)
    yield Row(
        "aggregate 100 devices", "each expanded (6 measured, scaled)", n, 1, chunk, 4, 100, 1, mine, other, mine / other
    )


def measure_threads(call: Call, counts: list[int], seconds: float) -> list[float]:
    """Median microseconds on each number of threads.

    In turns of four calls: a change of the number of threads makes OpenMP build its team anew, which is not the
    question here.
    """
    times: dict[int, list[float]] = {threads: [] for threads in counts}
    stop = time.perf_counter() + seconds * len(counts)
    while time.perf_counter() < stop or len(times[counts[0]]) < 8:
        for threads, own in times.items():
            torch.set_num_threads(threads)
            call()
            for _ in range(4):
                begin = time.perf_counter()
                call()
                own.append(time.perf_counter() - begin)
    torch.set_num_threads(1)
    return [statistics.median(own) * 1e6 for own in times.values()]


def bench_threads(seconds: float, counts: tuple[int, ...] = (2,)) -> Iterator[Row]:
    n, d = ITEMS * 32, 32
    out, full = torch.empty(n), torch.randn(n)
    draw, gradient = fresh_ids(65536), torch.randn(65536, d)
    for chunk, compression in itertools.product((1, 8, 16), (2, 16)):
        layout = layout_of(n, chunk, compression)
        compact = torch.randn(layout.size)
        cases: dict[str, Call] = {
            "lookup": lambda: ops.recover_rows(layout, compact, draw(), d),  # noqa: B023
            "recover": lambda: ops.recover_range(layout, compact, 0, out),  # noqa: B023
            "reduce": lambda: ops.reduce(layout, full),  # noqa: B023
            "step": lambda: ops.sgd_rows(layout, compact, gradient, draw(), 1e-6),  # noqa: B023
        }
        for question, call in cases.items():
            one, *several = measure_threads(call, [1, *counts], seconds)
            for threads, taken in zip(counts, several, strict=True):
                shape = (n, d, chunk, compression, 65536, threads)
                row = Row(f"{question}, {threads} threads", "1 thread", *shape, taken, one, taken / one)
                has_target = question in ("lookup", "recover") and threads == 2 and compression == 16
                yield against_target(row, 1 / 1.7 if has_target else None, ">= 1.7 x")


QUESTIONS: dict[str, Callable[[float], Iterator[Row]]] = {
    "lookup": bench_lookup,
    "step": bench_step,
    "range": bench_range,
    "aggregate": bench_aggregate,
    "threads": bench_threads,
}


def write(path: Path, rows: list[Row], hardware: str) -> None:
    about = {
        "hardware": hardware,
        "torch": torch.__version__,
        "instructions": native.status().instructions,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)] + list(about), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            line = asdict(row)
            for name in ("ours_us", "other_us", "stored_us"):
                line[name] = "" if line[name] is None else f"{line[name]:.1f}"
            writer.writerow({**line, "ratio": f"{row.ratio:.3f}", **about})


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU kernels against nn.Embedding and a plain copy.")
    parser.add_argument("--only", default=",".join(QUESTIONS), help="questions, joined by commas")
    parser.add_argument("--seconds", type=float, default=0.4, help="time for each comparison")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels_cpu.csv")
    parser.add_argument("--threads", default="2", help="numbers of threads to compare with one, joined by commas")
    parser.add_argument("--hardware", default=HARDWARE, help="what the results were measured on")
    arguments = parser.parse_args()
    counts = tuple(int(count) for count in arguments.threads.split(","))
    questions: dict[str, Callable[[float], Iterator[Row]]] = {
        **QUESTIONS,
        "threads": functools.partial(bench_threads, counts=counts),
    }
    status = native.status()
    if not status.available:
        raise SystemExit(f"The compiled kernels do not serve: {status.reason}")
    keep_freed_memory()
    rows = []
    with torch.no_grad():
        for name in arguments.only.split(","):
            grad = torch.enable_grad() if name == "step" else torch.no_grad()
            with grad:
                for row in questions[name](arguments.seconds):
                    rows.append(row)
                    shape = f"d={row.d:<3} Z={row.chunk:<3} c={row.compression:<4} B={row.batch:<6}"
                    target = f"{row.target}: {row.holds}" if row.target else ""
                    target += f"  (by stored index {row.stored_us:.0f} us)" if row.stored_us is not None else ""
                    print(
                        f"{row.question:22} n={row.n:<10} {shape} {row.ours_us:10.0f} us /{row.other_us:10.0f} us "
                        f"= {row.ratio:5.2f}  ({row.against}) {target}",
                        flush=True,
                    )
    write(arguments.out, rows, arguments.hardware)
    target_rows = [row for row in rows if row.target]
    held = sum(row.holds == "yes" for row in target_rows)
    print(f"{held} of {len(target_rows)} comparisons with a target hold it; written to {arguments.out.name}")


if __name__ == "__main__":
    main()
