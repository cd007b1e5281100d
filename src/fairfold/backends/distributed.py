"""Ranks of torch.distributed, as ``torchrun`` starts them: gloo between processors, NCCL between GPUs.

A round costs one sum of what devices have said, per size, over all ranks, and two of a few numbers. What clients keep
for themselves stays with the rank that has them until it is asked for: for an evaluation or a checkpoint.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fairfold.errors import InvalidSettings, InvalidState
from fairfold.protocol.people import People
from fairfold.protocol.ranks import ONE, Ranks

Value = TypeVar("Value")

LONGEST = timedelta(days=1)
"""A rank waits for others as long as these work: whoever dies is noticed by torchrun."""


class RankFailed(InvalidState):
    """Another rank has failed."""


class TorchRanks(Ranks):
    """The processes of a group."""

    def __init__(self) -> None:
        self.number, self.many = dist.get_rank(), dist.get_world_size()
        self._spoken: set[int] = set()

    def work_on(self, device: torch.device) -> None:
        """See the base class: NCCL wants a GPU for each rank."""
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if device.type == "cuda" and here > gpus:
            given, remedy = f"{here} ranks on a machine with {gpus} GPU(s)", "Start fewer (--nproc-per-node), or use"
            raise InvalidSettings(given, "a GPU for each rank", f"{remedy} run.device='cpu'.")

    @contextmanager
    def one_for_all(self) -> Iterator[None]:
        """See the base class."""
        try:
            yield
        except Exception as error:
            self._settle(f"{type(error).__name__}: {error}")
            raise
        self._settle("")

    def _settle(self, problem: str) -> None:
        failed = torch.tensor([int(bool(problem))])
        dist.all_reduce(failed)
        if not int(failed):
            return
        told: list[Any] = [None] * self.many
        dist.all_gather_object(told, problem)
        if not problem:
            reasons = "; ".join(f"rank {number} of {self.many}: {words}" for number, words in enumerate(told) if words)
            raise RankFailed(reasons, "ranks that all go on", "Correct what that rank says, and start all ranks again.")

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """See the base class."""
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def gathered(self, values: list[Value]) -> list[Value]:
        """See the base class; nothing but a number goes around where nobody has anything to say."""
        many = torch.tensor([len(values)])
        dist.all_reduce(many)
        if not int(many):
            return []
        told: list[Any] = [None] * self.many
        dist.all_gather_object(told, values)
        return [value for of in told for value in of]

    def tell(self, value: Value) -> Value:
        """See the base class."""
        told = [value if self.first else None]
        dist.broadcast_object_list(told, src=0)
        assert told[0] is not None or value is None or not self.first
        return told[0]  # type: ignore[return-value]

    def spoke(self, clients: list[int]) -> None:
        """See the base class."""
        self._spoken.update(clients)

    def gather_private(self, people: People) -> None:
        """See the base class: of everybody who may have learned something, zeros but from the rank that has them."""
        spoken, self._spoken = sorted(self._spoken), set()
        if not spoken:
            return
        for name, table in sorted(people.private.items()):
            places = [_places(people, name, client) for client in spoken]
            rows = torch.cat(places)
            others = torch.cat([torch.full_like(of, not self.has(c)) for c, of in zip(spoken, places, strict=True)])
            found = table[rows.to(table.device)]
            found[others.bool().to(table.device)] = 0
            self.add_up([found])
            table[rows.to(table.device)] = found


def _places(people: People, name: str, client: int) -> Tensor:
    """The rows of a private table that are a client's."""
    rows = people.rows_of(name, client)
    table = people.private[name]
    return torch.tensor([rows]) if isinstance(rows, int) else torch.arange(len(table))[rows]


def launched() -> bool:
    """Whether torchrun, or what sets the same variables, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


@contextmanager
def ranks_here() -> Iterator[Ranks]:
    """The ranks that this process is one of; one alone where nobody has started several."""
    if not launched():
        yield ONE
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=LONGEST)
    try:
        yield TorchRanks()
    finally:
        leave()


def leave() -> None:
    """End the group of processes, but never free it.

    torch 2.4 frees a group with the interpreter's lock in its hand and waits for gloo's threads, one of which may wait
    for that lock to free its last tensor. A group that nobody frees goes with the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    dist.destroy_process_group()
