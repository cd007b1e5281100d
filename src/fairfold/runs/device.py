"""The model of a device of any size, from one server's checkpoint, and the file it is sent as."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairfold.algorithms import assign
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidCheckpoint
from fairfold.federation.facts import facts_of, projection_of
from fairfold.federation.projection import Assignment, Hashed, Projection
from fairfold.federation.sampling import hash_seed
from fairfold.federation.task import Weights
from fairfold.runs.opened import OpenRun
from fairfold.runs.tensors import write_tensors
from fairfold.simulate.federation import Federation
from fairfold.simulate.result import Judge
from fairfold.subspace import Capacity, Subspace
from fairfold.version import __version__

FORMAT = 1

LEADING = "leading"
"""Name of the items that come first, beside the tensors of a device."""


@dataclass(frozen=True)
class DeviceModel:
    """What a device of one capacity holds.

    Attributes:
        capacity: Of the device.
        projections: How each tensor is held.
        compacts: What is held.
        trained: Whether devices of this capacity took part in the run.
        nests: Whether they could: its subspaces nest with those of the run.
        leading: Where items are numbered by a count: the catalogue's numbers of those that come first
            (:mod:`fairfold.data.counted` finds the rank of any item by it).
    """

    capacity: Capacity
    projections: dict[str, Projection]
    compacts: Weights
    trained: bool = False
    nests: bool = True
    leading: Tensor | None = None

    @property
    def size(self) -> int:
        """Numbers held."""
        return sum(projection.size for projection in self.projections.values())

    def recovered(self) -> Weights:
        """The full tensors these stand for."""
        return {name: held.recover(self.compacts[name]) for name, held in self.projections.items()}


def device_model(run: OpenRun, capacity: Capacity) -> DeviceModel:
    """The server's model, reduced to a capacity.

    A capacity that did not take part gets a size on the run's own chain, so that such a device could join; where the
    chain has none that small, it gets all it can hold: a model to use, not to train along.
    """
    projections, trained, nests = _projections(run, capacity)
    full = run.progress.state.full
    compacts = {name: held.reduce(full[name]) for name, held in projections.items()}
    counted = None if isinstance(run.data, ImageDataset) else run.data.counted
    return DeviceModel(capacity, projections, compacts, trained, nests, None if counted is None else counted.leading)


def quality(run: OpenRun, device: DeviceModel) -> tuple[str, float, float]:
    """The metric, the device model's value on the test set over all users, and that of the server's model."""
    federation, state, private = run.federation, run.progress.state, run.progress.private
    judge, everybody = Judge(federation, {}), torch.arange(federation.task.num_clients)
    own = judge.value(device.recovered(), private, everybody, [Assignment(device.projections)])
    return judge.metric, own, judge.value(state.full, private, everybody, federation.assignments(state.round_number))


def write_device_model(run: OpenRun, device: DeviceModel, path: Path, measured: tuple[str, float, float]) -> int:
    """Write a device's model with all that is needed to use it; returns the file's size.

    The users' own vectors are not in it where they are private: each device has its own.
    """
    metric, value, server = measured
    metadata = {
        "format": str(FORMAT),
        "fairfold": __version__,
        "capacity": str(device.capacity),
        "trained": json.dumps(device.trained),
        "nests": json.dumps(device.nests),
        "round": str(run.progress.state.round_number),
        "projections": json.dumps({name: facts_of(held) for name, held in device.projections.items()}),
        "quality": json.dumps({"metric": metric, "device": value, "server": server}),
        "settings": run.settings.model_dump_json(),
        "data": json.dumps(run.facts),
    }
    order = {} if device.leading is None else {LEADING: device.leading}
    return int(write_tensors(path, device.compacts | order, metadata)["bytes"])


def read_device_model(path: Path) -> tuple[DeviceModel, dict[str, Any]]:
    """A device's model as written, and what was written with it; needs neither the run nor its data."""
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != str(FORMAT) or "projections" not in metadata:
                raise InvalidCheckpoint(f"{path}", f"a device model of format {FORMAT}", "Export it again.")
            facts = json.loads(metadata["projections"])
            compacts: dict[str, Tensor] = {name: opened.get_tensor(name) for name in facts}
            leading = opened.get_tensor(LEADING) if LEADING in opened.keys() else None  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{path}: {error}", "what `fairfold export` wrote", "Export it again.") from None
    projections = {name: projection_of(values) for name, values in facts.items()}
    told = metadata | {key: json.loads(metadata[key]) for key in ("quality", "settings", "data", "trained", "nests")}
    del told["projections"]
    capacity = Capacity.parse(told["capacity"])
    return DeviceModel(capacity, projections, compacts, told["trained"], told["nests"], leading), told


