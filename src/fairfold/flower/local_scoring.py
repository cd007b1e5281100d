"""Recommendations on a device by the model it was sent and its users' own vectors, for all that torch trains.

The default's models need no torch (:mod:`fairfold.device.stored_model`). Nothing is sent, and nothing is stored.
"""

from pathlib import Path

import torch

from fairfold.config import read_settings
from fairfold.data import Interactions
from fairfold.data.interactions import items_at, ranks_of
from fairfold.device.stored_model import MODEL_FILE
from fairfold.errors import InvalidSettings, InvalidState
from fairfold.federation.algorithm import DeviceScoring, FoldsIn
from fairfold.federation.clients import Clients
from fairfold.federation.plan import Plan
from fairfold.federation.updates import ClientTask
from fairfold.flower.client_store import ClientStore
from fairfold.flower.local_data import LocalFile
from fairfold.metrics.ranking import first_by_score
from fairfold.runs.device_model import read_device_model
from fairfold.typing import Weights

BLOCK_ITEMS = 8_192  # items scored at a time: the full table is never made


@torch.no_grad()
def recommend(folder: Path, source: LocalFile, user: str, top: int) -> list[tuple[int, float]]:
    """The best items outside a user's history, by their numbers in the catalogue, with their scores."""
    device, metadata = read_device_model(folder / MODEL_FILE)
    settings, num_items = read_settings(metadata["settings"]), int(metadata["data"]["items"])
    if settings.model.reads_images:
        given = f"a model of images, model.kind={settings.model.kind!r}"
        raise InvalidSettings(given, "one of a recommender", "fairfold.runs.device_model.read_device_model reads it.")
    state = ClientStore(folder).load()
    leading = torch.empty(0, dtype=torch.int64) if device.leading is None else device.leading
    if state.numbering and device.leading is None:
        needed = "the order in which the run numbers items"
        raise InvalidState("a model too small to list its items", needed, "Enrol with more --capacity.")
    data = source.load(num_items, ratings=settings.predicts_ratings)
    row = data.names.index(user)
    ratings = None if data.train.ratings is None else data.train.ratings_of(row)
    own = ranks_of(data.train.of(row), leading)
    history = Interactions.from_pairs(torch.zeros_like(own), own, 1, num_items, ratings)
    plan = Plan.on_device(settings, num_items, 1, None, device.projections)
    task = ClientTask(max(int(metadata["round"]) - 1, 0), 0, device.projections, device.compacts)
    clients = Clients(plan, history, {}, state.secret)
    scoring = DeviceScoring.of(plan.algorithm)
    if isinstance(plan.algorithm, FoldsIn):
        vectors = _stored_vectors(plan, state.user_names, state.acknowledged.local_state, user)
        if vectors is None:  # not there when the model was trained
            with torch.enable_grad():
                vectors = plan.algorithm.fold_in(plan, task, clients, [0])
    else:
        vectors = scoring.scoring_vectors(plan, task, clients, [0])
    num_candidates = scoring.num_candidates(plan, task, top + len(own))
    blocks = torch.split(torch.arange(num_candidates), BLOCK_ITEMS)
    scores = torch.cat([scoring.block_scores(plan, task, vectors, block).float() for block in blocks], dim=1)
    scores[0, own[own < num_candidates]] = -torch.inf
    values, numbers = first_by_score(scores, min(top, num_candidates))
    ranked = zip(items_at(numbers[0], leading).tolist(), values[0].tolist(), strict=True)
    return [(item, value) for item, value in ranked if value > -torch.inf]


def _stored_vectors(plan: Plan, names: list[str], stored: Weights, user: str) -> Weights | None:
    """The vectors of a user that this device trained; None where it has none."""
    wanted = plan.architecture.user_vectors
    if user not in names or not wanted.keys() <= stored.keys():
        return None
    row = names.index(user)
    return {name: stored[name][row : row + 1] for name in wanted}
