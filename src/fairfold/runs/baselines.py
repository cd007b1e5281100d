"""Baselines of a run that need no federation; strong ones are tuned once per data set and cached."""

import hashlib
import json
import time
from pathlib import Path

from fairfold.data.files import Stages, cache_folder, no_progress
from fairfold.data.fingerprint import data_fingerprint
from fairfold.errors import CannotWrite, FairfoldError
from fairfold.federation.federation import Federation
from fairfold.metrics.ranking import RankingResult
from fairfold.metrics.ranking_baselines import largest_side
from fairfold.metrics.rating import Predictor
from fairfold.metrics.rating_baselines import fitted_rating_baselines
from fairfold.metrics.tuned_baselines import tuned_strong_baselines
from fairfold.runs.checkpoint import Echo
from fairfold.runs.tensors import read_checked_tensors, write_checked_tensors
from fairfold.runs.units import human_seconds

VERSION = 4  # version of cached baselines; raised whenever the baselines, or how they are tuned, change
USERS = "users"


def rating_baselines(federation: Federation, echo: Echo = lambda _: None) -> dict[str, Predictor]:
    """Tune means, biases and matrix factorization by SGD on the ratings of a run."""
    echo("Tuning baselines on held-out ratings: matrix factorization by SGD (not with --set run.baselines=false).")
    return {name: predict for name, predict, _ in fitted_rating_baselines(federation.interactions.train)}


def strong_baselines(
    federation: Federation, stages: Stages = no_progress, echo: Echo = lambda _: None, cache: Path | None = None
) -> dict[str, RankingResult]:
    """Evaluate tuned EASE, iALS and item-kNN on all items; a name says so where memory asks for a cut."""
    plan, data = federation.plan, federation.interactions
    top = plan.settings.run.top
    facts = {key: value for key, value in data_fingerprint(data).items() if key != "name"}
    content = [VERSION, facts, top, largest_side()]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder(cache) / "baselines" / f"{key}.safetensors"
    if (cached := _read(path)) is not None:
        return cached
    echo("Computing baselines, once for this data: EASE, iALS, item-kNN (not with --set run.baselines=false).")
    started = time.monotonic()
    computed = dict(tuned_strong_baselines(data, top, stages))
    echo(f"Baselines computed in {human_seconds(time.monotonic() - started)}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        users = next(iter(computed.values())).users
        tensors = {str(place): row.ndcg_by_user for place, row in enumerate(computed.values())}
        write_checked_tensors(path, tensors | {USERS: users}, {"names": json.dumps(list(computed))})
    except (OSError, CannotWrite) as error:
        echo(f"They could not be stored: {error}.")
    return computed


def _read(path: Path) -> dict[str, RankingResult] | None:
    """Read cached baselines; None where there are none, or the file is damaged."""
    try:
        tensors, metadata = read_checked_tensors(path, "Remove it.")
    except FairfoldError:
        return None
    values = ((name, tensors[str(place)]) for place, name in enumerate(json.loads(metadata["names"])))
    return {name: RankingResult(float(value.mean()), tensors[USERS], value) for name, value in values}
