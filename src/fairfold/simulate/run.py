"""A whole run: data, rounds, evaluations, early stopping."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from fairfold.backends.batched import batched, takes_steps
from fairfold.backends.cuda_graph import GraphBackend
from fairfold.backends.image_graph import ImageGraphBackend
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidSettings
from fairfold.kernels import gpu
from fairfold.metrics.ranking import RankingResult, Scorer
from fairfold.metrics.rating import Predictor
from fairfold.projections import Assignment
from fairfold.protocol.faults import Rejections
from fairfold.protocol.hearing import step_words
from fairfold.protocol.noising import privacy_facts, privacy_words
from fairfold.protocol.people import ImagePeople
from fairfold.protocol.plan import Plan
from fairfold.protocol.ranks import ONE, Ranks
from fairfold.protocol.round import Backend, in_turn, run_round
from fairfold.protocol.storage import Storage
from fairfold.protocol.turns import CLOCK, words_of
from fairfold.protocol.words import State, on
from fairfold.settings import Settings
from fairfold.settings.privacy import PrivatePrivacy
from fairfold.simulate.numbering import numbered, renumbered_scores
from fairfold.simulate.result import GroupReport, Judge, Result, RoundReport
from fairfold.simulate.world import World, load_data, popularity_of
from fairfold.trackers.callback import Callback
from fairfold.values import Weights

GOOD_BYTES = 2**30
"""Of a larger federation no copy of the best model is kept; its checkpoints are."""


@dataclass
class Progress:
    """Where a run stands: all that is needed to go on from here.

    Attributes:
        state: The server's.
        private: The users' own vectors.
        history: Reports of the rounds done.
        rejections: Answers that were refused.
        good: The first two as they were when quality was best; None where they are too large for a copy.
        gather: Brings the users' own vectors here, where other processes have some of them.
    """

    state: State
    private: Weights
    history: list[RoundReport]
    rejections: Rejections
    good: tuple[State, Weights] | None = None
    gather: Callable[[], None] = lambda: None

    def note(self, report: RoundReport, smaller_is_better: bool) -> None:
        """Add a round, and keep a copy of what is better than all before."""
        found = qualities([*self.history, report], smaller_is_better)
        self.history.append(report)
        held = [*self.state.full.values(), *self.private.values()]
        if report.quality is not None and found[-1] == max(found):
            small = sum(tensor.nbytes for tensor in held) <= GOOD_BYTES
            self.good = (self.state.copy(), {n: own.clone() for n, own in self.private.items()}) if small else None

    def go_back(self) -> None:
        """To the best model, where there is a copy."""
        if self.good is not None:
            self.state, private = self.good
            for name, own in private.items():
                self.private[name].copy_(own)


MUCH = 0.9
"""Devices that hold less than this share of what they may are told of."""

LOST = 6
"""Evaluations in a row that tell a run that diverges from a noisy one: of the kept runs of the paper, some come
back after five (experiments/results/choices)."""

FALL = 0.02
"""A quality has to fall by more than this to be called lost: at the start of a run, half of little is noise."""

Watch = Callable[[RoundReport, Progress], None]


def simulate(
    settings: Settings | None = None,
    watch: Watch = lambda _report, _progress: None,
    *,
    data: Dataset | ImageDataset | None = None,
    references: Mapping[str, Scorer] | None = None,
    beside: Mapping[str, RankingResult | Predictor] = MappingProxyType({}),
    progress: Progress | None = None,
    storage: Storage | None = None,
    callbacks: Sequence[Callback] = (),
    ranks: Ranks = ONE,
) -> Result:
    """Run a federation from its settings.

    Args:
        settings: Settings of the run; those of the best recipe if not given.
        watch: Told of every round as it ends, after all callbacks, with where the run stands.
        data: Used instead of loading ``settings.data``; its items are numbered anew under ``popularity="counts"``,
            as the result's ``counted`` says, unless they have been.
        references: Rows beside the model's, where ``data`` is given; popularity if not.
        beside: Further rows, judged already; of ratings what predicts them.
        progress: Where to go on; from the start if not given.
        storage: Where private vectors of a run from the start are kept; in memory if not given.
        callbacks: Told at the start, after every round and at the end; among them trackers (:mod:`fairfold.trackers`).
        ranks: Processes that share the clients; each of them runs this, on the same data.

    Example:
        >>> world = {"users": 30, "items": 80, "interactions_per_user": 20}
        >>> result = simulate(Settings(data=world, fleet={"capacities": "1x-4x"}, run={"rounds": 2}))
        >>> [group.capacity for group in result.groups], result.metric
        (['1x', '4x'], 'NDCG@20')
    """
    settings = Settings() if settings is None else settings
    private = isinstance(settings.privacy, PrivatePrivacy)
    if data is None:
        data, references = load_data(settings)
    elif isinstance(data, Dataset) and data.counted is None and (settings.subspace.counted or private):
        data = numbered(data, settings)
        moved = references is not None and data.counted is not None
        references = renumbered_scores(references or {}, data) if moved else references
    world = World.of(settings, data)
    world = replace(world, fleet=replace(world.fleet, ranks=ranks))
    device = choose_device(settings, world.plan)
    ranks.work_on(device)
    if settings.algorithm.pooled and ranks.many > 1:
        given, needed = f"algorithm.kind={settings.algorithm.kind!r} on {ranks.many} ranks", "clients to share out"
        raise InvalidSettings(given, needed, "All data is in one place here: leave torchrun out.")
    usual = popularity_of(data) if references is None else references
    judge = Judge(world, {**({} if settings.predicts_ratings else usual), **beside}, device)
    if progress is None:
        progress = Progress(world.initial(storage), world.people.private, [], Rejections())
    world.people.private = progress.private
    if not settings.model.reads_images:  # there the server's part, small and in a fixed order, stays on the CPU
        progress.state = progress.state.to(device)
        world.people.private = progress.private = on(progress.private, device)
    progress.gather = partial(ranks.gather_private, world.people)
    backend = choose_backend(world, device)
    try:
        with ranks.one_for_all():
            for callback in callbacks:
                callback.on_start(settings, world.plan.capacities, progress.state.round_number + 1)
        while stop_reason(progress.history, settings) is None:
            started = time.monotonic()
            progress.state = run_round(progress.state, world.fleet, world.people, progress.rejections, backend)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a round's time is when its work is done, not when it is queued
            report = _report(world, judge, progress, time.monotonic() - started)
            progress.note(report, settings.smaller_is_better)
            if diverged(progress.history, settings) is not None:
                progress.go_back()
            with ranks.one_for_all():
                for callback in callbacks:
                    callback.on_round(report)
            watch(report, progress)
        result = _result(world, judge, progress)
        for callback in callbacks:
            callback.on_end(result)
    finally:
        for callback in callbacks:
            callback.close()
    return result


def on_gpu(plan: Plan) -> bool:
    """Whether rounds of this plan can run on a GPU."""
    fast = takes_steps(plan) and not getattr(plan.algorithm, "prox", 0.0)
    in_step = plan.settings.fleet.pace.waits  # else answers of a round begin from different models
    return fast and in_step and plan.settings.run.backend == "batched"


def choose_device(settings: Settings, plan: Plan) -> torch.device:
    """Where a run works."""
    fits, wanted = on_gpu(plan), settings.run.device
    if wanted == "cuda" and not fits:
        needed = "a built-in model, run.backend='batched', gradient steps, prox=0 and rounds that wait (no fleet.pace)"
        remedy = "Use run.device='auto', which takes a GPU where it can be used."
        raise InvalidSettings("run.device='cuda' with settings that run on the CPU only", needed, remedy)
    if wanted == "cuda" and not gpu.available():
        given, remedy = "where torch has no GPU, or Triton is missing", "See fairfold doctor, or use run.device='cpu'."
        raise InvalidSettings(f"run.device='cuda' {given}", "an NVIDIA GPU and Triton", remedy)
    return torch.device("cuda" if fits and wanted != "cpu" and gpu.available() else "cpu")


def choose_backend(world: World, device: torch.device) -> Backend:
    """What makes the answers of a round."""
    if world.plan.settings.run.backend == "loop":
        return in_turn
    if device.type == "cuda" and isinstance(world.people, ImagePeople):
        return ImageGraphBackend(world.fleet, world.people, device)
    return GraphBackend(world.fleet, world.people, device) if device.type == "cuda" else batched


def stop_reason(history: list[RoundReport], settings: Settings) -> str | None:
    """Why a run is over: the last round, a quality that reached the threshold or long has not improved; else None."""
    run, sign = settings.run, -1 if settings.smaller_is_better else 1
    found = [(report.quality.server, report.round_number) for report in history if report.quality is not None]
    values = qualities(history, settings.smaller_is_better)
    if (lost := diverged(history, settings)) is not None:
        return lost
    if values and run.threshold is not None and values[-1] >= sign * run.threshold:
        return f"the quality, {found[-1][0]:.4g}, has reached the threshold of {run.threshold:g}"
    if values and run.patience is not None:
        best = values.index(max(values))
        if len(values) - 1 - best >= run.patience:
            waited = f"{run.patience} evaluation" + ("s" if run.patience > 1 else "")
            return f"no better quality for {waited} (best {found[best][0]:.4g} in round {found[best][1]})"
    if history and history[-1].round_number >= run.rounds:
        return f"all {run.rounds} rounds are done" if run.rounds > 1 else "its one round is done"
    return None


def qualities(history: list[RoundReport], smaller_is_better: bool) -> list[float]:
    """Of the server's model, as often as it was evaluated; the larger the better."""
    found = [report.quality.server for report in history if report.quality is not None]
    return [-value for value in found] if smaller_is_better else found


