"""What devices say of their pairs: how many they have room for, and the shorter of two ways to say them.

A user's pairs are few beside all that there are. Where an answer may be seen as it is, it says either all numbers of
the sum, or those of the pairs that there are, each with its place. Under masks, which hide what is zero, it says all,
and a device that has no room for them those of the leading items.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fairfold.algorithms.making import supported
from fairfold.algorithms.pairs import among, items_of, size_of, weights_of
from fairfold.kernels import ops
from fairfold.kernels.reference_pairs import leading_lengths
from fairfold.methods import Tensors
from fairfold.protocol.words import Public
from fairfold.subspace import Capacity, parse_scheme

if TYPE_CHECKING:
    from fairfold.data import Interactions


def room_for(settings: Any, public: Public, capacity: Capacity, whole: int) -> int:
    """Items whose pairs a device has room for, of so many: as many numbers as its capacity is a share.

    These are leading ones under masks; else of each user's own, a number and its place for every pair.
    """
    share = settings.subspace.share(Tensors({}, {}, catalogue=public.items), capacity)
    each = 2 if share < 1 and not settings.privacy.sums_alone else 1
    return min(whole, max(1, items_of(int(share * size_of(whole)) // each)))


def reach_of(settings: Any, public: Public, capacity: Capacity, whole: int) -> int:
    """Leading items that a device speaks of: all, or those that it has room for."""
    return room_for(settings, public, capacity, whole) if settings.privacy.sums_alone else whole


def heard_of(settings: Any, public: Public, whole: int, counts: Tensor | None, least: float) -> int:
    """Items up to the last one that so many of the users have who speak of it; that anybody speaks of, if none counted.

    Sizes share the users equally, as a scheme says.
    """
    reaches = [reach_of(settings, public, one, whole) for one in parse_scheme(settings.fleet.capacities)]
    if counts is None:
        return max(reaches)
    speak = (torch.tensor(reaches)[:, None] > torch.arange(whole)).double().mean(0)
    return supported(counts[:whole].double() * speak, least)


def totals_of(histories: "Interactions", *, lengths: bool, pairs: bool) -> Tensor:
    """How many users there are, and where that may be known how many items and pairs these have."""
    many = histories.counts_by_user.double()
    numbers = torch.stack([many.sum(), (many * (many + 1)).sum() / 2])
    return torch.cat([numbers.new_tensor([histories.num_users]), numbers * torch.tensor([lengths, pairs])])


def usually_said(totals: Tensor, length: float, most: int, whole: int, *, news: bool) -> int:
    """Numbers that a usual device says: all, or, where pairs were counted, those of its new ones with their places.

    Pairs were counted among all items; histories within the head have a mean length, and pairs go by its square. Where
    pairs are counted answers may be seen, and who has no news says nothing.
    """
    users, items, pairs = totals.tolist()
    if not pairs:
        return whole
    usual = pairs / users * (length * users / items) ** 2
    return min(whole, 2 * int(min(usual, size_of(most))) * news)


class Spoken(NamedTuple):
    """Histories of which the pairs are said, one after another; what some said before has a weight below 0.

    Attributes:
        items: Of all of them; each history ascends.
        begins: Where each begins.
        ends: Where what is said of it ends.
        weights: Of its pairs.
    """

    items: Tensor
    begins: Tensor
    ends: Tensor
    weights: Tensor

    @classmethod
    def of(cls, items: Tensor, lengths: Tensor, most: int) -> "Spoken":
        """Each user says pairs of their first so many items, and weighs them by how many they have in all."""
        begins = lengths.cumsum(0) - lengths
        return cls(items, begins, begins + lengths.clamp(max=most), weights_of(lengths))

    @classmethod
    def changes(cls, items: Tensor, lengths: Tensor, now: Tensor, said: Tensor, most: int) -> "Spoken":
        """What some histories have to say, of which some items were said before; nothing where no item has changed."""
        user = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        changed = torch.zeros(len(lengths), dtype=torch.bool)
        changed[user[now != said]] = True
        mine = changed[user]
        found = cls.of(*among(items, lengths, mine & now), most)
        return found.less(cls.of(*among(items, lengths, mine & said), most)) if bool((mine & said).any()) else found

    def less(self, before: "Spoken") -> "Spoken":
        """What is said now, where something else was said before."""
        begins, ends = (of + len(self.items) for of in (before.begins, before.ends))
        parts = before.items, begins, ends, -before.weights
        return Spoken(*(torch.cat(both) for both in zip(self, parts, strict=True)))

    def summed(self, leading: int, dtype: torch.dtype) -> Tensor:
        """The packed sum over the leading items."""
        return ops.pair_sums(self.items, self.begins, self.ends, self.weights.to(dtype), leading)

    def shortest(self, leading: int, dtype: torch.dtype) -> Tensor:
        """The same, sparse where that takes fewer bytes: nothing of the size of the sum is made then."""
        lengths = leading_lengths(self.items, self.begins, self.ends, leading)
        if 2 * int((lengths * (lengths + 1) // 2).sum()) >= size_of(leading):
            return self.summed(leading, dtype)
        places, values = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=dtype)]
        for begin, many, weight in zip(self.begins.tolist(), lengths.tolist(), self.weights, strict=True):
            mine = self.items[begin : begin + many]
            firsts = mine * (mine + 1) // 2
            places += [first + mine[: nth + 1] for nth, first in enumerate(firsts)]
            values.append(weight.to(dtype).expand(size_of(many)))
        where, shape = torch.cat(places)[None], (size_of(leading),)
        return torch.sparse_coo_tensor(where, torch.cat(values), shape, check_invariants=True).coalesce()
