"""Ratings on a device: a task is read, users are solved for, and changes of sums are sent (``algorithms.ratings``)."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from fairfold.device.facts import MAX_ITEMS, id_in, invalid_message, number_in, table_in
from fairfold.device.layout import DeviceLayout, layout_of
from fairfold.device.rating_model import Hyperparameters, UserPosterior
from fairfold.device.records import float32
from fairfold.device.requests import NeedsWorker, TaskInput, require_room
from fairfold.device.store import Tables
from fairfold.device.stored_model import StoredModel
from fairfold.errors import InvalidSettings
from fairfold.flower.local_data import Rated
from fairfold.flower.protocol import ARRAYS
from fairfold.privacy.ledger import LEVELS

ROWS, USERS, LAST_UPDATE = "item.weight", "users", "last_update"
COUNTS, RATING_OFFSETS, RATING_TOTALS = "counts", "rating_offsets", "rating_totals"
MAX_FACTORS = 64
METHODS = ("fair", "fair_hom", "full_trn", "fedavg")
FLOAT_BYTES = 4
RATING_UNIT, FEATURE_UNITS = 2.0**-8, (1.0, 2.0**-2, 2.0**4)
MAX_RATING, MAX_SQUARES, OFFSET_STEPS = 100.0, 2.0**15, 2**8
ITEM_BOUND, USER_BOUND = 2.0**9, 2.0**5  # a client's largest number in a sum under masks
STATISTIC_STEPS = {COUNTS: 1, RATING_OFFSETS: OFFSET_STEPS, RATING_TOTALS: 1}


def can_train(settings: Mapping[str, Any]) -> bool:
    """Whether this device trains such a model itself."""
    algorithm, level = settings["algorithm"], settings["privacy"]["level"]
    ours = algorithm["kind"] == "ratings" and not algorithm.get("streamed") and level in LEVELS[:2]
    return bool(ours and settings["subspace"]["method"] in METHODS)


# -- statistics --------------------------------------------------------------------------------------------------------


def require_ratings(histories: Rated, *, secure: bool) -> None:
    """Refuse ratings that have no room in a sum under masks."""
    largest = max((abs(rating) for items in histories.values() for rating in items.values()), default=0.0)
    if secure and not largest <= MAX_RATING:
        needed = f"ratings from {-MAX_RATING:g} to {MAX_RATING:g}: the fixed-point encoding has room for no others"
        remedy = "Give all ratings in other units (divide them all by one number)."
        raise InvalidSettings(f"a rating of {largest:g} (or its negative) in a secure sum", needed, remedy)


def statistics(histories: Rated, window: range, settings: Mapping[str, Any], *, secure: bool) -> dict[str, Any]:
    """The users of every item of a window, with the first window sums over all ratings, and what sorts the items."""
    require_ratings(histories, secure=secure)
    counts, offsets = (array("d", bytes(8 * len(window))) for _ in range(2))
    totals = [0.0] * 3
    for items in histories.values():
        ratings = [float32(rating) for rating in items.values()]
        moments = [float(len(ratings)), float(sum(ratings)), sum(rating * rating for rating in ratings)]
        mean = moments[1] / max(len(ratings), 1)
        if secure:
            share = min(1.0, MAX_SQUARES / moments[2]) if moments[2] else 1.0
            moments = [float(round(number * share)) for number in moments]
        totals = [so_far + number for so_far, number in zip(totals, moments, strict=True)]
        for item, rating in zip(items, ratings, strict=True):
            if item in window:
                offset = rating - mean
                counts[item - window.start] += 1
                offsets[item - window.start] += round(offset * OFFSET_STEPS) / OFFSET_STEPS if secure else offset
    found = {COUNTS: counts}
    if _groups_similar(settings):
        found[RATING_OFFSETS] = offsets
    return found if window.start else found | {RATING_TOTALS: array("d", totals)}


def _groups_similar(settings: Mapping[str, Any]) -> bool:
    given, method = settings["algorithm"].get("group_similar"), settings["subspace"]
    if given is not None:
        return bool(given)
    is_ranked = method["method"] in METHODS[:2] and method["mapping"] == "ranked"
    return is_ranked and method.get("popularity") != "counts"


# -- tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RatingTask:
    """A task of ratings, checked."""

    known: Hyperparameters
    rows: Any  # the compact table, flat
    layout: DeviceLayout
    largest: DeviceLayout  # of the clients whose rows updates are about
    factors: int
    num_items: int
    round_number: int

    def row(self, item: int) -> Any:
        """The row (bᵢ, vᵢ, n) that an item has in the compact table."""
        start = self.layout.row(item) * self.factors
        return self.rows[start : start + self.factors]

    @property
    def window(self) -> int:
        """Number of rows that the update is about."""
        return self.layout.size // self.factors

    def place(self, item: int) -> int:
        """Position of an item's row in the update; −1 where it is not about that row."""
        rows = self.largest.size // self.factors
        place = (self.largest.row(item) - self.round_number * self.window) % rows
        return place if place < self.window else -1


