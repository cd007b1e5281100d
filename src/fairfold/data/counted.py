"""What a count of the catalogue told: which items lead, and how everybody numbers the items by that alone."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counted:
    """The outcome of a count, and its cost.

    Items that lead come first, in the order of their counts; all others follow in the order of the catalogue. So the
    leading items are all that a device has to be sent, and it finds the rank of any item, or the item of any rank, in
    memory of their number alone. Ties, among equal counts and among all that do not lead, keep the catalogue's order.

    ``counts`` (int64 [items], the server's) says how many of the counted devices hold each item, in the order of ranks;
    ``leading`` (int32 [owned], everybody's) has the catalogue's numbers of the items that lead.
    """

    counts: Tensor = field(repr=False)
    leading: Tensor = field(repr=False)
    asked: int = 0  # devices that were to be counted
    devices: int = 0  # devices that were
    bytes_down: int = 0  # in all, as those sent up
    bytes_up: int = 0


def ranks_of(items: Tensor, leading: Tensor) -> Tensor:
    """The rank of items, given by their numbers in the catalogue."""
    numbers, rank = leading.long().sort()
    if not len(numbers):
        return items
    below = torch.searchsorted(numbers, items)  # how many leading items have smaller numbers
    found = below.clamp(max=len(numbers) - 1)
    return torch.where(numbers[found] == items, rank[found], len(numbers) + items - below)


def items_at(ranks: Tensor, leading: Tensor) -> Tensor:
    """The numbers in the catalogue of the items of some ranks."""
    numbers = leading.long().sort().values
    if not len(numbers):
        return ranks
    behind = ranks - len(numbers)  # how many items that do not lead stand before this one
    skipped = torch.searchsorted(numbers - torch.arange(len(numbers)), behind, right=True)
    return torch.where(behind < 0, leading.long()[ranks.clamp(max=len(numbers) - 1)], behind + skipped)
