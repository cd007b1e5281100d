"""Models of devices of any capacity, reduced from a server's checkpoint, and their files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairfold import __version__
from fairfold.checksums import read_errors
from fairfold.config import Settings
from fairfold.config.tables import DeviceData
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidCheckpoint
from fairfold.federation.evaluation import Evaluator, RoundReport
from fairfold.federation.plan import Plan
from fairfold.federation.updates import State
from fairfold.runs.loaded import LoadedRun, catalog_order
from fairfold.runs.tensors import read_checked_tensors, write_checked_tensors
from fairfold.subspace import Capacity
from fairfold.subspace.packed import QuantizedRows
from fairfold.subspace.projection import Assignment, Projection, describe_projection, make_projection
from fairfold.typing import FLOAT_BYTES, Weights

FORMAT = 8  # version of device model files
REMEDY = "Export it again."
JSON_KEYS = ("projections", "quality", "settings", "data", "trained", "nests")  # metadata that are JSON
Measured = tuple[str, float | None, float | None]  # A metric, the quality of a device's model and that of the server's
LEADING_BYTES = 1 << 20  # that a list of leading items may always take: without it a device cannot name its items
LEADING = "leading"  # key of the tensor of leading items


@dataclass(frozen=True, repr=False)
class DeviceModel:
    """Model of a device of one capacity, in its subspace."""

    capacity: Capacity
    projections: dict[str, Projection]  # subspace of each tensor
    compacts: Weights  # reduced tensors
    trained: bool = False  # whether devices of this capacity took part in the run
    nests: bool = True  # whether they could: its subspaces nest with those of the run
    leading: Tensor | None = None  # most popular items, if items were counted: see interactions.PopularityCounts

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(projection.size for projection in self.projections.values())

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {projection.size:,}" for name, projection in self.projections.items())
        return f"<fairfold.DeviceModel of {self.capacity}: {self.size:,} numbers ({held})>"

    def stored(self) -> Weights:
        """Tensors in their packed form, for a file."""
        return {name: held.packed(self.compacts[name]) for name, held in self.projections.items()}

    def recovered(self) -> Weights:
        """The full tensors that the device's compact ones stand for."""
        return {name: held.recover(self.compacts[name]) for name, held in self.projections.items()}


def device_model(run: LoadedRun, capacity: Capacity) -> DeviceModel:
    """Reduce the model of a run to a capacity: see :func:`reduce_model`."""
    data = run.federation.data
    counted = None if isinstance(data, ImageDataset) else data.counted
    return reduce_model(capacity, run.plan, run.progress.state, None if counted is None else counted.leading)


def reduce_model(capacity: Capacity, plan: Plan, state: State, leading: Tensor | None = None) -> DeviceModel:
    """Reduce the server's model to a capacity, under a resolved plan.

    A capacity that did not take part gets a size on the run's own chain, so that such a device could join; where the
    chain has none that small, it gets all it can hold: a model to use, not to train.
    """
    projections, trained, nests = plan.assignment_for(capacity, max(state.round_number - 1, 0))
    compacts = {name: held.reduce(state.full[name]) for name, held in projections.items()}
    order = catalog_order(state)
    leading = leading if order is None else _leading(order, projections)
    return DeviceModel(capacity, projections, compacts, trained, nests, leading)


def _leading(order: Tensor, projections: dict[str, Projection]) -> Tensor | None:
    """Catalog numbers of the leading items; None where these take more memory than the model and a megabyte."""
    falls = (order[:-1] > order[1:]).nonzero()
    first = int(falls[-1]) + 1 if len(falls) else 0
    rows = [held.shape[0] for held in projections.values() if isinstance(held, QuantizedRows)]
    first = max(rows, default=first)
    room = max(Assignment(projections).bytes(), LEADING_BYTES)
    return order[:first].to(torch.int32) if rows or FLOAT_BYTES * first <= room else None


def device_quality(run: LoadedRun, device: DeviceModel) -> Measured:
    """Evaluate a device's model and the server's on the test set, or take what devices with the data reported last."""
    if isinstance(run.settings.data, DeviceData):
        return reported_quality(run.plan, run.progress.history, device.capacity)
    evaluator = Evaluator(run.federation, {})
    value = evaluator.value(device.recovered(), evaluator.all_users, [Assignment(device.projections)])
    return evaluator.metric, value, evaluator.value(run.progress.state.full, evaluator.all_users, run.assignments)


def reported_quality(plan: Plan, history: Sequence[RoundReport], capacity: Capacity) -> Measured:
    """Quality of a capacity's model (None if it did not take part) and of the server's, as last reported by devices."""
    last = next((report.quality for report in reversed(history) if report.quality is not None), None)
    if last is None:
        return plan.settings.metric, None, None
    value = last.groups[plan.capacities.index(capacity)] if capacity in plan.capacities else None
    return plan.settings.metric, value, last.server


def write_device_model(run: LoadedRun, device: DeviceModel, path: Path, measured: Measured) -> int:
    """Write a device's model with all that is needed to use it, without local state; return the file's size."""
    content = device_file_contents(device, run.plan.resolved_settings, run.progress.state, run.facts, measured)
    return int(write_checked_tensors(path, *content)["bytes"])


def device_file_contents(
    device: DeviceModel, settings: Settings, state: State, facts: dict[str, Any], measured: Measured
) -> tuple[Weights, dict[str, str]]:
    """Tensors and metadata of a device model file."""
    metric, value, server = measured
    metadata = {
        "format": str(FORMAT),
        "fairfold": __version__,
        "capacity": str(device.capacity),
        "trained": json.dumps(device.trained),
        "nests": json.dumps(device.nests),
        "round": str(state.round_number),
        "projections": json.dumps({name: describe_projection(held) for name, held in device.projections.items()}),
        "quality": json.dumps({"metric": metric, "device": value, "server": server}),
        "settings": json.dumps(settings.plain()),
        "data": json.dumps(facts),
    }
    leading = {} if device.leading is None else {LEADING: device.leading}
    return device.stored() | leading, metadata


def read_device_model(path: Path) -> tuple[DeviceModel, dict[str, Any]]:
    """Read a device model and its metadata; needs neither the run nor its data.

    Example:
        >>> import fairfold, tempfile
        >>> readings = [(reader, book) for reader in range(20) for book in range(reader % 5, 40, 2)]
        >>> model = fairfold.fit(readings, "1x-4x", rounds=2, progress=False)
        >>> path = Path(tempfile.mkdtemp()) / "small.safetensors"
        >>> _ = model.export("4x", path)
        >>> device, metadata = read_device_model(path)
        >>> str(device.capacity), metadata["quality"]["metric"]
        ('4x', 'NDCG@20')
    """
    tensors, metadata = read_checked_tensors(path, REMEDY, version=FORMAT)
    with read_errors(path, InvalidCheckpoint, "a device model", REMEDY):
        values: dict[str, Any] = metadata | {key: json.loads(metadata[key]) for key in JSON_KEYS}
        projections = {name: make_projection(facts) for name, facts in values.pop("projections").items()}
        leading = tensors.pop(LEADING, None)
        capacity = Capacity.parse(values["capacity"])
        tensors = {name: held.unpacked(tensors[name]) for name, held in projections.items()}
    return DeviceModel(capacity, projections, tensors, values["trained"], values["nests"], leading), values
