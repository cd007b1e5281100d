"""Interactions of users with items, grouped by user, and data sets of them."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fairfold.errors import InvalidData


@dataclass(frozen=True)
class PopularityCounts:
    """How many clients hold each item, as counted by the clients themselves, and what the count cost.

    The most popular items (``leading``) come first, in order of their counts (ties: of the catalog); all others follow
    in the order of the catalog. So a client needs only the leading items to find the rank of any item, and back.
    """

    counts: Tensor = field(repr=False)  # int64 [items], by rank; known to the server
    leading: Tensor = field(repr=False)  # int32, catalog numbers of the most popular items; known to all clients
    asked: int = 0  # clients that were asked to count
    devices: int = 0  # clients that were counted
    bytes_down: int = 0  # of all clients, as bytes_up
    bytes_up: int = 0


def ranks_of(items: Tensor, leading: Tensor) -> Tensor:
    """Ranks of items that are given by their catalog numbers."""
    numbers, rank = leading.long().sort()
    if not len(numbers):
        return items
    below = torch.searchsorted(numbers, items)  # how many leading items have smaller numbers
    found = below.clamp(max=len(numbers) - 1)
    return torch.where(numbers[found] == items, rank[found], len(numbers) + items - below)


def items_at(ranks: Tensor, leading: Tensor) -> Tensor:
    """Catalog numbers of the items of given ranks."""
    numbers = leading.long().sort().values
    if not len(numbers):
        return ranks
    behind = ranks - len(numbers)  # how many other items come before this one
    skipped = torch.searchsorted(numbers - torch.arange(len(numbers)), behind, right=True)
    return torch.where(behind < 0, leading.long()[ranks.clamp(max=len(numbers) - 1)], behind + skipped)


def offsets_of(counts: Tensor) -> Tensor:
    """Start of each group and end of the last, int64 [groups + 1], from the sizes of the groups."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def sha256_of(tensors: Iterable[Tensor | None]) -> str:
    """SHA-256 of the numbers of some tensors, one after another."""
    checksum = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            checksum.update(tensor.contiguous().numpy().data)
    return checksum.hexdigest()


