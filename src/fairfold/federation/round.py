"""One round of a federation; it reads like the paper's Algorithms 1 (server) and 2 (client).

The algorithm defines what clients compute and what the server makes of it. A backend decides how updates are computed:
one client after another (the reference), in threads, in one program, on a GPU, over a network. All give the same sums.

Over a network the server's step fails safe: what clients send may spoil a round, and never ends a run. Updates within
all bounds can still add up to sums from which no model follows, such as co-occurrences that are not positive definite.
Such a round is dropped. Where the server sees single updates, bisection finds the clients without which the step works;
under masks nobody can be named.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fairfold.errors import FairfoldError
from fairfold.federation.aggregation import ONE, Aggregator, Ranks, make_aggregate
from fairfold.federation.algorithm import RemembersUpdates
from fairfold.federation.clients import Clients
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Rejections, apply_fault
from fairfold.federation.scheduling import ClientSampler, schedule_round
from fairfold.federation.secure_sums import GroupedAggregator, SecureAggregator
from fairfold.federation.updates import (
    Aggregate,
    ClientTask,
    ClientUpdate,
    ScheduledTask,
    State,
    Update,
    nonzero_values,
)

Scheduled = Iterable[ScheduledTask]
Separate = Mapping[int, str]
Updates = Iterator[ClientUpdate]
# Computes updates of scheduled tasks, of one client or several of a size; clients in the mapping stay single
Backend = Callable[[Clients, Scheduled, Separate], Updates]
CULPRIT = "its update leaves sums from which no model follows"
STEP_FAILED = "a round dropped: no model follows from its sums"
MAX_CULPRITS = 8  # found in one round at most, since each takes several steps to find
log = logging.getLogger("fairfold.federation")
Sender = TypeVar("Sender")
Member = TypeVar("Member")


def run_round(
    state: State, sampler: ClientSampler, clients: Clients, rejections: Rejections, backend: Backend
) -> State:
    """Run one round: sample, reduce once per size, train, validate, sum per size, recover once, step."""
    plan, ranks = sampler.plan, sampler.ranks
    schedule = schedule_round(sampler, state)  # C ← a random set of clients; ψ ← projection(S, θ), once per size
    cohort = schedule.cohort
    failing = sampler.faults(state.round_number, cohort)
    aggregator = make_aggregator(clients, sampler.size[cohort].tolist(), ranks, sampler.group[cohort].tolist())
    refused: list[tuple[int, str]] = []
    with ranks.fail_together():
        separate = aggregator.separate_clients(cohort, failing | schedule.stale)
        for computed in backend(clients, aggregator.own_tasks(schedule.scheduled), separate):  # optimize Fᵢ(Sᵢψᵢ)
            first = computed.client_ids[0]
            update = apply_fault(computed.update, failing.get(first))
            problem = schedule.stale.get(first) or plan.algorithm.validate_update(plan, computed.task, update)
            if not isinstance(plan.algorithm, RemembersUpdates):  # else it is saved when it is acknowledged
                clients.save_local_state(computed.client_ids, computed.local_state)
            if problem is not None or update is None:
                refused += [(client, problem or "no update") for client in computed.client_ids]
            else:
                aggregator.add(computed, update)
            del computed, update  # of a large catalogue a gigabyte
    ranks.mark_trained(cohort)
    aggregate = aggregator.aggregate(refused)
    for client, reason in ranks.all_gather(refused):
        rejections.note(state.round_number + 1, client, reason)
    return schedule.into(plan.algorithm.server_update(plan, state, aggregate))  # θ ← Σ pᵢ Sᵢψᵢ′


def sequential(clients: Clients, scheduled: Scheduled, alone: Separate) -> Updates:  # noqa: ARG001
    """The reference backend: the update of each client on its own, by the algorithm's ``client_update``."""
    plan = clients.plan
    for each in scheduled:
        client = clients.client(each.client, each.task.round_number)
        yield ClientUpdate(each.task, [each.client], *plan.algorithm.client_update(plan, each.task, client))


class StepFailed(Exception):
    """No model follows from the sums of a round; the state is as it was. ``culprits``: senders found all the same."""

    def __init__(self, reason: str, culprits: Sequence[Any] = ()) -> None:
        super().__init__(reason)
        self.culprits = list(culprits)


class Contribution(NamedTuple, Generic[Sender]):
    """One client's update to a task, kept apart from the sums."""

    sender: Sender
    task: ClientTask
    update: Update
    users: int = 1  # that it may be of


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
    """The next state, and the clients that had to be left out of it.

    Where they are more than can be found at a time, the round fails with those that were found.
    """

    def step(members: Sequence[Contribution[Sender]]) -> State:
        aggregate = make_aggregate(plan.settings, bounded=True)
        for one in members:
            aggregate.add(one.task, one.update, alone=plan.method.per_client, users=one.users)
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
    rest = [one for one in contributions if id(one) not in chosen]  # as they came, which decides how they are bounded
    if not rest:
        raise StepFailed("none of the updates can be used")
    senders = [one.sender for one in culprits]
    try:
        return step(rest), senders
    except StepFailed as error:
        # Where not even one update works by itself, it is not clear that their senders are at fault
        found = senders if any(works([one]) for one in rest) else []
        raise StepFailed(str(error), found) from error


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


def make_aggregator(
    clients: Clients, sizes: Sequence[int], ranks: Ranks = ONE, groups: Sequence[int] = ()
) -> Aggregator:
    """The aggregator that ``privacy.level`` asks for; ``sizes`` and ``groups`` are those of the cohort's clients."""
    if not clients.plan.settings.privacy.uses_secure_aggregation:
        return Aggregator(clients, ranks)
    if clients.plan.settings.fleet.secure_groups > 1 and groups:
        return GroupedAggregator(clients, sizes, groups, ranks)
    return SecureAggregator(clients, Counter(sizes), ranks)
