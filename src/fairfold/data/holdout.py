"""Hold out a share of each user's interactions, to choose settings on without touching the test set."""

import torch

from fairfold.data.interactions import Interactions
from fairfold.data.seeds import generator
from fairfold.errors import InvalidSettings


def hold_out(interactions: Interactions, share: float, seed: int = 0) -> tuple[Interactions, Interactions]:
    """Split every user's interactions by chance into those kept and those held out.

    Args:
        interactions: What to split.
        share: Share of each user's interactions that is held out, rounded to the nearest number; a user always
            keeps at least one.
        seed: Same seed, same split.

    Returns:
        The interactions kept and those held out, over the same users and catalogue.
    """
    if not 0 < share < 1:
        raise InvalidSettings(f"share = {share}", "between 0 and 1", "Hold out 0.1, for example.")
    users, counts = interactions.users, interactions.counts_by_user
    chance = torch.rand(len(interactions), generator=generator(seed, 2), dtype=torch.float64)
    # Users stay in order and each user's interactions are in random order, since chance < 1.
    order = (users.double() + chance).argsort()
    place = torch.arange(len(interactions)) - interactions.offsets[users]
    wanted = torch.minimum((counts * share).round().long(), (counts - 1).clamp(min=0))
    held = torch.zeros(len(interactions), dtype=torch.bool)
    held[order] = place < wanted[users]
    return _part(interactions, ~held), _part(interactions, held)


def _part(interactions: Interactions, mask: torch.Tensor) -> Interactions:
    counts = torch.bincount(interactions.users[mask], minlength=interactions.num_users)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    ratings = None if interactions.ratings is None else interactions.ratings[mask]
    return Interactions(interactions.num_users, interactions.num_items, offsets, interactions.items[mask], ratings)
