"""What a cell can be: a federation, reference rows, the corollary's convex case, device memory.

A *kind* checks a cell's settings, says what identifies its data, and runs it. New kinds join :data:`KINDS`.
"""

import shutil
import time
from abc import ABC, abstractmethod
from functools import cache
from json import dumps, loads
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from fairfold.errors import InvalidCapacity, InvalidCheckpoint, InvalidSettings
from fairfold.kernels import gpu
from fairfold.reproduce.fedrec import RIVALS, FedRecSettings
from fairfold.reproduce.fedrec import measured as measured_fedrec
from fairfold.reproduce.memory import MemorySettings, Tell, measured
from fairfold.reproduce.newest import newest_left_out
from fairfold.reproduce.records import Outcome
from fairfold.settings import Settings, merged, read_settings
from fairfold.settings.parts import RATING_MODELS
from fairfold.simulate.convex import ConvexFederation, fitted_slope
from fairfold.simulate.result import RoundReport
from fairfold.subspace import Capacity
from fairfold.trackers import Callback

Values = dict[str, Any]


class Kind(ABC):
    """One kind of cell."""

    def settings(self, values: Values) -> Any:
        """What the values say; refused where this kind cannot use them."""
        return read_settings(values)

    def meaning(self, values: Values) -> Values:
        """The same for settings that mean the same, however they are written."""
        return values

    def relevant(self, values: Values) -> Values:
        """The settings that decide what a cell trains on and how it is judged, hence its reference rows."""
        settings = read_settings(values)
        if settings.model.reads_images:
            return {"data": {"name": settings.data.name}, "model": {"kind": settings.model.kind}}
        found: Values = {"data": settings.data.effective(changed=True)}
        if settings.predicts_ratings:
            return found | {"model": {"kind": RATING_MODELS[0]}}  # of one that does: the same ratings for all
        top = settings.run.top
        return found | ({} if top == type(settings.run).model_fields["top"].default else {"run": {"top": top}})

    def data(self, values: Values) -> dict[str, Any]:
        """What identifies the data; an :class:`InvalidData` that says what to put where if it is not at hand."""
        return data_facts_of(dumps(self.relevant(values), sort_keys=True))

    def on_gpu(self, values: Values) -> bool:  # noqa: ARG002
        """Whether it works on a GPU on this machine."""
        return False

    def needs(self, values: Values) -> str:  # noqa: ARG002
        """What its cells compete for: cells that name the same are not all started at once."""
        return "a core"

    def work(self, values: Values) -> float:  # noqa: ARG002
        """How long it takes beside others that need the same, in any unit, known without running it."""
        return 1.0

    @abstractmethod
    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:
        """Run it; ``folder`` is its own, for what it needs to go on after an interruption."""


@cache
def data_facts_of(values: str) -> dict[str, Any]:
    """Counts and checksum of what settings train on; the synthetic world follows from its settings alone."""
    from fairfold.runs.checkpoint import data_facts
    from fairfold.simulate.world import load_data

    settings = read_settings(loads(values))
    return {} if settings.data.kind == "synthetic" else data_facts(load_data(settings)[0])


class _Federated(Kind):
    """``fairfold train``: the values are its settings."""

    def meaning(self, values: Values) -> Values:
        """What differs from the defaults; so settings to come leave kept cells as they are."""
        found = read_settings(values).plain(changed=True)
        found["run"].pop("seed", None)
        return found

    def on_gpu(self, values: Values) -> bool:
        settings = read_settings(values)
        return _fits_gpu(settings) and settings.run.device != "cpu" and gpu.available()

    def needs(self, values: Values) -> str:
        settings = read_settings(values)
        if not _fits_gpu(settings):
            return super().needs(values)
        return "a GPU for images" if settings.algorithm.images else "a GPU for tables"

    def work(self, values: Values) -> float:
        """Epochs that clients train one after another."""
        settings = read_settings(values)
        return float(settings.run.rounds * getattr(settings.algorithm, "local_epochs", 1))

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:
        from fairfold.runs.train import run

        settings = read_settings(merged(values, {"run": {"seed": seed}}))
        try:
            try:
                finished = run(settings, folder, resume=(folder / "settings.toml").exists(), callbacks=[_Ticks(tell)])
            except InvalidCheckpoint:  # of other settings, or damaged beyond use: nothing in it is of use
                shutil.rmtree(folder)
                finished = run(settings, folder, callbacks=[_Ticks(tell)])
        except InvalidCapacity as error:
            return Outcome("N/A", error.needed.removeprefix("a capacity it can serve (N/A: ").removesuffix(")"))
        result, rounds = finished.result, max(len(finished.result.history), 1)
        facts = {
            "metric": result.metric,
            "users": result.users,
            "seconds a round": sum(report.seconds for report in result.history) / rounds,
            "bytes a round": sum(report.bytes_down + report.bytes_up for report in result.history) / rounds,
            "devices": {
                group.capacity: {
                    "users": group.users, "numbers held": group.size, "bytes down": group.bytes_down,
                    "bytes up": group.bytes_up, "quality": group.quality, "everybody": group.everybody,
                }
                for group in result.groups
            },
            "rejections": dict(result.rejections),
        }  # fmt: skip
        curve = [(float(one.round_number), one.quality.server) for one in result.history if one.quality is not None]
        return Outcome.of_curve(curve, result.metric, seconds=finished.seconds, facts=facts)


