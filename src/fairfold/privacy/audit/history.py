"""The attack on histories: which items a user has, from one update or from the sum of a cohort.

*Matched items.* Popularity alone finds much of anybody's history, so items that a person has and another one has not
are compared with *equally popular* ones that the other has and the person has not. An order of items that comes from
neither of the two finds the histories of both equally well: one half, on average. Items of the catalog would not do: of
two that equally many users have, the one that users with short histories have is more often somebody's, and an order by
that would seem to find histories.
"""

from dataclasses import dataclass
from itertools import product
from math import nan

import torch
from torch import Generator, Tensor

from fairfold.data import Interactions
from fairfold.privacy.audit.reconstruction import UpdateReader
from fairfold.privacy.audit.replay import COMPARED_USERS, TARGETS_PER_COHORT, Advance, Observation, ReplayedClients

ALIKE = 0.1  # relative difference of popularity up to which two items count as equally popular
MOST = 256  # most items of a history that are compared with those of another
DRAWS = 2_000  # resamples of the bootstrap
SHADOWS = 24  # updates, or sums, of synthetic clients by which the attacker tunes itself
EXTRA_CLIENTS = 200  # synthetic clients beyond those of a sum, so that sums differ
Pairs = tuple[Tensor, Tensor]  # items of a user, and for each of them an equally popular item of another user
Scores = dict[str, Tensor]


@dataclass(frozen=True)
class Figure:
    """A mean over targets with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
    num_targets: int

    @classmethod
    def of(cls, values: list[float], seed: int = 0) -> "Figure":
        """Compute from one value per target; NaN values are left out."""
        found = torch.tensor([value for value in values if value == value], dtype=torch.float64)
        if not len(found):
            return cls(nan, nan, nan, 0)
        source = torch.Generator().manual_seed(seed)
        means = found[torch.randint(len(found), (DRAWS, len(found)), generator=source)].mean(1)
        low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return cls(float(found.mean()), low, high, len(found))


def matched_items(train: Interactions, user: int, others: list[int], source: Generator) -> list[Pairs]:
    """Pair a user's items with equally popular ones of others, without common ones; long histories are sampled."""
    mine = train.of(user)
    popularity = train.counts_by_item.double()
    found = list[Pairs]()
    for other in others:
        theirs = train.of(other)
        own = _some(mine[~torch.isin(mine, theirs)], source)
        equals = _some(theirs[~torch.isin(theirs, mine)], source)
        # Each belongs to one of the two users, so leaving both out keeps them equally popular.
        count, other_count = popularity[own][:, None], popularity[equals]
        first, second = ((count - other_count).abs() <= ALIKE * torch.maximum(count, other_count)).nonzero().T
        found.append((own[first], equals[second]))
    return found


def _some(items: Tensor, source: Generator) -> Tensor:
    return items if len(items) <= MOST else items[torch.randperm(len(items), generator=source)[:MOST]]


def matched_auc(scores: Tensor, pairs: list[Pairs]) -> float:
    """Probability that an item of a history scores above its equal: 0.5 by chance, NaN without items."""
    known = [(scores[mine], scores[equals]) for mine, equals in pairs if len(mine)]
    found = [float(((ahead > behind).double() + 0.5 * (ahead == behind)).mean()) for ahead, behind in known]
    return sum(found) / len(found) if found else nan


def precision(scores: Tensor, mine: Tensor, source: Generator) -> float:
    """Share of a history among equally many top items of the catalog; ties in random order."""
    order = torch.randperm(len(scores), generator=source)
    first = order[scores[order].argsort(descending=True, stable=True)[: len(mine)]]
    return float(torch.isin(first, mine).double().mean())


@dataclass(frozen=True)
class Target:
    """Result of the attack on one user's history."""

    user: int
    size: int
    auc: float
    precision: float
    inside: bool = True  # whether the observation includes the target


