"""All users' data in one place: the yardstick for every federation, run and reported like one.

A *round* is as many epochs over everybody's samples as a device does in a round of a federation. A step sees as many
samples as the devices of a round see together in theirs. Unlike a device's, the optimiser goes on from round to round;
what it keeps is part of the server's state.
"""

import math

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.federation.aggregate import ServerState
from fairfold.federation.replies import Rejections
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.task import Weights
from fairfold.simulate.federation import Federation
from fairfold.simulate.steps import LocalSteps


def run_round(state: ServerState, private: Weights, federation: Federation, rejections: Rejections) -> ServerState:  # noqa: ARG001
    """One round; see :func:`fairfold.simulate.loop.run_round`. ``private`` holds vectors that are private no more."""
    task, settings = federation.task, federation.settings
    values = {name: tensor.clone() for name, tensor in state.full.items()}
    values |= {name: rows.view(-1) for name, rows in private.items()}
    samples = task.everything(generator(settings, Purpose.TRAINING, state.round_number))
    batch = settings.batch_size * (settings.clients_per_round or task.num_clients)
    done = state.round_number * settings.local_epochs * math.ceil(samples.epoch / batch)
    steps = {
        name: LocalSteps(tensor, settings, {moment: of[name] for moment, of in state.moments.items()}, done)
        for name, tensor in values.items()
    }
    losses = vmap(task.sample_losses, in_dims=(None, 0, 0, 0 if task.has_targets else None))
    for part in samples.parts(batch):
        read: Weights = {name: values[name].requires_grad_() for name in values}
        users = [read[name].view(-1, columns)[part.users] for name, columns in task.own.items()]
        items = [read[name].view(shape)[part.items][:, None] for name, shape in task.tables.items()]
        targets = None if part.targets is None else part.targets[:, None]
        loss: Tensor = losses({name: read[name] for name in task.dense}, users, items, targets).mean()
        gradients = torch.autograd.grad(loss, list(read.values()))
        for name, gradient in zip(read, gradients, strict=True):
            values[name] = values[name].detach()
            steps[name].step(gradient, gradient.numel())
    moments: dict[str, Weights] = {}
    for name, optimiser in steps.items():
        for moment, tensor in optimiser.moments.items():
            moments.setdefault(moment, {})[name] = tensor
    full = {name: values[name].detach() for name in state.full}
    return ServerState(full, state.round_number + 1, moments)
