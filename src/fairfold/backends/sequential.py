"""The sequential backend: clients one after the other, as the algorithm specifies. All others must give its numbers."""

from collections.abc import Iterable, Iterator, Mapping

from fairfold.federation.clients import Clients
from fairfold.federation.updates import ClientUpdate, ScheduledTask

Scheduled = Iterable[ScheduledTask]
Separate = Mapping[int, str]
Updates = Iterator[ClientUpdate]


def sequential(clients: Clients, scheduled: Scheduled, alone: Separate) -> Updates:  # noqa: ARG001
    """Compute the update of each client on its own, by the algorithm's ``client_update``."""
    plan = clients.plan
    for each in scheduled:
        client = clients.client(each.client, each.task.round_number)
        yield ClientUpdate(each.task, [each.client], *plan.algorithm.client_update(plan, each.task, client))