def diverged(history: list[RoundReport], settings: Settings) -> str | None:
    """What to say of a run that loses what it had learned: half of its best quality, evaluated over and over."""
    values = qualities(history, settings.smaller_is_better)
    best = max(values, default=0.0)
    least = min(best / 2, best - FALL) if best > 0 else min(2 * best, best - FALL)
    if len(values) <= LOST or any(value >= least for value in values[-LOST:]):  # what is no number is no quality
        return None
    rounds = [report.round_number for report in history if report.quality is not None]
    return (
        f"it diverges: the quality was {abs(best):.4g} in round {rounds[values.index(best)]}, and is "
        f"{abs(values[-1]):.4g} in round {rounds[-1]}. The model of the better round is kept. Take smaller steps, a "
        "larger ridge or fewer rounds"
    )


def _report(world: World, judge: Judge, progress: Progress, seconds: float) -> RoundReport:
    number = progress.state.round_number
    plan = world.plan.algorithm.settled(world.plan, progress.state)
    assignments = plan.assignments(number - 1)
    clock = progress.state.moments.get(CLOCK, {})
    asked = heard = clock.get("asked")
    if asked is None:
        asked = heard = world.fleet.cohort(number - 1)
    else:
        heard, seconds = clock["heard"], float(clock["seconds"])
    traffic = torch.tensor([plan.algorithm.traffic(plan, group, number - 1) for group in range(len(assignments))])
    quality = None
    if number == plan.settings.run.rounds or number % plan.settings.run.evaluate_every == 0:
        progress.gather()
        quality = judge.quality(progress.state, assignments)
    down, up = (int(traffic[world.fleet.size[of.cpu()], way].sum()) for way, of in enumerate((asked, heard)))
    if number == 1 and isinstance(world.data, Dataset) and world.data.counted is not None:
        down, up = down + world.data.counted.bytes_down, up + world.data.counted.bytes_up  # of the count before it
    return RoundReport(number, seconds, len(heard), down, up, quality)


