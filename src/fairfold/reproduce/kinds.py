"""What a cell can be: a federation, reference rows, the corollary's convex case, device memory.

A *kind* checks a cell's settings, says what identifies its data, and runs it. New kinds join :data:`KINDS`.
"""

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from json import dumps, loads
from pathlib import Path
from statistics import mean
from typing import Any

from fairfold.errors import FairfoldError, InvalidCapacity, InvalidCheckpoint, InvalidData, InvalidSettings
from fairfold.kernels import gpu
from fairfold.reproduce.outcome import Outcome
from fairfold.runs.callbacks import Callback
from fairfold.settings import Settings, merged, read_settings
from fairfold.settings.parts import RATING_MODELS
from fairfold.simulate.result import RoundReport
from fairfold.subspace import Capacity

Values = dict[str, Any]
Tell = Callable[[int, int], None]
"""Told how far a cell is: what is done, of how much."""


class Kind(ABC):
    """One kind of cell."""

    @abstractmethod
    def check(self, values: Values) -> None:
        """Refuse settings that this kind cannot use."""

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
        """Run it.

        Args:
            values: Its settings.
            seed: Of everything random.
            folder: Its own, for what it needs to go on after an interruption.
            tell: Told how far it is.
        """


@cache
def data_facts_of(values: str) -> dict[str, Any]:
    """Counts and checksum of what settings train on; the synthetic world follows from its settings alone."""
    from fairfold.runs.checkpoint import data_facts
    from fairfold.simulate.world import load_data

    settings = read_settings(loads(values))
    return {} if settings.data.kind == "synthetic" else data_facts(load_data(settings)[0])


class Federated(Kind):
    """``fairfold train``: the values are its settings."""

    def check(self, values: Values) -> None:
        """See the base class."""
        self.settings(values, 0)

    def meaning(self, values: Values) -> Values:
        """What differs from the defaults; so settings to come leave kept cells as they are."""
        found = self.settings(values, 0).plain(changed=True)
        found["run"].pop("seed", None)
        return found

    def on_gpu(self, values: Values) -> bool:
        """See the base class."""
        settings = self.settings(values, 0)
        return _fits_gpu(settings) and settings.run.device != "cpu" and gpu.available()

    def needs(self, values: Values) -> str:
        """See the base class."""
        settings = self.settings(values, 0)
        if not _fits_gpu(settings):
            return super().needs(values)
        return "a GPU for images" if settings.algorithm.images else "a GPU for tables"

    def work(self, values: Values) -> float:
        """Epochs that clients train one after another."""
        settings = self.settings(values, 0)
        return float(settings.run.rounds * getattr(settings.algorithm, "local_epochs", 1))

    def settings(self, values: Values, seed: int) -> Settings:
        """Of one run."""
        return read_settings(merged(values, {"run": {"seed": seed}}))

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:
        """See the base class."""
        from fairfold.runs.train import run

        settings = self.settings(values, seed)
        try:
            try:
                finished = run(settings, folder, resume=(folder / "settings.toml").exists(), callbacks=[_Ticks(tell)])
            except InvalidCheckpoint:  # of other settings, or damaged beyond use: nothing in it is of use
                shutil.rmtree(folder)
                finished = run(settings, folder, callbacks=[_Ticks(tell)])
        except InvalidCapacity as error:
            return Outcome("N/A", error.needed.removeprefix("a capacity it can serve (N/A: ").removesuffix(")"))
        result = finished.result
        curve = [(r.round_number, r.quality.server) for r in result.history if r.quality is not None]
        facts = {
            "metric": result.metric,
            "users": result.users,
            "seconds a round": sum(report.seconds for report in result.history) / max(len(result.history), 1),
            "bytes a round": sum(r.bytes_down + r.bytes_up for r in result.history) / max(len(result.history), 1),
            "devices": {
                group.capacity: {
                    "users": group.users, "numbers held": group.size, "bytes down": group.bytes_down,
                    "bytes up": group.bytes_up, "quality": group.quality, "everybody": group.everybody,
                }
                for group in result.groups
            },
            "rejections": dict(result.rejections),
        }  # fmt: skip
        return Outcome.of_curve(
            [(float(number), value) for number, value in curve],
            smaller_is_better=result.metric == "MSE",
            seconds=finished.seconds,
            facts=facts,
        )


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
        """See the base class."""
        self._rounds = settings.run.rounds
        self._tell(first_round - 1, self._rounds)

    def on_round(self, report: RoundReport) -> None:
        """See the base class."""
        self._tell(report.round_number, self._rounds)


