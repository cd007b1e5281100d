"""Kinds of cells: a federation, baselines, the corollary's convex case, device memory, federated recommenders.

A *kind* validates a cell's settings, identifies its data, and runs it. New kinds join :data:`KINDS`.
"""

# ruff: noqa: ARG002 - kinds need different parts of what a cell gets

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from itertools import count
from json import dumps, loads
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from experiments.cells import (
    MemorySettings,
    ReportProgress,
    RoundProgress,
    fits_gpu,
    measured,
    outcome_of_run,
    run_with_partial_counts,
)
from experiments.combine import pack_per_user
from experiments.convex import ConvexFederation, fitted_slope
from experiments.fedrec import BASELINES, FedRecSettings, leave_newest_out, trial_settings
from experiments.fedrec import measured as measured_fedrec
from experiments.fedrec import tried as tried_fedrec
from experiments.fedrec_audit import AUC, FedRecAuditSettings, audit_updates
from experiments.records import Outcome
from fairfold.config import merge_tables, read_settings
from fairfold.config.tables import RATING_MODELS
from fairfold.errors import InvalidCapacity, InvalidCheckpoint, InvalidSettings
from fairfold.federation.algorithm import TrainsImages
from fairfold.federation.training import LocalSgd
from fairfold.kernels import gpu

Values = dict[str, Any]
PLAIN = {"level": "plain"}
NO_TRIALS: Mapping[str, Outcome] = {}


class Kind(ABC):
    """One kind of cell."""

    def settings(self, values: Values) -> Any:
        """Validate a cell's settings."""
        return read_settings(values)

    def canonical(self, values: Values) -> Values:
        """Settings in a canonical form: equal for cells that run the same, however they are written."""
        return values

    def trials(self, values: Values) -> dict[str, tuple[str, Values]]:
        """Cells that are run first, to choose settings of this one: kind and settings by name."""
        return {}

    def data_settings(self, values: Values) -> Values:
        """The settings that decide on which data a cell is trained and evaluated, and so its baselines."""
        settings = self.settings(values)
        if settings.model.reads_images:
            return {"data": {"name": settings.data.name}, "model": {"kind": settings.model.kind}}
        found: Values = {"data": settings.data.effective(changed=True)}
        if settings.predicts_ratings:
            return found | {"model": {"kind": RATING_MODELS[0]}}  # of one that does: the same ratings for all
        top = settings.run.top
        return found | ({} if top == type(settings.run).model_fields["top"].default else {"run": {"top": top}})

    def data(self, values: Values) -> dict[str, Any]:
        """Fingerprint of the data; :class:`InvalidData` with instructions where it is missing."""
        return data_facts_of(dumps(self.data_settings(values), sort_keys=True))

    def on_gpu(self, values: Values) -> bool:
        """Whether a cell uses a GPU on this machine."""
        return False

    def needs(self, values: Values) -> str:
        """The resource that cells compete for: cells that need the same are not all started at once."""
        return "a core"

    def work(self, values: Values) -> float:
        """Estimated duration beside other cells that need the same resource, in any unit."""
        return 1.0

    @abstractmethod
    def run(
        self, values: Values, seed: int, folder: Path, report: ReportProgress, trials: Mapping[str, Outcome] = NO_TRIALS
    ) -> Outcome:
        """Run a cell; ``folder`` is its own, to resume after an interruption, ``trials`` are outcomes by name."""


@cache
def data_facts_of(values: str) -> dict[str, Any]:
    """Fingerprint of the data of some settings; empty for synthetic data, which follow from the settings."""
    from fairfold.federation.federation import load_data

    settings = read_settings(loads(values))
    return {} if settings.data.kind == "synthetic" else load_data(settings)[0].fingerprint()


