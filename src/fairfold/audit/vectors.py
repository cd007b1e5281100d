"""Users' vectors from one word: what is not sent can be solved for.

*Closed form.* Every row of a word is a multiple of u. Rows that the user does not have are −η·w·(v·u)u, which gives
|u|²; the others give its sign.

*Ratings.* The sums over users hold (bᵤ, u) times 1, as it is.

*Gradient, matrix factorisation.* Rows move along u: its direction, not its length.
"""

import torch
from torch import Tensor

from fairfold.algorithms.closed_form import ClosedForm, subspace_of
from fairfold.algorithms.gradient import Gradient
from fairfold.algorithms.rating_rows import USERS
from fairfold.algorithms.rating_words import units_of
from fairfold.algorithms.ratings import RatingSquares
from fairfold.audit.devices import Seen
from fairfold.protocol.plan import Plan
from fairfold.values import Weights

EXACT = (ClosedForm, RatingSquares)


def vector_error(plan: Plan, seen: Seen, secret: Weights) -> float | None:
    """How far off a user's vector is that a word gives away, relative to its length; None where there is no way.

    Of gradient steps only the direction: the sine of the angle.
    """
    algorithm, found = plan.algorithm, None
    if isinstance(algorithm, RatingSquares):
        true = secret[USERS]
        size = plan.settings.model.factors - 1
        found = _user_row(seen.answer.sums[USERS] / units_of(size), size)
        true = _user_row(true, size)
    elif isinstance(algorithm, ClosedForm | Gradient) and len(plan.architecture.tables) == 1:
        if next(iter(plan.architecture.own.values()), 0) != next(iter(plan.architecture.tables.values()))[1]:
            return None
        found, true = _direction(plan, seen), secret[next(iter(plan.architecture.own))]
        if found is not None and isinstance(algorithm, Gradient):
            cosine = torch.nn.functional.cosine_similarity(found, true.double().view(-1), dim=0)
            return float((1 - cosine.square()).clamp(min=0).sqrt())
    else:
        return None
    true = true.double().view(-1)
    length = float(true.norm())
    return None if found is None or not length else float((found - true).norm()) / length


def _user_row(sums: Tensor, size: int) -> Tensor:
    """(bᵤ, u) stands beside the user's first fact, which is 1."""
    return sums.double()[size**2 : -1].view(2 * size + 2, -1)[:size, size]


def _direction(plan: Plan, seen: Seen) -> Tensor | None:
    """The vector of the closed form; of gradient steps some multiple of it."""
    (name,), factors, sent = plan.architecture.tables, plan.settings.model.factors, seen.sent
    held, items = sent.projections[name], torch.arange(plan.public.items)
    rows = held.rows(plan.algorithm.change(sent, name, seen.answer.sums[name], seen.answer.weight), items).double()
    table = held.rows(sent.vectors[name], items).double()
    alone = held.rows(torch.ones_like(sent.vectors[name]), items).abs().amax(1) > 0  # held at all
    space = subspace_of(held) if hasattr(held, "subspace") else None
    if space is not None and space.head:
        alone &= items < space.head // factors  # what shares a slot is a mixture
    rows, table = rows[alone], table[alone]
    if len(rows) < 2 or not bool(rows.any()):
        return None
    unit: Tensor = torch.linalg.eigh(rows.T @ rows)[1][:, -1]
    algorithm = plan.algorithm
    if not isinstance(algorithm, ClosedForm):
        return unit
    along, expected = rows @ unit, table @ unit
    ratio = (along / expected)[expected.abs() > expected.abs().median() / 10].median()
    square = -float(ratio) / (algorithm.local_step * algorithm.unobserved_weight)
    if square <= 0:
        return None
    beyond = along - ratio * expected
    sign = 1.0 if float(beyond[beyond.abs() > beyond.abs().max() / 2].sum()) > 0 else -1.0
    found: Tensor = sign * square**0.5 * unit
    return found
