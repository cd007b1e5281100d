"""A whole run: data, rounds, evaluations, early stopping."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

import fairfold.data  # its readers are reached through it, so that a device need not import them
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.data.synthetic import SyntheticWorld
from fairfold.errors import InvalidSettings
from fairfold.federation.aggregate import ServerState
from fairfold.federation.image_task import task_of
from fairfold.federation.projection import Assignment
from fairfold.federation.replies import Rejections
from fairfold.federation.settings import Settings
from fairfold.federation.storage import Storage
from fairfold.federation.task import Weights
from fairfold.kernels import gpu
from fairfold.metrics.ranking import Scorer
from fairfold.simulate import batched, captured, central, image_cohort, loop
from fairfold.simulate.alike import numbered_alike
from fairfold.simulate.counting import numbered_by_counts, renumbered_scores
from fairfold.simulate.federation import Federation
from fairfold.simulate.result import GroupReport, Judge, Result, RoundReport

BYTES = 4


@dataclass
class Progress:
    """Where a run stands: all that is needed to go on from here."""

    state: ServerState
    private: Weights
    history: list[RoundReport]
    rejections: Rejections


Watch = Callable[[RoundReport, Progress], None]


def simulate(
    settings: Settings,
    watch: Watch = lambda _report, _progress: None,
    *,
    data: Dataset | ImageDataset | None = None,
    references: Mapping[str, Scorer] | None = None,
    progress: Progress | None = None,
    storage: Storage | None = None,
) -> Result:
    """Run a federation from its settings.

    Args:
        settings: Of the run.
        watch: Told of every round as it ends.
        data: Used instead of loading ``settings.data``; its items are numbered anew under ``popularity="counts"``,
            as the result's ``counted`` says, unless they have been.
        references: Rows beside the model's, where ``data`` is given; popularity if not.
        progress: Where to go on; from the start if not given.
        storage: Where private vectors of a run from the start are kept; in memory if not given.
    """
    if data is None:
        data, references = load_data(settings)
    elif settings.popularity == "counts" and isinstance(data, Dataset) and data.counted is None:
        data = numbered_by_counts(data, settings)
        references = None if references is None else renumbered_scores(references, data)
    federation = Federation.of(settings, task_of(data, settings))
    device = choose_device(settings)
    judge = Judge(federation, _popularity(data) if references is None else references, device)
    if progress is None:
        full, private = federation.initial(storage)
        progress = Progress(ServerState(full), private, [], Rejections())
    if not settings.reads_images:  # there the server's part, small and in a fixed order, stays on the CPU
        progress.state, progress.private = _moved(progress.state, device), _on(progress.private, device)
    run_round = _backend(federation, device)
    while stop_reason(progress.history, settings) is None:
        started = time.monotonic()
        progress.state = run_round(progress.state, progress.private, progress.rejections)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a round's time is when its work is done, not when it is queued
        report = _report(federation, judge, progress, time.monotonic() - started)
        progress.history.append(report)
        watch(report, progress)
    result = _result(federation, judge, progress)
    cpu = torch.device("cpu")
    return replace(result, state=_moved(result.state, cpu), private=_on(result.private, cpu))


def choose_device(settings: Settings) -> torch.device:
    """Where a run of these settings works."""
    fits = settings.backend == "batched" and (captured.serves(settings) or image_cohort.serves(settings))
    if settings.device == "cuda" and not fits:
        raise InvalidSettings(
            "device='cuda' with settings that run on the CPU only",
            "a built-in model, a federated method, backend='batched', solver='gradient' and prox=0",
            "Use device='auto', which takes a GPU where it can be used.",
        )
    if settings.device == "cuda" and not gpu.available():
        raise InvalidSettings(
            "device='cuda' where torch has no GPU, or Triton is missing",
            "an NVIDIA GPU and Triton",
            "See fairfold doctor, or use device='cpu'.",
        )
    return torch.device("cuda" if fits and settings.device != "cpu" and gpu.available() else "cpu")


RunRound = Callable[[ServerState, Weights, Rejections], ServerState]


def _backend(federation: Federation, device: torch.device) -> RunRound:
    """What runs a round on a device."""
    if device.type == "cuda" and federation.settings.reads_images:
        return image_cohort.ImageCohorts(federation, device).run_round
    if device.type == "cuda":
        return captured.Cohorts(federation, device).run_round
    settings = federation.settings
    run_round = batched.run_round if settings.backend == "batched" else loop.run_round
    if settings.method == "central" and settings.solver == "gradient":  # a closed-form round is the sum over everybody
        run_round = central.run_round
    return lambda state, private, rejections: run_round(state, private, federation, rejections)


def _on(weights: Weights, device: torch.device) -> Weights:
    return {name: tensor.to(device) for name, tensor in weights.items()}


def _moved(state: ServerState, device: torch.device) -> ServerState:
    moments = {moment: _on(of, device) for moment, of in state.moments.items()}
    return ServerState(_on(state.full, device), state.round_number, moments)


def stop_reason(history: list[RoundReport], settings: Settings) -> str | None:
    """Why a run is over: the last round, a quality that reached the threshold or long has not improved; else None."""
    smaller_is_better = settings.smaller_is_better
    found = [(report.quality.server, report.round_number) for report in history if report.quality is not None]
    values = [-value if smaller_is_better else value for value, _ in found]
    if values and settings.threshold is not None:
        wanted = -settings.threshold if smaller_is_better else settings.threshold
        if values[-1] >= wanted:
            return f"the quality, {found[-1][0]:.4g}, has reached the threshold of {settings.threshold:g}"
    if values and settings.patience is not None:
        best = values.index(max(values))
        if len(values) - 1 - best >= settings.patience:
            waited = f"{settings.patience} evaluation" + ("s" if settings.patience > 1 else "")
            return f"no better quality for {waited} (best {found[best][0]:.4g} in round {found[best][1]})"
    if history and history[-1].round_number >= settings.rounds:
        return f"all {settings.rounds} rounds are done"
    return None


def _report(federation: Federation, judge: Judge, progress: Progress, seconds: float) -> RoundReport:
    settings, number = federation.settings, progress.state.round_number
    assignments = federation.assignments(number - 1)
    cohort = federation.cohort(number - 1)
    group = federation.group[cohort]
    taking_part = torch.tensor([held.projections is not None for held in assignments])[group]
    moved = torch.tensor([_bytes_moved(held, progress.state, settings) for held in assignments])[group].sum(0)
    quality = None
    if number == settings.rounds or number % settings.evaluate_every == 0:
        quality = judge.quality(progress.state, progress.private, assignments)
    down, up = int(moved[0]), int(moved[1])
    if number == 1 and settings.popularity == "counts":  # the count before it belongs to the bytes of the run
        counted = federation.task.data.counted
        assert counted is not None
        down, up = down + counted.bytes_down, up + counted.bytes_up
    return RoundReport(number, seconds, int(taking_part.sum()), down, up, quality)


def _bytes_moved(held: Assignment, state: ServerState, settings: Settings) -> tuple[int, int]:
    """What a device of some size receives and sends in a round; nothing where there are no devices."""
    if settings.method == "central" or held.projections is None:
        return 0, 0
    full_size = sum(tensor.numel() for tensor in state.full.values())
    received = 2 * held.size() if settings.streamed else held.size()
    return (full_size if settings.broadcast else received) * BYTES, held.size() * BYTES


def _result(federation: Federation, judge: Judge, progress: Progress) -> Result:
    settings, assignments = federation.settings, federation.assignments(max(progress.state.round_number - 1, 0))
    last = progress.history[-1] if progress.history else None
    quality = last.quality if last else None
    if quality is None:  # stopped between evaluations, or nothing was left to do
        quality = judge.quality(progress.state, progress.private, assignments)
        if last:
            progress.history[-1] = replace(last, quality=quality)
    groups, everybody = [], judge.for_everybody(progress.state, assignments)
    for number, (capacity, held) in enumerate(zip(federation.capacities, assignments, strict=True)):
        members = (federation.group == number).nonzero().flatten()
        size = held.size()
        down, up = _bytes_moved(held, progress.state, settings)
        groups.append(
            GroupReport(
                capacity=str(capacity),
                users=len(members),
                size=size,
                bytes_held=size * BYTES,
                bytes_down=down,
                bytes_up=up,
                quality=quality.groups[number],
                references=judge.references(members),
                everybody=everybody[number],
            )
        )
    return Result(
        settings,
        judge.metric,
        progress.state,
        progress.private,
        progress.history,
        groups,
        quality.server,
        judge.references(torch.arange(federation.task.num_clients)),
        federation.task.num_clients,
        dict(progress.rejections.counts),
        None if settings.popularity != "counts" else federation.task.data.counted,
    )


def load_data(settings: Settings) -> tuple[Dataset | ImageDataset, dict[str, Scorer]]:
    """What a run trains on, and the reference rows that go with it."""
    if settings.reads_images:
        return fairfold.data.load_images(settings.data), {}
    return load_interactions(settings)


def load_interactions(settings: Settings) -> tuple[Dataset, dict[str, Scorer]]:
    """What a recommender trains on, and its reference rows; refused for models of images."""
    if settings.reads_images:
        raise InvalidSettings(
            f"model={settings.model!r}, which reads images, where only recommenders are served",
            "a model of interactions",
            "Use mf, mf-ratings, neumf or neumf-mlp here; `fairfold train` serves images.",
        )
    if settings.data != "synthetic":
        options = {} if settings.top_users is None else {"top_users": settings.top_users}
        if settings.predicts_ratings:
            options["ratings"] = True
        if settings.resplit:
            options["resplit"] = True
        data = fairfold.data.load(settings.data, **options)  # type: ignore[arg-type]
        data = numbered_alike(data, settings) if settings.alike else data
        data = numbered_by_counts(data, settings) if settings.popularity == "counts" else data
        return data, _popularity(data)
    world = SyntheticWorld(
        users=settings.world.users,
        items=settings.world.items,
        interactions_per_user=settings.world.interactions_per_user,
        taste_strength=settings.world.taste_strength,
        seed=settings.seed,
    )
    data, best = world.dataset(), dict[str, Scorer]({"best possible": world.best_scores})
    if settings.popularity == "counts":
        data = numbered_by_counts(data, settings)
        best = renumbered_scores(best, data)
    return data, _popularity(data) | best


def _popularity(data: Dataset | ImageDataset) -> dict[str, Scorer]:
    if isinstance(data, ImageDataset):
        return {}
    popularity = data.train.counts_by_item.float()
    return {"popularity": lambda users: popularity.expand(len(users), -1)}
