"""Replies of a small device to the messages of the default algorithm: ``flower.client_tasks`` without torch."""

import contextlib
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairfold.checksums import PARSE_ERRORS
from fairfold.device import cooccurrence, uploads
from fairfold.device.facts import id_in, invalid_message, number_in, table_in, window_in
from fairfold.device.masked import Measured, masked
from fairfold.device.records import Records
from fairfold.device.requests import PRIVATE, NeedsWorker, TaskInput, Work
from fairfold.device.store import DeviceState, DeviceStore, RememberedUpdate, load_device_id
from fairfold.device.stored_model import store_model
from fairfold.errors import InvalidMessage, InvalidState
from fairfold.flower.local_data import LocalFile, Rated
from fairfold.flower.protocol import (
    ARRAYS,
    CAPACITY,
    FACTS,
    FILE,
    KEYS,
    MODEL,
    NUMBERING,
    REVEAL,
    ROWS,
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

if TYPE_CHECKING:
    from fairfold.privacy.secure.log import Fetch

TRAIN, EVALUATE = "train", "evaluate"
COUNTS = "counts"
INDICES = ".indices"  # suffix of the places of a sparse vector
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
    fetch_log: "Fetch | None" = None  # the server's log of enrolled keys, where it has one

    def reply(self, kind: str, records: Records) -> Reply:
        """The records of the reply to a message; raises :class:`NeedsWorker` before anything is changed."""
        handlers = {
            CAPACITY: self._capacity,
            STATISTICS: self._statistics,
            NUMBERING: self._numbering,
            MODEL: self._model,
            ROWS: self._rows,
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
        is_rated = settings["algorithm"]["kind"] == "ratings"
        if is_rated:
            from fairfold.device import ratings  # here: what a device has no use for takes no memory

            if not ratings.can_train(settings):
                raise NeedsWorker("another form of ratings")
        else:
            cooccurrence.require_default(facts, settings)
        num_items, window = window_in(facts)
        level = settings["privacy"]["level"]
        with self._sum(facts, settings, (STATISTICS_PURPOSE, window.start, None)) as masking:
            train, _ = self.file.parts(num_items, ratings=is_rated)
            if is_rated:
                sums, steps = (
                    ratings.statistics(train, window, settings, secure=level != LEVELS[0]),
                    ratings.STATISTIC_STEPS,
                )
            else:
                lists, private = [list(items) for items in train.values()], level == PRIVATE
                sums = uploads.statistics(lists, window, is_private=private, with_pairs=level == LEVELS[0])
                steps = {COUNTS: uploads.UNIT if private else 1, "users": 1}
            weight = float(len(train))
            if masking is not None:
                return masking(Measured(sums, weight), steps)
            return {ARRAYS: sums, FACTS: {"version": VERSION, "weight": weight}}

    # -- secure sums ---------------------------------------------------------------------------------------------------

    @property
    def participation(self) -> Participation:
        """The device's part in secure sums."""
        return Participation(self.folder, load_device_id(self.folder), self.rules, self.fetch_log)

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
        num_items, window = window_in(facts)
        numbers = records[ARRAYS]["numbers"]
        if numbers.typecode != "q" or len(numbers) != len(window):
            raise invalid_message("other numbers than were announced", f"{len(window)} numbers")
        if min(numbers) < 0 or max(numbers) >= num_items:
            raise invalid_message("numbers beyond the catalogue", f"numbers from 0 to {num_items - 1}")
        store = DeviceStore(self.folder)
        state, numbering = store.load(), id_in(facts, "numbering")
        known = dict(state.item_numbers) if state.numbering == numbering else {}
        parts = self.file.parts(num_items, ratings=facts.get("ratings") is True)
        own = {item for part in parts for items in part.values() for item in items}
        known |= {item: numbers[item - window.start] for item in own if item in window}
        store.save(replace(state, numbering=numbering, item_numbers=known))
        return {FACTS: {"version": VERSION}}

    def _model(self, facts: dict[str, Any], records: Records) -> Reply:
        signer = str(self.rules.get("signer", ""))
        store_model(self.folder, records[ARRAYS][FILE].tobytes(), self.capacity, facts, signer)
        return {FACTS: {"version": VERSION}}

    def _rows(self, facts: dict[str, Any], records: Records) -> Reply:
        from fairfold.device.encoding import keep_sums  # here: only some runs stream

        def histories(num_items: int) -> dict[str, list[int]]:
            return {user: list(items) for user, items in self.file.histories(num_items).items()}

        keep_sums(self.folder, records[ARRAYS][FILE].tobytes(), facts, histories, str(self.rules.get("signer", "")))
        return {FACTS: {"version": VERSION}}

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _train(self, facts: dict[str, Any], records: Records) -> Reply:
        settings = table_in(facts, "settings")
        evaluate = facts.get("evaluate") is True and settings["privacy"]["level"] != PRIVATE
        store = DeviceStore(self.folder)
        work = self._open(facts, records, settings, store.load(), evaluate=evaluate)
        with self._sum(facts, settings, ("train", number_in(facts, "round", 2**31), id_in(facts, "run"))) as masking:
            quality = work.quality() if evaluate else {}
            sums, weight = work.update(is_masked=masking is not None)
            update = RememberedUpdate(id_in(facts, "update_id"), work.local_state())
            if work.remembers:
                store.save(replace(work.state, pending=update))
            else:
                store.save(replace(work.state, acknowledged=update, pending=None))
            if masking is not None:
                return masking(_measured(sums, weight, quality), work.steps)
            return _plain_reply(facts, sums, weight, quality)

    def _evaluate(self, facts: dict[str, Any], records: Records) -> Reply:
        settings = table_in(facts, "settings")
        work = self._open(facts, records, settings, DeviceStore(self.folder).load(), evaluate=True)
        if settings["privacy"]["level"] == PRIVATE:
            raise refuse("a request for qualities where sums have noise", "what the budget is spent on")
        with self._sum(facts, settings, ("evaluate", number_in(facts, "round", 2**31), id_in(facts, "run"))) as masking:
            quality = work.quality()
            return (
                _plain_reply(facts, {}, 0.0, quality) if masking is None else masking(_measured({}, 0.0, quality), {})
            )

    def _open(
        self, facts: dict[str, Any], records: Records, settings: dict[str, Any], state: DeviceState, *, evaluate: bool
    ) -> Work:
        """A task, read and checked, with the users' histories."""

        def histories(num_items: int, ratings: bool) -> tuple[Rated, Rated]:
            return self._numbered(facts, num_items, state, ratings=ratings)

        given = TaskInput(facts, records, settings, self.capacity, state, histories, self.tick, evaluate)
        kind = settings["algorithm"]["kind"]
        if kind == "gradient":
            from fairfold.device import gradient

            if gradient.can_train(facts, settings):
                return gradient.GradientWork(given)
        if kind == "ratings":
            from fairfold.device import ratings

            return ratings.RatingsWork(given)
        return cooccurrence.CoOccurrenceWork(given)

    def _numbered(
        self, facts: dict[str, Any], num_items: int, state: DeviceState, *, ratings: bool
    ) -> tuple[Rated, Rated]:
        """Histories and held-out items by the numbers of the run."""
        parts = self.file.parts(num_items, ratings=ratings)
        numbering = id_in(facts, "numbering")
        if not numbering:
            return parts
        own, numbers = {item for part in parts for items in part.values() for item in items}, state.item_numbers
        if state.numbering != numbering or not own <= numbers.keys():
            given = "items without their numbers in this run"
            raise InvalidState(given, "the server's numbering", "The server sends it again.")
        train, held_out = (
            {user: dict(sorted((numbers[item], of) for item, of in items.items())) for user, items in part.items()}
            for part in parts
        )
        return train, held_out


def _plain_reply(facts: Mapping[str, Any], sums: dict[str, Any], weight: float, quality: dict[str, Any]) -> Reply:
    scales = [1.0] * sum(not name.endswith(INDICES) for name in sums)
    reply = {"version": VERSION, "run": facts["run"], "update_id": facts["update_id"], "weight": weight}
    return {ARRAYS: sums, FACTS: reply | {"scales": scales} | quality}


def _measured(sums: dict[str, Any], weight: float, quality: dict[str, Any]) -> Measured:
    return Measured(sums, weight, quality.get("quality", 0.0), float(quality.get("evaluated", 0)))


def _secure_message(facts: dict[str, Any]) -> bytes:
    message = facts.get(SECURE)
    if not isinstance(message, bytes) or len(message) > MAX_SECURE_MESSAGE:
        raise invalid_message("no message of secure aggregation", "one")
    return message


def _secure_reply(message: bytes) -> Reply:
    return {FACTS: {"version": VERSION, SECURE: message}}
