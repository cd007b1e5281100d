"""Rankings of the whole catalogue, a batch of users at a time: NDCG@k, and metrics by the names that the field uses.

For every user all items outside the training set are ranked by score, the lower item number first where scores are
equal; the first k ranks are compared with the user's test items. With hit(r) = 1 when rank r (from 1) holds a test item
and T the number of the user's test items, NDCG@k is Σ hit(r) / log2(r + 1) over r ≤ k, divided by the same sum for the
best ranking, which has its hits at r ≤ min(k, T).

Definitions are those of trec_eval. A metric without ``@k`` takes the whole ranking of the items that a user does not
have yet; ``coverage`` and ``novelty`` need a k, and take the run's:

- ``recall@k``: hits / T. ``precision@k``: hits / k. ``hit@k``: 1 if there is a hit, else 0.
- ``mrr``: 1 / r of the first hit, 0 without one.
- ``map``: the mean over the T items of the precision at the rank of each, 0 for an item that is not among the first k.
- ``novelty@k``: the mean of -log2(share of users who have an item) over the first k items (Zhou et al. 2010).
- ``coverage@k``: the share of the catalogue that is among the first k items of at least one user.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.data.sampling import generator
from fairfold.errors import InvalidData, InvalidSettings, InvalidVector, did_you_mean

Scorer = Callable[[Tensor], Tensor]

CUT = " cut to "  # in the name of a baseline that had to leave items out
BATCH_ELEMENTS = 1 << 24  # scores held at a time, four bytes each: so many users make a batch
LEAST_SAMPLED, MOST_SCORES = 10_000, 4_000_000_000  # users of a sample; scores of an evaluation of all of them
NAMES = ("ndcg", "recall", "precision", "hit", "mrr", "map", "coverage", "novelty")
NEEDS_DEPTH = ("coverage", "novelty")  # over the whole catalogue they say nothing
NORMAL_95 = 1.959964  # a mean lies within so many standard errors, with a probability of 95 %


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


def sampled_users(test: Interactions) -> Tensor:
    """The users with test items, ascending; a sample where to rank all items for all of them would take too long.

    At least 10,000 are drawn, by chance, and in every run the same: models of the same data are compared by them.
    """
    found, most = users_with_tests(test), max(LEAST_SAMPLED, MOST_SCORES // test.num_items)
    if len(found) <= most:
        return found
    return found[torch.randperm(len(found), generator=generator(0, 5))[:most]].sort().values


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
    rows, places = expand(interactions.offsets, users)
    return rows, interactions.items[places]


def expand(offsets: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Positions within ``groups``, and places in a list by groups with ``offsets``, of all members of these groups."""
    counts = offsets.diff()[groups]
    rows = torch.repeat_interleave(torch.arange(len(groups)), counts)
    within = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    return rows, offsets[groups][rows] + within


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


@dataclass(frozen=True)
class Measure:
    """A metric of rankings, and how many ranks it looks at (None: all)."""

    kind: str
    k: int | None

    @classmethod
    def parse(cls, name: str, top: int) -> Self:
        """The metric of a name such as ``ndcg@10``; ``top`` is the k of those that need one and name none."""
        parts = re.fullmatch(r"([a-z]+)(?:@([1-9][0-9]*))?", str(name).strip().lower())
        if parts is None or parts[1] not in NAMES:
            hint = did_you_mean(str(name).lower().split("@")[0], NAMES)
            raise InvalidSettings(f"metric {name!r}{hint}", f"one of {', '.join(NAMES)}", "Write ndcg@10, or mrr.")
        k = None if parts[2] is None else int(parts[2])
        return cls(parts[1], top if k is None and parts[1] in NEEDS_DEPTH else k)

    def __str__(self) -> str:
        return self.kind if self.k is None else f"{self.kind}@{self.k}"


