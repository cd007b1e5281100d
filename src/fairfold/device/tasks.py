"""Replies of a small device to the messages of the default algorithm: ``flower.client_tasks`` without torch."""

import logging
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairfold.checksums import PARSE_ERRORS
from fairfold.device import uploads
from fairfold.device.facts import MAX_ITEMS, UNITS, amount_of, id_in, invalid_message, number_in, table_in, window_in
from fairfold.device.model import NEIGHBORS, PAIRS, POPULARITY, ROWS, CoOccurrenceModel, packed_bytes
from fairfold.device.records import Records
from fairfold.device.store import DeviceState, DeviceStore, RememberedUpdate, load_device_id
from fairfold.device.stored_model import store_model
from fairfold.device.uploads import UserHistory
from fairfold.errors import InvalidCapacity, InvalidMessage, InvalidState
from fairfold.flower.local_data import LocalFile
from fairfold.flower.protocol import (
    ARRAYS,
    CAPACITY,
    CODED,
    FACTS,
    FILE,
    MODEL,
    NUMBERING,
    SECURE,
    STATISTICS,
    VERSION,
)
from fairfold.privacy.ledger import served_privacy

TRAIN, EVALUATE = "train", "evaluate"
SYNC_STATE, DEFAULT_QUALITY, SUM, QUALITY, REQUEST = "sync_state", "default_quality", "sum", "quality", "request"
MAX_HEAD = 2**15

log = logging.getLogger("fairfold.device")
Reply = dict[str, dict[str, Any]]


class NeedsWorker(Exception):
    """A message that this device leaves to the worker: another algorithm, secure aggregation, ratings."""


@dataclass(frozen=True)
class Task:
    """A task of the default algorithm, checked."""

    model: CoOccurrenceModel | None  # read where the task needs it
    projections: dict[str, Any]
    context: dict[str, Any]
    request: list[float]
    num_items: int
    top: int


