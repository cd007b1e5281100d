"""Before the first round: what a network can serve, the survey of the devices, and the numbers that items get by it."""

import logging
from collections.abc import Iterator

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fairfold.errors import InvalidMessage, InvalidSettings, InvalidState
from fairfold.flower.books import Books
from fairfold.flower.nodes import Node
from fairfold.flower.protocol import NUMBERING, SURVEY
from fairfold.flower.surveys import ask, tell, unpack_survey, windows
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.dry_run import try_out
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Public
from fairfold.settings import Settings
from fairfold.settings.parts import FaultSettings
from fairfold.simulate.numbering import order_by
from fairfold.values import Weights

log = logging.getLogger("fairfold.flower")


def refuse_unserved(settings: Settings) -> None:
    """Refuse settings that only make sense where one process holds everybody's data."""
    problems = []
    if settings.algorithm.pooled:
        problems.append(f"algorithm.kind={settings.algorithm.kind!r} (it asks for all data in one place)")
    if settings.algorithm.uploads_users():
        problems.append("algorithm.user_vectors='uploaded' (a user's vectors stay on the device)")
    if settings.fleet.replacement:
        problems.append("fleet.replacement (a node cannot be drawn twice)")
    if settings.fleet.faults != FaultSettings():
        problems.append("fleet.faults (real devices have their own)")
    if problems:
        raise InvalidSettings("; ".join(problems), "settings a real federation can serve", "Leave these out.")


def first_plan(settings: Settings, num_items: int, picture: tuple[int, int, int] | None) -> Plan:
    """A plan before anybody was asked anything: refuses what cannot be served."""
    if picture is not None:
        return Plan.of(settings, Public(0), picture)
    try_out(settings)
    if num_items < 1:
        raise InvalidSettings(f"num_items = {num_items}", "the size of the catalogue", "Name it.")
    return Plan.of(settings, Public(num_items))


def plan_of(settings: Settings, num_items: int, books: Books, picture: tuple[int, int, int] | None) -> Plan:
    """The plan, by what devices have summed up."""
    if picture is not None:
        return Plan.of(settings, Public(0), picture)
    return Plan.of(settings, Public(num_items, survey=books.survey or {}))


def open_books(books: Books, settings: Settings, num_items: int, nodes: list[Node], grid: Grid, timeout: float) -> None:
    """Ask everybody who is there for the sums before the first round, and number the items by them."""
    log.info("asking %d nodes for the sums before the first round", len(nodes))
    silent: set[int] = set()
    survey: Weights = {}
    for window in windows(num_items):
        asked = [node for node in nodes if node.node_id not in silent]
        heard = 0
        for node, content in _asked(grid, asked, SURVEY, ask(settings, num_items, window), timeout):
            try:
                answer = unpack_survey(content, settings, window)
            except InvalidMessage as error:
                log.warning("node %d left out of the survey: %s", node.node_id, error.given)
                silent.add(node.node_id)
                continue
            heard += 1
            for name, part in answer.sums.items():
                whole = survey.setdefault(
                    name, torch.zeros(num_items if len(part) == len(window) else len(part)).double()
                )
                (whole[window.start : window.stop] if len(whole) == num_items else whole).add_(part)
        if not heard:
            raise InvalidState("a survey that nobody answered", "devices that do", "See the devices' own logs.")
    books.survey = survey
    place = None
    if settings.subspace.counted:
        _, place = order_by(survey[COUNTS], settings)
    else:
        place = settings.algorithm.numbering(Plan.of(settings, Public(num_items, survey=survey)))
    if place is not None:
        books.number_items(place)
        books.survey = {name: _moved(of, place) for name, of in survey.items()}


def _moved(sums: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    if len(sums) != len(place):
        return sums
    found = torch.empty_like(sums)
    found[place] = sums
    return found


def tell_numbers(
    books: Books, nodes: list[Node], told: set[int], grid: Grid, settings: Settings, timeout: float
) -> list[Node]:
    """Those of some nodes who know the numbers of their items in this run, after being told."""
    if books.place is None:
        return nodes
    lacking = [node for node in nodes if node.node_id not in told]
    for window in windows(len(books.place)):
        record = tell(books.numbering, books.place, window, ratings=settings.predicts_ratings)
        done = {node.node_id for node, _ in _asked(grid, lacking, NUMBERING, record, timeout)}
        lacking = [node for node in lacking if node.node_id in done]
    told.update(node.node_id for node in lacking)
    return [node for node in nodes if node.node_id in told]


def _asked(
    grid: Grid, nodes: list[Node], kind: str, record: RecordDict, timeout: float
) -> Iterator[tuple[Node, RecordDict]]:
    """The same question to several nodes, and what they answer; who fails is logged."""
    waiting = {node.node_id: node for node in nodes}
    messages = [Message(record.copy(), dst_node_id=node, message_type=kind, ttl=2 * timeout + 60) for node in waiting]
    replies = grid.send_and_receive(messages, timeout=timeout)
    asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    for reply in replies:
        answered = getattr(grid, "sent_to", asked).get(reply.metadata.reply_to_message_id)
        node = waiting.pop(answered if answered is not None else asked.get(reply.metadata.reply_to_message_id, 0), None)
        if node is None:
            continue
        if reply.has_error():
            log.warning("node %d cannot answer %s", node.node_id, kind)
            continue
        yield node, reply.content
    for node in waiting.values():
        log.warning("node %d did not answer %s in time", node.node_id, kind)
