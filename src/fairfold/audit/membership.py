"""Attackers who know much of a person: is this item in the history? Is this person in the sum?

*One item.* All of a history is known but one item, and the question is which of two equally popular ones that is. The
attacker lets a device of its own say both, and sees which word fits better. Where words depend on a vector that it
cannot know (gradient steps), it sees which item's row moves more like those of the items that it knows.

*One person in a sum.* Their history is known, and the question is whether it is part of the sum. By what sums of other
cohorts look like; or, the strongest attacker there is, by the words of everybody else in the sum, which are taken off.
"""

from collections.abc import Callable
from math import erfc, exp, sqrt

import torch
from torch import Tensor

from fairfold.audit.devices import Devices, Seen
from fairfold.audit.matched import matched_items
from fairfold.audit.ranking import MORE, part_of
from fairfold.audit.rows import Reader
from fairfold.data import Interactions

OTHERS = 16
"""Sums of other cohorts by which the attacker knows what is usual."""

SHRUNK = 0.5
"""How much of a number's spread is taken to be that of all numbers: few sums tell little of each."""


def flat(seen: Seen, only: list[str] | None = None) -> Tensor:
    """A word as one vector."""
    names = sorted(seen.answer.sums) if only is None else only
    return torch.cat([seen.answer.sums[name].reshape(-1).double() for name in names])


