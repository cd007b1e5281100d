"""Gradient FAIR on a small device: local training of MF and NeuMF in C, from Python without torch and numpy.

``algorithms.gradient`` with the library of ``native/device``. What it does not know (other losses, FedProx, dropout,
other methods than FAIR) is left to the worker.
"""

import hashlib
import math
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from heapq import nsmallest
from typing import Any, ClassVar

from fairfold.device.facts import MAX_ITEMS, invalid_message, number_in, table_in
from fairfold.device.layout import layout_of
from fairfold.device.model import ndcg_of
from fairfold.device.native import LOSSES, LocalNetwork, NetworkForm, add_weighted, draw_samples, library
from fairfold.device.requests import NeedsWorker, TaskInput, require_room
from fairfold.device.store import DeviceState, Tables
from fairfold.device.stored_model import StoredModel
from fairfold.flower.protocol import ARRAYS

MAX_USER_NUMBERS, MAX_DENSE_NUMBERS, MAX_SAMPLES = 1 << 16, 1 << 24, 1 << 24
SCORED_AT_ONCE = 4_096  # items
FLOAT_BYTES, MIN_COMPRESSED = 4, 64  # FAIR holds tensors of fewer numbers whole


@dataclass(frozen=True)
class GradientTask:
    """A task of gradient training, checked."""

    form: NetworkForm
    projections: dict[str, Any]
    vectors: dict[str, Any]
    algorithm: dict[str, Any]
    num_items: int
    round_number: int
    top: int
    spread: float  # of a new user's vectors

    @property
    def sends_weights(self) -> bool:
        """Whether an update is the weighted model itself: under the paper's rule."""
        return bool(self.algorithm["aggregation"] == "paper")

    def weight(self, samples: int) -> float:
        """The weight of a user with some samples."""
        weighting = self.algorithm["weighting"]
        return float(samples ** {"data": 1.0, "equal": 0.0}.get(weighting, weighting))

    @property
    def columns(self) -> dict[str, int]:
        """Length of each of a user's own vectors."""
        widths = [width for width in (self.form.product, self.form.width) if width]
        return dict(zip(self.form.users, widths, strict=True))


