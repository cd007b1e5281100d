"""Replies of a small device to the messages of the default algorithm: ``flower.client_tasks`` without torch."""

import contextlib
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fairfold.checksums import PARSE_ERRORS
from fairfold.device import gradient, uploads
from fairfold.device.facts import id_in, invalid_message, number_in, table_in, window_in
from fairfold.device.masked import Measured, masked
from fairfold.device.model import ROWS
from fairfold.device.records import Records
from fairfold.device.requests import PRIVATE, QUALITY, SUM, NeedsWorker, Task, read_task, require_default
from fairfold.device.store import DeviceState, DeviceStore, RememberedUpdate, load_device_id
from fairfold.device.stored_model import store_model
from fairfold.device.uploads import UserHistory
from fairfold.errors import InvalidMessage, InvalidState
from fairfold.flower.local_data import LocalFile
from fairfold.flower.protocol import (
    ARRAYS,
    CAPACITY,
    FACTS,
    FILE,
    KEYS,
    MODEL,
    NUMBERING,
    REVEAL,
    SECURE,
    SHARES,
    SIGN,
    STATISTICS,
    VERSION,
    WINDOW,
)
from fairfold.privacy.ledger import LEVELS, STATISTICS_PURPOSE
from fairfold.privacy.participation import Participation, RequestKey, SumRules
from fairfold.privacy.secure.segments import refuse

TRAIN, EVALUATE = "train", "evaluate"
SYNC_STATE, DEFAULT_QUALITY = "sync_state", "default_quality"
COUNTS = "counts"
STEPS = {SUM: uploads.UNIT, QUALITY: uploads.UNIT}  # of fixed point, per unit
MAX_SECURE_MESSAGE = 1 << 26

log = logging.getLogger("fairfold.device")
Reply = dict[str, dict[str, Any]]
Masking = Callable[[Measured, Mapping[str, int]], Reply]