class Estimate(NamedTuple):
    """A mean over users with half of its 95 % interval; ``by_user`` is empty for a metric of the whole catalogue."""

    value: float
    half_width: float
    by_user: Tensor

    @classmethod
    def of(cls, by_user: Tensor) -> Self:
        """The mean of a value per user."""
        count = len(by_user)
        error = float(by_user.std()) / count**0.5 if count > 1 else float("nan")
        return cls(float(by_user.mean()), NORMAL_95 * error, by_user)


def measure_ranking(
    score: Scorer,
    train: Interactions,
    test: Interactions,
    measures: Sequence[Measure],
    users: Tensor,
    counted: Interactions | None = None,
) -> Mapping[str, Estimate]:
    """Every metric by its name, over those of ``users`` who have test items; novelty by the users of ``counted``."""
    depth = max(min(one.k or test.num_items, test.num_items) for one in measures)
    counted = train if counted is None else counted
    shares = counted.counts_by_item.clamp(min=1).double() / counted.num_users
    values: dict[str, list[Tensor]] = {str(one): [] for one in measures}
    recommended = {one: torch.zeros(test.num_items, dtype=torch.bool) for one in measures if one.kind == "coverage"}
    for batch, items, hits in ranked_batches(score, train, test, depth, users):
        relevant = test.counts_by_user[batch]
        for one in measures:
            if one.kind == "coverage":
                best = items[:, : one.k]
                recommended[one][best[best >= 0]] = True
            elif one.kind == "novelty":
                values[str(one)].append(_novelty(items[:, : one.k], shares))
            else:
                values[str(one)].append(_by_user(one, hits, relevant))
    found = {name: Estimate.of(torch.cat(parts)) for name, parts in values.items() if parts}
    for one, mask in recommended.items():
        found[str(one)] = Estimate(float(mask.double().mean()), float("nan"), torch.zeros(0))
    return {str(one): found[str(one)] for one in measures}


def _by_user(measure: Measure, hits: Tensor, relevant: Tensor) -> Tensor:
    """The values of some users by their hits [users, ranks]."""
    k = hits.shape[1] if measure.k is None else measure.k
    within = hits[:, :k].double()
    if measure.kind == "ndcg":
        return ndcg(hits[:, :k], relevant, k)
    if measure.kind in ("recall", "precision"):
        return within.sum(1) / (relevant if measure.kind == "recall" else k)
    if measure.kind == "hit":
        return within.amax(1)
    ranks = torch.arange(1, within.shape[1] + 1, dtype=torch.float64)
    if measure.kind == "mrr":
        return (within / ranks).amax(1)
    return (within * within.cumsum(1) / ranks).sum(1) / relevant  # map


def _novelty(items: Tensor, shares: Tensor) -> Tensor:
    """Mean self-information of the items of each user; -1 is no item."""
    present = items >= 0
    bits = torch.where(present, -shares[items.clamp(min=0)].log2(), 0.0)
    return bits.sum(1) / present.sum(1).clamp(min=1)


def paired_test(first: Tensor, second: Tensor, draws: int = 10_000, seed: int = 0) -> tuple[Estimate, float]:
    """The mean difference of two values per user, and its p-value by a paired randomization test.

    Under the null hypothesis the two models could be exchanged for every user, so that each difference has either sign
    (Smucker et al. 2007). The p-value is the share of ``draws`` random signs, the observed ones among them, with a mean
    at least as far from 0.
    """
    difference = first - second
    generator = torch.Generator().manual_seed(seed)
    observed = abs(float(difference.mean()))
    as_far = 1
    for size in _portions(draws, max(1, 2_000_000 // len(difference))):
        signs = torch.randint(0, 2, (size, len(difference)), generator=generator, dtype=torch.int8).double() * 2 - 1
        as_far += int(((signs @ difference / len(difference)).abs() >= observed * (1 - 1e-12)).sum())
    return Estimate.of(difference), as_far / (draws + 1)


def _portions(total: int, largest: int) -> Iterator[int]:
    while total > 0:
        yield min(total, largest)
        total -= largest
