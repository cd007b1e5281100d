"""Scores by rows, pairs, neighbours and popularity of items, from histories alone: what a device does with a model."""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fairfold.kernels import ops
from fairfold.kernels.few_bits import PackedRows
from fairfold.metrics.ranking import first_by_score
from fairfold.projections.coded import FACTORS, factors_of
from fairfold.values import Weights

TASTE, WORN = "taste", "worn"
"""Names of what is made of a history: the sum of its rows, and which items it has."""

BLOCK = 1024
"""Rows whose numbers are made of bits at a time."""

NONE = 1e-30
"""What adds nothing to any score."""

SCORES_AT_ONCE = 1 << 22
"""Scores made at a time, where many histories are judged."""


class Served:
    """A model as it is held.

    A pair (j, i, t) adds to the score of j, for who has i, what its rows miss of t: t − b_j ⟨w_j, w_i⟩ a_i, times
    ``weight``; and to the score of i as much of that as its factors say, (a_j b_i) / (a_i b_j). A neighbour (j, i, v)
    adds v to the score of j, for who has i, and nothing to that of i. Popularity adds its (1 + n)-th to every item that
    has a score, for who has n items with a row: it counts as one more item that everybody has, and who has none is
    served by it alone.

    Args:
        rows: (a, b, w) of the leading items, [rows, 2 + columns]; or as they are stored, and read as they are.
        listed: Pairs, [pairs, 3]; one of an item with itself is none.
        weight: What a pair counts.
        near: Neighbours, [neighbours, 3], if there are any.
        popular: What popularity adds at the items 0, 1, 3, 7, …, if it does; between them it is a power of the number.
    """

    def __init__(
        self, rows: Tensor | PackedRows, listed: Tensor, weight: float, near: Tensor | None = None,
        popular: Tensor | None = None,
    ) -> None:  # fmt: skip
        factors = rows[:, :FACTORS] if isinstance(rows, Tensor) else factors_of(rows.ahead)
        self.rows, self.known = rows[:, FACTORS:] if isinstance(rows, Tensor) else rows, len(rows)
        self.into, self.out = factors.T
        pairs, values = listed[:, :2].long(), listed[:, 2]
        real = pairs[:, 0] != pairs[:, 1]
        pairs, values = pairs[real], values[real].to(factors.dtype)
        back = torch.ones_like(values)
        both = (pairs < self.known).all(1)
        (rarer, other), held = pairs[both].T, values[both]
        a, b = self.into, self.out
        values[both] = held - b[rarer] * (self.rows[rarer] * self.rows[other]).sum(1) * a[other]
        back[both] = a[rarer] * b[other] / (a[other] * b[rarer]).clamp(min=1e-30)
        values = weight * values
        one_way = listed.new_empty(0, 3) if near is None else near
        one_way = one_way[one_way[:, 0] != one_way[:, 1]]
        (scored, has), alike = one_way[:, :2].long().T, one_way[:, 2].to(factors.dtype)
        # Pairs both ways, by the item that is scored.
        self._from, to = torch.cat([pairs[:, 1], pairs[:, 0], has]), torch.cat([pairs[:, 0], pairs[:, 1], scored])
        values, order = torch.cat([values, values * back, alike]), to.argsort(stable=True)
        self._from, self._to, self._values = self._from[order], to[order], values[order]
        blocks = (torch.arange(at, min(at + BLOCK, self.known)) for at in range(0, self.known, BLOCK))
        self._largest = max((float((self.rows[of].norm(dim=1) * self.out[of]).max()) for of in blocks), default=0.0)
        self._popular = None if popular is None or not bool(popular.any()) else popular.flatten().clamp(min=NONE).log()
        self.reach = 1 + max([self.known - 1, *(int(of.max()) for of in (self._to, self._from) if len(of))])

    def histories(self, histories: list[Tensor]) -> Weights:
        """What is made of some histories."""
        worn = self.into.new_zeros(len(histories), self.reach)
        worn[_places(histories, self.reach)] = 1
        if isinstance(self.rows, PackedRows):
            mine = [history[history < self.known] for history in histories]
            tastes = [ops.packed_sum(self.rows, items, self.into[items]) for items in mine]
            return {TASTE: torch.stack(tastes) if tastes else worn.new_zeros(0, self.rows.columns), WORN: worn}
        return {TASTE: (worn[:, : self.known] * self.into) @ self.rows, WORN: worn}

    def scores(self, made: Weights, items: Tensor) -> Tensor:
        """Of items that follow each other, [users, items]: those without a score after all others, in their order."""
        taste, worn = made[TASTE], made[WORN]
        least = self._least(taste, worn)
        behind = 1 - 1 / (items + 2).to(worn.dtype)  # the same in every block of items
        found = least[:, None] - behind * (1 + least.abs()[:, None])
        here = items < self.known
        mine = items[here]
        packed = isinstance(self.rows, PackedRows)
        told = ops.packed_products(self.rows, mine, taste) if packed else taste @ self.rows[mine].T  # type: ignore[arg-type]
        found[:, here] = told * self.out[mine]
        ends = torch.stack([items[0], items[-1] + 1]) if len(items) else items.new_zeros(2)
        low, high = torch.searchsorted(self._to, ends).tolist()
        if high > low:
            first = torch.searchsorted(self._to[low:high], items)
            added = embedding_bag(
                self._from[low:high], worn.T.contiguous(), first, mode="sum", per_sample_weights=self._values[low:high]
            ).T  # by item: the pairs that score it, of all users at once
            beyond = ~here & (added != 0)
            found = torch.where(beyond, added, found + torch.where(here, added, 0))
            here = here | beyond
        if self._popular is not None:
            found = found + torch.where(here, self.popular(items) / (1 + worn[:, : self.known].sum(1, keepdim=True)), 0)
        return found

    def popular(self, items: Tensor) -> Tensor:
        """What popularity adds to some items, for who has none."""
        if self._popular is None:
            return torch.zeros(len(items))
        place = (items.double() + 1).log2().clamp(max=len(self._popular) - 1)
        first = place.floor().long().clamp(max=len(self._popular) - 2)
        low, high = (self._popular[of].double() for of in (first, first + 1))
        return torch.lerp(low, high, place - first).exp().to(self.into.dtype)

    def _least(self, taste: Tensor, worn: Tensor) -> Tensor:
        """What no score of a user is below."""
        if not self.known:
            return taste.new_zeros(len(taste))
        rows = taste.norm(dim=1) * self._largest
        pairs = worn.sum(1) * (self._values.abs().max() if len(self._values) else 0.0)
        least: Tensor = -(rows + pairs)
        return least

    def judged(self, given: list[Tensor], wanted: list[Tensor], catalogue: int, top: int) -> Tensor:
        """NDCG@top of every user: what is found of some items by the others that they have.

        Items that no score tells apart come in their order, so the leading ones are all that can be among the first.
        """
        longest = max((len(history) for history in given), default=0)
        items = torch.arange(min(catalogue, self.reach + top + longest))
        discount = 1 / torch.arange(2, top + 2, dtype=torch.float64).log2()
        found, step = torch.zeros(len(given), dtype=torch.float64), max(1, SCORES_AT_ONCE // len(items))
        for start in range(0, len(given), step):
            some, hidden = given[start : start + step], wanted[start : start + step]
            scores = self.scores(self.histories(some), items).float()  # equal ones are, however many users there are
            scores[_places(some, len(items))] = -torch.inf
            best = first_by_score(scores, min(top, len(items)))[1]
            looked_for = torch.zeros_like(scores, dtype=torch.bool)
            looked_for[_places(hidden, len(items))] = True
            hits = looked_for.gather(1, best).double() @ discount[: best.shape[1]]
            many = torch.tensor([min(len(missing), top) for missing in hidden])
            found[start : start + step] = hits / discount.cumsum(0)[many - 1]
        return found.clamp(max=1)


def _places(histories: list[Tensor], items: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the leading items of some histories."""
    rows = torch.repeat_interleave(torch.arange(len(histories)), torch.tensor([len(one) for one in histories]))
    columns = torch.cat(histories)
    here = columns < items
    return rows[here], columns[here]