def read_task(given: TaskInput) -> RatingTask:
    """Read and check a task."""
    facts, settings = given.facts, given.settings
    if not can_train(settings) or "image_shape" in facts:
        raise NeedsWorker("another form of ratings")
    projections, context = table_in(facts, "projections"), table_in(facts, "context")
    num_items, factors = number_in(facts, "items", MAX_ITEMS, 1), settings["model"]["factors"]
    if type(factors) is not int or not 3 <= factors <= MAX_FACTORS or settings["model"]["kind"] != "mf":
        raise NeedsWorker("a model of another size")
    known = factors - 1
    shapes = {"center": [3], "metric": [known, known], "variances": [2, known], "regression": [known, known + 2]}
    if {name: held["shape"] for name, held in projections.items()} != shapes | {ROWS: [num_items, factors]}:
        raise invalid_message(f"tensors {sorted(projections)}", "those of a model of ratings")
    if context.keys() != {ROWS} or context[ROWS]["shape"] != [num_items, factors]:
        raise invalid_message("an update about other rows", "those of the largest size")
    layouts = {name: layout_of(held) for name, held in projections.items()}
    layout, largest = layouts[ROWS], layout_of(context[ROWS])
    if any(one.chunk != factors or one.is_signed or one.head % factors for one in (layout, largest)):
        raise invalid_message("rows that are cut", "whole ones")
    if layout.size > largest.size or any(layouts[name].tail for name in shapes):
        raise invalid_message("tensors that are larger or smaller than they can be", "what was agreed")
    reference = num_items * (settings["subspace"].get("reference_factors") or factors)
    numbers = sum(one.size for one in layouts.values())
    require_room(given.capacity, FLOAT_BYTES * numbers, layout.size, reference)
    vectors = _vectors(given, {name: one.size for name, one in layouts.items()})
    number = number_in(facts, "round", 2**31)
    return RatingTask(_hyperparameters(vectors, known), vectors[ROWS], layout, largest, factors, num_items, number)


def _hyperparameters(vectors: Mapping[str, Any], known: int) -> Hyperparameters:
    columns = {"center": 3, "metric": known, "variances": known, "regression": known + 2}
    tables = {name: _table(vectors[name].tolist(), width) for name, width in columns.items()}
    return Hyperparameters(tables["center"][0], tables["metric"], tables["variances"], tables["regression"])


def _vectors(given: TaskInput, sizes: Mapping[str, int]) -> dict[str, Any]:
    arrays, scales = given.records[ARRAYS], given.facts.get("scales")
    if {name: (vector.typecode, len(vector)) for name, vector in arrays.items()} != {
        name: ("f", size) for name, size in sizes.items()
    } or not (isinstance(scales, list) and len(scales) == len(sizes)):
        raise invalid_message("vectors of other lengths than their sizes", "what was agreed")
    found = dict(arrays)
    for name, scale in zip(sorted(sizes), scales, strict=True):
        if not isinstance(scale, float) or not 0 < scale < math.inf or (scale != 1 and given.facts["half"] is not True):
            raise invalid_message("a scale that is no positive number", "what the sender divided by")
        if scale != 1:
            found[name] = array("f", [number * scale for number in arrays[name]])
        if not math.isfinite(math.fsum(found[name])):
            raise invalid_message("NaN or infinity", "finite numbers")
    return found


def _table(numbers: list[float], columns: int) -> list[list[float]]:
    return [numbers[start : start + columns] for start in range(0, len(numbers), columns)]


def statistic_units(known: int) -> list[float]:
    """Factors of the sums over users in an update."""
    units = [1.0] * known + [*FEATURE_UNITS[:2]] + [FEATURE_UNITS[2]] * known
    return [RATING_UNIT] * known**2 + [one * other for one in units for other in units] + [RATING_UNIT]


def quantized(changes: Sequence[Sequence[float]], steps: int, bound: float) -> list[list[float]]:
    """Changes that are added to the same numbers, rounded to steps, and scaled down where they are too large."""
    most = max(math.fsum(map(abs, column)) for column in zip(*changes, strict=True))
    scale = min(1.0, bound / 2 / most) if most else 1.0
    return [[round(number * scale * steps) / steps for number in change] for change in changes]


