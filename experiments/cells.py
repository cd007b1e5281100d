"""What cells of several kinds run: federations, federations with partial popularity counts, and device memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.combine import pack_per_user
from experiments.records import Outcome
from fairfold.algorithms.gradient import GradientAlgorithm
from fairfold.config import Settings, read_settings
from fairfold.data import Dataset
from fairfold.data.interactions import PopularityCounts
from fairfold.data.sampling import generator
from fairfold.errors import InvalidCapacity, InvalidSettings
from fairfold.federation.evaluation import Callback, Result, RoundReport
from fairfold.federation.federation import load_unnumbered
from fairfold.federation.simulation import simulate
from fairfold.methods import Method
from fairfold.methods.base import Tensors
from fairfold.nn import footprint
from fairfold.subspace import Capacity
from fairfold.subspace.blocks import KeptColumns, LowRank
from fairfold.subspace.projection import Hashed

ORDER = 6
"""Purpose of the random choice of counted users."""


def outcome_of_run(result: Result, seconds: float) -> Outcome:
    """Outcome of a run: quality over rounds, costs and quality by size, and quality by user."""
    rounds = max(len(result.history), 1)
    facts = {
        "metric": result.metric,
        "users": result.users,
        "seconds a round": sum(report.seconds for report in result.history) / rounds,
        "bytes a round": sum(report.bytes_down + report.bytes_up for report in result.history) / rounds,
        "devices": {
            group.capacity: {
                "users": group.users, "numbers held": group.size, "bytes held": group.bytes_held,
                "bytes down": group.bytes_down, "bytes up": group.bytes_up, "quality": group.quality,
                "everybody": group.everybody,
            }
            for group in result.groups
        },
        "rejections": dict(result.rejections),
        "notes": result.notes,
    }  # fmt: skip
    curve = [(float(one.round_number), one.quality.server) for one in result.history if one.quality is not None]
    by_user = {f"size {capacity}": each for capacity, each in result.group_by_user.items()}
    outcome = Outcome.of_curve(curve, result.metric, seconds=seconds, facts=facts)
    outcome.by_user.update(_of_server(outcome, result.by_user))
    outcome.by_user.update({name: pack_per_user(each.numpy()) for name, each in by_user.items()})
    return outcome


def _of_server(outcome: Outcome, known: Mapping[int, Tensor]) -> dict[str, str]:
    """Quality by user of the best and the last evaluation; empty if an interrupted run made one of them."""
    rounds = {"best": outcome.best_round, "last": outcome.last_round}
    if not all(number in known for number in rounds.values()):
        return {}
    return {name: pack_per_user(known[int(number or 0)].numpy()) for name, number in rounds.items()}


def run_with_partial_counts(settings: Settings, share: float, callback: Callback) -> Outcome:
    """Run a federation whose item counts come from a share of the users."""
    started = time.monotonic()
    data = with_partial_counts(load_unnumbered(settings)[0], share, settings.run.seed)
    return outcome_of_run(simulate(settings, data=data, callbacks=[callback]), time.monotonic() - started)


def with_partial_counts(data: Dataset, share: float, seed: int) -> Dataset:
    """Renumber a data set by the counts of a random share of its users; ties in random order."""
    if not 0 < share <= 1:
        raise InvalidSettings(f"order_from = {share}", "above 0 and at most 1", "Take 0.1 for a tenth of the users.")
    many, chance = max(1, round(share * data.num_users)), generator(seed, ORDER)
    chosen = torch.zeros(data.num_users, dtype=torch.bool)
    chosen[torch.randperm(data.num_users, generator=chance)[:many]] = True
    found = torch.bincount(data.train.items[chosen[data.train.users]], minlength=data.num_items)
    counts = (found * (data.num_users / many)).round().long()  # each user stands for several
    order = torch.randperm(data.num_items, generator=chance)  # the given numbers may follow from all counts
    order = order[counts[order].argsort(descending=True, stable=True)]
    return data.renumbered(order.argsort(), PopularityCounts(counts[order], order.to(torch.int32), many, many))


ReportProgress = Callable[[int, int], None]
"""Callback for progress: how much is done, of how much."""


@dataclass(frozen=True)
class MemorySettings:
    """Settings of a memory cell: a table of items × dim."""

    subspace: dict[str, Any]  # the table of a federation's settings: a method and its keys
    items: int = 1_000_000
    dim: int = 32
    compressions: tuple[int, ...] = (1, 8, 31, 32, 1024)  # where memory is measured, as far as the method serves them
    batch: int = 512  # rows looked up at once
    rows: int = 5_000  # rows a round touches

    def method(self) -> Method:
        """The method to measure."""
        averaging = {"kind": "gradient", "aggregation": "paper"}  # which all methods go with
        return read_settings({"algorithm": averaging, "subspace": self.subspace}).subspace


def measured(given: MemorySettings, report: ReportProgress) -> tuple[float, dict[str, Any]]:
    """Largest whole compression that a method serves, and measured bytes by compression."""
    most = largest_compression(given)
    devices: dict[str, Any] = {}
    points = sorted({*(c for c in given.compressions if c <= most), most})
    for number, compression in enumerate(points):
        held = _held(given, compression)
        assert held is not None
        hashed = isinstance(held, Hashed)
        columns = given.dim if hashed else held.size // given.items
        size = held.size if hashed else given.items * columns
        job = footprint.FootprintJob(given.items, columns, size, batch=given.batch, rows=given.rows)
        devices[f"{compression}x"] = {"numbers held": held.size, "measured peak bytes": footprint.measure(job)}
        report(number + 1, len(points))
    whole = f"table of {given.items:,} × {given.dim}"
    return float(most), {"metric": "compression", "table": whole, "devices": devices}


def largest_compression(given: MemorySettings) -> int:
    """Find by bisection the largest compression that a method serves."""
    served, refused = 1, given.items * given.dim + 1
    while refused - served > 1:
        middle = (served + refused) // 2
        if _held(given, middle) is None:
            refused = middle
        else:
            served = middle
    return served


def _held(given: MemorySettings, compression: int) -> Hashed | LowRank | KeptColumns | None:
    """The projection that a device of a capacity holds; None if the method does not serve it."""
    table = Tensors({"item": (given.items, given.dim)}, {})
    try:
        (held,) = given.method().assign(table, [Capacity.parse(f"{compression}x")], 0)
    except InvalidCapacity:
        return None
    assert held.projections is not None
    projection = held.projections["item"]
    assert isinstance(projection, Hashed | LowRank | KeptColumns)
    return projection


class RoundProgress(Callback):
    """Reports how many rounds are done."""

    def __init__(self, report: ReportProgress) -> None:
        self._report, self._rounds = report, 1

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:  # noqa: ARG002
        self._rounds = settings.run.rounds
        self._report(first_round - 1, self._rounds)

    def on_round(self, report: RoundReport) -> None:
        self._report(report.round_number, self._rounds)


def fits_gpu(settings: Settings) -> bool:
    """Whether rounds can run on a GPU, by the settings alone: see ``supports_gpu``."""
    algorithm = settings.algorithm
    steps = isinstance(algorithm, GradientAlgorithm) and algorithm.has_standard_training and not algorithm.prox
    return bool(steps) and not settings.model.is_custom and settings.run.backend == "batched"
