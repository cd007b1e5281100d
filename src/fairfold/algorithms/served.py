"""Scores by rows of items and a list of pairs, from histories alone: what a device does with its model."""

import torch
from torch import Tensor

from fairfold.projections.rounded import DIGIT
from fairfold.values import Weights

TASTE, WORN = "taste", "worn"
"""Names of what is made of a history: the sum of its rows, and its items, each times its factor."""


class Served:
    """A model as it is held.

    Args:
        rows: W of the leading items, [rows, columns].
        into: a of these.
        out: b of these.
        listed: Pairs, [pairs, 5]; one of an item with itself is none.
        weight: What a pair counts.
    """

    def __init__(self, rows: Tensor, into: Tensor, out: Tensor, listed: Tensor, weight: float) -> None:
        self.rows, self.into, self.out, self.known = rows, into, out, len(rows)
        items = (listed[:, 0:4:2] * DIGIT + listed[:, 1:4:2]).long()
        real = items[:, 0] != items[:, 1]
        pairs, values = items[real], listed[real, 4]
        held = rows.new_zeros(len(pairs))
        both = (pairs < self.known).all(1)
        held[both] = (rows[pairs[both, 0]] * rows[pairs[both, 1]]).sum(1)
        # Both ways, by the item that is scored: what the pair adds beyond the rows.
        self._from, to = torch.cat([pairs[:, 0], pairs[:, 1]]), torch.cat([pairs[:, 1], pairs[:, 0]])
        order = to.argsort(stable=True)
        self._from, self._to = self._from[order], to[order]
        self._values = (weight * (values - held)).repeat(2)[order] if len(pairs) else values
        self._reach = 1 + max(self.known - 1, int(self._to.max()) if len(self._to) else -1)

    def _factor(self, of: Tensor, items: Tensor) -> Tensor:
        """A factor of items; beyond the rows that of the last one, the most alike in popularity."""
        return of[items.clamp(max=self.known - 1)]

    def histories(self, histories: list[Tensor]) -> Weights:
        """What is made of some histories."""
        worn = self.rows.new_zeros(len(histories), self._reach)
        if self.known:
            for place, history in enumerate(histories):
                items = history[history < self._reach]
                worn[place, items] = self._factor(self.into, items)
        return {TASTE: worn[:, : self.known] @ self.rows, WORN: worn}

    def scores(self, made: Weights, items: Tensor) -> Tensor:
        """Of some ascending items, [users, items]: those without a score after all others, in their order."""
        taste, worn = made[TASTE], made[WORN]
        least = self._least(taste, worn)
        behind = (items + 1).to(worn.dtype) / (int(items.max()) + 1 if items.numel() else 1)
        found = least[:, None] - behind * (1 + least.abs()[:, None])
        here = items < self.known
        mine = items[here]
        found[:, here] = (taste @ self.rows[mine].T) * self.out[mine]
        low, high = (
            torch.searchsorted(self._to, torch.stack([items[0], items[-1] + 1])).tolist() if len(items) else (0, 0)
        )
        if high > low:
            place = torch.searchsorted(items, self._to[low:high])
            part = worn[:, self._from[low:high]] * self._values[low:high]
            part = part * self._factor(self.out, self._to[low:high])
            added = torch.zeros_like(found).index_add_(1, place, part)
            beyond = ~here & (added != 0)
            found = torch.where(beyond, added, found + torch.where(here, added, 0))
        return found

    def _least(self, taste: Tensor, worn: Tensor) -> Tensor:
        """What no score of a user is below."""
        if not self.known:
            return taste.new_zeros(len(taste))
        rows = taste.norm(dim=1) * (self.rows.norm(dim=1) * self.out).max()
        pairs = worn.abs().sum(1) * (self._values.abs().max() * self.out.max() if len(self._values) else 0.0)
        least: Tensor = -(rows + pairs)
        return least
