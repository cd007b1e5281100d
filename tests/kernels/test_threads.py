"""Calls from several threads at once: each has the numbers it would have alone, however many layouts there are."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fairfold.kernels import native, ops, reference
from fairfold.kernels.hashing import Layout, expand_seed
from fairfold.kernels.native import loader as packed

THREADS, LAYOUTS, ROWS, ROW_SIZE = 8, 1100, 4, 8
SLOW_CALLS = 8
"""Calls of the one slow thread; during each of them the others go through more layouts than are remembered."""


@pytest.fixture
def one_thread_a_call() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread_a_call")
def test_layouts_outlive_the_calls_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is put together slowly, while other threads bring ever new layouts, still reads its own."""
    if not native.status().available:
        pytest.skip(native.status().reason)
    # No two layouts are of one size, so that a call that reads another's is wrong, or refused.
    layouts = [Layout(800, 0, 8 * (16 + number), 8, expand_seed(number), True) for number in range(LAYOUTS)]
    rows = torch.arange(ROWS, dtype=torch.int64) * 20
    values = torch.ones(ROWS, ROW_SIZE)
    compact = torch.arange(layouts[-1].size, dtype=torch.float32)
    recovered, summed = [], []
    for layout in layouts:
        recovered.append(reference.recover_rows(layout, compact[: layout.size], rows, ROW_SIZE))
        summed.append(torch.zeros(layout.size))
        reference.accumulate_rows(layout, values, rows, summed[-1])
    failures: list[str] = []
    done = [0] * THREADS
    over = threading.Event()
    slow = threading.local()

    def put_together() -> int:
        """Called between the look-up of the layout and the call: the slow thread waits here for the others."""
        until = sum(done) + 2 * LAYOUTS
        while getattr(slow, "waits", False) and sum(done) < until:
            time.sleep(0.001)
        return 1

    monkeypatch.setattr(packed, "threads", put_together)

    def check(number: int) -> None:
        layout = layouts[number]
        try:
            if not torch.equal(ops.recover_rows(layout, compact[: layout.size], rows, ROW_SIZE), recovered[number]):
                failures.append(f"recover_rows of layout {number}")
            sums = torch.zeros(layout.size)
            ops.accumulate_rows(layout, values, rows, sums)
            if not torch.equal(sums, summed[number]):  # whole numbers: any order of a sum gives the same
                failures.append(f"accumulate_rows of layout {number}")
        except Exception as error:
            failures.append(f"layout {number}: {error!r}")

    def work(worker: int) -> None:
        order = torch.randperm(LAYOUTS, generator=torch.Generator().manual_seed(worker)).tolist()
        slow.waits = worker == 0
        for number in itertools.cycle(order) if worker else order[: SLOW_CALLS // 2]:
            check(number)
            done[worker] += 1
            if over.is_set():
                return
        over.set()

    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(THREADS)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    assert not failures, f"{len(failures)} of {2 * sum(done)} calls: {failures[:5]}"


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("chunk", [1, 8])
def test_more_threads_than_slots_to_share(blocks: int, chunk: int, instructions: str) -> None:
    """Threads share the slots of a sum; one that has none left adds nothing."""
    layout = Layout(1 << 18, 0, blocks * chunk, chunk, expand_seed(3), True)
    full = torch.ones(layout.full_size, dtype=torch.float64)
    sums, counts = torch.zeros(layout.size, dtype=torch.float64), torch.zeros(layout.size, dtype=torch.int32)
    expected, expected_counts = torch.zeros_like(sums), torch.zeros_like(counts)
    reference.accumulate_range(layout, full, 0, expected, expected_counts)
    rows = torch.arange(layout.full_size // 8)
    row_sums, only_counts = torch.zeros_like(sums), torch.zeros_like(counts)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        ops.accumulate_range(layout, full, 0, sums, counts)
        ops.accumulate_rows(layout, full.view(-1, 8), rows, row_sums)
        ops.count_range(layout, 0, layout.full_size, only_counts)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(sums, expected)
    assert torch.equal(row_sums, expected)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(only_counts, expected_counts)