def _result(world: World, judge: Judge, progress: Progress) -> Result:
    progress.gather()
    plan = world.plan.algorithm.settled(world.plan, progress.state)
    assignments = plan.assignments(max(progress.state.round_number - 1, 0))
    last = progress.history[-1] if progress.history else None
    quality = last.quality if last and last.round_number == progress.state.round_number else None
    if quality is None:  # stopped between evaluations, or nothing was left to do
        quality = judge.quality(progress.state, assignments)
        if last and last.quality is None:
            progress.history[-1] = replace(last, quality=quality)
    groups, everybody = [], judge.for_everybody(progress.state, assignments)
    for number, (capacity, held) in enumerate(zip(plan.capacities, assignments, strict=True)):
        members = judge.members(number)
        cost = (held.size(), held.bytes(), *plan.algorithm.traffic(plan, number))
        judged = (quality.groups[number], judge.references(members), everybody[number])
        groups.append(GroupReport(str(capacity), len(members), *cost, *judged))
    cpu = torch.device("cpu")
    return Result(
        plan.settings, judge.metric, progress.state.to(cpu), on(progress.private, cpu), progress.history, groups,
        quality.server, judge.references(judge.everybody), len(judge.everybody), dict(progress.rejections.counts),
        world.data.counted if isinstance(world.data, Dataset) else None,
        [
            *plan.algorithm.told(plan, progress.state), *_capped(plan, assignments),
            *words_of(progress.state.moments, plan.settings), *_left_out(world, progress.state),
            *_hidden(world),
        ],
        privacy_facts(plan.settings), judge.differences(progress.state, assignments), judge.by_user, judge.own,
    )  # fmt: skip


