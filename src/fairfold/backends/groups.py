"""Clients to be trained at once."""

from collections.abc import Iterable, Iterator

from fairfold.protocol.words import Visit


def at_once(cohort: list[int], most: int) -> Iterator[list[int]]:
    """Clients to train at once, nobody twice: a second time starts from what the first one learned."""
    clients: list[int] = []
    for client in cohort:
        if client in clients or len(clients) == most:
            yield clients
            clients = []
        clients.append(client)
    if clients:
        yield clients


def visits_at_once(visits: Iterable[Visit], most: int) -> Iterator[list[Visit]]:
    """The same for visits, each made when its group is."""
    some: dict[int, Visit] = {}
    for visit in visits:
        if visit.client in some or len(some) == most:
            yield list(some.values())
            some = {}
        some[visit.client] = visit
    if some:
        yield list(some.values())