class References(Kind):
    """What needs no federation and no training: popularity, neighbours, SVD, ridge; means for ratings."""

    def check(self, values: Values) -> None:
        """See the base class."""
        read_settings(values)

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:  # noqa: ARG002
        """See the base class."""
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


@dataclass(frozen=True)
class ConvexSettings:
    """Of the corollary's case; see :class:`fairfold.simulate.convex.ConvexFederation`.

    The error of a single run is a random number; the corollary is about its mean, taken over ``problems``.
    """

    full_size: int = 40
    size: int = 10
    devices: int = 20
    samples: int = 30
    disagreement: float = 1.0
    strong_convexity: float = 0.5
    clients_per_round: int = 5
    local_steps: int = 5
    rounds: tuple[int, ...] = (50, 100, 200, 400, 800, 1600)
    problems: int = 8


class Convex(Kind):
    """Homogeneous FAIR on strongly convex least squares: the slope of log error over log rounds, −1 for O(1/T)."""

    def check(self, values: Values) -> None:
        """See the base class."""
        self._settings(values)

    def _settings(self, values: Values) -> ConvexSettings:
        try:
            return ConvexSettings(**values)
        except TypeError as error:
            raise InvalidSettings(f"convex: {error}", "keys of ConvexSettings", "Check the spelling.") from None

    def data(self, values: Values) -> dict[str, Any]:  # noqa: ARG002
        """Made from the seed."""
        return {}

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:  # noqa: ARG002
        """See the base class."""
        from dataclasses import asdict

        from fairfold.simulate.convex import ConvexFederation, fitted_slope

        given = asdict(self._settings(values))
        rounds, problems = sorted(given.pop("rounds")), given.pop("problems")
        draws = {key: given.pop(key) for key in ("clients_per_round", "local_steps")}
        started, runs = time.monotonic(), list[list[float]]()
        for number in range(problems):
            runs.append(ConvexFederation(**given, seed=seed * problems + number).errors(rounds, **draws))
            tell(number + 1, problems)
        errors = [mean(of_round) for of_round in zip(*runs, strict=True)]
        slope = fitted_slope(rounds, errors)
        return Outcome(
            best=slope, best_round=float(rounds[-1]), last=slope, last_round=float(rounds[-1]),
            curve=tuple(zip(map(float, rounds), errors, strict=True)),
            seconds=time.monotonic() - started, facts={"metric": "slope", "curve": "F(θ_T) − F*"},
        )  # fmt: skip


class Memory(Kind):
    """The largest compression a method can serve, found by asking it, and the measured memory of such a device."""

    def check(self, values: Values) -> None:
        """See the base class."""
        from fairfold.reproduce.memory import MemorySettings

        try:
            MemorySettings(**values).method()
        except TypeError as error:
            raise InvalidSettings(f"memory: {error}", "keys of MemorySettings", "Check the spelling.") from None

    def data(self, values: Values) -> dict[str, Any]:  # noqa: ARG002
        """None."""
        return {}

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:  # noqa: ARG002
        """See the base class."""
        from fairfold.reproduce.memory import MemorySettings, measured

        started = time.monotonic()
        most, facts = measured(MemorySettings(**values), tell)
        seconds = time.monotonic() - started
        return Outcome(best=most, best_round=0.0, last=most, last_round=0.0, seconds=seconds, facts=facts)


KINDS: dict[str, Kind] = {"federated": Federated(), "references": References(), "convex": Convex(), "memory": Memory()}


def run_kind(kind: str, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:
    """Run a cell; data that is not at hand is an outcome, not an error."""
    try:
        return KINDS[kind].run(values, seed, folder, tell)
    except InvalidData as error:
        return no_data(error)


def no_data(error: FairfoldError) -> Outcome:
    """The outcome of a cell whose data is not at hand: what to put where."""
    return Outcome("no data", str(error))