@dataclass(frozen=True)
class Interactions:
    """Interactions of dense user and item ids, one user's items after another (compressed sparse rows).

    Example:
        >>> users, items = torch.tensor([0, 0, 1]), torch.tensor([7, 2, 5])
        >>> interactions = Interactions.from_pairs(users, items, num_users=2, num_items=10)
        >>> len(interactions), interactions.of(0)
        (3, tensor([2, 7]))
    """

    num_users: int  # with or without interactions
    num_items: int  # size of the catalog; numbered by falling popularity where the source allows it
    offsets: Tensor  # int64 [num_users + 1]; the items of user u are items[offsets[u]:offsets[u + 1]]
    items: Tensor  # int64 [interactions]; ascending within a user, without repeats
    ratings: Tensor | None = None  # float32, aligned with items; None for implicit feedback

    @classmethod
    def from_pairs(
        cls, users: Tensor, items: Tensor, num_users: int, num_items: int, ratings: Tensor | None = None
    ) -> "Interactions":
        """Build from parallel tensors of dense ids, in any order; of repeated pairs the last one counts."""
        if users.shape != items.shape or (ratings is not None and ratings.shape != items.shape):
            lengths = [users.numel(), items.numel(), *([] if ratings is None else [ratings.numel()])]
            raise InvalidData(f"columns of lengths {lengths}", "one length", "Give one user and one item per row.")
        for name, ids, limit in (("user", users, num_users), ("item", items, num_items)):
            if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < limit):
                given = f"{name} ids from {int(ids.min())} to {int(ids.max())}"
                raise InvalidData(given, f"ids from 0 to {limit - 1}", f"Make the ids dense, or raise num_{name}s.")
        pairs = users.long() * num_items + items.long()
        order = torch.argsort(pairs, stable=True)
        pairs = pairs[order]
        last = torch.ones_like(pairs, dtype=torch.bool)
        last[:-1] = pairs[1:] != pairs[:-1]
        order, pairs = order[last], pairs[last]
        per_user = torch.bincount(torch.div(pairs, num_items, rounding_mode="floor"), minlength=num_users)
        ratings = None if ratings is None else ratings[order].to(torch.float32)
        return cls(num_users, num_items, offsets_of(per_user), pairs % num_items, ratings)

    def where(self, mask: Tensor) -> "Interactions":
        """Select interactions by a boolean mask; users and items stay numbered as they are."""
        counts = torch.bincount(self.users[mask], minlength=self.num_users)
        ratings = None if self.ratings is None else self.ratings[mask]
        return replace(self, offsets=offsets_of(counts), items=self.items[mask], ratings=ratings)

    def renumbered(self, place: Tensor) -> "Interactions":
        """Give item i the number ``place[i]``."""
        return Interactions.from_pairs(self.users, place[self.items], self.num_users, self.num_items, self.ratings)

    def of_users(self, users: Tensor) -> "Interactions":
        """Select some users, given by their numbers in ascending order, and number them anew."""
        mask = torch.isin(self.users, users)
        ratings = None if self.ratings is None else self.ratings[mask]
        offsets = offsets_of(self.counts_by_user[users])
        return replace(self, num_users=len(users), offsets=offsets, items=self.items[mask], ratings=ratings)

    def __len__(self) -> int:
        return int(self.items.numel())

    def span(self, user: int) -> "slice[int, int, None]":
        """Slice of ``items`` that belongs to one user."""
        return slice(int(self._bounds[user]), int(self._bounds[user + 1]))

    @cached_property
    def _bounds(self) -> Any:
        return self.offsets.numpy()  # shares memory; indexing it makes no tensor

    def of(self, user: int) -> Tensor:
        """The items that one user has, ascending."""
        return self.items[self.span(user)]

    def ratings_of(self, user: int) -> Tensor:
        """Ratings of one user, aligned with :meth:`of`."""
        if self.ratings is None:
            raise InvalidData("implicit interactions", "ratings", "Prepare the data with ratings kept.")
        return self.ratings[self.span(user)]

    @cached_property
    def users(self) -> Tensor:
        """User of every interaction, aligned with ``items``."""
        numbers = torch.arange(self.num_users, device=self.offsets.device)
        return torch.repeat_interleave(numbers, self.counts_by_user, output_size=len(self))

    @property
    def counts_by_user(self) -> Tensor:
        """Number of interactions of each user."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def counts_by_item(self) -> Tensor:
        """Number of interactions of each item: its popularity."""
        return torch.bincount(self.items, minlength=self.num_items)


@dataclass(frozen=True)
class Dataset:
    """Interactions to train on, to validate on and to test on, with the original ids and titles."""

    name: str
    train: Interactions
    test: Interactions
    valid: Interactions | None = None
    user_ids: list[str] | None = field(default=None, repr=False)
    item_ids: list[str] | None = field(default=None, repr=False)
    titles: list[str] | None = field(default=None, repr=False)
    split: str = ""  # how it was split, in words
    counted: PopularityCounts | None = None  # where clients have counted the items, which are numbered by it
    held_out_users: "Dataset | None" = None  # users who do not train: histories, and items to find
    repairs: Mapping[str, int] = field(default_factory=dict, repr=False)  # what was repaired or left out, by reason

    def renumbered(self, place: Tensor, counted: PopularityCounts | None = None) -> "Dataset":
        """Give item i the number ``place[i]`` in all splits, ids and titles."""
        order = place.argsort().tolist()
        return replace(
            self,
            train=self.train.renumbered(place),
            test=self.test.renumbered(place),
            valid=None if self.valid is None else self.valid.renumbered(place),
            item_ids=None if self.item_ids is None else [self.item_ids[item] for item in order],
            titles=None if self.titles is None else [self.titles[item] for item in order],
            counted=counted,
            held_out_users=None if self.held_out_users is None else self.held_out_users.renumbered(place),
        )

    def of_users(self, users: Tensor) -> "Dataset":
        """Select some users, given by their numbers in ascending order, and number them anew."""
        valid = None if self.valid is None else self.valid.of_users(users)
        ids = None if self.user_ids is None else [self.user_ids[user] for user in users.tolist()]
        return replace(
            self, train=self.train.of_users(users), test=self.test.of_users(users), valid=valid, user_ids=ids
        )

    def with_titles(self, titles: list[str]) -> "Dataset":
        """Give titles to the items."""
        new = self.held_out_users
        return replace(self, titles=titles, held_out_users=None if new is None else new.with_titles(titles))

    def with_validation(self) -> "Dataset":
        """Join the validation set, where there is one, to the training set."""
        train, valid = self.train, self.valid
        if valid is None:
            return self
        ratings = None
        if train.ratings is not None and valid.ratings is not None:
            ratings = torch.cat([train.ratings, valid.ratings])
        users, items = torch.cat([train.users, valid.users]), torch.cat([train.items, valid.items])
        joined = Interactions.from_pairs(users, items, self.num_users, self.num_items, ratings)
        return replace(self, train=joined, valid=None)

    def notes(self) -> list[str]:
        """How the data was split, and what was repaired or left out when it was read, in sentences."""
        split = [f"Split: {self.split}."] if self.split else []
        return split + [f"{count:,} {reason}." for reason, count in self.repairs.items()]

    @property
    def evaluated(self) -> "Dataset":
        """Histories to rank from and items to find: of held-out users where there are any, else of all users."""
        return self if self.held_out_users is None else self.held_out_users

    @property
    def num_users(self) -> int:
        """Number of users who train."""
        return self.train.num_users

    @property
    def num_items(self) -> int:
        """Size of the catalog."""
        return self.train.num_items

    def fingerprint(self) -> dict[str, Any]:
        """Name, counts and checksum, by which runs and cached baselines recognize the data they belong to."""
        counts = {"users": self.num_users, "items": self.num_items, "interactions": len(self.train)}
        new = [] if self.held_out_users is None else [self.held_out_users.train, self.held_out_users.test]
        parts = [self.train, self.test, *new]
        tensors = [tensor for part in parts for tensor in (part.offsets, part.items, part.ratings)]
        return {"name": self.name, **counts, "sha256": sha256_of(tensors)}
