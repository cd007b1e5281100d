"""The default algorithm on a device: tasks are read, histories brought up to date, pairs or reports uploaded."""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fairfold.device import uploads
from fairfold.device.facts import MAX_ITEMS, id_in, invalid_message, number_in, table_in
from fairfold.device.model import (
    FACTORS,
    NEIGHBORS,
    PAIRS,
    POPULARITY,
    ROWS,
    STREAM,
    CoOccurrenceModel,
    Held,
    packed_bytes,
)
from fairfold.device.requests import PRIVATE, NeedsWorker, TaskInput, require_room
from fairfold.device.store import DeviceState, Tables
from fairfold.device.uploads import UserHistory
from fairfold.flower.protocol import ARRAYS, CODED
from fairfold.privacy.ledger import LEVELS

SUM, QUALITY, REQUEST, ITEM_SHARES = "sum", "quality", "request", "item_shares"
SYNC_STATE, DEFAULT_QUALITY = "sync_state", "default_quality"
MAX_HEAD = 2**24


@dataclass(frozen=True)
class Task:
    """A task of the default algorithm, checked."""

    model: CoOccurrenceModel | None  # read where the task needs it
    projections: dict[str, Any]
    context: dict[str, Any]
    request: list[float]
    item_shares: list[float]  # in a private run
    num_items: int
    top: int


def read_task(given: TaskInput) -> Task:
    """Read and check a task; the model where it is needed."""
    facts, records, settings = given.facts, given.records, given.settings
    require_default(facts, settings)
    projections, context = table_in(facts, "projections"), table_in(facts, "context")
    num_items = number_in(facts, "items", MAX_ITEMS, 1)
    names = {ROWS, PAIRS, POPULARITY}
    passing = {STREAM: context.pop(STREAM)} if STREAM in context else {}
    if projections.keys() not in (names, names | {NEIGHBORS}) or context.keys() not in ({SUM}, {QUALITY}):
        raise invalid_message("other tensors than the model's", ", ".join(sorted(names)))
    if passing != streamed_part(projections[ROWS], settings):
        raise invalid_message("other rows that pass by than the model's", "those of all items, in its columns")
    if not all(str(held["kind"]).startswith("quantized") for held in projections.values()):
        raise NeedsWorker("a model in floats")
    head = projections[ROWS]["shape"][0]
    if not 1 <= head <= min(num_items, MAX_HEAD, settings["algorithm"]["max_items"]):
        raise invalid_message("a model of more items than the catalogue", f"at most {num_items}")
    if any(projections[name]["items"] != head for name in (PAIRS, NEIGHBORS) if name in projections):
        raise invalid_message("a list of pairs of unknown items", f"items below {head}")
    lengths = {name: packed_bytes(held) for name, held in (projections | passing).items()}
    coded = {name: vector.tobytes() for name, vector in records[CODED].items()}
    if {name: len(content) for name, content in coded.items()} != lengths:
        raise invalid_message("tensors of other lengths than their sizes", "what was agreed")
    size = sum(lengths[name] for name in projections)
    require_room(given.capacity, size, size, num_items * settings["subspace"]["reference_factors"] * 4)
    arrays = dict(zip(sorted(records[ARRAYS]), facts["scales"], strict=True))
    private = settings["privacy"]["level"] == PRIVATE
    if arrays.keys() != ({REQUEST, ITEM_SHARES} if private else {REQUEST}):
        raise invalid_message("other vectors than the model's", f"{REQUEST}, and {ITEM_SHARES} in a private run")
    numbers, shares = (
        [float(number) * arrays[name] for number in records[ARRAYS].get(name, ())] for name in (REQUEST, ITEM_SHARES)
    )
    if len(shares) != private * head or not all(map(math.isfinite, shares)):
        raise invalid_message("a task without shares of items", "a share for each item")
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)) or numbers[3] < 0:
        raise invalid_message("a request that is no four numbers", "what FairStrategy sends")
    size = context[SUM]["kept"][0] if SUM in context else 0
    if type(size) is not int or not 0 <= size <= uploads.triangle_size(head):
        raise invalid_message("a sum of more pairs than items have", f"at most {uploads.triangle_size(head)}")
    if SUM in context:
        part_of(context[SUM])
    model = None
    if given.evaluate or QUALITY in context:
        model = CoOccurrenceModel(coded, projections | passing, float(settings["algorithm"]["pair_weight"]))
    return Task(model, projections, context, numbers, shares, num_items, int(settings["run"]["top"]))


def streamed_part(held: Held, settings: Mapping[str, Any]) -> dict[str, Held]:
    """What passes by a device that holds such rows, where settings say so (``algorithms.cooccurrence.streaming``)."""
    (rows, columns), whole = held["kept"], held["shape"][0]
    if not settings["algorithm"].get("streamed") or rows == whole or columns == FACTORS:
        return {}
    return {STREAM: {**held, "kept": [whole, columns], "bits": 8}}


