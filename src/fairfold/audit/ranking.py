"""The attack on histories: which items does a device have, by one word of it, or by the sum of its cohort?"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fairfold.audit.devices import ASIDE, AT_ONCE, Devices, Seen
from fairfold.audit.matched import Pairs, matched_auc, matched_items, precision
from fairfold.audit.rows import Reader

SHADOWS = 24
"""Words, or sums, of made-up devices by which the attacker tunes itself."""

MORE = 200
"""Made-up devices beyond those of a sum, so that sums differ."""

Scores = dict[str, Tensor]


@dataclass(frozen=True)
class Target:
    """How well one user's history was found."""

    user: int
    size: int
    auc: float
    precision: float
    inside: bool = True  # whether the target has a part in what was seen


class Tuned:
    """What the attacker learned from words of made-up devices: what is usual for each item, and which score serves.

    Half of the words say what is usual, the other half which score finds the histories that it knows of them.
    """

    def __init__(self, scores: list[Scores], equals: list[list[list[Pairs]]]) -> None:
        half = max(len(scores) // 2, 1)
        self._usual = {}
        for name in scores[0]:
            of = torch.stack([one[name] for one in scores[:half]])
            self._usual[name] = (of.mean(0), of.std(0, unbiased=False))
        known = zip(scores[half:] or scores, equals[half:] or equals, strict=True)
        tried = [(one, pairs) for one, of in known for pairs in of if any(len(mine) for mine, _ in pairs)]
        found = {
            way: sum(matched_auc(self.read(one, way), pairs) for one, pairs in tried) / max(len(tried), 1)
            for way in product(self._usual, ("as it is", "turned round", "beside what is usual"))
        }
        self._way = max(found, key=lambda way: found[way])

    def read(self, scores: Scores, way: tuple[str, str] | None = None) -> Tensor:
        """Scores of items in one way; in the one that serves best if none is named."""
        name, how = self._way if way is None else way
        if how == "beside what is usual":
            return self._unusual(name, scores[name])
        return scores[name] if how == "as it is" else -scores[name]

    def _unusual(self, name: str, scores: Tensor) -> Tensor:
        mean, spread = self._usual[name]
        least = float(spread[spread > 0].median()) / 10 if bool((spread > 0).any()) else 1.0
        return (scores - mean) / spread.clamp(min=least)


def attack_words(
    devices: Devices, reader: Reader, users: list[int], source: torch.Generator, advance: Callable[[], None]
) -> list[Target]:
    """One word of one device, and beside it what the word of another of its size says of the same user."""
    found, tuned = list[Target](), dict[int, Tuned]()
    everybody = devices.fleet.taking_part.tolist()
    before: dict[int, tuple[int, Tensor]] = {}
    for user, seen in zip(users, devices.words(users), strict=True):
        size = seen.sent.size
        if size not in tuned:
            tuned[size] = _tuned_to_words(devices, reader, size, source)
        scores = tuned[size].read(reader.scores(seen))
        last, said = before.get(size, (user, None))
        some = [everybody[place] for place in torch.randint(len(everybody), (ASIDE,), generator=source).tolist()]
        pairs = matched_items(devices.people.train, user, [one for one in some if one not in (user, last)], source)
        found.append(_found(devices, user, scores, pairs, source))
        if said is not None:
            found.append(_found(devices, user, said, pairs, source, inside=False))
        before[size] = (user, scores)
        advance()
    return found


def _tuned_to_words(devices: Devices, reader: Reader, size: int, source: torch.Generator) -> Tuned:
    others = devices.made_up(SHADOWS, source)
    others.fleet.size.fill_(size)
    train, everybody = others.people.train, list(range(SHADOWS))
    rest = [[other for other in everybody if other != user] for user in everybody]
    equals = [[matched_items(train, user, rest[user], source)] for user in everybody]
    return Tuned([reader.scores(word) for word in others.words(everybody)], equals)


def attack_sums(
    devices: Devices,
    reader: Reader,
    cohort: int,
    users: int,
    source: torch.Generator,
    advance: Callable[[], None],
) -> list[Target]:
    """The sum of a cohort as the server hears it, and the same with others in the place of the targets.

    What the latter says of the targets is what everybody's data say of them: only what is beyond that is their own.
    """
    known: dict[int, tuple[list[Scores], list[list[list[Pairs]]]]] = {}
    many = min(cohort, len(devices.fleet.taking_part))
    pool = devices.made_up(many + max(many // 4, MORE), source)
    for _ in range(SHADOWS):
        drawn = pool.cohorts(many, 1, source)[0]
        members, aside = drawn.members, drawn.beside(source)
        for seen in pool.sums(members, rough=True):
            scores, equals = known.setdefault(seen.sent.size, ([], []))
            scores.append(reader.scores(seen))
            mine = [user for user in members if int(pool.fleet.size[user]) == seen.sent.size] or members
            equals.append([matched_items(pool.people.train, user, aside, source) for user in mine[:AT_ONCE]])
        advance()
    tuned = {size: Tuned(*of) for size, of in known.items()}
    found = list[Target]()
    for drawn in devices.cohorts(cohort, users, source):
        train = devices.people.train
        pairs = {user: matched_items(train, user, drawn.beside(source), source) for user in drawn.targets}
        for inside, members in ((True, drawn.members), (False, drawn.without)):
            sums = devices.sums(members) if drawn.outside or inside else []
            ranked = {
                seen.sent.size: tuned[seen.sent.size].read(reader.scores(seen))
                for seen in sums
                if seen.sent.size in tuned
            }
            for user in drawn.targets:
                part = part_of(sums, int(devices.fleet.size[user]))
                if part is not None and part.sent.size in ranked:
                    target = _found(devices, user, ranked[part.sent.size], pairs[user], source, inside=inside)
                    found.append(target)
            advance()
    return found


def part_of(sums: list[Seen], size: int) -> Seen | None:
    """The sum that a device of a size is part of: that of its size, or the one sum of all."""
    mine = [seen for seen in sums if seen.sent.size == size] or (sums if len(sums) == 1 else [])
    return mine[0] if mine else None


def _found(
    devices: Devices,
    user: int,
    scores: Tensor,
    pairs: list[Pairs],
    source: torch.Generator,
    *,
    inside: bool = True,
) -> Target:
    mine, size = devices.people.train.of(user), int(devices.fleet.size[user])
    return Target(user, size, matched_auc(scores, pairs), precision(scores, mine, source), inside)
