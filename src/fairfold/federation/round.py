"""One round of a federation; it reads like the paper's Algorithms 1 (server) and 2 (client).

The algorithm defines what clients compute and what the server makes of it. A backend decides how updates are computed:
one client after another (the reference), in threads, in one program, on a GPU, over a network. All give the same sums.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from fairfold.federation.aggregation import make_aggregator
from fairfold.federation.algorithm import RemembersUpdates
from fairfold.federation.clients import Clients
from fairfold.federation.randomness import Rejections, apply_fault
from fairfold.federation.scheduling import ClientSampler, schedule_round
from fairfold.federation.updates import ClientUpdate, ScheduledTask, State

Scheduled = Iterable[ScheduledTask]
Separate = Mapping[int, str]
Updates = Iterator[ClientUpdate]
# Computes updates of scheduled tasks, of one client or several of a size; clients in the mapping stay single
Backend = Callable[[Clients, Scheduled, Separate], Updates]


def run_round(
    state: State, sampler: ClientSampler, clients: Clients, rejections: Rejections, backend: Backend
) -> State:
    """Run one round: sample, reduce once per size, train, validate, sum per size, recover once, step."""
    plan, ranks = sampler.plan, sampler.ranks
    schedule = schedule_round(sampler, state)  # C ← a random set of clients; ψ ← projection(S, θ), once per size
    cohort = schedule.cohort
    failing = sampler.faults(state.round_number, cohort)
    aggregator = make_aggregator(clients, sampler.size[cohort].tolist(), ranks)
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
