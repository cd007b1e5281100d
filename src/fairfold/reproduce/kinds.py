"""What a cell can be: a federation, reference rows, the corollary's convex case, device memory.

A *kind* checks a cell's settings, says what identifies its data, and runs it. New kinds join :data:`KINDS`.
"""

import shutil
import time
from abc import ABC, abstractmethod
from functools import cache
from itertools import count
from json import dumps, loads
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from fairfold.errors import InvalidCapacity, InvalidCheckpoint, InvalidSettings
from fairfold.kernels import gpu
from fairfold.reproduce.federated import ordered_by_few, outcome_of_run
from fairfold.reproduce.fedrec import RIVALS, FedRecSettings, trials_of
from fairfold.reproduce.fedrec import measured as measured_fedrec
from fairfold.reproduce.fedrec import tried as tried_fedrec
from fairfold.reproduce.memory import MemorySettings, Tell, measured
from fairfold.reproduce.newest import newest_left_out
from fairfold.reproduce.overheard import AUC, OverheardSettings, overheard
from fairfold.reproduce.paired import packed
from fairfold.reproduce.records import Outcome
from fairfold.settings import Settings, merged, read_settings
from fairfold.settings.parts import RATING_MODELS
from fairfold.simulate.convex import ConvexFederation, fitted_slope
from fairfold.simulate.result import RoundReport
from fairfold.subspace import Capacity
from fairfold.trackers import Callback

Values = dict[str, Any]
PLAIN = {"level": "plain"}


class Kind(ABC):
    """One kind of cell."""

    def settings(self, values: Values) -> Any:
        """What the values say; refused where this kind cannot use them."""
        return read_settings(values)

    def meaning(self, values: Values) -> Values:
        """The same for settings that mean the same, however they are written."""
        return values

    def earlier(self, values: Values) -> list[Values]:  # noqa: ARG002
        """What a cell was asked before it was asked for more: such a kept one is shown until the new one is run."""
        return []

    def trials(self, values: Values) -> dict[str, tuple[str, Values]]:  # noqa: ARG002
        """Cells by which a cell chooses settings, by name: their kinds and settings. They are run before it, once."""
        return {}

    def relevant(self, values: Values) -> Values:
        """The settings that decide what a cell trains on and how it is judged, hence its reference rows."""
        settings = self.settings(values)
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

    def run_after(self, values: Values, seed: int, folder: Path, tell: Tell, tried: dict[str, Outcome]) -> Outcome:  # noqa: ARG002
        """The same for a cell that chooses settings by what its trials found, by name."""
        return self.run(values, seed, folder, tell)


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
        found: Values = self.settings(values).plain(changed=True)
        found["run"].pop("seed", None)
        if found.get("privacy") == PLAIN:  # a table that came after the first cells
            del found["privacy"]
        return found

    def on_gpu(self, values: Values) -> bool:
        settings = self.settings(values)
        return _fits_gpu(settings) and settings.run.device != "cpu" and gpu.available()

    def needs(self, values: Values) -> str:
        settings = self.settings(values)
        if not _fits_gpu(settings):
            return super().needs(values)
        return "a GPU for images" if settings.algorithm.images else "a GPU for tables"

    def work(self, values: Values) -> float:
        """Epochs that clients train one after another."""
        settings = self.settings(values)
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
        return outcome_of_run(finished.result, finished.seconds)


def _fits_gpu(settings: Settings) -> bool:
    """Whether rounds can run on a GPU, by the settings alone: :func:`fairfold.simulate.run.on_gpu` without a plan."""
    algorithm = settings.algorithm
    steps = getattr(algorithm, "steps", False) and not getattr(algorithm, "prox", 0.0)
    return bool(steps) and not settings.model.own and settings.run.backend == "batched"


class _Ordered(_Federated):
    """The same, with items numbered by the counts of a share of the users: ``order_from``."""

    def settings(self, values: Values) -> Any:
        return super().settings(_without(values, "order_from"))

    def meaning(self, values: Values) -> Values:
        return super().meaning(values) | {"order_from": values["order_from"]}

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:  # noqa: ARG002
        settings = read_settings(merged(_without(values, "order_from"), {"run": {"seed": seed}}))
        return ordered_by_few(settings, float(values["order_from"]), _Ticks(tell))


