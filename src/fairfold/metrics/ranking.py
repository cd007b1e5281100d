"""NDCG@k over the whole catalogue, a batch of users at a time.

For every user all items outside the training set are ranked by score, the lower item number first where scores are
equal; the first k ranks are compared with the user's test items. With hit(r) = 1 when rank r (from 1) holds a test item
and T the number of the user's test items, NDCG@k is Σ hit(r) / log2(r + 1) over r ≤ k, divided by the same sum for the
best ranking, which has its hits at r ≤ min(k, T).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData, InvalidVector

Scorer = Callable[[Tensor], Tensor]

CUT = " cut to "  # in the name of a baseline that had to leave items out
BATCH_ELEMENTS = 1 << 24  # scores held at a time, four bytes each: so many users make a batch


@dataclass(frozen=True)
class RankingResult:
    """NDCG of the users with test items: the mean, and the values (float64) of each of ``users`` (int64, ascending)."""

    ndcg: float
    users: Tensor = field(repr=False)
    ndcg_by_user: Tensor = field(repr=False)


def evaluate_ranking(
    score: Scorer, train: Interactions, test: Interactions, k: int = 20, *, users: Tensor | None = None
) -> RankingResult:
    """Rank the catalogue for every user with test items, or for ``users`` alone, and compare with these.

    ``score`` takes user ids (int64, on the CPU) and returns their scores of all items, [users, items], on any device.
    An item scored -inf is never recommended; NaN is an error. Scores are not written to. Items of ``train`` are not
    ranked; a test item among them counts as missed.
    """
    evaluated = users_with_tests(test, users)
    if not len(evaluated):
        remedy = "Check how the data was split: of who has a single item none is held out."
        raise InvalidData("no user with test items", "at least one", remedy)
    hits = torch.cat([found for _, _, found in ranked_batches(score, train, test, k, evaluated)])
    by_user = ndcg(hits, test.counts_by_user[evaluated], k)
    return RankingResult(float(by_user.mean()), evaluated, by_user)


def users_with_tests(test: Interactions, users: Tensor | None = None) -> Tensor:
    """The users with test items, ascending; of ``users`` where these are given."""
    asked = torch.arange(test.num_users) if users is None else torch.unique(users)
    return asked[test.counts_by_user[asked] > 0]


def ranked_batches(
    score: Scorer, train: Interactions, test: Interactions, k: int, users: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The users with test items, a batch at a time, with their best k items, and which of these are test items."""
    _check_sizes(train, test, k)
    for batch in torch.split(users_with_tests(test, users), max(1, BATCH_ELEMENTS // test.num_items)):
        items = recommend(score, batch, train, k)
        yield batch, items, _is_in(test, batch, items)


def ndcg(hits: Tensor, relevant: Tensor, k: int) -> Tensor:
    """NDCG@k of each user, float64, by hits [users, ranks] and the number of each one's relevant items, 1 at least."""
    discount = 1 / torch.arange(2, k + 2, dtype=torch.float64).log2()
    gains = hits.double() @ discount[: hits.shape[1]]
    # The two sums run in different orders: without the limit a perfect ranking could come out above 1.
    return (gains / discount.cumsum(0)[relevant.clamp(max=k) - 1]).clamp(max=1)


def recommend(score: Scorer, users: Tensor, train: Interactions, k: int) -> Tensor:
    """The best k items outside the training set for some users, int64 [users, k], best first; -1 where none is left."""
    given = score(users)
    if given.shape != (len(users), train.num_items):
        needed = f"[{len(users)}, {train.num_items}], a row per user and a column per item"
        remedy = "Return the scores of the whole catalogue for the users asked for."
        raise InvalidVector(f"scores of shape {list(given.shape)}", needed, remedy)
    # A copy, since the scorer may hand out a table of its own.
    scores = given.detach().to(torch.promote_types(given.dtype, torch.float32), copy=True)
    rows, items = user_items(train, users)
    scores[rows.to(scores.device), items.to(scores.device)] = -torch.inf
    count = min(k, train.num_items)
    values, top = first_by_score(scores, count)
    if bool(values.isnan().any()):
        raise InvalidVector("scores with NaN", "numbers", "Check the model: training may have diverged.")
    top = top.masked_fill(values == -torch.inf, -1).cpu()
    return torch.nn.functional.pad(top, (0, k - count), value=-1)


def first_by_score(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row and their columns, the lower column first among equals.

    ``torch.topk`` alone leaves open which of several equal values it returns. Which ones belong is open only
    where the last value taken occurs again among those left behind: only such rows are searched again.
    """
    columns = scores.shape[1]
    values, top = scores.topk(min(count + 1, columns), dim=1)
    if count < columns:
        open_rows = (values[:, count - 1] == values[:, count]).nonzero().flatten()
        values, top = values[:, :count], top[:, :count]
        if len(open_rows):
            threshold = values[open_rows, -1:]
            number = torch.arange(columns, device=scores.device)
            tied = torch.where(scores[open_rows] == threshold, number, columns)
            lowest = tied.topk(count, dim=1, largest=False).values
            above = (values[open_rows] > threshold).sum(1, keepdim=True)
            rank = torch.arange(count, device=scores.device)
            refilled = lowest.gather(1, (rank - above).clamp(min=0))
            top[open_rows] = torch.where(rank < above, top[open_rows], refilled)
    # Equal values in ascending order of column: sort by column, then stably by value.
    top, order = top.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, top.gather(1, order)


def user_items(interactions: Interactions, users: Tensor) -> tuple[Tensor, Tensor]:
    """Positions within ``users`` and items, of all interactions of these users."""
    counts = interactions.counts_by_user[users]
    rows = torch.repeat_interleave(torch.arange(len(users)), counts)
    within = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    return rows, interactions.items[interactions.offsets[users][rows] + within]


def _is_in(interactions: Interactions, users: Tensor, items: Tensor) -> Tensor:
    """Which of some users' items [users, k] they interacted with; -1 is no item."""
    rows, owned = user_items(interactions, users)
    # Ascending, as users come in order and items ascend within a user.
    pairs = rows * interactions.num_items + owned
    asked = torch.arange(len(users))[:, None] * interactions.num_items + items
    found = torch.searchsorted(pairs, asked).clamp(max=len(pairs) - 1)
    return (pairs[found] == asked) & (items >= 0)


def _check_sizes(train: Interactions, test: Interactions, k: int) -> None:
    if k < 1:
        raise InvalidData(f"k = {k}", "at least 1", "Ask for at least one rank.")
    sizes = [(part.num_users, part.num_items) for part in (train, test)]
    if sizes[0] != sizes[1]:
        given = f"train of {sizes[0][0]} users × {sizes[0][1]} items, test of {sizes[1][0]} × {sizes[1][1]}"
        raise InvalidData(given, "the same users and catalogue in both", "Prepare both parts together.")


def is_cut(name: str) -> bool:
    """Whether a baseline of this name had to leave items out: a difference from it says little."""
    return CUT in name
