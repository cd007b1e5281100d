"""The model of a device of any size, from one server's checkpoint, and the file it is sent as."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidCheckpoint
from fairfold.projections import Assignment, Projection, facts_of, projection_of
from fairfold.projections.coded import CodedRows
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import State
from fairfold.runs.federated import catalogue_of
from fairfold.runs.opened import OpenRun
from fairfold.runs.tensors import read_values, write_sealed
from fairfold.sealed import reading
from fairfold.settings import Settings
from fairfold.settings.parts import DeviceData
from fairfold.simulate.result import Judge, RoundReport
from fairfold.subspace import Capacity
from fairfold.values import BYTES, Weights
from fairfold.version import __version__

FORMAT = 6
AGAIN = "Export it again."

PLAIN = ("projections", "quality", "settings", "data", "trained", "nests")
"""What is written beside the tensors as plain values."""

Measured = tuple[str, float | None, float | None]

LEADING = "leading"
"""Name of the items that come first, beside the tensors of a device."""


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {projection.size:,}" for name, projection in self.projections.items())
        return f"<fairfold.DeviceModel of {self.capacity}: {self.size:,} numbers ({held})>"

    def stored(self) -> Weights:
        """The same as it is written to a file."""
        return {name: held.packed(self.compacts[name]) for name, held in self.projections.items()}

    def recovered(self) -> Weights:
        """The full tensors these stand for."""
        return {name: held.recover(self.compacts[name]) for name, held in self.projections.items()}


def device_model(run: OpenRun, capacity: Capacity) -> DeviceModel:
    """The server's model, reduced to a capacity: see :func:`reduced_to`."""
    data = run.world.data
    counted = None if isinstance(data, ImageDataset) else data.counted
    return reduced_to(capacity, run.plan, run.progress.state, None if counted is None else counted.leading)


def reduced_to(capacity: Capacity, plan: Plan, state: State, leading: Tensor | None = None) -> DeviceModel:
    """The model of a state, reduced to a capacity, under a plan that is settled.

    A capacity that did not take part gets a size on the run's own chain, so that such a device could join; where the
    chain has none that small, it gets all it can hold: a model to use, not to train along. Where real devices have
    numbered the items, the state knows how.
    """
    projections, trained, nests = plan.at(capacity, max(state.round_number - 1, 0))
    compacts = {name: held.reduce(state.full[name]) for name, held in projections.items()}
    order = catalogue_of(state)
    leading = leading if order is None else _leading(order, projections)
    return DeviceModel(capacity, projections, compacts, trained, nests, leading)


def _leading(order: Tensor, projections: dict[str, Projection]) -> Tensor | None:
    """The catalogue's numbers of the items that come first: all others follow in the catalogue's order, or unscored.

    None where these are more than the model itself: a device has nothing of the size of the catalogue.
    """
    falls = (order[:-1] > order[1:]).nonzero()
    first = int(falls[-1]) + 1 if len(falls) else 0
    rows = [held.shape[0] for held in projections.values() if isinstance(held, CodedRows)]
    first = max(rows, default=first)
    return order[:first].to(torch.int32) if rows or BYTES * first <= Assignment(projections).bytes() else None


def quality(run: OpenRun, device: DeviceModel) -> tuple[str, float | None, float | None]:
    """The metric, the device model's value on the test set over all users, and that of the server's model.

    Where the data lies on devices it is what these said last, each of the model of its size; None of another size.
    """
    if isinstance(run.settings.data, DeviceData):
        return said_quality(run.plan, run.progress.history, device.capacity)
    judge = Judge(run.world, {})
    own = judge.value(device.recovered(), judge.everybody, [Assignment(device.projections)])
    return judge.metric, own, judge.value(run.progress.state.full, judge.everybody, run.assignments)


def said_quality(
    plan: Plan, history: Sequence[RoundReport], capacity: Capacity
) -> tuple[str, float | None, float | None]:
    """The same as devices said it last, after some round."""
    last = next((report.quality for report in reversed(history) if report.quality is not None), None)
    if last is None:
        return plan.settings.metric, None, None
    mine = last.groups[plan.capacities.index(capacity)] if capacity in plan.capacities else None
    return plan.settings.metric, mine, last.server


def write_device_model(run: OpenRun, device: DeviceModel, path: Path, measured: Measured) -> int:
    """Write a device's model with all that is needed to use it; returns the file's size.

    The users' own vectors are not in it where they are private: each device has its own.
    """
    content = contents(device, run.settings, run.progress.state, run.facts, measured)
    return int(write_sealed(path, *content)["bytes"])


def contents(
    device: DeviceModel, settings: Settings, state: State, facts: dict[str, Any], measured: Measured
) -> tuple[Weights, dict[str, str]]:
    """The tensors of such a file, and what is written with them."""
    metric, value, server = measured
    metadata = {
        "format": str(FORMAT),
        "fairfold": __version__,
        "capacity": str(device.capacity),
        "trained": json.dumps(device.trained),
        "nests": json.dumps(device.nests),
        "round": str(state.round_number),
        "projections": json.dumps({name: facts_of(held) for name, held in device.projections.items()}),
        "quality": json.dumps({"metric": metric, "device": value, "server": server}),
        "settings": json.dumps(settings.plain()),
        "data": json.dumps(facts),
    }
    order = {} if device.leading is None else {LEADING: device.leading}
    return device.stored() | order, metadata


def read_device_model(path: Path) -> tuple[DeviceModel, dict[str, Any]]:
    """The model of a device as `fairfold export` wrote it, and its metadata; needs neither the run nor its data.

    Example:
        >>> import fairfold, tempfile
        >>> readings = [(reader, book) for reader in range(20) for book in range(reader % 5, 40, 2)]
        >>> model = fairfold.fit(readings, "1x-4x", rounds=2, progress=False)
        >>> path = Path(tempfile.mkdtemp()) / "small.safetensors"
        >>> _ = model.export("4x", path)
        >>> device, told = read_device_model(path)
        >>> str(device.capacity), told["quality"]["metric"]
        ('4x', 'NDCG@20')
    """
    tensors, told = read_values(path, AGAIN, version=FORMAT)
    with reading(path, InvalidCheckpoint, "a device model", AGAIN):
        values: dict[str, Any] = told | {key: json.loads(told[key]) for key in PLAIN}
        projections = {name: projection_of(facts) for name, facts in values.pop("projections").items()}
        leading = tensors.pop(LEADING, None)
        capacity = Capacity.parse(values["capacity"])
        tensors = {name: held.unpacked(tensors[name]) for name, held in projections.items()}
    return DeviceModel(capacity, projections, tensors, values["trained"], values["nests"], leading), values
