"""Hold out a share of the training data, to choose settings on without touching the test set."""

from dataclasses import replace

import torch

from fairfold.data.images import ImageDataset
from fairfold.data.interactions import Interactions
from fairfold.data.seeds import generator
from fairfold.errors import InvalidSettings


def hold_out(interactions: Interactions, share: float, seed: int = 0) -> tuple[Interactions, Interactions]:
    """Split every user's interactions by chance into those kept (at least one) and those held out."""
    _check(share)
    users, counts = interactions.users, interactions.counts_by_user
    chance = torch.rand(len(interactions), generator=generator(seed, 2), dtype=torch.float64)
    # Users stay in order and each user's interactions are in random order, since chance < 1.
    order = (users.double() + chance).argsort()
    place = torch.arange(len(interactions)) - interactions.offsets[users]
    wanted = torch.minimum((counts * share).round().long(), (counts - 1).clamp(min=0))
    held = torch.zeros(len(interactions), dtype=torch.bool)
    held[order] = place < wanted[users]
    return interactions.where(~held), interactions.where(held)


def hold_out_images(data: ImageDataset, share: float, seed: int = 0) -> ImageDataset:
    """The training images alone: a share of them, drawn by chance, takes the place of the test set."""
    _check(share)
    order = torch.randperm(len(data.train), generator=generator(seed, 2))
    held = round(share * len(data.train))
    kept, judged = data.train.at(order[held:].sort().values), data.train.at(order[:held].sort().values)
    return replace(data, train=kept, test=judged)


def _check(share: float) -> None:
    if not 0 < share < 1:
        raise InvalidSettings(f"share = {share}", "between 0 and 1", "Hold out 0.1, for example.")
