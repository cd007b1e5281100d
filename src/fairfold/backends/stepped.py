"""Many clients trained in one program, under autograd: what serves where the compiled step does not.

Clients stand in order of falling numbers of steps, so that those still at work are always a prefix. A step reads
tensors that were all made before the first one, at shapes that depend on the number of clients at work alone, and asks
the device for nothing: between two changes of that number it is one fixed program.
"""

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.backends.gather import Active
from fairfold.kernels import ops
from fairfold.kernels.form import Places
from fairfold.protocol.steps import LocalSteps
from fairfold.protocol.work import Work


def train(clients: list[Active], work: Work) -> None:
    """All steps of all clients; their values change in place."""
    equal: dict[tuple[torch.Size, ...], list[Active]] = {}
    for client in clients:
        if client.samples.ends.numel():
            ranks = tuple(places.positions.shape for places in client.factors.values())
            equal.setdefault(ranks, []).append(client)
    for group in equal.values():
        _Program(group, work).train()


class _Program:
    def __init__(self, clients: list[Active], work: Work) -> None:
        self._work = work
        self._clients = sorted(clients, key=lambda client: -client.samples.ends.numel())
        self._values = torch.cat([client.values for client in self._clients])
        self._lengths = [client.samples.ends.numel() for client in self._clients]
        sizes = torch.tensor([client.values.numel() for client in self._clients])
        self._ends = sizes.cumsum(0).tolist()
        offsets = [end - int(size) for end, size in zip(self._ends, sizes, strict=True)]
        self._factors = list(self._clients[0].factors)
        shifted = [
            {name: places.shifted(offset) for name, places in client.places.items()}
            | {_factor(name): places.shifted(offset) for name, places in client.factors.items()}
            for client, offset in zip(self._clients, offsets, strict=True)
        ]
        self._tables = {name: Places.joined([of[name] for of in shifted]) for name in work.tables}
        others = (*work.dense, *work.own, *(_factor(name) for name in self._factors))
        self._others = {name: Places.joined([of[name] for of in shifted], torch.stack) for name in others}
        self._pull = None
        if work.prox:
            self._pull = torch.cat([client.pull for client in self._clients if client.pull is not None])
            self._start = torch.cat([client.start for client in self._clients])
        self._rows, self._shares, self._targets = self._padded()
        self._losses = vmap(work.sample_losses, in_dims=(0, 0, 0, 0 if work.has_targets else None))

    def _padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Every step's samples at one shape: rows [steps, clients, samples, width] and what each sample counts."""
        most, samples = max(self._lengths), [client.samples for client in self._clients]
        sizes = [torch.diff(of.ends, prepend=torch.tensor([0])) for of in samples]
        longest, width = max(int(size.max()) for size in sizes), samples[0].rows.shape[1]
        rows = torch.zeros(most, len(samples), longest, width, dtype=torch.int32)
        shares = torch.zeros(most, len(samples), longest, dtype=self._values.dtype)
        targets = torch.zeros_like(shares) if self._work.has_targets else None
        offset = 0
        for place, (of, size, client) in enumerate(zip(samples, sizes, self._clients, strict=True)):
            real = torch.arange(longest) < size[:, None]
            rows[:, place] = offset  # a row of its own, left out of the loss by its share of 0
            rows[: len(size), place][real] = of.rows + offset
            shares[: len(size), place] = torch.where(real, 1 / size[:, None], 0)
            if targets is not None and of.targets is not None:
                targets[: len(size), place][real] = of.targets
            offset += len(client.places[next(iter(self._work.tables))].positions)
        return rows, shares, targets

    def train(self) -> None:
        gradient = torch.zeros_like(self._values)  # kept: filled and emptied at every step
        optimiser = LocalSteps(self._values, self._work.steps)
        for step in range(self._lengths[0]):
            moving = sum(length > step for length in self._lengths)
            end = self._ends[moving - 1]
            self._add_gradients(step, moving, gradient)
            if self._pull is not None:
                gradient[:end] += self._pull[:end] * (self._values[:end] - self._start[:end])
            optimiser.step(gradient, end)
            gradient[:end].zero_()
        for client, end in zip(self._clients, self._ends, strict=True):
            client.values.copy_(self._values[end - client.values.numel() : end])

    def _add_gradients(self, step: int, moving: int, into: Tensor) -> None:
        """Add the gradients of the sum of the clients' losses of a step."""
        local, work = self._rows[step, :moving], self._work
        read = {name: places.at(local.reshape(-1)) for name, places in self._tables.items()}
        read |= {name: of.at(slice(moving)) for name, of in self._others.items()}
        flat = {
            name: ops.recover_positions(self._values, of.positions, of.signs).requires_grad_()
            for name, of in read.items()
        }
        losses: Tensor = self._losses(
            {name: flat[name] for name in work.dense},
            [flat[name] for name in work.own],
            [self._items(name, local.shape, flat) for name in work.tables],
            None if self._targets is None else self._targets[step, :moving],
        )
        shares = self._shares[step, :moving]
        loss = torch.where(shares > 0, losses * shares, 0).sum()
        gradients = torch.autograd.grad(loss, list(flat.values()))
        for (name, of), gradient in zip(read.items(), gradients, strict=True):
            ops.accumulate_positions(gradient.reshape(flat[name].shape), of.positions, of.signs, into)

    def _items(self, name: str, shape: torch.Size, flat: dict[str, Tensor]) -> Tensor:
        """Rows of a table for every sample, [clients, samples, width, columns]."""
        rows = flat[name].view(*shape, -1)
        return rows @ flat[_factor(name)][:, None] if name in self._factors else rows


def _factor(name: str) -> str:
    return f"second factor of {name}"
