"""The server's step, which fails safe: what clients send may spoil a round, and never ends a run.

Updates within all bounds can still add up to sums from which no model follows, such as co-occurrences that are not
positive definite. Such a round is dropped. Where the server sees single updates, bisection finds the clients without
which the step works; under masks nobody can be named.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fairfold.errors import FairfoldError
from fairfold.federation.aggregation import make_aggregate
from fairfold.federation.plan import Plan
from fairfold.federation.updates import Aggregate, ClientTask, State, Update, nonzero_values

CULPRIT = "its update leaves sums from which no model follows"
STEP_FAILED = "a round dropped: no model follows from its sums"
MAX_CULPRITS = 8  # found in one round at most, since each takes several steps to find
log = logging.getLogger("fairfold.federation")
Sender = TypeVar("Sender")
Member = TypeVar("Member")


class StepFailed(Exception):
    """No model follows from the sums of a round; the state is as it was."""


class Contribution(NamedTuple, Generic[Sender]):
    """One client's update to a task, kept apart from the sums."""

    sender: Sender
    task: ClientTask
    update: Update


def checked_server_update(plan: Plan, state: State, aggregate: Aggregate) -> State:
    """The server's next state; raises :class:`StepFailed` where there is none, or where it is not finite.

    A tensor that an algorithm changes in place cannot be restored: sums are checked before the step for that reason.
    """
    for _, update in aggregate.parts():
        if not _all_finite(update.sums.values()):
            raise StepFailed("sums that are not finite")
    try:
        after = plan.algorithm.server_update(plan, state, aggregate)
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        if isinstance(error, FairfoldError | torch.OutOfMemoryError):  # not for what clients sent
            raise
        log.debug("the server's step failed", exc_info=True)
        raise StepFailed(" ".join(str(error).split())[:200] or type(error).__name__) from error
    if not _all_finite(_new_tensors(state, after)):
        raise StepFailed("a model that is not finite")
    return after


def step_without_culprits(
    plan: Plan, state: State, contributions: Sequence[Contribution[Sender]]
) -> tuple[State, list[Sender]]:
    """The next state, and the clients that had to be left out of it; raises where they are too many."""

    def step(members: Sequence[Contribution[Sender]]) -> State:
        aggregate = make_aggregate(plan.algorithm)
        for one in members:
            aggregate.add(one.task, one.update, alone=plan.method.per_client)
        return checked_server_update(plan, state.copy(), aggregate)  # a step may change tensors in place

    def works(members: Sequence[Contribution[Sender]]) -> bool:
        try:
            step(members)
        except StepFailed:
            return False
        return True

    # What is large against others comes last, so that the first prefix that fails ends with a culprit
    ordered = sorted(contributions, key=lambda one: _squared_norm(one.update))
    culprits = find_culprits(works, ordered, MAX_CULPRITS)
    chosen = {id(one) for one in culprits}
    rest = [one for one in ordered if id(one) not in chosen]
    if not rest:
        raise StepFailed("none of the updates can be used")
    return step(rest), [one.sender for one in culprits]


def find_culprits(works: Callable[[Sequence[Member]], bool], members: Sequence[Member], most: int) -> list[Member]:
    """Members without which it works, each found by bisection: the last one of the shortest prefix that fails."""
    rest, culprits = list(members), list[Member]()
    while rest and len(culprits) < most and not works(rest):
        good, bad = 0, len(rest)
        while bad - good > 1:
            middle = (good + bad) // 2
            if works(rest[:middle]):
                good = middle
            else:
                bad = middle
        culprits.append(rest.pop(bad - 1))
    return culprits


def _squared_norm(update: Update) -> float:
    return sum(float(nonzero_values(vector).double().square().sum()) for vector in update.sums.values())


def _new_tensors(before: State, after: State) -> list[Tensor]:
    """Tensors that a step has made, by identity: one changed in place is finite where sums are."""
    known = {id(tensor) for group in (before.full, *before.algorithm_state.values()) for tensor in group.values()}
    groups = (after.full, *after.algorithm_state.values())
    return [tensor for group in groups for tensor in group.values() if id(tensor) not in known]


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    for tensor in map(nonzero_values, tensors):
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not bool(torch.isfinite(low) & torch.isfinite(high)):  # NaN is both
                return False
    return True
