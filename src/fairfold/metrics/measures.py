"""Metrics of rankings by the names that the field uses: ``ndcg@10``, ``recall@20``, ``mrr``, ``coverage``.

Definitions are those of trec_eval. A metric without ``@k`` takes the whole ranking of the items that a user does not
have yet; ``coverage`` and ``novelty`` need a k, and take the run's. With T held-out items of a user and hits at the
ranks r:

- ``ndcg@k``: see :mod:`fairfold.metrics.ranking`. ``recall@k``: hits / T. ``precision@k``: hits / k.
- ``hit@k``: 1 if there is a hit, else 0. ``mrr``: 1 / r of the first hit, 0 without one.
- ``map``: the mean over the T items of the precision at the rank of each, 0 for an item that is not among the first k.
- ``novelty@k``: the mean of -log2(share of users who have an item) over the first k items (Zhou et al. 2010).
- ``coverage@k``: the share of the catalogue that is among the first k items of at least one user.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidSettings, did_you_mean
from fairfold.metrics.ranking import Scorer, ndcg, ranked_batches

NAMES = ("ndcg", "recall", "precision", "hit", "mrr", "map", "coverage", "novelty")
NEEDS_DEPTH = ("coverage", "novelty")  # over the whole catalogue they say nothing
NORMAL_95 = 1.959964  # a mean lies within so many standard errors, with a probability of 95 %


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
    score: Scorer, train: Interactions, test: Interactions, measures: Sequence[Measure], users: Tensor
) -> Mapping[str, Estimate]:
    """Every metric by its name, over those of ``users`` who have test items."""
    depth = max(min(one.k or test.num_items, test.num_items) for one in measures)
    shares = train.counts_by_item.clamp(min=1).double() / train.num_users
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