# -- inside ------------------------------------------------------------------------------------------------------------


def _projections(run: OpenRun, capacity: Capacity) -> tuple[dict[str, Projection], bool, bool]:
    """How each tensor is held, whether such devices took part, and whether they could."""
    federation, settings = run.federation, run.settings
    last_round = max(run.progress.state.round_number - 1, 0)
    held = federation.assignments(last_round)
    if capacity in federation.capacities and settings.method in ("fair", "fedhm", "heterofl"):
        projections = held[federation.capacities.index(capacity)].projections
        assert projections is not None  # these methods serve every capacity
        return projections, True, True
    task, seed, capacity = federation.task, hash_seed(settings, last_round), federation.limited(capacity)
    dense = {name: shape for name, shape in task.shapes.items() if name not in task.compressed}
    if settings.method in ("fedhm", "heterofl"):
        (alone,) = assign(settings, task.compressed, dense, [capacity], seed, task.reads)
    else:
        hashed = settings.model_copy(update={"method": "fair"})
        (alone,) = assign(hashed, task.compressed, dense, [capacity], seed, task.reads)
    assert alone.projections is not None
    projections, nests = dict(alone.projections), True
    one_tail = settings.mapping == "ranked" and settings.tail_share is not None
    for name in task.compressed:
        chain = _chain(federation, held, name)
        found = _on_chain(chain, capacity, one_tail) if chain else None
        if found is not None:
            projections[name] = Hashed(task.compressed[name], found)
        nests = nests and (found is not None or not chain)
    everywhere_full = all(one.size == prod(one.shape) for one in projections.values())
    return projections, everywhere_full and settings.method in ("fedavg", "full_trn"), nests


def _chain(federation: Federation, held: list[Assignment], name: str) -> list[Subspace]:
    """The proper subspaces of a tensor that devices of the run have held."""
    if federation.settings.method in ("fedhm", "heterofl"):
        return []
    found = [assignment.projections[name] for assignment in held if assignment.projections is not None]
    return [held.subspace for held in found if isinstance(held, Hashed) and not held.subspace.is_full]


def _on_chain(chain: list[Subspace], capacity: Capacity, one_tail: bool) -> Subspace | None:
    """The largest subspace within a capacity that nests with those of the chain.

    Their sizes, doubled or halved; or, where all have one tail, that tail and all that is left to own.
    """
    known = min(chain, key=lambda subspace: subspace.size)
    limit = capacity.limit(known.full_size)
    if limit >= known.full_size:
        return Subspace(known.full_size, known.full_size)
    size, head = known.size, 0
    if one_tail:
        head = (limit - known.layout.tail) // known.chunk * known.chunk
        if head <= 0:
            return None
        size = head + known.layout.tail
    else:
        unit = known.chunk * (2 if known.mapping == "ranked" else 1)
        while 2 * size <= limit:
            size *= 2
        while size > limit and size % (2 * unit) == 0:
            size //= 2
        if size > limit:
            return None
    return Subspace(known.full_size, size, known.seed, known.mapping, known.chunk, head, sign=known.sign)