class _Federated(Kind):
    """A federation as of ``fairfold train``."""

    def canonical(self, values: Values) -> Values:
        """Differences from the defaults, so that new settings leave stored cells valid."""
        found: Values = self.settings(values).plain(changed=True)
        found["run"].pop("seed", None)
        if found.get("privacy") == PLAIN:  # a table that is newer than the first cells
            del found["privacy"]
        return found

    def on_gpu(self, values: Values) -> bool:
        settings = self.settings(values)
        return fits_gpu(settings) and settings.run.device != "cpu" and gpu.available()

    def needs(self, values: Values) -> str:
        settings = self.settings(values)
        if not fits_gpu(settings):
            return super().needs(values)
        return "a GPU for images" if isinstance(settings.algorithm, TrainsImages) else "a GPU for tables"

    def work(self, values: Values) -> float:
        """Local epochs of all rounds."""
        settings = self.settings(values)
        algorithm = settings.algorithm
        return float(settings.run.rounds * (algorithm.local_epochs if isinstance(algorithm, LocalSgd) else 1))

    def run(
        self, values: Values, seed: int, folder: Path, report: ReportProgress, trials: Mapping[str, Outcome] = NO_TRIALS
    ) -> Outcome:
        from fairfold.runs.train import run

        settings = read_settings(merge_tables(values, {"run": {"seed": seed}}))
        try:
            try:
                finished = run(
                    settings, folder, resume=(folder / "settings.toml").exists(), callbacks=[RoundProgress(report)]
                )
            except InvalidCheckpoint:  # of other settings, or damaged beyond use
                shutil.rmtree(folder)
                finished = run(settings, folder, callbacks=[RoundProgress(report)])
        except InvalidCapacity as error:
            return Outcome("N/A", error.needed.removeprefix("a capacity it can serve (N/A: ").removesuffix(")"))
        return outcome_of_run(finished.result, finished.seconds)


class _PartialCounts(_Federated):
    """A federation whose items are numbered by the counts of a share of the users: ``order_from``."""

    def settings(self, values: Values) -> Any:
        return super().settings(_without(values, "order_from"))

    def canonical(self, values: Values) -> Values:
        return super().canonical(values) | {"order_from": values["order_from"]}

    def run(
        self, values: Values, seed: int, folder: Path, report: ReportProgress, trials: Mapping[str, Outcome] = NO_TRIALS
    ) -> Outcome:
        settings = read_settings(merge_tables(_without(values, "order_from"), {"run": {"seed": seed}}))
        return run_with_partial_counts(settings, float(values["order_from"]), RoundProgress(report))


def _without(values: Values, *keys: str) -> Values:
    return {key: value for key, value in values.items() if key not in keys}


class _Baselines(Kind):
    """Central baselines: popularity, neighbors, SVD, ridge, EASE, iALS (or the ``strong`` ones); means for ratings."""

    ASKED = "baselines"

    def settings(self, values: Values) -> Any:
        return read_settings(_without(values, self.ASKED))

    def work(self, values: Values) -> float:
        """Started first: tuning takes long."""
        return 1e6

    def run(
        self, values: Values, seed: int, folder: Path, report: ReportProgress, trials: Mapping[str, Outcome] = NO_TRIALS
    ) -> Outcome:
        from experiments.central_baselines import (
            rating_baseline_results,
            strong_ranking_baselines,
            tuned_ranking_baselines,
        )
        from fairfold.federation.federation import load_interactions

        settings = self.settings(values)
        data, _ = load_interactions(settings)
        top = settings.run.top
        started = time.monotonic()
        found, tried, by_user = dict[str, Any](), dict[str, Any](), dict[str, str]()
        if settings.predicts_ratings:
            results = rating_baseline_results(data)
        elif self.ASKED in values:
            results = strong_ranking_baselines(data, top)
        else:
            results = tuned_ranking_baselines(data, top)
        for one in results:
            found[one.name] = one.value
            if one.tried:
                tried[one.name] = {one.format_value(value): ndcg for value, ndcg in one.tried.items()}
            if one.by_user is not None:
                by_user[one.name] = pack_per_user(one.by_user.numpy())
            report(len(found), 8)
        metric = "MSE" if settings.predicts_ratings else f"NDCG@{top}"
        facts = {"baselines": found, "tried on held-out training data": tried, "metric": metric}
        return Outcome(seconds=time.monotonic() - started, facts=facts, by_user=by_user)


class _DataclassKind(Kind):
    """A kind whose settings are a dataclass; without data of its own."""

    def __init__(self, name: str, form: type) -> None:
        self._name, self._form = name, form

    def settings(self, values: Values) -> Any:
        try:
            return self._form(**values)
        except TypeError as error:
            needed = f"keys of {self._form.__name__}"
            raise InvalidSettings(f"{self._name}: {error}", needed, "Check the spelling.") from None

    def data(self, values: Values) -> dict[str, Any]:
        return {}