def can_train(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether this device trains such a task itself."""
    algorithm, model = settings["algorithm"], settings["model"]
    is_known = model["kind"] in ("mf", "neumf") and not model.get("item_bias") and not model.get("dropout")
    loss = algorithm.get("objective", "bpr") in LOSSES and not algorithm.get("prox")
    ours = algorithm["kind"] == "gradient" and algorithm.get("user_vectors", "private") == "private"
    method = settings["subspace"]["method"] in ("fair", "fedavg", "fair_hom", "full_trn")
    return bool(is_known and loss and ours and method and not facts.get("half") and library() is not None)


def form_of(settings: Mapping[str, Any]) -> NetworkForm:
    """The model that settings name."""
    model, algorithm = settings["model"], settings["algorithm"]
    factors = int(model["factors"])
    optimizer = str(algorithm["local_optimizer"]), float(algorithm["local_lr"])
    rest = (str(algorithm.get("objective", "bpr")), float(algorithm.get("l2", 0.0)), *optimizer)
    if model["kind"] == "mf":
        return NetworkForm(factors, 0, (), False, ("item.weight",), ("user.weight",), (), *rest)
    depth = int(model.get("depth", 1))
    wide = factors << (depth - 1)
    dense = [f"network.{3 * layer + 1}.{kind}" for layer in range(depth) for kind in ("weight", "bias")]
    tables, users = (tuple(f"{side}_{part}.weight" for part in ("product", "network")) for side in ("item", "user"))
    layers = tuple(wide >> layer for layer in range(depth))
    return NetworkForm(factors, wide, layers, True, tables, users, (*dense, "output.weight", "output.bias"), *rest)


def _shapes(form: NetworkForm, num_items: int) -> dict[str, list[int]]:
    widths = [width for width in (form.product, form.width) if width]
    shapes = {name: [num_items, width] for name, width in zip(form.tables, widths, strict=True)}
    inputs, sizes = 2 * form.width, list[list[int]]()
    for units in form.layers:
        sizes += [[units, inputs], [units]]
        inputs = units
    if form.output:
        sizes += [[1, form.product + inputs], [1]]
    return shapes | dict(zip(form.dense, sizes, strict=True))


def read_gradient_task(given: TaskInput) -> GradientTask:
    """Read and check a task."""
    facts = given.facts
    settings = given.settings
    projections = table_in(given.facts, "projections")
    num_items = number_in(facts, "items", MAX_ITEMS, 1)
    factors, depth = settings["model"]["factors"], settings["model"].get("depth", 1)
    if not 0 < factors <= MAX_USER_NUMBERS or not 0 < depth <= 16 or factors << depth > MAX_USER_NUMBERS:
        raise invalid_message("a model that is too large", f"at most {MAX_USER_NUMBERS} numbers a user")
    form = form_of(settings)
    shapes = _shapes(form, num_items)
    if {name: held["shape"] for name, held in projections.items()} != shapes:
        raise invalid_message(f"tensors {sorted(projections)}", f"those of the model, {sorted(shapes)}")
    if any(held["kind"] != "hashed" for held in projections.values()):
        raise NeedsWorker("a tensor of another kind")
    layouts = {name: layout_of(held) for name, held in projections.items()}
    if sum(layouts[name].full_size for name in form.dense) > MAX_DENSE_NUMBERS:
        raise invalid_message("layers that are too large", f"at most {MAX_DENSE_NUMBERS} numbers")
    method, everything = settings["subspace"], [name for name, of in layouts.items() if of.full_size >= MIN_COMPRESSED]
    counted = form.tables if method.get("compress", "tables") == "tables" else everything
    columns = method.get("reference_factors")
    whole = sum(num_items * columns if columns and name in form.tables else layouts[name].full_size for name in counted)
    bytes_held = FLOAT_BYTES * sum(one.size for one in layouts.values())
    require_room(given.capacity, bytes_held, sum(layouts[name].size for name in counted), whole)
    arrays = given.records[ARRAYS]
    sizes = {name: layout.size for name, layout in layouts.items()}
    if {name: (vector.typecode, len(vector)) for name, vector in arrays.items()} != {
        name: ("f", size) for name, size in sizes.items()
    } or facts.get("scales") != [1.0] * len(sizes):
        raise invalid_message("vectors of other lengths than their sizes", "what was agreed")
    if not all(math.isfinite(math.fsum(vector)) for vector in arrays.values()):
        raise invalid_message("NaN or infinity", "finite numbers")
    top, spread = int(settings["run"]["top"]), 0.1 if settings["model"]["kind"] == "mf" else 0.01
    number = number_in(facts, "round", 2**31)
    return GradientTask(form, projections, dict(arrays), settings["algorithm"], num_items, number, top, spread)


def user_vectors(task: GradientTask, state: DeviceState, names: list[str]) -> dict[str, dict[str, Any]]:
    """Each user's own vectors, stored or new."""
    stored = {name: row for row, name in enumerate(state.user_names)}
    found = dict[str, dict[str, Any]]()
    for name in names:
        draw = random.Random(_seed(state, "vectors", name))
        own = found[name] = {}
        for key, columns in task.columns.items():
            shape, numbers = state.acknowledged.local_state.get(key, ([], array("f")))
            if name in stored and shape == [len(state.user_names), columns]:
                own[key] = numbers[stored[name] * columns : (stored[name] + 1) * columns]
            else:
                own[key] = array("f", [draw.gauss(0.0, task.spread) for _ in range(columns)])
    return found


def _seed(state: DeviceState, *facts: object) -> int:
    text = "\0".join(map(str, (state.secret, *facts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def local_state(task: GradientTask, own: Mapping[str, Mapping[str, Any]]) -> Tables:
    """All users' vectors as they are stored."""
    joined = {key: reduce(lambda one, other: one + other, [of[key] for of in own.values()]) for key in task.columns}
    return {key: ([len(own), columns], joined[key]) for key, columns in task.columns.items()}


def train(
    task: GradientTask,
    histories: Mapping[str, list[int]],
    own: Mapping[str, Mapping[str, Any]],
    state: DeviceState,
    *,
    is_masked: bool,
) -> tuple[dict[str, Any], float]:
    """Train every user, whose vectors change in place; the weighted sum of models, or of changes, and its weight."""
    algorithm, total = task.algorithm, 0.0
    sums = {name: array("f", bytes(FLOAT_BYTES * len(task.vectors[name]))) for name in sorted(task.vectors)}
    epochs, negatives, batch = (int(algorithm[key]) for key in ("local_epochs", "num_negatives", "batch_size"))
    for name, history in histories.items():
        if len(history) * epochs * (1 + negatives) > MAX_SAMPLES:
            raise invalid_message("a round of too many draws for one user", f"at most {MAX_SAMPLES}")
        values = {key: vector[:] for key, vector in task.vectors.items()}
        network = LocalNetwork(task.form, task.projections, values, own[name])
        shuffle, seed = algorithm.get("shuffle", True), _seed(state, task.round_number, name)
        items = draw_samples(history, task.num_items, epochs, negatives, shuffle=shuffle, seed=seed)
        count = len(history)
        stops = [min(stop, count) for stop in range(batch, count + batch, batch)]
        network.train(items, 1 + negatives, [epoch * count + stop for epoch in range(epochs) for stop in stops])
        weight = task.weight(count)
        for key, vector in values.items():
            add_weighted(sums[key], vector, task.vectors[key], weight)
        total += weight
    if task.sends_weights and not is_masked:
        for key, vector in task.vectors.items():
            add_weighted(sums[key], vector, None, total)
    if not all(math.isfinite(math.fsum(vector)) for vector in sums.values()):
        raise invalid_message("a task whose training diverges", "a smaller learning rate")
    return sums, total


def quality(
    task: GradientTask,
    histories: Mapping[str, list[int]],
    held_out: Mapping[str, list[int]],
    own: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Sum of NDCG over the users with held-out items, and their number; nothing without any."""
    found = []
    top = min(task.top, task.num_items)
    for name, wanted in held_out.items():
        if not wanted or name not in histories:
            continue
        network = LocalNetwork(task.form, task.projections, task.vectors, own[name])
        ranked = _best(network, set(histories[name]), task.num_items, top)
        found.append(ndcg_of(ranked, wanted, top))
    return {"quality": float(sum(found)), "evaluated": len(found)} if found else {}


def _best(network: LocalNetwork, known: set[int], num_items: int, top: int) -> list[int]:
    """The best items outside a history, by blocks; of equal scores the lower number comes first."""
    best: list[tuple[float, int]] = []
    for first in range(0, num_items, SCORED_AT_ONCE):
        scores = network.scores(first, min(SCORED_AT_ONCE, num_items - first))
        block = ((-score, item) for item, score in enumerate(scores, first) if item not in known)
        best = nsmallest(top, (*best, *block))
    return [item for _, item in best]


def stored_vectors(state: DeviceState, user: str) -> dict[str, Any]:
    """A user's own vectors as they are stored; none of a user who was not there when the model was trained."""
    if user not in state.user_names:
        return {}
    row, tables = state.user_names.index(user), state.acknowledged.local_state
    return {name: numbers[row * shape[-1] : (row + 1) * shape[-1]] for name, (shape, numbers) in tables.items()}


def scores(model: StoredModel, own: Mapping[str, Any]) -> Any:
    """Scores of all items by a stored model, in the order of its numbers, for a user's own vectors."""
    form, held = form_of(model.metadata["settings"]), model.metadata["projections"]
    return LocalNetwork(form, held, model.tensors, own).scores(0, model.items)


class GradientWork:
    """A task with the users' histories and own vectors."""

    remembers = False
    steps: ClassVar[Mapping[str, int]] = {}

    def __init__(self, given: TaskInput) -> None:
        self.task, self._before = read_gradient_task(given), given.state
        train, held_out = given.histories(self.task.num_items, False)
        self.train = {name: list(items) for name, items in train.items()}
        self.held_out = {name: list(items) for name, items in held_out.items()}
        self.own = user_vectors(self.task, given.state, list(train))
        self.state = replace(given.state, user_names=list(train), history={})

    def quality(self) -> dict[str, Any]:
        """Sum of NDCG over the users with held-out items, and their number."""
        return quality(self.task, self.train, self.held_out, self.own)

    def update(self, *, is_masked: bool) -> tuple[dict[str, Any], float]:
        """The weighted sum of the users' models, or of their changes."""
        return train(self.task, self.train, self.own, self._before, is_masked=is_masked)

    def local_state(self) -> Tables:
        """The users' own vectors."""
        return local_state(self.task, self.own)