@dataclass
class SmallDevice:
    """A device with its own file, capacity and state folder; ``tick`` is called between two users of a long task."""

    file: LocalFile
    capacity: str
    folder: Path
    tick: Callable[[], None] = lambda: None

    def reply(self, kind: str, records: Records) -> Reply:
        """The records of the reply to a message; raises :class:`NeedsWorker` before anything is changed."""
        handlers = {
            CAPACITY: self._capacity,
            STATISTICS: self._statistics,
            NUMBERING: self._numbering,
            MODEL: self._model,
        }
        handlers |= {TRAIN: self._train, EVALUATE: self._evaluate}
        if kind not in handlers:
            raise NeedsWorker(kind)
        facts = records.get(FACTS)
        if kind != CAPACITY and (facts is None or facts.get("version") != VERSION):
            raise invalid_message("another version of the protocol", f"version {VERSION}")
        try:
            return handlers[kind](facts or {}, records)
        except PARSE_ERRORS as error:
            if isinstance(error, InvalidMessage | InvalidState):
                raise
            given = f"a message that cannot be carried out ({type(error).__name__}: {str(error)[:200]})"
            raise InvalidMessage(given, "what FairStrategy sends", "See the log.") from error

    def _capacity(self, _facts: dict[str, Any], _records: Records) -> Reply:
        name = f"{load_device_id(self.folder):x}"
        return {FACTS: {"version": VERSION, "capacity": self.capacity, "number": -1, "name": name}}

    def _statistics(self, facts: dict[str, Any], _records: Records) -> Reply:
        self._require_default(facts, table_in(facts, "settings"))
        num_items, window = window_in(facts)
        train, _ = self._histories(num_items)
        counts = array("d", bytes(8 * len(window)))
        for items in train.values():
            for item in items:
                if item in window:
                    counts[item - window.start] += 1
        sums = {"counts": counts}
        if window.start == 0:
            lengths = [len(items) for items in train.values()]
            pairs = sum(length * (length + 1) for length in lengths) / 2
            sums["users"] = array("d", [len(train), sum(lengths), pairs])
        return {ARRAYS: sums, FACTS: {"version": VERSION, "weight": float(len(train))}}

    def _numbering(self, facts: dict[str, Any], records: Records) -> Reply:
        if facts.get("ratings") is True:
            raise NeedsWorker("ratings")
        num_items, window = window_in(facts)
        numbers = records[ARRAYS]["numbers"]
        if numbers.typecode != "q" or len(numbers) != len(window):
            raise invalid_message("other numbers than were announced", f"{len(window)} numbers")
        if min(numbers) < 0 or max(numbers) >= num_items:
            raise invalid_message("numbers beyond the catalogue", f"numbers from 0 to {num_items - 1}")
        store = DeviceStore(self.folder)
        state, numbering = store.load(), id_in(facts, "numbering")
        known = dict(state.item_numbers) if state.numbering == numbering else {}
        own = {item for part in self._histories(num_items) for items in part.values() for item in items}
        known |= {item: numbers[item - window.start] for item in own if item in window}
        store.save(replace(state, numbering=numbering, item_numbers=known))
        return {FACTS: {"version": VERSION}}

    def _model(self, _facts: dict[str, Any], records: Records) -> Reply:
        store_model(self.folder, records[ARRAYS][FILE].tobytes(), self.capacity)
        return {FACTS: {"version": VERSION}}

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _train(self, facts: dict[str, Any], records: Records) -> Reply:
        evaluate = facts.get("evaluate") is True
        task = self._task(facts, records, evaluate=evaluate)
        store = DeviceStore(self.folder)
        state, users = self._open(facts, task, store.load())
        quality = self._quality(task, users) if evaluate else {}
        share, candidate, reporting, most = task.request
        model = task.model
        if QUALITY in task.context:
            assert model is not None
            sums = uploads.report(
                list(users.values()),
                model,
                is_default=candidate == 0,
                share=reporting,
                catalogue=task.num_items,
                top=task.top,
                tick=self.tick,
            )
        else:
            head, leading = task.projections[ROWS]["shape"][0], uploads.triangle_items(task.context[SUM]["kept"][0])
            sums = uploads.upload(list(users.values()), head=head, leading=leading, share=share, most=int(most))
        pending = RememberedUpdate(id_in(facts, "update_id"), _local_state(users))
        store.save(replace(state, pending=pending))
        reply = {"version": VERSION, "run": facts["run"], "update_id": facts["update_id"], "weight": float(len(users))}
        return {ARRAYS: sums, FACTS: reply | {"scales": [1.0]} | quality}

    def _evaluate(self, facts: dict[str, Any], records: Records) -> Reply:
        task = self._task(facts, records, evaluate=True)
        _, users = self._open(facts, task, DeviceStore(self.folder).load())
        reply = {"version": VERSION, "run": facts["run"], "update_id": facts["update_id"], "weight": 0.0}
        return {ARRAYS: {}, FACTS: reply | {"scales": []} | self._quality(task, users)}

    def _task(self, facts: dict[str, Any], records: Records, *, evaluate: bool) -> Task:
        settings = table_in(facts, "settings")
        self._require_default(facts, settings)
        projections, context = table_in(facts, "projections"), table_in(facts, "context")
        num_items = number_in(facts, "items", MAX_ITEMS, 1)
        names = {ROWS, PAIRS, POPULARITY}
        if projections.keys() not in (names, names | {NEIGHBORS}) or context.keys() not in ({SUM}, {QUALITY}):
            raise invalid_message("other tensors than the model's", ", ".join(sorted(names)))
        if not all(str(held["kind"]).startswith("quantized") for held in projections.values()):
            raise NeedsWorker("a model in floats")
        head = projections[ROWS]["shape"][0]
        if not 1 <= head <= min(num_items, MAX_HEAD, settings["algorithm"]["max_items"]):
            raise invalid_message("a model of more items than the catalogue", f"at most {num_items}")
        if any(projections[name]["items"] != head for name in (PAIRS, NEIGHBORS) if name in projections):
            raise invalid_message("a list of pairs of unknown items", f"items below {head}")
        lengths = {name: packed_bytes(held) for name, held in projections.items()}
        coded = {name: vector.tobytes() for name, vector in records[CODED].items()}
        if {name: len(content) for name, content in coded.items()} != lengths:
            raise invalid_message("tensors of other lengths than their sizes", "what was agreed")
        self._require_room(sum(lengths.values()), num_items * settings["subspace"]["reference_factors"] * 4)
        (scale,), request = facts["scales"], records[ARRAYS][REQUEST]
        numbers = [float(number) * scale for number in request]
        if len(numbers) != 4 or not all(map(math.isfinite, numbers)) or numbers[3] < 0:
            raise invalid_message("a request that is no four numbers", "what FairStrategy sends")
        size = context[SUM]["kept"][0] if SUM in context else 0
        if type(size) is not int or not 0 <= size <= uploads.triangle_size(head):
            raise invalid_message("a sum of more pairs than items have", f"at most {uploads.triangle_size(head)}")
        model = None
        if evaluate or QUALITY in context:
            model = CoOccurrenceModel(coded, projections, float(settings["algorithm"]["pair_weight"]))
        return Task(model, projections, context, numbers, num_items, int(settings["run"]["top"]))

    def _require_default(self, facts: dict[str, Any], settings: dict[str, Any]) -> None:
        """Leave everything but plain sums of the default algorithm to the worker, and what it has to refuse."""
        algorithm, privacy = settings["algorithm"]["kind"], settings["privacy"]["level"]
        is_plain = privacy == served_privacy(self.folder) == "plain" and SECURE not in facts
        if algorithm != "co_occurrence" or not is_plain or "image_shape" in facts:
            raise NeedsWorker(f"{algorithm}, {privacy}")

    def _require_room(self, size: int, full: int) -> None:
        amount = amount_of(self.capacity)
        if amount is None:
            raise NeedsWorker("a capacity in another form")
        number, unit = amount
        budget = full / number if unit in "x×" else number * UNITS[unit]
        if size > int(budget):
            raise InvalidCapacity(f"a task of {size} bytes", f"at most {self.capacity}", "Ask this device first.")

    def _histories(self, num_items: int) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Items of every user to train on, and held out; ascending, by the users' names in order."""
        rows, held_out, numbers = self.file.read(num_items)
        parts = []
        for part in (rows, held_out):
            items = dict[str, set[int]]()
            for user, item, _ in part:
                items.setdefault(user, set()).add(numbers[item])
            parts.append({user: sorted(items[user]) for user in sorted(items)})
        return parts[0], parts[1]

    def _open(
        self, facts: dict[str, Any], task: Task, state: DeviceState
    ) -> tuple[DeviceState, dict[str, UserHistory]]:
        """The state reconciled with the server, and the users' histories: what they have and had in this run."""
        state = state.reconcile(id_in(facts, "run"), id_in(facts, "acknowledged_id"))
        train, held_out = self._histories(task.num_items)
        if numbering := id_in(facts, "numbering"):
            own = {item for part in (train, held_out) for items in part.values() for item in items}
            if state.numbering != numbering or not own <= state.item_numbers.keys():
                given = "items without their numbers in this run"
                raise InvalidState(given, "the server's numbering", "The server sends it again.")
            train, held_out = (
                {user: sorted(state.item_numbers[item] for item in items) for user, items in part.items()}
                for part in (train, held_out)
            )
        users = _stored_users(state)
        for name in train:
            users.setdefault(name, UserHistory([], []))
        for name, user in users.items():
            known = dict(zip(user.items, user.states, strict=True))
            current = set(train.get(name, ()))
            user.items = sorted(known.keys() | current)
            user.states = [known.get(item, uploads.NEW) for item in user.items]
            user.mark_lost(current)
            user.held_out = held_out.get(name, [])
        acknowledged = state.acknowledged
        if state.history:  # as the worker stores it: rows of the acknowledged state are those of the merged history
            acknowledged = replace(acknowledged, local_state=_local_state(users))
        history = _history(users)
        return replace(state, acknowledged=acknowledged, user_names=list(users), history=history), users

    def _quality(self, task: Task, users: dict[str, UserHistory]) -> dict[str, Any]:
        """Sum of NDCG over the users with held-out items, and their number; nothing without any."""
        assert task.model is not None
        found = []
        top = min(task.top, task.num_items)
        for user in users.values():
            if user.held_out:
                self.tick()
                found.append(task.model.ndcg(user.items, user.held_out, task.num_items, top, len(user.items)))
        return {"quality": float(sum(found)), "evaluated": len(found)} if found else {}


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


def _history(users: dict[str, UserHistory]) -> dict[str, Any]:
    offsets = array("q", [0])
    for user in users.values():
        offsets.append(offsets[-1] + len(user.items))
    items = array("q", [item for user in users.values() for item in user.items])
    return {"offsets": ([len(offsets)], offsets), "items": ([len(items)], items)}


def _local_state(users: dict[str, UserHistory]) -> dict[str, Any]:
    states = array("f", [state for user in users.values() for state in user.states])
    qualities = array("f", [user.default_quality for user in users.values()])
    return {DEFAULT_QUALITY: ([len(qualities), 1], qualities), SYNC_STATE: ([len(states), 1], states)}