@dataclass
class SmallDevice:
    """A device with its file, capacity, state folder and its owner's rules; long tasks call ``tick`` between users."""

    file: LocalFile
    capacity: str
    folder: Path
    rules: Mapping[str, Any] = field(default_factory=dict)
    tick: Callable[[], None] = lambda: None

    def reply(self, kind: str, records: Records) -> Reply:
        """The records of the reply to a message; raises :class:`NeedsWorker` before anything is changed."""
        handlers = {
            CAPACITY: self._capacity,
            STATISTICS: self._statistics,
            NUMBERING: self._numbering,
            MODEL: self._model,
            KEYS: self._secure_keys,
        }
        handlers |= {step: partial(self._secure_step, step) for step in (SHARES, SIGN, REVEAL)}
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
        settings = table_in(facts, "settings")
        require_default(facts, settings)
        num_items, window = window_in(facts)
        with self._sum(facts, settings, (STATISTICS_PURPOSE, window.start, None)) as masking:
            train = list(self._histories(num_items)[0].values())
            level = settings["privacy"]["level"]
            sums = uploads.statistics(train, window, is_private=level == PRIVATE, with_pairs=level == LEVELS[0])
            if masking is not None:
                steps = {COUNTS: uploads.UNIT if level == PRIVATE else 1, "users": 1}
                return masking(Measured(sums, float(len(train))), steps)
            return {ARRAYS: sums, FACTS: {"version": VERSION, "weight": float(len(train))}}

    # -- secure sums ---------------------------------------------------------------------------------------------------

    @property
    def participation(self) -> Participation:
        """The device's part in secure sums."""
        return Participation(self.folder, load_device_id(self.folder), self.rules)

    def _secure_keys(self, facts: dict[str, Any], _records: Records) -> Reply:
        return _secure_reply(self.participation.begin(_secure_message(facts)))

    def _secure_step(self, kind: str, facts: dict[str, Any], _records: Records) -> Reply:
        from fairfold.privacy.secure.client import SecureClient

        steps = {SHARES: SecureClient.share, SIGN: SecureClient.sign, REVEAL: SecureClient.reveal}
        return _secure_reply(self.participation.run_step(steps[kind], _secure_message(facts)))

    @contextlib.contextmanager
    def _sum(self, facts: dict[str, Any], settings: dict[str, Any], request: RequestKey) -> Iterator[Masking | None]:
        """How to mask the reply to a request; None for one in plain."""
        privacy, mine = settings["privacy"], self.participation
        level = LEVELS.index(privacy["level"])
        rules = SumRules(level > 0, level > 1, int(privacy["min_cohort"]) if level else 0)
        with mine.session(_secure_message(facts) if SECURE in facts else None, rules, request) as client:
            if client is None:
                yield None
                return

            def masking(measured: Measured, steps: Mapping[str, int]) -> Reply:
                assert client is not None
                content = masked(mine, client, rules, measured, steps, privacy, WINDOW)
                return {SECURE: {SECURE: array("B", content)}, FACTS: {"version": VERSION}}

            yield masking

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

    def _model(self, facts: dict[str, Any], records: Records) -> Reply:
        signer = str(self.rules.get("signer", ""))
        store_model(self.folder, records[ARRAYS][FILE].tobytes(), self.capacity, facts, signer)
        return {FACTS: {"version": VERSION}}

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _train(self, facts: dict[str, Any], records: Records) -> Reply:
        settings = table_in(facts, "settings")
        if settings["algorithm"]["kind"] == "gradient" and gradient.can_train(facts, settings):
            return self._train_network(facts, records, settings)
        private = settings["privacy"]["level"] == PRIVATE
        evaluate = facts.get("evaluate") is True and not private
        task = read_task(facts, records, self.capacity, evaluate=evaluate)
        store = DeviceStore(self.folder)
        state, users = self._open(facts, task, store.load())
        with self._sum(facts, settings, ("train", number_in(facts, "round", 2**31), id_in(facts, "run"))) as masking:
            quality = self._quality(task, users) if evaluate else {}
            sums = self._update(task, list(users.values()), settings, is_secure=masking is not None)
            update_id, weight = id_in(facts, "update_id"), float(len(users))
            store.save(replace(state, pending=RememberedUpdate(update_id, _local_state(users))))
            if masking is not None:
                return masking(_measured(sums, weight, quality), STEPS)
            reply = {"version": VERSION, "run": facts["run"], "update_id": facts["update_id"], "weight": weight}
            return {ARRAYS: sums, FACTS: reply | {"scales": [1.0]} | quality}

    def _update(
        self, task: Task, users: list[UserHistory], settings: dict[str, Any], *, is_secure: bool
    ) -> dict[str, Any]:
        """The sum of the users' uploads, or of their reports on a candidate."""
        share, candidate, reporting, most = task.request
        if QUALITY in task.context:
            assert task.model is not None
            return uploads.report(
                users, task.model, is_default=candidate == 0, share=reporting, catalogue=task.num_items,
                top=task.top, tick=self.tick,
            )  # fmt: skip
        head, leading = task.projections[ROWS]["shape"][0], uploads.triangle_items(task.context[SUM]["kept"][0])
        if settings["privacy"]["level"] == PRIVATE:
            return uploads.private_upload(users, task.item_shares, leading, share=share)
        exponent = float(settings["algorithm"]["history_exponent"])
        return uploads.upload(
            users, head=head, leading=leading, share=share, most=None if is_secure else int(most), exponent=exponent
        )

    def _train_network(self, facts: dict[str, Any], records: Records, settings: dict[str, Any]) -> Reply:
        """Gradient steps in C; without a server's acknowledgement, as the worker's."""
        task = gradient.read_gradient_task(facts, records, self.capacity)
        store = DeviceStore(self.folder)
        state = store.load()
        train, held_out = self._numbered(facts, task.num_items, state)
        with self._sum(facts, settings, ("train", task.round_number, id_in(facts, "run"))) as masking:
            own = gradient.user_vectors(task, state, list(train))
            evaluate = facts.get("evaluate") is True
            quality = gradient.quality(task, train, held_out, own) if evaluate else {}
            sums, weight = gradient.train(task, train, own, state, is_masked=masking is not None)
            update = RememberedUpdate(id_in(facts, "update_id"), gradient.local_state(task, own))
            store.save(replace(state, acknowledged=update, pending=None, user_names=list(train), history={}))
            if masking is not None:
                return masking(_measured(sums, weight, quality), {})
            reply = {"version": VERSION, "run": facts["run"], "update_id": facts["update_id"], "weight": weight}
            return {ARRAYS: sums, FACTS: reply | {"scales": [1.0] * len(sums)} | quality}

    def _evaluate(self, facts: dict[str, Any], records: Records) -> Reply:
        settings = table_in(facts, "settings")
        measure: Callable[[], dict[str, Any]]
        if settings["algorithm"]["kind"] == "gradient" and gradient.can_train(facts, settings):
            network = gradient.read_gradient_task(facts, records, self.capacity)
            state = DeviceStore(self.folder).load()
            train, held_out = self._numbered(facts, network.num_items, state)
            own = gradient.user_vectors(network, state, list(train))
            measure = partial(gradient.quality, network, train, held_out, own)
        else:
            measure = self._measuring(facts, records)
        if settings["privacy"]["level"] == PRIVATE:
            raise refuse("a request for qualities where sums have noise", "what the budget is spent on")
        with self._sum(facts, settings, ("evaluate", number_in(facts, "round", 2**31), id_in(facts, "run"))) as masking:
            quality = measure()
            if masking is not None:
                return masking(_measured({}, 0.0, quality), {})
            reply = {"version": VERSION, "run": facts["run"], "update_id": facts["update_id"], "weight": 0.0}
            return {ARRAYS: {}, FACTS: reply | {"scales": []} | quality}

    def _measuring(self, facts: dict[str, Any], records: Records) -> Callable[[], dict[str, Any]]:
        task = read_task(facts, records, self.capacity, evaluate=True)
        _, users = self._open(facts, task, DeviceStore(self.folder).load())
        return partial(self._quality, task, users)

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

    def _numbered(
        self, facts: dict[str, Any], num_items: int, state: DeviceState
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Histories and held-out items by the numbers of the run."""
        train, held_out = self._histories(num_items)
        if numbering := id_in(facts, "numbering"):
            own = {item for part in (train, held_out) for items in part.values() for item in items}
            if state.numbering != numbering or not own <= state.item_numbers.keys():
                given = "items without their numbers in this run"
                raise InvalidState(given, "the server's numbering", "The server sends it again.")
            train, held_out = (
                {user: sorted(state.item_numbers[item] for item in items) for user, items in part.items()}
                for part in (train, held_out)
            )
        return train, held_out

    def _open(
        self, facts: dict[str, Any], task: Task, state: DeviceState
    ) -> tuple[DeviceState, dict[str, UserHistory]]:
        """The state reconciled with the server, and the users' histories: what they have and had in this run."""
        state = state.reconcile(id_in(facts, "run"), id_in(facts, "acknowledged_id"))
        train, held_out = self._numbered(facts, task.num_items, state)
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


def _measured(sums: dict[str, Any], weight: float, quality: dict[str, Any]) -> Measured:
    return Measured(sums, weight, quality.get("quality", 0.0), float(quality.get("evaluated", 0)))


def _secure_message(facts: dict[str, Any]) -> bytes:
    message = facts.get(SECURE)
    if not isinstance(message, bytes) or len(message) > MAX_SECURE_MESSAGE:
        raise invalid_message("no message of secure aggregation", "one")
    return message


def _secure_reply(message: bytes) -> Reply:
    return {FACTS: {"version": VERSION, SECURE: message}}


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