def part_of(block: Mapping[str, Any]) -> tuple[int, int]:
    """The part of the pairs that is uploaded, and the number of parts."""
    found = block.get("part", [0, 1])
    known = isinstance(found, list) and len(found) == 2 and all(type(number) is int for number in found)
    if not known or not 0 <= found[0] < found[1] <= uploads.MAX_PARTS:
        raise invalid_message(f"part {found} of a sum", f"a part, and at most {uploads.MAX_PARTS} of them")
    return found[0], found[1]


def require_default(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Leave every other algorithm to the worker, and what it has to refuse."""
    algorithm = settings["algorithm"]["kind"]
    if algorithm != "co_occurrence" or "image_shape" in facts or settings["privacy"]["level"] not in LEVELS:
        raise NeedsWorker(algorithm)


class CoOccurrenceWork:
    """A task with the users' histories: what they have and had in this run."""

    remembers = True
    steps: ClassVar[Mapping[str, int]] = {SUM: uploads.UNIT, QUALITY: uploads.UNIT}

    def __init__(self, given: TaskInput) -> None:
        self.task = read_task(given)
        self.settings = given.settings
        self.tick = given.tick
        state = given.state.reconcile(id_in(given.facts, "run"), id_in(given.facts, "acknowledged_id"))
        train, held_out = given.histories(self.task.num_items, False)
        self.users = _stored_users(state)
        for name in train:
            self.users.setdefault(name, UserHistory([], []))
        for name, user in self.users.items():
            known = dict(zip(user.items, user.states, strict=True))
            current = set(train.get(name, ()))
            user.items = sorted(known.keys() | current)
            user.states = [known.get(item, uploads.NEW) for item in user.items]
            user.mark_lost(current)
            user.held_out = list(held_out.get(name, ()))
        acknowledged = state.acknowledged
        if state.history:  # as the worker stores it: rows of the acknowledged state are those of the merged history
            acknowledged = replace(acknowledged, local_state=self.local_state())
        history = _history(self.users)
        self.state = replace(state, acknowledged=acknowledged, user_names=list(self.users), history=history)

    def quality(self) -> dict[str, Any]:
        """Sum of NDCG over the users with held-out items, and their number; nothing without any."""
        task, found = self.task, []
        assert task.model is not None
        top = min(task.top, task.num_items)
        for user in self.users.values():
            if user.held_out:
                self.tick()
                found.append(task.model.ndcg(user.items, user.held_out, task.num_items, top, len(user.items)))
        return {"quality": float(sum(found)), "evaluated": len(found)} if found else {}

    def update(self, *, is_masked: bool) -> tuple[dict[str, Any], float]:
        """The sum of the users' uploads, or of their reports on a candidate."""
        return self._sums(is_masked=is_masked), float(len(self.users))

    def _sums(self, *, is_masked: bool) -> dict[str, Any]:
        task, users = self.task, list(self.users.values())
        share, candidate, reporting, most = task.request
        if QUALITY in task.context:
            assert task.model is not None
            return uploads.report(
                users,
                task.model,
                is_default=candidate == 0,
                share=reporting,
                catalogue=task.num_items,
                top=task.top,
                tick=self.tick,
            )
        head, leading = task.projections[ROWS]["shape"][0], uploads.triangle_items(task.context[SUM]["kept"][0])
        if self.settings["privacy"]["level"] == PRIVATE:
            return uploads.private_upload(users, task.item_shares, leading, share=share)
        exponent = float(self.settings["algorithm"]["history_exponent"])
        return uploads.upload(
            users,
            head=head,
            leading=leading,
            share=share,
            most=None if is_masked else int(most),
            exponent=exponent,
            part=part_of(task.context[SUM]),
        )

    def local_state(self) -> Tables:
        """Sync states of all items, and the quality of the first candidate, by user."""
        users = self.users.values()
        states = array("f", [state for user in users for state in user.states])
        qualities = array("f", [user.default_quality for user in users])
        return {DEFAULT_QUALITY: ([len(qualities), 1], qualities), SYNC_STATE: ([len(states), 1], states)}


def _stored_users(state: DeviceState) -> dict[str, UserHistory]:
    """The users of the stored history, with the acknowledged sync states and default qualities."""
    if not state.history:
        return {}
    offsets, items = (state.history[key][1].tolist() for key in ("offsets", "items"))
    local_state = state.acknowledged.local_state
    states = local_state[SYNC_STATE][1] if SYNC_STATE in local_state else []
    states = [int(number) for number in states] if len(states) == len(items) else [uploads.NEW] * len(items)
    qualities = local_state[DEFAULT_QUALITY][1].tolist() if DEFAULT_QUALITY in local_state else []
    if len(qualities) != len(state.user_names):
        qualities = [0.0] * len(state.user_names)
    users = {}
    for row, name in enumerate(state.user_names):
        where = slice(offsets[row], offsets[row + 1])
        users[name] = UserHistory(items[where], states[where], qualities[row])
    return users


def _history(users: Mapping[str, UserHistory]) -> Tables:
    offsets = array("q", [0])
    for user in users.values():
        offsets.append(offsets[-1] + len(user.items))
    items = array("q", [item for user in users.values() for item in user.items])
    return {"offsets": ([len(offsets)], offsets), "items": ([len(items)], items)}
