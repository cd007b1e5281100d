"""The model of a device of any size, from one server's checkpoint, and the file it is sent as."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidCheckpoint
from fairfold.projections import Assignment, Projection, facts_of, projection_of
from fairfold.runs.opened import OpenRun
from fairfold.runs.tensors import read_values, write_sealed
from fairfold.sealed import reading
from fairfold.simulate.result import Judge
from fairfold.subspace import Capacity
from fairfold.values import Weights
from fairfold.version import __version__

FORMAT = 3
AGAIN = "Export it again."

PLAIN = ("projections", "quality", "settings", "data", "trained", "nests")
"""What is written beside the tensors as plain values."""

LEADING = "leading"
"""Name of the items that come first, beside the tensors of a device."""


@dataclass(frozen=True)
class DeviceModel:
    """What a device of one capacity holds.

    Where items are numbered by a count, ``leading`` has the catalogue's numbers of those that come first
    (:mod:`fairfold.data.counted` finds the rank of any item by it).
    """

    capacity: Capacity
    projections: dict[str, Projection]  # how each tensor is held
    compacts: Weights  # what is held
    trained: bool = False  # whether devices of this capacity took part in the run
    nests: bool = True  # whether they could: its subspaces nest with those of the run
    leading: Tensor | None = None

    @property
    def size(self) -> int:
        """Numbers held."""
        return sum(projection.size for projection in self.projections.values())

    def stored(self) -> Weights:
        """The same as it is written to a file."""
        return {name: held.packed(self.compacts[name]) for name, held in self.projections.items()}

    def recovered(self) -> Weights:
        """The full tensors these stand for."""
        return {name: held.recover(self.compacts[name]) for name, held in self.projections.items()}


def device_model(run: OpenRun, capacity: Capacity) -> DeviceModel:
    """The server's model, reduced to a capacity.

    A capacity that did not take part gets a size on the run's own chain, so that such a device could join; where the
    chain has none that small, it gets all it can hold: a model to use, not to train along.
    """
    projections, trained, nests = run.plan.at(capacity, run.last_round)
    full, data = run.progress.state.full, run.world.data
    compacts = {name: held.reduce(full[name]) for name, held in projections.items()}
    counted = None if isinstance(data, ImageDataset) else data.counted
    return DeviceModel(capacity, projections, compacts, trained, nests, None if counted is None else counted.leading)


def quality(run: OpenRun, device: DeviceModel) -> tuple[str, float, float]:
    """The metric, the device model's value on the test set over all users, and that of the server's model."""
    judge = Judge(run.world, {})
    own = judge.value(device.recovered(), judge.everybody, [Assignment(device.projections)])
    return judge.metric, own, judge.value(run.progress.state.full, judge.everybody, run.assignments)


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
        "settings": json.dumps(run.settings.plain()),
        "data": json.dumps(run.facts),
    }
    order = {} if device.leading is None else {LEADING: device.leading}
    return int(write_sealed(path, device.stored() | order, metadata)["bytes"])


def read_device_model(path: Path) -> tuple[DeviceModel, dict[str, Any]]:
    """A device's model as written, and what was written with it; needs neither the run nor its data."""
    tensors, told = read_values(path, AGAIN, version=FORMAT)
    with reading(path, InvalidCheckpoint, "a device model", AGAIN):
        values: dict[str, Any] = told | {key: json.loads(told[key]) for key in PLAIN}
        projections = {name: projection_of(facts) for name, facts in values.pop("projections").items()}
        leading = tensors.pop(LEADING, None)
        capacity = Capacity.parse(values["capacity"])
        tensors = {name: held.unpacked(tensors[name]) for name, held in projections.items()}
    return DeviceModel(capacity, projections, tensors, values["trained"], values["nests"], leading), values