def _without(values: Values, *keys: str) -> Values:
    return {key: value for key, value in values.items() if key not in keys}


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
    """What needs no federation and no training: popularity, neighbours, SVD, ridge, EASE, iALS; means for ratings.

    Beside the settings, ``support`` asks for the same among items that so many users have, and ``head`` for those of a
    model that knows so many of these, and for no others.
    """

    ASKED = ("support", "head")

    def settings(self, values: Values) -> Any:
        return read_settings(_without(values, *self.ASKED))

    def earlier(self, values: Values) -> list[Values]:
        return [_without(values, *self.ASKED)]

    def work(self, values: Values) -> float:  # noqa: ARG002
        """Started first: what is chosen by trials takes long."""
        return 1e6

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:  # noqa: ARG002
        from fairfold.metrics.reference_rows import ranking_rows, rating_rows, rows_beside
        from fairfold.simulate.world import load_interactions

        settings, (support, head) = self.settings(values), (int(values.get(key, 0)) for key in self.ASKED)
        data, _ = load_interactions(settings)
        rated, top = settings.predicts_ratings, settings.run.top
        started, found, tried, by_user = time.monotonic(), dict[str, Any](), dict[str, Any](), dict[str, str]()
        rows = rows_beside(data, head, support, top) if head else ranking_rows(data, top, support)
        for reference in rating_rows(data) if rated else rows:
            found[reference.name] = reference.value
            if reference.tried:
                tried[reference.name] = {reference.words(value): ndcg for value, ndcg in reference.tried.items()}
            if reference.by_user is not None:
                by_user[reference.name] = packed(reference.by_user.numpy())
            tell(len(found), 16 if support else 8)
        metric = "MSE" if rated else f"NDCG@{settings.run.top}"
        facts = {"references": found, "tried on held-out training data": tried, "metric": metric}
        return Outcome(seconds=time.monotonic() - started, facts=facts, by_user=by_user)


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

    def trials(self, values: Values) -> dict[str, tuple[str, Values]]:
        return {name: ("fedrec-trial", trial) for name, trial in trials_of(values).items()}

    def on_gpu(self, values: Values) -> bool:
        """Rivals train on a GPU where there is one."""
        return self.settings(values).method in RIVALS and torch.cuda.is_available()

    def work(self, values: Values) -> float:
        return float(self.settings(values).rounds) * (10 if self.settings(values).data == "ml-1m" else 1)

    def run(self, values: Values, seed: int, folder: Path, tell: Tell) -> Outcome:
        return self.run_after(values, seed, folder, tell, {})

    def run_after(self, values: Values, seed: int, folder: Path, tell: Tell, tried: dict[str, Outcome]) -> Outcome:  # noqa: ARG002
        started = time.monotonic()
        found = {name: (outcome.best_round or 0.0, outcome.best or 0.0) for name, outcome in tried.items()}
        facts, by_user = measured_fedrec(self.settings(values), seed, found, tell)
        seconds = time.monotonic() - started
        facts["measures"]["seconds"] = seconds
        return Outcome.of_value(facts["measures"]["NDCG@10"], 0.0, seconds=seconds, facts=facts, by_user=by_user)


class _FedRecTrial(_FedRec):
    """One setting of such a recommender, judged by the item before the newest."""

    def trials(self, values: Values) -> dict[str, tuple[str, Values]]:  # noqa: ARG002
        return {}

    def run_after(self, values: Values, seed: int, folder: Path, tell: Tell, tried: dict[str, Outcome]) -> Outcome:  # noqa: ARG002
        started = time.monotonic()
        found = tried_fedrec(self.settings(values), tell)
        facts = {"metric": "NDCG@10, held out"}
        return Outcome.of_curve(found, "NDCG@10", seconds=time.monotonic() - started, facts=facts)


class _Overheard(_FedRec):
    """One answer of such a recommender, attacked."""

    def trials(self, values: Values) -> dict[str, tuple[str, Values]]:  # noqa: ARG002
        return {}

    def work(self, values: Values) -> float:
        return float(self.settings(values).rounds + 1)

    def run_after(self, values: Values, seed: int, folder: Path, tell: Tell, tried: dict[str, Outcome]) -> Outcome:  # noqa: ARG002
        given, started, done = self.settings(values), time.monotonic(), count(1)
        facts, by_user = overheard(given, seed, lambda: tell(min(next(done), given.targets), given.targets))
        facts["measures"]["seconds"] = seconds = time.monotonic() - started
        return Outcome.of_value(facts["measures"][AUC], 0.0, seconds=seconds, facts=facts, by_user=by_user)


KINDS: dict[str, Kind] = {
    "federated": _Federated(),
    "ordered": _Ordered(),
    "references": _References(),
    "convex": _Convex("convex", ConvexFederation),
    "memory": _Memory("memory", MemorySettings),
    "fedrec": _FedRec("fedrec", FedRecSettings),
    "fedrec-trial": _FedRecTrial("fedrec-trial", FedRecSettings),
    "fedrec-audit": _Overheard("fedrec-audit", OverheardSettings),
}