class Usual:
    """Mean and spread of sums of other cohorts, number by number; of a single word that is nothing, and very little."""

    def __init__(self, sums: list[Tensor]) -> None:
        if not sums:
            self._mean: Tensor | float = 0.0
            self._spread: Tensor | float = 1.0
            return
        total, squares = torch.zeros_like(sums[0]), torch.zeros_like(sums[0])
        for one in sums:
            total += one
        self._mean = total / len(sums)
        for one in sums:
            squares += (one - self._mean).square()
        spread = squares / max(len(sums) - 1, 1)
        active = spread > 0
        level = float(spread[active].mean()) if bool(active.any()) else 1.0
        self._spread = (1 - SHRUNK) * spread + SHRUNK * level

    def fit(self, heard: Tensor, said: Tensor) -> float:
        """How much a sum looks as if it held a word: 0 on the average where it does not."""
        apart, said, spread = self._beside(heard, said)
        scaled = said / spread
        length = float((said * scaled).sum()) ** 0.5
        return float((apart * scaled).sum()) / length if length else 0.0

    def distance(self, heard: Tensor, said: Tensor) -> float:
        """How far a sum is from one that holds a word and what is usual beside it."""
        apart, said, spread = self._beside(heard, said)
        return float(((apart - said).square() / spread).sum())

    def _beside(self, heard: Tensor, said: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        """The same numbers of all: where some sizes were too few to be heard, a sum is the beginning of another."""
        if isinstance(self._mean, float) or isinstance(self._spread, float):
            return heard - self._mean, said, self._spread
        many = min(len(heard), len(self._mean))
        return heard[:many] - self._mean[:many], said[:many], self._spread[:many]


def other_sums(devices: Devices, cohort: int, size: int, source: torch.Generator) -> list[Tensor]:
    """Sums that the server has seen of others: of the run's clients, or of made-up ones where a sum is of most."""
    many, found = min(cohort, len(devices.fleet.taking_part)), list[Tensor]()
    most = 2 * many > len(devices.fleet.taking_part)
    others = devices.made_up(many + max(many // 4, MORE), source) if most else devices
    for _ in range(OTHERS):
        members = others.cohorts(many, 1, source)[0].members
        seen = part_of(others.sums(members, rough=True), size)
        found += [] if seen is None else [flat(seen)]
    return found


def one_item(
    devices: Devices, reader: Reader, cohort: int, users: int, source: torch.Generator, advance: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Of each target whether the item that was not known was told from its equal: 1, 0, or a half by chance.

    With a ``cohort`` of 1 from one word, else from the sum of so many; then also from the same sum with others in the
    place of the targets, where all there is to know is which item goes well with the others.
    """
    found: tuple[list[float], list[float]] = ([], [])
    usual, exact = dict[int, Usual](), devices.fleet.plan.algorithm.from_history
    for drawn in devices.cohorts(cohort, users, source):
        asked = {user: _asked(devices, user, drawn.beside(source), source) for user in drawn.targets}
        for told, members in zip(found, (drawn.members, drawn.without), strict=True):
            if told is found[1] and (cohort == 1 or not drawn.outside):
                continue
            sums = list(devices.words(members)) if cohort == 1 else devices.sums(members)
            for user, question in asked.items():
                seen = part_of(sums, int(devices.fleet.size[user]))
                if seen is None or question is None:
                    continue
                known, pair = question
                if exact:
                    size = seen.sent.size
                    if size not in usual:
                        usual[size] = Usual([] if cohort == 1 else other_sums(devices, cohort, size, source))
                    scores = _by_words(devices, user, seen, known, pair, usual[size])
                else:
                    scores = _by_rows(reader, seen, known, pair)
                told.append(1.0 if scores[0] > scores[1] else 0.0 if scores[0] < scores[1] else 0.5)
            advance()
    return found


def _asked(
    devices: Devices, user: int, others: list[int], source: torch.Generator
) -> tuple[Tensor, tuple[int, int]] | None:
    """What is known of a user, and the item that is not, beside an equal of somebody else's; None of who has none."""
    train = devices.people.train
    found, everything = matched_items(train, user, others, source), train.of(user)
    mine, equals = (torch.cat([train.items[:0], *(pairs[side] for pairs in found)]) for side in (0, 1))
    if not len(mine) or len(everything) < 2:
        return None
    place = int(torch.randint(len(mine), (1,), generator=source))
    pair = int(mine[place]), int(equals[place])
    return everything[everything != pair[0]], pair


def _by_words(
    devices: Devices, user: int, seen: Seen, known: Tensor, pair: tuple[int, int], usual: Usual
) -> tuple[float, float]:
    """What the target would say with either item, beside what is usual of the others."""
    train, histories = devices.people.train, [torch.cat([known, torch.tensor([item])]) for item in pair]
    users = torch.repeat_interleave(torch.arange(2), len(known) + 1)
    ratings = None
    if train.ratings is not None:  # the rating of an unknown item is what is usual
        given = dict(zip(train.of(user).tolist(), train.ratings_of(user).tolist(), strict=True))
        usually = float(train.ratings.mean())
        ratings = torch.tensor(
            [given[int(i)] if int(i) in set(known.tolist()) else usually for i in torch.cat(histories)]
        )
    both = Interactions.from_pairs(users, torch.cat(histories), 2, train.num_items, ratings)
    heard = flat(seen)
    first, second = (
        -usual.distance(heard, _padded(flat(word), heard))
        for word in devices.with_histories(both, torch.tensor([user, user])).words([0, 1])
    )
    return first, second


def _padded(said: Tensor, heard: Tensor) -> Tensor:
    """A word as long as the sum of all sizes, of which it is the beginning."""
    if len(said) == len(heard):
        return said
    return torch.cat([said, said.new_zeros(max(len(heard) - len(said), 0))])[: len(heard)]


def _by_rows(reader: Reader, seen: Seen, known: Tensor, pair: tuple[int, int]) -> tuple[float, float]:
    rows = reader.rows(seen).double()
    direction = rows[known].mean(0)
    return float(rows[pair[0]] @ direction), float(rows[pair[1]] @ direction)


def one_person(
    devices: Devices, cohort: int, users: int, source: torch.Generator, advance: Callable[[], None]
) -> list[float]:
    """Of pairs of a member and somebody outside, whether the member fits the sum better: 1, 0, or a half by chance."""
    found = list[float]()
    usual: dict[int, Usual] = {}
    for drawn in devices.cohorts(cohort, users, source):
        sums = devices.sums(drawn.members)
        for user, other in zip(drawn.targets, drawn.outside + drawn.aside, strict=False):
            fits = list[float]()
            for one in (user, other):
                size = int(devices.fleet.size[one])
                seen = part_of(sums, size)
                if seen is None:
                    continue
                if seen.sent.size not in usual:
                    usual[seen.sent.size] = Usual(other_sums(devices, cohort, seen.sent.size, source))
                heard = flat(seen)
                fits.append(usual[seen.sent.size].fit(heard, _padded(flat(next(devices.words([one]))), heard)))
            if len(fits) == 2:
                found.append(1.0 if fits[0] > fits[1] else 0.0 if fits[0] < fits[1] else 0.5)
        advance()
    return found


def difference(
    devices: Devices, cohort: int, users: int, source: torch.Generator, advance: Callable[[], None]
) -> list[float]:
    """Whether a target was in a sum, told by who knows all others' words: 1 if right, and −1 if wrong.

    What is left of a sum without the others is the target's word or nothing, and noise where there is any; which of
    both is the toss of a coin. The mean is the attacker's advantage: the chance of a hit less that of a false alarm.
    """
    found = list[float]()
    for drawn in devices.cohorts(cohort, users, source):
        exact = devices.exact_sums(drawn.members)
        for seen in devices.sums(drawn.members):
            heard = flat(seen)
            noise = heard.clone()
            for part in exact:
                noise -= _padded(flat(part), heard) if _belongs(part, seen, heard) else 0.0
            mine = [user for user in drawn.targets if part_of([seen], int(devices.fleet.size[user])) is not None]
            for word in devices.words(mine):
                if not _belongs(word, seen, heard):
                    continue
                said = _padded(flat(word), heard)
                inside = bool(torch.randint(2, (1,), generator=source))
                score, length = float(noise @ said) + inside * float(said @ said), float(said @ said)
                found.append(1.0 if (score > length / 2) == inside else -1.0)
        advance()
    return found


def _belongs(part: Seen, heard: Seen, flat_heard: Tensor) -> bool:
    """Whether a word or a sum of one size is part of a sum: of its size, or of all sizes."""
    return part.sent.size == heard.sent.size or len(flat(part)) < len(flat_heard)


def most_advantage(epsilon: float, delta: float) -> float:
    """What no attacker's advantage exceeds, whatever it knows, under (ε, δ) alone."""
    return (exp(epsilon) - 1 + 2 * delta) / (exp(epsilon) + 1) if epsilon < 700 else 1.0


def gaussian_advantage(sigma: float) -> float:
    """The same by Gaussian noise of σ times what one user can change: 2Φ(1/2σ) − 1."""
    return 1 - erfc(1 / (2 * sigma) / sqrt(2))