def _fits_gpu(settings: Settings) -> bool:
    """Whether rounds can run on a GPU, by the settings alone: :func:`fairfold.simulate.run.on_gpu` without a plan."""
    algorithm = settings.algorithm
    steps = getattr(algorithm, "steps", False) and not getattr(algorithm, "prox", 0.0)
    return bool(steps) and not settings.model.own and settings.run.backend == "batched"


class _Ticks(Callback):
    """Tells how many rounds are done."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._rounds = tell, 1

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:  # noqa: ARG002
        self._rounds = settings.run.rounds
        self._tell(first_round - 1, self._rounds)

    def on_round(self, report: RoundReport) -> None:
        self._tell(report.round_number, self._rounds)


class _References(Kind):
    """What needs no federation and no training: popularity, neighbours, SVD, ridge; means for ratings."""

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:  # noqa: ARG002
        from fairfold.metrics.reference_rows import ranking_rows, rating_rows
        from fairfold.simulate.world import load_interactions

        settings = read_settings(values)
        data, _ = load_interactions(settings)
        rated = settings.predicts_ratings
        started, found, tried = time.monotonic(), dict[str, Any](), dict[str, Any]()
        for reference in rating_rows(data) if rated else ranking_rows(data, settings.run.top):
            found[reference.name] = reference.value
            if reference.tried:
                tried[reference.name] = {f"{value:g}": ndcg for value, ndcg in reference.tried.items()}
            tell(len(found), 6)
        metric = "MSE" if rated else f"NDCG@{settings.run.top}"
        facts = {"references": found, "tried on held-out training data": tried, "metric": metric}
        return Outcome(seconds=time.monotonic() - started, facts=facts)


class _Made(Kind):
    """A kind whose settings are a dataclass, and whose data is made from these and the seed."""

    def __init__(self, name: str, form: type) -> None:
        self._name, self._form = name, form

    def settings(self, values: Values) -> Any:
        try:
            return self._form(**values)
        except TypeError as error:
            needed = f"keys of {self._form.__name__}"
            raise InvalidSettings(f"{self._name}: {error}", needed, "Check the spelling.") from None

    def data(self, values: Values) -> dict[str, Any]:  # noqa: ARG002
        return {}


class _Convex(_Made):
    """Homogeneous FAIR on strongly convex least squares: the slope of log error over log rounds, −1 for O(1/T)."""

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:  # noqa: ARG002
        given: ConvexFederation = self.settings(values)
        started, runs, rounds = time.monotonic(), list[list[float]](), sorted(given.rounds)
        for number in range(given.problems):
            runs.append(given.errors(seed * given.problems + number))
            tell(number + 1, given.problems)
        errors = [mean(of_round) for of_round in zip(*runs, strict=True)]
        return Outcome.of_value(
            fitted_slope(rounds, errors), float(rounds[-1]), curve=tuple(zip(map(float, rounds), errors, strict=True)),
            seconds=time.monotonic() - started, facts={"metric": "slope", "curve": "F(θ_T) − F*"},
        )  # fmt: skip


class _Memory(_Made):
    """The largest compression a method can serve, found by asking it, and the measured memory of such a device."""

    def settings(self, values: Values) -> Any:
        found = super().settings(values)
        found.method()
        return found

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:  # noqa: ARG002
        started = time.monotonic()
        most, facts = measured(self.settings(values), tell)
        return Outcome.of_value(most, 0.0, seconds=time.monotonic() - started, facts=facts)


class _FedRec(_Made):
    """A federated recommender of the literature, or ours, or a reference, with one item per user left out by time."""

    def data(self, values: Values) -> dict[str, Any]:
        from fairfold.runs.checkpoint import data_facts

        return data_facts(newest_left_out(self.settings(values).data))

    def on_gpu(self, values: Values) -> bool:
        """Rivals train on a GPU where there is one."""
        return self.settings(values).method in RIVALS and torch.cuda.is_available()

    def work(self, values: Values) -> float:
        return float(self.settings(values).rounds)

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:  # noqa: ARG002
        facts = measured_fedrec(self.settings(values), seed, tell)
        seconds = facts.pop("measured in seconds")
        facts["measures"]["seconds"] = seconds
        return Outcome.of_value(facts["measures"]["NDCG@10"], 0.0, seconds=seconds, facts=facts)


KINDS: dict[str, Kind] = {
    "federated": _Federated(),
    "references": _References(),
    "convex": _Convex("convex", ConvexFederation),
    "memory": _Memory("memory", MemorySettings),
    "fedrec": _FedRec("fedrec", FedRecSettings),
}