class TunedAttack:
    """An attack tuned on synthetic clients: the background of each item, and the score that works best."""

    def __init__(self, scores: list[Scores], equals: list[list[list[Pairs]]]) -> None:
        # Half of the observations estimate the background, the others select the score that finds known histories.
        half = max(len(scores) // 2, 1)
        self._background = {}
        for name in scores[0]:
            values = torch.stack([one[name] for one in scores[:half]])
            self._background[name] = (values.mean(0), values.std(0, unbiased=False))
        known = zip(scores[half:] or scores, equals[half:] or equals, strict=True)
        cases = [(one, pairs) for one, by_user in known for pairs in by_user if any(len(mine) for mine, _ in pairs)]
        aucs = {
            way: sum(matched_auc(self.read(one, way), pairs) for one, pairs in cases) / max(len(cases), 1)
            for way in product(self._background, ("raw", "negated", "standardized"))
        }
        self._way = max(aucs, key=lambda way: aucs[way])

    def read(self, scores: Scores, way: tuple[str, str] | None = None) -> Tensor:
        """Item scores of one kind and transformation; of the best ones if none is named."""
        name, how = self._way if way is None else way
        if how != "standardized":
            return scores[name] if how == "raw" else -scores[name]
        mean, spread = self._background[name]
        least = float(spread[spread > 0].median()) / 10 if bool((spread > 0).any()) else 1.0
        return (scores[name] - mean) / spread.clamp(min=least)


def attack_updates(
    replay: ReplayedClients, reader: UpdateReader, users: list[int], source: Generator, advance: Advance
) -> list[Target]:
    """Attack each user by one update; also by the update of another client of the same size, for comparison."""
    found = list[Target]()
    tuned = dict[int, TunedAttack]()
    before = dict[int, tuple[int, Tensor]]()
    everybody = replay.sampler.participants
    for user, seen in zip(users, replay.updates(users), strict=True):
        size = seen.task.size
        if size not in tuned:
            tuned[size] = _tune_to_updates(replay, reader, size, source)
        scores = tuned[size].read(reader.scores(seen))
        last, last_scores = before.get(size, (user, None))
        some = everybody[torch.randint(len(everybody), (COMPARED_USERS,), generator=source)].tolist()
        pairs = matched_items(replay.clients.train, user, [one for one in some if one not in (user, last)], source)
        found.append(_evaluate(replay, user, scores, pairs, source))
        if last_scores is not None:
            found.append(_evaluate(replay, user, last_scores, pairs, source, inside=False))
        before[size] = (user, scores)
        advance()
    return found


def _tune_to_updates(replay: ReplayedClients, reader: UpdateReader, size: int, source: Generator) -> TunedAttack:
    others = replay.synthetic(SHADOWS, source)
    others.sampler.size.fill_(size)
    train, everybody = others.clients.train, list(range(SHADOWS))
    rest = [[other for other in everybody if other != user] for user in everybody]
    equals = [[matched_items(train, user, rest[user], source)] for user in everybody]
    return TunedAttack([reader.scores(seen) for seen in others.updates(everybody)], equals)


def attack_sums(
    replay: ReplayedClients, reader: UpdateReader, cohort: int, users: int, source: Generator, advance: Advance
) -> list[Target]:
    """Attack targets by the sum of their cohort, and by the same sum with other clients in place of the targets."""
    # The latter reveals what everybody's data reveal of the targets: only what is beyond is due to their own data.
    known: dict[int, tuple[list[Scores], list[list[list[Pairs]]]]] = {}
    cohort_size = min(cohort, len(replay.sampler.participants))
    pool = replay.synthetic(cohort_size + max(cohort_size // 4, EXTRA_CLIENTS), source)
    for _ in range(SHADOWS):
        drawn = pool.cohorts(cohort_size, 1, source)[0]
        members, others = drawn.members, drawn.compared(source)
        for seen in pool.sums(members, rough=True):
            scores, equals = known.setdefault(seen.task.size, ([], []))
            scores.append(reader.scores(seen))
            mine = [user for user in members if int(pool.sampler.size[user]) == seen.task.size] or members
            mine = mine[:TARGETS_PER_COHORT]
            equals.append([matched_items(pool.clients.train, user, others, source) for user in mine])
        advance()
    tuned = {size: TunedAttack(*examples) for size, examples in known.items()}
    found = list[Target]()
    for drawn in replay.cohorts(cohort, users, source):
        train = replay.clients.train
        pairs = {user: matched_items(train, user, drawn.compared(source), source) for user in drawn.targets}
        for inside, members in ((True, drawn.members), (False, drawn.without_targets)):
            sums = replay.sums(members) if drawn.outside or inside else []
            by_size = {seen.task.size: seen for seen in sums if seen.task.size in tuned}
            ranked = {size: tuned[size].read(reader.scores(seen)) for size, seen in by_size.items()}
            for user in drawn.targets:
                part = sum_with_size(sums, int(replay.sampler.size[user]))
                if part is not None and part.task.size in ranked:
                    found.append(_evaluate(replay, user, ranked[part.task.size], pairs[user], source, inside))
            advance()
    return found


def sum_with_size(sums: list[Observation], size: int) -> Observation | None:
    """The sum that includes clients of a size: that of the size, or the only sum of all sizes."""
    mine = [seen for seen in sums if seen.task.size == size] or (sums if len(sums) == 1 else [])
    return mine[0] if mine else None


def _evaluate(
    replay: ReplayedClients, user: int, scores: Tensor, pairs: list[Pairs], source: Generator, inside: bool = True
) -> Target:
    mine, size = replay.clients.train.of(user), int(replay.sampler.size[user])
    return Target(user, size, matched_auc(scores, pairs), precision(scores, mine, source), inside)
