"""What the CUDA graph backends share: recording of steps, learning rates, and draws made some rounds ahead."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fairfold.federation.training import LocalSgd

Drawn = TypeVar("Drawn")

NUM_MOMENTS = {"sgd": 0, "adagrad": 1, "adam": 2}  # vectors that each optimizer stores beside the values


def lr_schedule(settings: LocalSgd, steps: int) -> Tensor:
    """The learning rate and the root of Adam's second bias correction (else 1) at every step, [steps, 2]."""
    number = torch.arange(1, steps + 1, dtype=torch.float64)
    rates = torch.tensor([settings.local_lr, 1.0], dtype=torch.float64).repeat(steps, 1)
    if settings.local_optimizer == "adam":
        rates[:, 0] /= 1 - 0.9**number
        rates[:, 1] = (1 - 0.999**number).sqrt()
    return rates


def capture(step: Callable[[], None], changed: list[Tensor], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Record a step, run a few times first as torch asks, as a CUDA graph; the tensors that it changes are restored.

    Recordings that never run at once may share the memory of a ``pool``.
    """
    originals = [tensor.clone() for tensor in changed]

    def restore() -> None:
        for tensor, original in zip(changed, originals, strict=True):
            tensor.copy_(original)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            restore()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may be pinning memory meanwhile.
    with gc_paused(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    restore()
    return graph


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection: to free a former recording while another is made breaks both."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Prefetcher(Generic[Drawn]):
    """The random draws of each round, made by threads some rounds ahead, as a GPU trains faster than a CPU draws.

    The next draws begin when this round's steps are queued, and the host has little more to do than to wait for them.
    """

    def __init__(self, draw: Callable[[int], Drawn], rounds: int, ahead: int) -> None:
        self._draw, self._rounds, self._ahead = draw, rounds, ahead
        self._threads = ThreadPoolExecutor(ahead, thread_name_prefix="fairfold-samples")
        self._pending: dict[int, Future[Drawn]] = {}

    def get(self, round_number: int) -> Drawn:
        """The random draws of a round; waits for its thread."""
        if round_number not in self._pending:
            self._pending[round_number] = self._threads.submit(self._draw, round_number)
        return self._pending[round_number].result()

    def prefetch_after(self, round_number: int) -> None:
        """Start the draws of the rounds that follow, and forget those of earlier ones."""
        wanted = {round_number, *range(round_number, min(round_number + self._ahead + 1, self._rounds))}
        self._pending = {each: self._pending.get(each) or self._threads.submit(self._draw, each) for each in wanted}
