"""A whole simulated run: data, rounds, evaluations, early stopping."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from fairfold.backends.batched import choose_backend, choose_device
from fairfold.config import Settings
from fairfold.config.fleet import DifferentialPrivacy
from fairfold.config.tables import InteractionData
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidSettings
from fairfold.federation.aggregation import ONE, Ranks, merged_groups_notes
from fairfold.federation.algorithm import Centralized, Tunable
from fairfold.federation.architecture import Storage
from fairfold.federation.evaluation import Callback, Evaluator, GroupReport, Result, RoundReport
from fairfold.federation.federation import Federation, load_federation, popularity_baseline, renumber_scorers
from fairfold.federation.plan import Plan, privacy_notes, privacy_report
from fairfold.federation.randomness import Rejections, uses_seed
from fairfold.federation.round import run_round
from fairfold.federation.scheduling import CLOCK, staleness_notes
from fairfold.federation.updates import State, to_device
from fairfold.metrics.ranking import RankingResult, Scorer
from fairfold.metrics.rating import Predictor
from fairfold.subspace.projection import Assignment
from fairfold.typing import Weights

MAX_COPY_BYTES = 2**30  # above this size no copy of the best model is stored; checkpoints are
MOSTLY_USED = 0.9  # a note names capacities of which clients hold less than this share
# Bad evaluations in a row of a run that diverges; noisy ones recover after five (experiments/results/choices)
DIVERGED_EVALUATIONS = 6
MIN_FALL = 0.02  # a quality has to fall by more than this to count as lost: early in a run, half of little is noise


@dataclass
class Progress:
    """All that is needed to continue a run; ``best`` are copies when quality was best, unless too large."""

    state: State
    local_state: Weights
    history: list[RoundReport]
    rejections: Rejections
    best: tuple[State, Weights] | None = None
    gather: Callable[[], None] = lambda: None

    def note(self, report: RoundReport, smaller_is_better: bool) -> None:
        """Append a report, and copy a model that is better than all before."""
        self.history.append(report)
        values = qualities(self.history, smaller_is_better)
        if report.quality is not None and values[-1] == max(values):
            tensors = [*self.state.full.values(), *self.local_state.values()]
            self.best = None
            if sum(tensor.nbytes for tensor in tensors) <= MAX_COPY_BYTES:
                self.best = self.state.copy(), {name: rows.clone() for name, rows in self.local_state.items()}

    def restore_best(self) -> None:
        """Go back to the best model, where there is a copy."""
        if self.best is not None:
            self.state, local_state = self.best
            for name, rows in local_state.items():
                self.local_state[name].copy_(rows)


RoundCallback = Callable[[RoundReport, Progress], None]


def simulate(
    settings: Settings | None = None,
    on_round: RoundCallback = lambda _report, _progress: None,
    *,
    data: Dataset | ImageDataset | None = None,
    federation: Federation | None = None,
    baselines: Mapping[str, Scorer] | None = None,
    evaluated_baselines: Mapping[str, RankingResult | Predictor] = MappingProxyType({}),
    progress: Progress | None = None,
    storage: Storage | None = None,
    callbacks: Sequence[Callback] = (),
    ranks: Ranks = ONE,
) -> Result:
    """Run a federation from its settings.

    Args:
        settings: Settings of the run; those of the default recipe if not given.
        on_round: Called after every round and all callbacks, with the report and the progress of the run.
        data: Used instead of loading ``settings.data``; its items are numbered anew under ``popularity="counts"``
            (the result's ``counted``), unless they have been.
        federation: A federation that was built already, with its data; ``settings`` and ``data`` are then its own.
        baselines: Baselines to evaluate beside the model, where ``data`` is given; popularity if not.
        evaluated_baselines: Further baselines, evaluated already; for ratings their predictors.
        progress: Where to continue; from the start if not given.
        storage: Where the local state of a run from the start is stored; in memory if not given.
        callbacks: Called at the start, after every round and at the end, such as :mod:`fairfold.runs.trackers`.
        ranks: Processes that share the clients; each of them calls this, on the same data.

    Example:
        >>> world = {"users": 30, "items": 80, "interactions_per_user": 20}
        >>> result = simulate(Settings(data=world, fleet={"capacities": "1x-4x"}, run={"rounds": 2}))
        >>> [group.capacity for group in result.groups], result.metric
        (['1x', '4x'], 'NDCG@20')
    """
    if federation is None:
        federation, baselines = _build_federation(Settings() if settings is None else settings, data, baselines)
    settings = federation.plan.settings
    federation = replace(federation, sampler=replace(federation.sampler, ranks=ranks))
    clients = federation.clients
    device = choose_device(federation.plan)
    ranks.check_device(device)
    if isinstance(settings.algorithm, Centralized) and ranks.num_ranks > 1:
        given = f"algorithm.kind={settings.algorithm.kind!r} on {ranks.num_ranks} ranks"
        raise InvalidSettings(given, "clients to share out", "All data is in one place here: leave torchrun out.")
    if baselines is None:
        baselines = popularity_baseline(federation.data)
    rankings = {} if settings.predicts_ratings else baselines
    evaluator = Evaluator(federation, {**rankings, **evaluated_baselines}, device)
    if progress is None:
        progress = Progress(federation.initial(storage), clients.local_state, [], Rejections())
    if not settings.model.reads_images:  # for images the server's part, small and in a fixed order, stays on the CPU
        progress.state = progress.state.to(device)
        progress.local_state = to_device(progress.local_state, device)
    clients.local_state = progress.local_state
    progress.gather = partial(ranks.gather_local_state, clients)
    backend = choose_backend(federation.sampler, clients, device)
    try:
        with ranks.fail_together():
            for callback in callbacks:
                callback.on_start(settings, federation.plan.capacities, progress.state.round_number + 1)
        while stop_reason(progress.history, settings) is None:
            started = time.monotonic()
            progress.state = run_round(progress.state, federation.sampler, clients, progress.rejections, backend)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a round takes until its work is done, not queued
            report = _round_report(federation, evaluator, progress, time.monotonic() - started)
            progress.note(report, settings.smaller_is_better)
            if diverged(progress.history, settings) is not None:
                progress.restore_best()
            with ranks.fail_together():
                for callback in callbacks:
                    callback.on_round(report)
            on_round(report, progress)
        result = _make_result(federation, evaluator, progress)
        for callback in callbacks:
            callback.on_end(result)
    finally:
        for callback in callbacks:
            callback.close()
    return result


def _build_federation(
    settings: Settings, data: Dataset | ImageDataset | None, baselines: Mapping[str, Scorer] | None
) -> tuple[Federation, Mapping[str, Scorer] | None]:
    """Build the federation of a run, with its baselines, from given data or from that of the settings."""
    if data is None:
        return load_federation(settings)
    numbers = settings.subspace.counts_items or isinstance(settings.privacy, DifferentialPrivacy)
    if not isinstance(data, Dataset) or data.counted is not None or not numbers:
        return Federation.of(settings, data), baselines
    federation = Federation.with_numbered_items(settings, data)
    if baselines is not None and federation.interactions.counted is not None:
        baselines = renumber_scorers(baselines, federation.interactions)
    return federation, baselines


def stop_reason(history: list[RoundReport], settings: Settings) -> str | None:
    """Say why a run is over: its last round, a quality that is reached, diverges or no longer improves; else None."""
    run = settings.run
    evaluated = [(report.quality.server, report.round_number) for report in history if report.quality is not None]
    values = qualities(history, settings.smaller_is_better)
    if (divergence := diverged(history, settings)) is not None:
        return divergence
    sign = -1 if settings.smaller_is_better else 1
    if values and run.threshold is not None and values[-1] >= sign * run.threshold:
        return f"the quality, {evaluated[-1][0]:.4g}, has reached the threshold of {run.threshold:g}"
    if values and run.patience is not None:
        best = values.index(max(values))
        if len(values) - 1 - best >= run.patience:
            waited = f"{run.patience} evaluation" + ("s" if run.patience > 1 else "")
            return f"no better quality for {waited} (best {evaluated[best][0]:.4g} in round {evaluated[best][1]})"
    if history and history[-1].round_number >= run.rounds:
        return f"all {run.rounds} rounds are done" if run.rounds > 1 else "its one round is done"
    return None


def qualities(history: list[RoundReport], smaller_is_better: bool) -> list[float]:
    """Qualities of the server's model in the evaluated rounds, with a sign so that larger is better."""
    values = [report.quality.server for report in history if report.quality is not None]
    return [-value for value in values] if smaller_is_better else values


def diverged(history: list[RoundReport], settings: Settings) -> str | None:
    """Describe a run that has lost half of its best quality for several evaluations; None if it has not."""
    values = qualities(history, settings.smaller_is_better)
    best = max(values, default=0.0)
    least = min(best / 2, best - MIN_FALL) if best > 0 else min(2 * best, best - MIN_FALL)
    latest = values[-DIVERGED_EVALUATIONS:]
    if len(values) <= DIVERGED_EVALUATIONS or any(value >= least for value in latest):  # NaN is not
        return None
    rounds = [report.round_number for report in history if report.quality is not None]
    was = f"the quality was {abs(best):.4g} in round {rounds[values.index(best)]}"
    now = f"and is {abs(values[-1]):.4g} in round {rounds[-1]}. The model of the better round is kept"
    return f"it diverges: {was}, {now}. Take smaller steps, a larger ridge or fewer rounds"


def _round_report(federation: Federation, evaluator: Evaluator, progress: Progress, seconds: float) -> RoundReport:
    number = progress.state.round_number
    plan = Tunable.of(federation.plan.algorithm).resolve(federation.plan, progress.state)
    assignments = plan.assignments(number - 1)
    clock = progress.state.algorithm_state.get(CLOCK)
    if clock is None:
        asked = completed = federation.sampler.cohort(number - 1)
    else:
        asked = clock["asked"]
        completed = clock["completed"]
        seconds = float(clock["seconds"])
    quality = None
    if number == plan.settings.run.rounds or number % plan.settings.run.evaluate_every == 0:
        progress.gather()
        quality = evaluator.quality(progress.state, assignments)
    traffic = torch.tensor([plan.algorithm.traffic(plan, size, number - 1) for size in range(len(assignments))])
    down = int(traffic[federation.sampler.size[asked.cpu()], 0].sum())
    up = int(traffic[federation.sampler.size[completed.cpu()], 1].sum())
    counted = federation.data.counted if isinstance(federation.data, Dataset) else None
    if number == 1 and counted is not None:  # the count before the first round
        down, up = down + counted.bytes_down, up + counted.bytes_up
    return RoundReport(number, seconds, len(completed), down, up, quality)


def _make_result(federation: Federation, evaluator: Evaluator, progress: Progress) -> Result:
    progress.gather()
    state = progress.state
    plan = Tunable.of(federation.plan.algorithm).resolve(federation.plan, state)
    assignments = plan.assignments(max(state.round_number - 1, 0))
    last = progress.history[-1] if progress.history else None
    quality = last.quality if last and last.round_number == state.round_number else None
    if quality is None:  # stopped between evaluations, or nothing was left to do
        quality = evaluator.quality(state, assignments)
        if last and last.quality is None:
            progress.history[-1] = replace(last, quality=quality)
    for_all_users = evaluator.quality_for_all_users(state, assignments)
    groups = []
    for size, (capacity, held) in enumerate(zip(plan.capacities, assignments, strict=True)):
        members = evaluator.members(size)
        cost = held.size(), held.bytes(), *plan.algorithm.traffic(plan, size)
        values = quality.groups[size], evaluator.baselines(members), for_all_users[size]
        groups.append(GroupReport(str(capacity), len(members), *cost, *values))
    cpu = torch.device("cpu")
    return Result(
        settings=plan.settings,
        metric=evaluator.metric,
        state=state.to(cpu),
        local_state=to_device(progress.local_state, cpu),
        history=progress.history,
        groups=groups,
        quality=quality.server,
        baselines={**evaluator.baselines(evaluator.all_users), **evaluator.published()},
        users=len(evaluator.all_users),
        rejections=dict(progress.rejections.counts),
        counted=federation.data.counted if isinstance(federation.data, Dataset) else None,
        notes=[*_result_notes(federation, plan, state, assignments), *evaluator.notes()],
        privacy=privacy_report(plan.settings),
        differences=evaluator.differences(state, assignments),
        by_user=evaluator.by_user,
        group_by_user=evaluator.group_by_user,
    )


def _result_notes(federation: Federation, plan: Plan, state: State, assignments: list[Assignment]) -> list[str]:
    settings = plan.settings
    notes = [*Tunable.of(plan.algorithm).notes(plan, state), *_support_notes(plan, assignments)]
    notes += [*staleness_notes(state.algorithm_state, settings), *_never_drawn_notes(federation, state)]
    notes += _data_notes(federation)
    secure = settings.privacy.uses_secure_aggregation
    if secure or not settings.model.reads_images:
        notes += privacy_notes(privacy_report(settings))
    if secure:
        groups = settings.fleet.groups(federation.clients.num_clients)
        names = [str(capacity) for capacity in plan.capacities]
        notes += merged_groups_notes(groups, federation.sampler.size, names)
    return notes


def _support_notes(plan: Plan, assignments: list[Assignment]) -> list[str]:
    """A sentence on clients that hold much less than they may, since few items have enough users."""
    tensors = plan.architecture.tensors
    support = plan.method.min_support or plan.architecture.min_support
    if tensors.network or not support or isinstance(plan.settings.privacy, DifferentialPrivacy):
        return []
    shares = []
    for capacity, held in zip(plan.capacities, assignments, strict=True):
        if held.projections is not None:
            share = plan.method.used_share(tensors, held.projections, capacity)
            shares += [f"{capacity} {share:.0%}"] if share < MOSTLY_USED else []
    if not shares:
        return []
    few = "too few" if plan.settings.privacy.uses_secure_aggregation else f"fewer than {support}"
    why, cap = f"items that {few} users have own no row", plan.architecture.max_rows
    if cap is not None:
        why = f"no more than {cap:,} items own a row (algorithm.max_items)"
    by = "support" if cap is None else "algorithm.max_items"
    hold = f"devices hold less than they may ({', '.join(shares)})"
    return [f"Capped by {by}: {hold}: {why}, and nothing else needs the room."]


def _data_notes(federation: Federation) -> list[str]:
    """How data was split here and what was left out of it, and that a seed which was given changes nothing."""
    settings, data = federation.plan.settings, federation.data
    notes = data.notes() if isinstance(data, Dataset) and isinstance(settings.data, InteractionData) else []
    if "seed" in settings.run.model_fields_set and not uses_seed(settings):
        notes.append(
            "run.seed changes nothing: this run draws nothing at random (--splits 3 shows a spread over splits)."
        )
    return notes


def _never_drawn_notes(federation: Federation, state: State) -> list[str]:
    clock = state.algorithm_state.get(CLOCK)
    drawn = torch.zeros(federation.clients.num_clients, dtype=torch.bool) if clock is None else clock["drawn"]
    for number in range(state.round_number if clock is None else 0):
        drawn[federation.sampler.cohort(number)] = True
    participants = len(federation.sampler.participants)
    missing = participants - int(drawn.sum())
    more = "More rounds, or a larger fleet.clients_per_round, would include them."
    return [f"{missing:,} of {participants:,} devices were never drawn. {more}"] if missing > 0 else []
