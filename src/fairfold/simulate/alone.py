"""One client's round in one native call: the numbers of ``together``, without autograd and by what a step touches."""

import torch

from fairfold.federation.task import Task
from fairfold.kernels.form import Objective, Places
from fairfold.kernels.native import train_calls
from fairfold.simulate.active import Active


def train(client: Active, task: Task) -> bool:
    """All steps of a client, its values changed in place; False where the model or the machine does not allow it."""
    settings, form = task.settings, task.form
    if form is None or client.factors or settings.objective != "bpr":
        return False
    dense = [client.places[name] for name in task.dense]
    together = Places(
        torch.cat([torch.empty(0, dtype=torch.int32), *(of.positions for of in dense)]),
        torch.cat([torch.empty(0, dtype=torch.int8), *(of.signs for of in dense)]),
    )
    return train_calls.train(
        form,
        Objective(
            task.ratings,
            0.0 if task.ratings else settings.regulariser,
            settings.local_optimiser,
            settings.local_step,
        ),
        client.values,
        client.pull,
        [client.places[name] for name in task.tables],
        [client.places[name] for name in task.own],
        together,
        client.samples,
    )