class _Convex(_DataclassKind):
    """Homogeneous FAIR on strongly convex least squares: the slope of log error over log rounds, −1 for O(1/T)."""

    def run(
        self, values: Values, seed: int, folder: Path, report: ReportProgress, trials: Mapping[str, Outcome] = NO_TRIALS
    ) -> Outcome:
        given: ConvexFederation = self.settings(values)
        started = time.monotonic()
        runs = list[list[float]]()
        rounds = sorted(given.rounds)
        for number in range(given.problems):
            runs.append(given.errors(seed * given.problems + number))
            report(number + 1, given.problems)
        errors = [mean(of_round) for of_round in zip(*runs, strict=True)]
        return Outcome.of_value(
            fitted_slope(rounds, errors), float(rounds[-1]), curve=tuple(zip(map(float, rounds), errors, strict=True)),
            seconds=time.monotonic() - started, facts={"metric": "slope", "curve": "F(θ_T) − F*"},
        )  # fmt: skip


class _Memory(_DataclassKind):
    """The largest compression that a method can serve, and the measured memory of such a device."""

    def settings(self, values: Values) -> Any:
        found = super().settings(values)
        found.method()
        return found

    def run(
        self, values: Values, seed: int, folder: Path, report: ReportProgress, trials: Mapping[str, Outcome] = NO_TRIALS
    ) -> Outcome:
        started = time.monotonic()
        most, facts = measured(self.settings(values), report)
        return Outcome.of_value(most, 0.0, seconds=time.monotonic() - started, facts=facts)


class _FedRec(_DataclassKind):
    """A federated recommender of the literature, ours, or a central baseline, with leave-one-out by time."""

    def data(self, values: Values) -> dict[str, Any]:
        return leave_newest_out(self.settings(values).data).fingerprint()

    def trials(self, values: Values) -> dict[str, tuple[str, Values]]:
        return {name: ("fedrec-trial", trial) for name, trial in trial_settings(values).items()}

    def on_gpu(self, values: Values) -> bool:
        """Federated baselines train on a GPU if there is one."""
        return self.settings(values).method in BASELINES and torch.cuda.is_available()

    def work(self, values: Values) -> float:
        return float(self.settings(values).rounds) * (10 if self.settings(values).data == "ml-1m" else 1)

    def run(
        self, values: Values, seed: int, folder: Path, report: ReportProgress, trials: Mapping[str, Outcome] = NO_TRIALS
    ) -> Outcome:
        started = time.monotonic()
        found = {name: (outcome.best_round or 0.0, outcome.best or 0.0) for name, outcome in trials.items()}
        facts, by_user = measured_fedrec(self.settings(values), seed, found, report)
        seconds = time.monotonic() - started
        facts["measures"]["seconds"] = seconds
        return Outcome.of_value(facts["measures"]["NDCG@10"], 0.0, seconds=seconds, facts=facts, by_user=by_user)


class _FedRecTrial(_FedRec):
    """One candidate setting of a federated recommender, evaluated on the item before the newest."""

    def trials(self, values: Values) -> dict[str, tuple[str, Values]]:
        return {}

    def run(
        self, values: Values, seed: int, folder: Path, report: ReportProgress, trials: Mapping[str, Outcome] = NO_TRIALS
    ) -> Outcome:
        started = time.monotonic()
        found = tried_fedrec(self.settings(values), report)
        facts = {"metric": "NDCG@10, held out"}
        return Outcome.of_curve(found, "NDCG@10", seconds=time.monotonic() - started, facts=facts)


class _FedRecAudit(_FedRec):
    """Attacks on updates of a federated recommender."""

    def trials(self, values: Values) -> dict[str, tuple[str, Values]]:
        return {}

    def work(self, values: Values) -> float:
        return float(self.settings(values).rounds + 1)

    def run(
        self, values: Values, seed: int, folder: Path, report: ReportProgress, trials: Mapping[str, Outcome] = NO_TRIALS
    ) -> Outcome:
        given = self.settings(values)
        started = time.monotonic()
        done = count(1)
        facts, by_user = audit_updates(given, seed, lambda: report(min(next(done), given.targets), given.targets))
        facts["measures"]["seconds"] = seconds = time.monotonic() - started
        return Outcome.of_value(facts["measures"][AUC], 0.0, seconds=seconds, facts=facts, by_user=by_user)


KINDS: dict[str, Kind] = {
    "federated": _Federated(),
    "ordered": _PartialCounts(),
    "baselines": _Baselines(),
    "convex": _Convex("convex", ConvexFederation),
    "memory": _Memory("memory", MemorySettings),
    "fedrec": _FedRec("fedrec", FedRecSettings),
    "fedrec-trial": _FedRecTrial("fedrec-trial", FedRecSettings),
    "fedrec-audit": _FedRecAudit("fedrec-audit", FedRecAuditSettings),
}