def _hidden(world: World) -> list[str]:
    """What is told of the privacy of a run."""
    plan, chosen = world.plan, world.plan.settings
    told = [] if chosen.model.reads_images and not chosen.privacy.sums_alone else privacy_words(privacy_facts(chosen))
    if chosen.privacy.sums_alone:
        groups = chosen.fleet.groups(world.people.num_clients)
        told += step_words(groups, world.fleet.size, [str(capacity) for capacity in plan.capacities])
    return told


def _capped(plan: Plan, assignments: list[Assignment]) -> list[str]:
    """Where devices hold much less than they may, that is said, and why."""
    tensors, shares = plan.architecture.tensors, list[str]()
    support = getattr(plan.method, "support", 0) or getattr(plan.algorithm, "support", 0)
    by_noise = isinstance(plan.settings.privacy, PrivatePrivacy)  # which is what limits the head there
    if tensors.network or not support or by_noise:
        return []
    for capacity, held in zip(plan.capacities, assignments, strict=True):
        if held.projections is not None:
            share = plan.method.used(tensors, held.projections, capacity)
            shares += [f"{capacity} {share:.0%}"] if share < MUCH else []
    few = f"fewer than {support}" if not plan.settings.privacy.sums_alone else "too few"  # of a sum: told beside it
    why = f"items that {few} users have own no row, and nothing else needs the room"
    return [f"Capped by support: devices hold less than they may ({', '.join(shares)}): {why}."] if shares else []


def _left_out(world: World, state: State) -> list[str]:
    """Where some devices were never drawn, that is said."""
    drawn = state.moments.get(CLOCK, {}).get("drawn", torch.zeros(world.people.num_clients, dtype=torch.bool))
    for number in range(0 if CLOCK in state.moments else state.round_number):
        drawn[world.fleet.cohort(number)] = True
    missing = len(world.fleet.taking_part) - int(drawn.sum())
    more = "More rounds, or a larger fleet.clients_per_round, would hear them."
    return [f"{missing:,} of {len(world.fleet.taking_part):,} devices were never drawn. {more}"] if missing > 0 else []
