"""Strong references of a run: computed once per data set, split and choice of items, kept beside the prepared data."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fairfold.data.files import Stages, cache_folder, silent
from fairfold.errors import CannotWrite, FairfoldError
from fairfold.metrics.ranking import RankingResult
from fairfold.metrics.rating import Predictor
from fairfold.metrics.rating_references import rating_references
from fairfold.metrics.reference_rows import strong_rows
from fairfold.runs.checkpoint import data_facts
from fairfold.runs.tensors import bytes_of, read_values, write_sealed
from fairfold.runs.units import human_seconds
from fairfold.simulate.world import World

VERSION = 3
"""Raised whenever the references, or how they are chosen, change: kept rows of others are computed again."""

USERS = "users"


def rating_rows(world: World, say: Callable[[str], None] = lambda _: None) -> dict[str, Predictor]:
    """Means, biases and matrix factorisation by SGD, of the ratings of a run."""
    say("Tuning references on held-out ratings: matrix factorisation by SGD (not with --set run.references=false).")
    return {name: predict for name, predict, _ in rating_references(world.interactions.train)}


def strong_references(
    world: World, stages: Stages = silent, say: Callable[[str], None] = lambda _: None, cache: Path | None = None
) -> dict[str, RankingResult]:
    """EASE, iALS and item-kNN on the data of a ranking, among the items that its model knows and among all."""
    plan, data, top = world.plan, world.interactions, world.plan.settings.run.top
    known = plan.algorithm.tells_apart(plan, plan.assignments(0), torch.arange(data.num_items))
    facts = {key: value for key, value in data_facts(data).items() if key != "name"}
    what = [VERSION, facts, top, hashlib.sha256(bytes_of(known)).hexdigest()]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder(cache) / "references" / f"{key}.safetensors"
    if (kept := _read(path)) is not None:
        return kept
    say("Computing references, once for this data: EASE, iALS, item-kNN (not with --set run.references=false).")
    started = time.monotonic()
    found = dict(strong_rows(data, known, top, stages))
    say(f"References computed in {human_seconds(time.monotonic() - started)}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        users = next(iter(found.values())).users
        tensors = {str(place): row.ndcg_by_user for place, row in enumerate(found.values())}
        write_sealed(path, tensors | {USERS: users}, {"names": json.dumps(list(found))})
    except (OSError, CannotWrite) as error:
        say(f"They could not be kept: {error}.")
    return found


def _read(path: Path) -> dict[str, RankingResult] | None:
    """What was kept; None where there is nothing whole: it is computed again."""
    try:
        tensors, told = read_values(path, "Remove it.")
    except FairfoldError:
        return None
    names, users = json.loads(told["names"]), tensors[USERS]
    values = [tensors[str(place)] for place in range(len(names))]
    return {name: RankingResult(float(value.mean()), users, value) for name, value in zip(names, values, strict=True)}
