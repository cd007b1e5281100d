"""One client's round in one native call: the numbers of ``stepped``, without autograd and by what a step touches."""

from fairfold.backends.gather import Active
from fairfold.kernels.form import Objective, Places
from fairfold.kernels.native import calls
from fairfold.protocol.work import Work


def train(client: Active, work: Work) -> bool:
    """All steps of a client, its values changed in place; False where the model or the machine does not allow it."""
    steps, form = work.steps, work.form
    if form is None or client.factors or work.objective != "bpr":
        return False
    objective = Objective(
        work.ratings, 0.0 if work.ratings else steps.regulariser, steps.local_optimiser, steps.local_step
    )
    tables, own, dense = ([client.places[name] for name in names] for names in (work.tables, work.own, work.dense))
    try:
        calls.train(form, objective, client.values, client.pull, tables, own, Places.joined(dense), client.samples)
    except calls.NotServed:
        return False
    return True