class RatingsWork:
    """A task with the users' ratings as at the run's first update; newer ones count in the next run."""

    remembers = True
    steps: ClassVar[Mapping[str, int]] = {ROWS: 2**7, USERS: 2**11}

    def __init__(self, given: TaskInput) -> None:
        self.task, self.tick = read_task(given), given.tick
        state = given.state.reconcile(id_in(given.facts, "run"), id_in(given.facts, "acknowledged_id"))
        train, held_out = given.histories(self.task.num_items, True)
        if state.history:
            names, history = state.user_names, state.history
            self.held_out = held_out if names == list(train) else {}
        else:
            names = list(train)
            history = _history(train)
            self.held_out = held_out
        offsets, items, ratings = (history[key][1] for key in ("offsets", "items", "ratings"))
        self.users = {
            name: (items[start:stop].tolist(), ratings[start:stop].tolist())
            for name, (start, stop) in zip(names, pairwise(offsets), strict=True)
        }
        self.state = replace(state, user_names=names, history=history)
        self._remembered: Tables = {}

    @cached_property
    def posteriors(self) -> dict[str, UserPosterior]:
        """Every user, solved for."""
        known, found = self.task.known, dict[str, UserPosterior]()
        for name, (items, ratings) in self.users.items():
            self.tick()
            targets = [known.centered(rating) for rating in ratings]
            found[name] = UserPosterior([self.task.row(item) for item in items], targets, known)
        return found

    def quality(self) -> dict[str, Any]:
        """Sum of squared errors of the held-out ratings, and their number; nothing without any."""
        errors = [
            self.task.known.predicted(self.posteriors[name].row, self.task.row(item)) - float32(rating)
            for name, items in self.held_out.items()
            for item, rating in items.items()
        ]
        return {"quality": sum(error * error for error in errors), "evaluated": len(errors)} if errors else {}

    def update(self, *, is_masked: bool) -> tuple[dict[str, Any], float]:
        """The changes of the users' sums since they last took part, by row of the window, and over users."""
        task, units = self.task, statistic_units(self.task.factors - 1)
        rows, users = [0.0] * (task.window * task.factors), [0.0] * len(units)
        last_rows, last_users = self._stored(LAST_UPDATE, task.factors), self._stored(USERS, len(units))
        at = 0
        for number, (name, (items, _)) in enumerate(self.users.items()):
            self.tick()
            parts, squares = self.posteriors[name].row_sums()
            for places in _by_place(task, items):
                changes = [
                    [one - last for one, last in zip(parts[place], last_rows[at + place], strict=True)]
                    for place in places.indices
                ]
                sent = quantized(changes, self.steps[ROWS], ITEM_BOUND) if is_masked else changes
                for place, change in zip(places.indices, sent, strict=True):
                    last_rows[at + place] = [
                        last + one for last, one in zip(last_rows[at + place], change, strict=True)
                    ]
                    for column, one in enumerate(change):
                        rows[places.row * task.factors + column] += one
            at += len(items)
            found = zip(self.posteriors[name].sums(squares), last_users[number], units, strict=True)
            user_change = [(one - last) * unit for one, last, unit in found]
            if is_masked:
                (user_change,) = quantized([user_change], self.steps[USERS], USER_BOUND)
            users = [total + one for total, one in zip(users, user_change, strict=True)]
            found = zip(last_users[number], user_change, units, strict=True)
            last_users[number] = [last + one / unit for last, one, unit in found]
        self._remembered = {
            name: ([len(of), columns], array("f", [number for row in of for number in row]))
            for name, of, columns in ((LAST_UPDATE, last_rows, task.factors), (USERS, last_users, len(units)))
        }
        sums = {ROWS: array("f", rows), USERS: array("f", users)}
        if not all(math.isfinite(math.fsum(vector)) for vector in sums.values()):
            raise invalid_message("a task whose users cannot be solved for", "what FairStrategy sends")
        return sums, float(len(self.users))

    def _stored(self, name: str, columns: int) -> list[list[float]]:
        """The rows that the acknowledged update left; zero before the first."""
        count = sum(len(items) for items, _ in self.users.values()) if name == LAST_UPDATE else len(self.users)
        shape, numbers = self.state.acknowledged.local_state.get(name, ([], array("f")))
        return _table(numbers.tolist(), columns) if shape == [count, columns] else [[0.0] * columns] * count

    def local_state(self) -> Tables:
        """Local state after the update: what was last sent of every rating's item and of every user."""
        return self._remembered


@dataclass(frozen=True)
class _Place:
    row: int  # of the window
    indices: list[int]  # of a user's items


def _by_place(task: RatingTask, items: Sequence[int]) -> list[_Place]:
    """The items of a user by the row of the window that they are about."""
    found = dict[int, list[int]]()
    for index, item in enumerate(items):
        found.setdefault(task.place(item), []).append(index)
    return [_Place(row, indices) for row, indices in found.items() if row >= 0]


def _history(users: Rated) -> Tables:
    offsets, numbers, ratings = array("q", [0]), array("q"), array("f")
    for items in users.values():
        offsets.append(offsets[-1] + len(items))
        numbers.extend(items)
        ratings.extend(items.values())
    described: Mapping[str, array[Any]] = {"offsets": offsets, "items": numbers, "ratings": ratings}
    return {name: ([len(of)], of) for name, of in described.items()}


def scores(model: StoredModel, history: Mapping[int, float]) -> list[float]:
    """Predicted ratings of all items by a stored model, in the order of its numbers, for a user's ratings."""
    factors = int(model.metadata["settings"]["model"]["factors"])
    layout = layout_of(model.metadata["projections"][ROWS])
    known = _hyperparameters(model.tensors, factors - 1)
    table = _table(model.tensors[ROWS].tolist(), factors)
    targets = [known.centered(float32(rating)) for rating in history.values()]
    posterior = UserPosterior([table[layout.row(item)] for item in history], targets, known)
    predicted = [known.predicted(posterior.row, row) for row in table]
    return [predicted[layout.row(item)] for item in range(model.items)]
