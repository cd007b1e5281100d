"""Tasks of the default algorithm as a device receives them, read and checked before anything is computed."""

import math
from dataclasses import dataclass
from typing import Any

from fairfold.device import uploads
from fairfold.device.facts import MAX_ITEMS, UNITS, amount_of, invalid_message, number_in, table_in
from fairfold.device.model import NEIGHBORS, PAIRS, POPULARITY, ROWS, CoOccurrenceModel, packed_bytes
from fairfold.device.records import Records
from fairfold.errors import InvalidCapacity
from fairfold.flower.protocol import ARRAYS, CODED
from fairfold.privacy.ledger import LEVELS

SUM, QUALITY, REQUEST, ITEM_SHARES = "sum", "quality", "request", "item_shares"
PRIVATE = LEVELS[-1]
MAX_HEAD = 2**24


class NeedsWorker(Exception):
    """A message that this device leaves to the worker: another algorithm, ratings."""


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


def read_task(facts: dict[str, Any], records: Records, capacity: str, *, evaluate: bool) -> Task:
    """Read and check a task; the model where it is needed."""
    settings = table_in(facts, "settings")
    require_default(facts, settings)
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
    _require_room(capacity, sum(lengths.values()), num_items * settings["subspace"]["reference_factors"] * 4)
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
    model = None
    if evaluate or QUALITY in context:
        model = CoOccurrenceModel(coded, projections, float(settings["algorithm"]["pair_weight"]))
    return Task(model, projections, context, numbers, shares, num_items, int(settings["run"]["top"]))


def require_default(facts: dict[str, Any], settings: dict[str, Any]) -> None:
    """Leave every other algorithm to the worker, and what it has to refuse."""
    algorithm = settings["algorithm"]["kind"]
    if algorithm != "co_occurrence" or "image_shape" in facts or settings["privacy"]["level"] not in LEVELS:
        raise NeedsWorker(algorithm)


def _require_room(capacity: str, size: int, full: int) -> None:
    amount = amount_of(capacity)
    if amount is None:
        raise NeedsWorker("a capacity in another form")
    number, unit = amount
    budget = full / number if unit in "x×" else number * UNITS[unit]
    if size > int(budget):
        raise InvalidCapacity(f"a task of {size} bytes", f"at most {capacity}", "Ask this device first.")
