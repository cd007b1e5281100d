"""What a device of FedHM computes, fast: the numbers of :func:`fairfold.federation.train.gradient`.

A product of factors is not looked up coordinate by coordinate, so the compiled program does not serve it. The active
set is exact all the same: rows of the tall factor that no sample touches do not move. Only touched rows are trained,
beside the whole small factor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fairfold.federation.projection import LowRank, Projection
from fairfold.federation.settings import Settings
from fairfold.federation.task import Weights
from fairfold.federation.train import Device, Trained, gradient
from fairfold.simulate.steps import LocalSteps


@dataclass
class _Table:
    """One item table: the touched rows of what the device holds, and the small factor where it holds a product."""

    rows: Tensor
    right: Tensor | None

    def __call__(self, numbers: Tensor) -> Tensor:
        found = functional.embedding(numbers, self.rows)
        return found if self.right is None else found @ self.right

    @property
    def trained(self) -> list[Tensor]:
        return [self.rows] if self.right is None else [self.rows, self.right]


def solve(received: Weights, device: Device, settings: Settings) -> Trained:
    """E epochs of gradient steps on the factors; see :func:`fairfold.federation.train.gradient`."""
    if settings.prox or settings.compress != "tables":
        return gradient(received, device, settings)
    task, client = device.task, device.client
    local = task.local(client, device.generator)
    items, local_items = torch.unique(local.items, return_inverse=True)
    tables = {name: _touched(device.projections[name], received[name], items) for name in task.tables}
    dense = {name: received[name].clone() for name in task.dense}
    own = {name: device.own.get(name, _mine(received, name, client, task.own[name])).clone() for name in task.own}
    parameters = [*(part for table in tables.values() for part in table.trained), *dense.values(), *own.values()]
    optimisers = [LocalSteps(parameter.view(-1), settings) for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_()
    start = 0
    for end in local.ends:
        step = slice(start, end)
        start = end
        rows = [table(local_items[step]) for table in tables.values()]
        targets = None if local.targets is None else local.targets[step].to(rows[0].dtype)
        loss = task.sample_losses(dense, list(own.values()), rows, targets).mean()
        for optimiser, slope in zip(optimisers, torch.autograd.grad(loss, parameters), strict=True):
            optimiser.step(slope.reshape(-1), slope.numel())
    compacts = {name: _put_back(device.projections[name], received[name], items, tables[name]) for name in tables}
    compacts |= {name: vector.detach() for name, vector in dense.items()}
    for name in task.user_tables:
        compacts[name] = received[name].clone()
        compacts[name].view(-1, task.own[name])[client] = own[name].detach()
    return Trained(compacts, {name: own[name].detach() for name in device.own})


def _mine(received: Weights, name: str, client: int, length: int) -> Tensor:
    """A user's vector in the table that was sent along; nothing where it stays on the device."""
    return received[name].view(-1, length)[client] if name in received else torch.empty(0)


def _touched(projection: Projection, compact: Tensor, items: Tensor) -> _Table:
    if isinstance(projection, LowRank):
        left, right = projection.factors(compact)
        return _Table(left[items], right.clone())
    return _Table(compact.view(projection.shape)[items], None)


def _put_back(projection: Projection, received: Tensor, items: Tensor, table: _Table) -> Tensor:
    compact = received.clone()
    if isinstance(projection, LowRank) and table.right is not None:
        left, right = projection.factors(compact)
        left[items] = table.rows.detach()
        right.copy_(table.right.detach())
    else:
        compact.view(projection.shape)[items] = table.rows.detach()
    return compact
