"""Ranks of torch.distributed, as ``torchrun`` starts them: gloo between processors, NCCL between GPUs.

A round costs one sum of the updates, per size, over all ranks, and two of a few numbers. The local state of a client
stays with the rank that owns it until it is gathered: for an evaluation or a checkpoint.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fairfold.errors import InvalidSettings, InvalidState
from fairfold.federation.aggregation import ONE, Ranks
from fairfold.federation.clients import Clients

Value = TypeVar("Value")

TIMEOUT = timedelta(days=1)  # ranks wait for each other as long as they work: torchrun notices one that dies
DRAIN_SECONDS = 0.1  # the lock is free while this process sleeps


class RankFailed(InvalidState):
    """Another rank has failed."""


class TorchRanks(Ranks):
    """The ranks of a torch.distributed process group."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._trained: set[int] = set()

    def check_device(self, device: torch.device) -> None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = torch.cuda.device_count()
        if device.type == "cuda" and local_ranks > gpus:
            given = f"{local_ranks} ranks on a machine with {gpus} GPU(s)"
            raise InvalidSettings(
                given, "a GPU for each rank", "Start fewer (--nproc-per-node), or use run.device='cpu'."
            )

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._share_failure(f"{type(error).__name__}: {error}")
            raise
        self._share_failure("")

    def _share_failure(self, problem: str) -> None:
        """Raise on all ranks if one of them has a problem."""
        failed = torch.tensor([int(bool(problem))])
        dist.all_reduce(failed)
        if not int(failed):
            return
        problems: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(problems, problem)
        if not problem:
            reasons = [f"rank {rank} of {self.num_ranks}: {text}" for rank, text in enumerate(problems) if text]
            remedy = "Correct the error of that rank, and start all ranks again."
            raise RankFailed("; ".join(reasons), "ranks that all go on", remedy)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def all_gather(self, values: list[Value]) -> list[Value]:
        count = torch.tensor([len(values)])
        dist.all_reduce(count)
        if not int(count):  # the common case costs one number
            return []
        gathered: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(gathered, values)
        return [value for rank_values in gathered for value in rank_values]

    def broadcast(self, value: Value) -> Value:
        shared = [value if self.first else None]
        dist.broadcast_object_list(shared, src=0)
        assert shared[0] is not None or value is None or not self.first
        return shared[0]  # type: ignore[return-value]

    def mark_trained(self, client_ids: list[int]) -> None:
        self._trained.update(client_ids)

    def gather_local_state(self, clients: Clients) -> None:
        trained, self._trained = sorted(self._trained), set()
        if not trained:
            return
        for name, table in sorted(clients.local_state.items()):  # sums, to which only the owner adds more than zeros
            of_clients = [_client_rows(clients, name, client) for client in trained]
            rows = torch.cat(of_clients).to(table.device)
            others = [torch.full_like(of, not self.owns(c)) for c, of in zip(trained, of_clients, strict=True)]
            values = table[rows]
            values[torch.cat(others).bool().to(table.device)] = 0
            self.all_reduce([values])
            table[rows] = values


def _client_rows(clients: Clients, name: str, client: int) -> Tensor:
    rows = clients.state_rows(name, client)
    return torch.tensor([rows]) if isinstance(rows, int) else torch.arange(len(clients.local_state[name]))[rows]


def is_launched() -> bool:
    """Whether torchrun, or what sets the same variables, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


@contextmanager
def ranks_here() -> Iterator[Ranks]:
    """The ranks that this process is one of; a single one unless torchrun has started several."""
    if not is_launched():
        yield ONE
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=TIMEOUT)
    try:
        yield TorchRanks()
    finally:
        leave()


def leave() -> None:
    """End the process group once its threads have let go of all tensors."""
    # A thread of gloo takes the interpreter's lock to free the last tensor it has worked on. If the interpreter is
    # ending by then, the process aborts; torch 2.4 frees the group under that lock, and both wait for ever.
    time.sleep(DRAIN_SECONDS)
    dist.destroy_process_group()
