"""All users' data in one place: the yardstick for every federation, run and reported like one.

It is a federation of one client, which has everybody's interactions and holds the full model. A *round* is as many
epochs over everybody's samples as a device does in a round of a federation. A step sees as many samples as the devices
of a round see together in theirs. Unlike a device's, the optimiser goes on from round to round: its moments are what
the one client keeps.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.algorithms.gradient import Recommending
from fairfold.protocol.people import Client
from fairfold.protocol.plan import Plan
from fairfold.protocol.steps import LocalSteps
from fairfold.protocol.words import Answer, Sent, State, Totals
from fairfold.values import Weights

MOMENT = "moment/"


class Central(Recommending):
    """Gradient steps on everybody's data."""

    pooled: ClassVar[bool] = True
    values: ClassVar[bool] = True
    DEFAULTS: ClassVar = {"subspace": {"method": "fedavg"}}

    kind: Literal["central"] = "central"

    def problem_with(self, settings: Any) -> str | None:
        if settings.subspace.method != "fedavg":
            return f"data in one place is trained with the full model: leave out method={settings.subspace.method!r}"
        return None

    def answer(self, plan: Plan, sent: Sent, client: Client) -> tuple[Answer, Weights]:
        """E epochs over everybody's samples; the answer is the model."""
        work, people = client.people.work, client.people
        kept = {name: rows for name, rows in client.own.items() if not name.startswith(MOMENT)}
        values = {name: vector.clone() for name, vector in sent.vectors.items()}
        values |= {name: rows.reshape(-1).clone() for name, rows in kept.items()}
        cohort = plan.settings.fleet.clients_per_round or people.train.num_users
        batch = self.batch_size * cohort
        done = sent.round_number * self.local_epochs * math.ceil(len(people.train) / batch)
        steps = {name: LocalSteps(tensor, self, _moments_of(client.own, name), done) for name, tensor in values.items()}
        losses = vmap(work.sample_losses, in_dims=(None, 0, 0, 0 if work.has_targets else None))
        for part in work.everything(people.source(sent.round_number, 0), batch):
            read: Weights = {name: values[name].requires_grad_() for name in values}
            users = [read[name].view(-1, columns)[part.users] for name, columns in work.own.items()]
            items = [read[name].view(shape)[part.items][:, None] for name, shape in work.tables.items()]
            targets = None if part.targets is None else part.targets[:, None]
            loss: Tensor = losses({name: read[name] for name in work.dense}, users, items, targets).mean()
            gradients = torch.autograd.grad(loss, list(read.values()))
            for name, gradient in zip(read, gradients, strict=True):
                values[name] = values[name].detach()
                steps[name].step(gradient, gradient.numel())
        own = {name: values[name].detach().view(rows.shape) for name, rows in kept.items()}
        for name, optimiser in steps.items():
            own |= {f"{MOMENT}{moment}/{name}": tensor for moment, tensor in optimiser.moments.items()}
        return Answer({name: values[name].detach() for name in sent.vectors}, 1.0), own

    def apply(self, plan: Plan, state: State, totals: Totals) -> State:
        """The one client's model is the server's."""
        full = dict(state.full)
        for _, answer in totals.parts():
            full |= answer.sums
        return replace(state, full=full, round_number=state.round_number + 1)


def _moments_of(own: Weights, name: str) -> Weights:
    mine = {key.removeprefix(MOMENT): of for key, of in own.items() if key.startswith(MOMENT)}
    return {key.removesuffix(f"/{name}"): of for key, of in mine.items() if key.endswith(f"/{name}")}
