"""Attackers with prior knowledge: is this item in the history, and is this person in the sum?

*One item.* All of a history is known but one item: which of two equally popular ones is it? The attacker checks which
update fits better; where updates depend on a vector that it cannot know (gradient steps), which item's row changes more
like those of the known items.

*One person.* Does the sum include this known history? By comparison with sums of other cohorts; or, for the strongest
attacker, with the updates of everybody else in the sum subtracted.
"""

from functools import cache
from math import erfc, exp, sqrt

import torch
from torch import Generator, Tensor

from fairfold.data import Interactions
from fairfold.privacy.audit.history import EXTRA_CLIENTS, matched_items, sum_with_size
from fairfold.privacy.audit.reconstruction import UpdateReader
from fairfold.privacy.audit.replay import Advance, Observation, ReplayedClients

Pair = tuple[int, int]  # an item of a history, and an equally popular one
BACKGROUND_SUMS = 16  # sums of other cohorts from which the attacker estimates the background
SHRINKAGE = 0.5  # shrinkage of each number's variance towards the mean of all: a few sums estimate each one badly


def flat(seen: Observation) -> Tensor:
    """The sums of an observation as one vector."""
    return torch.cat([vector.reshape(-1).double() for _, vector in sorted(seen.update.sums.items())])


class SumBackground:
    """Mean and variance of sums of other cohorts, number by number; 0 and 1 for a single update."""

    def __init__(self, sums: list[Tensor]) -> None:
        self._mean: Tensor | float = 0.0
        self._spread: Tensor | float = 1.0
        if not sums:
            return
        zero = torch.zeros_like(sums[0])
        self._mean = mean = sum(sums, zero) / len(sums)
        spread = sum(((one - mean).square() for one in sums), zero) / max(len(sums) - 1, 1)
        level = float(spread[spread > 0].mean()) if bool((spread > 0).any()) else 1.0
        self._spread = (1 - SHRINKAGE) * spread + SHRINKAGE * level

    def fit(self, observed: Tensor, update: Tensor) -> float:
        """How much a sum looks as if it included an update: 0 on average if it does not."""
        apart, update, spread = self._centered(observed, update)
        scaled = update / spread
        length = float((update * scaled).sum()) ** 0.5
        return float((apart * scaled).sum()) / length if length else 0.0

    def distance(self, observed: Tensor, update: Tensor) -> float:
        """Distance of a sum from the background plus an update."""
        apart, update, spread = self._centered(observed, update)
        return float(((apart - update).square() / spread).sum())

    def _centered(self, observed: Tensor, update: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        """The observed sum minus the mean, the update, and the spread, cut to the common beginning of all vectors."""
        if isinstance(self._mean, float) or isinstance(self._spread, float):
            return observed - self._mean, update, self._spread
        length = min(len(observed), len(self._mean))
        return observed[:length] - self._mean[:length], update[:length], self._spread[:length]


def other_sums(replay: ReplayedClients, cohort: int, size: int, source: Generator) -> list[Tensor]:
    """Sums of other cohorts: of the run's clients, or of synthetic ones where a cohort has most of the clients."""
    available = len(replay.sampler.participants)
    cohort_size = min(cohort, available)
    extra = max(cohort_size // 4, EXTRA_CLIENTS)
    others = replay.synthetic(cohort_size + extra, source) if 2 * cohort_size > available else replay
    drawn = (others.cohorts(cohort_size, 1, source)[0].members for _ in range(BACKGROUND_SUMS))
    sums = (sum_with_size(others.sums(members, rough=True), size) for members in drawn)
    return [flat(seen) for seen in sums if seen is not None]


class BackgroundCache:
    """The background of sums of a cohort size, by client size; each is computed once, on first use."""

    def __init__(self, replay: ReplayedClients, cohort: int, source: Generator) -> None:
        self.of = cache(lambda size: SumBackground([] if cohort == 1 else other_sums(replay, cohort, size, source)))


def infer_item(
    replay: ReplayedClients,
    reader: UpdateReader,
    cohort: int,
    users: int,
    source: Generator,
    advance: Advance,
    known: BackgroundCache | None = None,
) -> tuple[list[float], list[float]]:
    """For each target whether the unknown item was distinguished from its equal: 1, 0, or 0.5 if undecided.

    From one update where ``cohort`` is 1, else from a sum; and from one with others in place of the targets, which
    reveals only which item goes well with the others.
    """
    found: tuple[list[float], list[float]] = ([], [])
    background = known or BackgroundCache(replay, cohort, source)
    exact, train = replay.sampler.plan.algorithm.serves_new_users, replay.clients.train
    for drawn in replay.cohorts(cohort, users, source):
        questions = {user: _question(train, user, drawn.compared(source), source) for user in drawn.targets}
        for results, members in zip(found, (drawn.members, drawn.without_targets), strict=True):
            if results is found[1] and (cohort == 1 or not drawn.outside):
                continue
            sums = list(replay.updates(members)) if cohort == 1 else replay.sums(members)
            for user, question in questions.items():
                seen = sum_with_size(sums, int(replay.sampler.size[user]))
                if seen is None or question is None:
                    continue
                if exact:
                    scores = _by_updates(replay, user, seen, *question, background.of(seen.task.size))
                else:
                    scores = _by_rows(reader, seen, *question)
                results.append(_first_is_higher(*scores))
            advance()
    return found


def _first_is_higher(first: float, second: float) -> float:
    return (1 + (first > second) - (first < second)) / 2


def _question(train: Interactions, user: int, others: list[int], source: Generator) -> tuple[Tensor, Pair] | None:
    """The known items of a user, and the unknown one with an equally popular item; None if there is no such pair."""
    found, everything = matched_items(train, user, others, source), train.of(user)
    mine, equals = (torch.cat([train.items[:0], *(pairs[side] for pairs in found)]) for side in (0, 1))
    if not len(mine) or len(everything) < 2:
        return None
    place = int(torch.randint(len(mine), (1,), generator=source))
    pair = int(mine[place]), int(equals[place])
    return everything[everything != pair[0]], pair


def _by_updates(
    replay: ReplayedClients, user: int, seen: Observation, known: Tensor, pair: Pair, background: SumBackground
) -> tuple[float, float]:
    """Fit of the target's update with either item to the observation, given the background of the others."""
    train = replay.clients.train
    ratings = None
    observed = flat(seen)
    users = torch.repeat_interleave(torch.arange(2), len(known) + 1)
    items = torch.cat([known, torch.tensor(pair[:1]), known, torch.tensor(pair[1:])])
    if train.ratings is not None:  # an unknown item gets the mean rating
        given = dict(zip(train.of(user).tolist(), train.ratings_of(user).tolist(), strict=True))
        mean, known_items = float(train.ratings.mean()), set(known.tolist())
        ratings = torch.tensor([given[item] if item in known_items else mean for item in items.tolist()])
    both = Interactions.from_pairs(users, items, 2, train.num_items, ratings)
    updates = replay.with_histories(both, torch.tensor([user, user])).updates([0, 1])
    first, second = (-background.distance(observed, _padded(flat(update), observed)) for update in updates)
    return first, second


def _padded(update: Tensor, observed: Tensor) -> Tensor:
    """Pad an update with zeros, or cut it, to the length of a sum of all sizes."""
    return torch.nn.functional.pad(update, (0, len(observed) - len(update)))


def _by_rows(reader: UpdateReader, seen: Observation, known: Tensor, pair: Pair) -> tuple[float, float]:
    rows = reader.rows(seen).double()
    first, second = (float(rows[item] @ rows[known].mean(0)) for item in pair)
    return first, second


def infer_membership(
    replay: ReplayedClients,
    cohort: int,
    users: int,
    source: Generator,
    advance: Advance,
    known: BackgroundCache | None = None,
) -> list[float]:
    """For pairs of a member and an outsider whether the member fits the sum better: 1, 0, or 0.5 if undecided."""
    found, background = list[float](), known or BackgroundCache(replay, cohort, source)
    for drawn in replay.cohorts(cohort, users, source):
        sums = replay.sums(drawn.members)
        for pair in zip(drawn.targets, drawn.outside + drawn.aside, strict=False):
            fits = list[float]()
            for user in pair:
                seen = sum_with_size(sums, int(replay.sampler.size[user]))
                if seen is not None:
                    observed = flat(seen)
                    update = _padded(flat(next(replay.updates([user]))), observed)
                    fits.append(background.of(seen.task.size).fit(observed, update))
            if len(fits) == 2:
                found.append(_first_is_higher(*fits))
        advance()
    return found


def infer_by_difference(
    replay: ReplayedClients, cohort: int, users: int, source: Generator, advance: Advance
) -> list[float]:
    """Whether a sum includes a target, decided by an attacker who knows all other updates: 1 if right, −1 if wrong."""
    found = list[float]()  # the mean is the attacker's advantage: the true positive rate less the false positive rate
    for drawn in replay.cohorts(cohort, users, source):
        exact = replay.exact_sums(drawn.members)
        for seen in replay.sums(drawn.members):
            observed = flat(seen)
            noise = observed.clone()
            for part in exact:
                noise -= _padded(flat(part), observed) if _belongs(part, seen, observed) else 0.0
            mine = [user for user in drawn.targets if sum_with_size([seen], int(replay.sampler.size[user])) is not None]
            for own in (one for one in replay.updates(mine) if _belongs(one, seen, observed)):
                update = _padded(flat(own), observed)
                # A sum without the others is the target's update or nothing, by a coin toss, plus any noise.
                inside, length = bool(torch.randint(2, (1,), generator=source)), float(update @ update)
                score = float(noise @ update) + inside * length
                found.append(1.0 if (score > length / 2) == inside else -1.0)
        advance()
    return found


def _belongs(part: Observation, whole: Observation, observed: Tensor) -> bool:
    """Whether a sum, of one size or of all, includes an update or a sum of one size."""
    return part.task.size == whole.task.size or len(flat(part)) < len(observed)


def max_advantage(epsilon: float, delta: float) -> float:
    """Bound of any attacker's advantage under (ε, δ)."""
    return (exp(epsilon) - 1 + 2 * delta) / (exp(epsilon) + 1) if epsilon < 700 else 1.0


def gaussian_advantage(sigma: float) -> float:
    """Bound of any attacker's advantage under Gaussian noise of σ times one user's sensitivity: 2Φ(1/2σ) − 1."""
    return 1 - erfc(1 / (2 * sigma) / sqrt(2))
