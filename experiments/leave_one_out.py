"""Hit rate and NDCG@k of one held-out item per user: among 99 items drawn by chance, and among all.

With one item wanted, NDCG@k is 1/log2(rank + 1) where its rank is at most k, else 0. Ties count against the item: a
scorer that scores all alike finds nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.data.sampling import NegativeSampler, generator
from fairfold.errors import InvalidData
from fairfold.metrics.ranking import Scorer, ndcg, user_items

DRAWN = 99
USERS_AT_ONCE = 512


@dataclass(frozen=True)
class LeaveOneOutRanks:
    """Ranks, from 1, of every user's item: among those drawn for it and itself, and among all that are not known."""

    sampled: Tensor
    everywhere: Tensor

    def hits(self, k: int = 10) -> tuple[Tensor, Tensor]:
        """Of every user whether the item is among the first k: of those drawn, of all."""
        return (self.sampled <= k).double(), (self.everywhere <= k).double()

    def gains(self, k: int = 10) -> tuple[Tensor, Tensor]:
        """NDCG@k of every user: among those drawn, among all."""
        return _gain(self.sampled, k), _gain(self.everywhere, k)


def _gain(ranks: Tensor, k: int) -> Tensor:
    return ndcg(ranks[:, None] == torch.arange(1, k + 1), torch.ones(len(ranks), dtype=torch.int64), k)


def leave_one_out_ranks(score: Scorer, known: Interactions, wanted: Interactions, seed: int = 0) -> LeaveOneOutRanks:
    """Rank every user's one item.

    Args:
        score: Scores of all items for some users.
        known: What is not ranked: items that a user is known to have.
        wanted: One item per user.
        seed: Of the 99 items drawn, which nobody has in ``known`` nor ``wanted``.
    """
    if not bool((wanted.counts_by_user == 1).all()):
        raise InvalidData("users with none or several items", "one item per user", "Leave out one item of each.")
    both = Interactions.from_pairs(
        torch.cat([known.users, wanted.users]), torch.cat([known.items, wanted.items]), known.num_users, known.num_items
    )
    sampler, source = NegativeSampler(both), generator(seed, 5)
    found = []
    for users in torch.split(torch.arange(known.num_users), USERS_AT_ONCE):
        scores = score(users).detach().double()
        mine = scores.gather(1, wanted.items[users][:, None])
        drawn = sampler.draw(users[:, None].expand(-1, DRAWN), source)
        sampled = 1 + (~(scores.gather(1, drawn) < mine)).sum(1)  # what is no number finds nothing
        rows, items = user_items(known, users)
        scores[rows, items] = -torch.inf
        everywhere = (~(scores < mine)).sum(1)  # its own place among them
        found.append(torch.stack([sampled, everywhere]))
    return LeaveOneOutRanks(*torch.cat(found, dim=1))
