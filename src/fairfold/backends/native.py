"""One client's round in one native call: the numbers of ``stepped``, without autograd and by what a step touches."""

import torch

from fairfold.backends.gather import Active
from fairfold.kernels.form import Objective, Places
from fairfold.kernels.native import train_calls
from fairfold.protocol.work import Work


def train(client: Active, work: Work) -> bool:
    """All steps of a client, its values changed in place; False where the model or the machine does not allow it."""
    steps, form = work.steps, work.form
    if form is None or client.factors or work.objective != "bpr":
        return False
    dense = [client.places[name] for name in work.dense]
    joined = Places(
        torch.cat([torch.empty(0, dtype=torch.int32), *(of.positions for of in dense)]),
        torch.cat([torch.empty(0, dtype=torch.int8), *(of.signs for of in dense)]),
    )
    return train_calls.train(
        form,
        Objective(
            work.ratings,
            0.0 if work.ratings else steps.regulariser,
            steps.local_optimiser,
            steps.local_step,
        ),
        client.values,
        client.pull,
        [client.places[name] for name in work.tables],
        [client.places[name] for name in work.own],
        joined,
        client.samples,
    )
