"""Who touched what: interactions grouped by user, in memory proportional to their number."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fairfold.data.counted import Counted
from fairfold.errors import InvalidData


def offsets_of(counts: Tensor) -> Tensor:
    """Where each group begins, and the end of the last, int64 [groups + 1]."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


@dataclass(frozen=True)
class Interactions:
    """Interactions of dense user and item ids, one user's items after another (compressed sparse rows).

    Attributes:
        num_users: Number of users, with or without interactions.
        num_items: Size of the catalogue. Items are numbered by falling popularity where the source allows it.
        offsets: int64 [num_users + 1]; the items of user u are ``items[offsets[u]:offsets[u + 1]]``.
        items: int64 [interactions]; ascending within a user, without repeats.
        ratings: float32 aligned with ``items``, or None for implicit feedback.

    Example:
        >>> users, items = torch.tensor([0, 0, 1]), torch.tensor([7, 2, 5])
        >>> interactions = Interactions.from_pairs(users, items, num_users=2, num_items=10)
        >>> len(interactions), interactions.of(0)
        (3, tensor([2, 7]))
    """

    num_users: int
    num_items: int
    offsets: Tensor
    items: Tensor
    ratings: Tensor | None = None

    @classmethod
    def from_pairs(
        cls, users: Tensor, items: Tensor, num_users: int, num_items: int, ratings: Tensor | None = None
    ) -> "Interactions":
        """Build from parallel lists of dense user and item ids, in any order; of repeated pairs the last one counts."""
        if users.shape != items.shape or (ratings is not None and ratings.shape != items.shape):
            lengths = [users.numel(), items.numel(), *([] if ratings is None else [ratings.numel()])]
            raise InvalidData(f"columns of lengths {lengths}", "one length", "Give one user and one item per row.")
        for name, ids, limit in (("user", users, num_users), ("item", items, num_items)):
            if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < limit):
                raise InvalidData(
                    f"{name} ids from {int(ids.min())} to {int(ids.max())}",
                    f"ids from 0 to {limit - 1}",
                    f"Make the ids dense, or raise num_{name}s.",
                )
        pairs = users.long() * num_items + items.long()
        order = torch.argsort(pairs, stable=True)
        pairs = pairs[order]
        last = torch.ones_like(pairs, dtype=torch.bool)
        last[:-1] = pairs[1:] != pairs[:-1]
        order, pairs = order[last], pairs[last]
        per_user = torch.bincount(torch.div(pairs, num_items, rounding_mode="floor"), minlength=num_users)
        kept = None if ratings is None else ratings[order].to(torch.float32)
        return cls(num_users, num_items, offsets_of(per_user), pairs % num_items, kept)

    def where(self, mask: Tensor) -> "Interactions":
        """Those of the interactions that a mask has chosen, of the same users and items."""
        counts = torch.bincount(self.users[mask], minlength=self.num_users)
        ratings = None if self.ratings is None else self.ratings[mask]
        return replace(self, offsets=offsets_of(counts), items=self.items[mask], ratings=ratings)

    def renumbered(self, place: Tensor) -> "Interactions":
        """The same interactions with item i at number ``place[i]``."""
        return Interactions.from_pairs(self.users, place[self.items], self.num_users, self.num_items, self.ratings)

    def __len__(self) -> int:
        return int(self.items.numel())

    def span(self, user: int) -> "slice[int, int, None]":
        """Where the items of one user stand."""
        return slice(int(self._bounds[user]), int(self._bounds[user + 1]))

    @cached_property
    def _bounds(self) -> Any:
        return self.offsets.numpy()  # the same memory: reading a number of it makes no tensor

    def of(self, user: int) -> Tensor:
        """The items of one user, ascending."""
        return self.items[self.span(user)]

    def ratings_of(self, user: int) -> Tensor:
        """The ratings of one user, aligned with :meth:`of`."""
        if self.ratings is None:
            raise InvalidData("implicit interactions", "ratings", "Prepare the data with ratings kept.")
        return self.ratings[self.span(user)]

    @cached_property
    def users(self) -> Tensor:
        """The user of every interaction, aligned with ``items``."""
        numbers = torch.arange(self.num_users, device=self.offsets.device)
        return torch.repeat_interleave(numbers, self.counts_by_user, output_size=len(self))

    @property
    def counts_by_user(self) -> Tensor:
        """How many interactions each user has."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def counts_by_item(self) -> Tensor:
        """How many interactions each item has: its popularity."""
        return torch.bincount(self.items, minlength=self.num_items)


@dataclass(frozen=True)
class Dataset:
    """A prepared data set: what is trained on, what is asked for, and the way back to the original ids.

    ``counted`` is there where the items have been numbered anew, by a count among devices.
    """

    name: str
    train: Interactions
    test: Interactions
    valid: Interactions | None = None
    user_ids: list[str] | None = field(default=None, repr=False)
    item_ids: list[str] | None = field(default=None, repr=False)
    titles: list[str] | None = field(default=None, repr=False)
    counted: Counted | None = None

    def renumbered(self, place: Tensor, counted: Counted | None = None) -> "Dataset":
        """The same data with item i at number ``place[i]``."""
        order = place.argsort().tolist()
        return replace(
            self,
            train=self.train.renumbered(place),
            test=self.test.renumbered(place),
            valid=None if self.valid is None else self.valid.renumbered(place),
            item_ids=None if self.item_ids is None else [self.item_ids[item] for item in order],
            titles=None if self.titles is None else [self.titles[item] for item in order],
            counted=counted,
        )

    def with_validation(self) -> "Dataset":
        """The same data with the validation set, where there is one, trained on as well."""
        train, valid = self.train, self.valid
        if valid is None:
            return self
        ratings = None
        if train.ratings is not None and valid.ratings is not None:
            ratings = torch.cat([train.ratings, valid.ratings])
        users, items = torch.cat([train.users, valid.users]), torch.cat([train.items, valid.items])
        joined = Interactions.from_pairs(users, items, self.num_users, self.num_items, ratings)
        return replace(self, train=joined, valid=None)

    @property
    def num_users(self) -> int:
        """Number of users."""
        return self.train.num_users

    @property
    def num_items(self) -> int:
        """Size of the catalogue."""
        return self.train.num_items
