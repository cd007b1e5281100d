"""Newton steps of item rows from additive statistics: the users' mean gradient, and one Gram matrix of users.

**The Newton step.** With users' vectors u solved exactly, the loss of an item's row v is quadratic. Its gradient is the
change that clients send. Its Hessian is w·Σ u uᵀ + (1 − w)·Σ⁺ u uᵀ, where Σ⁺ is over the users of this item and w is
the weight of the others. A d × d matrix for every item would be far more than a row, so Σ⁺ u uᵀ is taken to be c·Σ u uᵀ
with c the share of users that have the item: what is left to send is one d × d matrix. It is exact for w = 1, where one
step is the least-squares solution for all rows, and else errs towards the mean user: the more, the smaller w. Shorter
steps make up for that without another statistic, with Nesterov's momentum or without. All of it is a sum over clients,
in any subspace: the change of a slot is a mean over its items, so the step of a slot that whole rows share is the step
of that mean.

**Few clients per round.** The least squares of one round's users alone would follow their noise and forget all others.
So each round's statistics, the Gram matrix and the right sides b = change + H v, join a running mean, in round t with
a = share / (1 − (1 − share)ᵗ): an update fades as fast as clients come by, and the first round counts whole.
The right sides need not be kept. The rows solved the mean before, (H̄ + ridge) v = b̄, so the gradient of the old part
vanishes, and the new solution is v + a·(H̄′ + ridge)⁻¹ (change − ridge v): a step of length a by the running mean of
Gram matrices, which is all that the server keeps. If everybody takes part a is 1, and nothing is kept but
where the last step ended, for momentum; with fewer the step is at once what momentum would come to.
"""

import torch
from torch import Tensor

from fairfold.typing import Weights

GRAM = "user_gram"
"""Name of the sum of u uᵀ over users, which a Newton step needs."""
SEEN = "seen"
"""Name of the sum of the weights of the rounds in the running mean: 1 − (1 − share)ᵗ."""
EPSILON = 1e-9
"""Added to the Hessian, which is singular where there are fewer users than factors."""


def newton_step(
    rows: Tensor, change: Tensor, gram: Tensor, shares: Tensor, unobserved_weight: float, ridge: float
) -> Tensor:
    """The step from item rows to the minimum of the mean loss, by each item's approximate Hessian.

    Args:
        rows: Item rows [items, factors].
        change: Minus the gradient of the users' mean loss [items, factors], without the ridge.
        gram: Mean of u uᵀ over users [factors, factors].
        shares: Share of users that have each item [items].
        unobserved_weight: w, weight of an item that a user does not have, against 1.
        ridge: Ridge of an item's row, divided by the number of users.
    """
    weights = unobserved_weight + (1 - unobserved_weight) * shares
    values, vectors = torch.linalg.eigh(gram)
    hessian = weights[:, None] * values.clamp(min=0) + (ridge + EPSILON)
    step: Tensor = ((change - ridge * rows) @ vectors / hessian) @ vectors.T
    return step


def running_gram(kept: Weights, gram: Tensor, share: float) -> tuple[Weights, float]:
    """The running mean of Gram matrices after a round in which a share of clients took part, and that round's rate."""
    seen = share + (1 - share) * float(kept[SEEN] if kept else 0.0)
    rate = share / seen
    mean = torch.lerp(kept[GRAM].to(gram), gram, rate) if kept else gram
    return {GRAM: mean, SEEN: torch.tensor([seen], dtype=torch.float64)}, rate
