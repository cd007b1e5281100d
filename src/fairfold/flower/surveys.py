"""The sums before the first round, and the numbers that items get by them, as messages about some items at a time."""

import json
from dataclasses import dataclass

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fairfold.flower.protocol import ARRAYS, FACTS, VERSION, WINDOW
from fairfold.flower.vectors import DOUBLE, WHOLE, facts_in, number_in, pack, refused, unpack, word_in
from fairfold.flower.wire import MOST_ITEMS, reading, sent_settings, table_in
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.words import Answer
from fairfold.settings import Settings, read_settings


def windows(items: int) -> list[range]:
    """The catalogue in parts."""
    return [range(start, min(start + WINDOW, items)) for start in range(0, items, WINDOW)]


def ask(settings: Settings, items: int, window: range) -> RecordDict:
    """What asks a device for its part of the sums, of some items."""
    facts = {
        "version": VERSION, "settings": json.dumps(sent_settings(settings)), "items": items, "start": window.start,
        "stop": window.stop,
    }  # fmt: skip
    return RecordDict({FACTS: ConfigRecord(facts)})


def asked_in(content: RecordDict) -> tuple[Settings, int, range]:
    """The same, on the device."""
    facts = facts_in(content)
    with reading():
        settings = read_settings(table_in(facts, "settings"))
    return settings, *_window(facts)


def _window(facts: ConfigRecord) -> tuple[int, range]:
    """The size of the catalogue, and the items in question."""
    items = number_in(facts, "items", MOST_ITEMS, 1)
    start = number_in(facts, "start", items - 1)
    return items, range(start, number_in(facts, "stop", min(items, start + WINDOW), start + 1))


def pack_survey(answer: Answer) -> RecordDict:
    """A device's part."""
    arrays, _ = pack(answer.sums, half=False)
    return RecordDict({ARRAYS: arrays, FACTS: ConfigRecord({"version": VERSION, "weight": float(answer.weight)})})


def unpack_survey(content: RecordDict, settings: Settings, window: range) -> Answer:
    """The same, on the server: refused unless every sum is there, of the right length."""
    weight = facts_in(content).get("weight")
    wanted = {
        name: len(window) if per_item else 3
        for name, per_item in settings.algorithm.surveys(settings).items()
        if per_item or window.start == 0
    }
    if not isinstance(weight, float) or not 0 < weight < 2**31:
        raise refused("a weight out of range", "a number of users")
    sums = unpack(content.get(ARRAYS), [1.0] * len(wanted), wanted, half=False, dtype=DOUBLE)
    counts = sums.get(COUNTS)
    if counts is not None and not bool(((counts >= 0) & (counts <= weight)).all()):
        raise refused("counts out of range", "at most one a user")
    return Answer(sums, weight)


@dataclass(frozen=True)
class Told:
    """The numbers that some items have in a run."""

    numbering: int
    items: int
    window: range
    places: Tensor
    ratings: bool


def tell(numbering: int, place: Tensor, window: range, *, ratings: bool) -> RecordDict:
    """What tells a device the numbers of some items."""
    facts = {
        "version": VERSION, "numbering": f"{numbering:x}", "items": len(place), "start": window.start,
        "stop": window.stop, "ratings": ratings,
    }  # fmt: skip
    part = place[window.start : window.stop].to(torch.int64).contiguous()
    return RecordDict({ARRAYS: ArrayRecord({"places": Array(part.numpy())}), FACTS: ConfigRecord(facts)})


def told_in(content: RecordDict) -> Told:
    """The same, on the device."""
    facts = facts_in(content)
    items, window = _window(facts)
    places = unpack(content.get(ARRAYS), [1.0], {"places": len(window)}, half=False, dtype=WHOLE)["places"]
    if int(places.min()) < 0 or int(places.max()) >= items:
        raise refused("numbers beyond the catalogue", f"numbers from 0 to {items - 1}")
    return Told(word_in(facts, "numbering"), items, window, places, facts.get("ratings") is True)
