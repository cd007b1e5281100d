"""Devices whose words are attacked: those of a run, replayed from its settings, data and seed, and made-up ones.

The attacker is honest but curious: it follows the protocol, and knows the settings, the hash, how popular every item
is, and who takes part. What it does not know of people it makes up: devices with histories drawn by popularity tell it
what a word looks like by chance.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from fairfold.algorithms.correlations import Correlations
from fairfold.backends.batched import batched
from fairfold.data import Interactions
from fairfold.protocol.faults import Rejections
from fairfold.protocol.fleet import Fleet
from fairfold.protocol.hearing import Hearing, hearing_of
from fairfold.protocol.people import People
from fairfold.protocol.round import run_round
from fairfold.protocol.words import Answer, Sent, State, Visit
from fairfold.settings.privacy import PrivatePrivacy
from fairfold.simulate.world import World
from fairfold.values import Weights

AT_ONCE = 10
"""Targets in each of several cohorts."""

LARGE = 4
"""Cohorts of most clients that are looked at."""

ASIDE = 20
"""Others with whose items those of a target are compared."""


@dataclass(frozen=True)
class Seen:
    """A word as the server has it: what was sent to a size, and what came back, of one device or of many."""

    sent: Sent
    answer: Answer


@dataclass(frozen=True)
class Cohort:
    """Clients whose words are added up; some of them are targets.

    Attributes:
        members: Of the sum.
        targets: Some of them.
        outside: Others, who take the place of the targets in a sum without these.
        aside: Others, who are in neither sum: their items are compared with those of the targets.
    """

    members: list[int]
    targets: list[int]
    outside: list[int]
    aside: list[int]

    def beside(self, source: torch.Generator) -> list[int]:
        """Some of those who are in neither sum, drawn by chance."""
        return [self.aside[place] for place in torch.randperm(len(self.aside), generator=source)[:ASIDE].tolist()]

    @property
    def without(self) -> list[int]:
        """The same with others in the place of the targets."""
        return [user for user in self.members if user not in set(self.targets)] + self.outside


class _Silent(Rejections):
    """Of an attack's own sums nobody wants to read who was left out."""

    def note(self, round_number: int, client: int, reason: str) -> None:
        """Nothing."""


class _Unchanged(People):
    """People who keep nothing of what they say here: the same words may be asked for again."""

    def __init__(self, of: People) -> None:
        self.__dict__.update(of.__dict__)

    def keep(self, clients: list[int], own: Weights) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Devices:
    """Clients with their data at one moment of a run: what they would say now."""

    fleet: Fleet
    people: People
    state: State
    numbers: Iterator[int] = field(default_factory=lambda: count(1 << 20), repr=False, compare=False)

    @classmethod
    def of_run(cls, world: World, before: int = 0) -> "Devices":
        """The clients of a run as they are after some rounds, replayed."""
        found = cls(world.fleet, world.people, world.initial())
        for _ in range(before):
            found = found.after_a_round()
        return found

    def after_a_round(self) -> "Devices":
        """The same one round later; what they keep is changed in place."""
        if isinstance(self.fleet.plan.algorithm, Correlations):  # pairs do not depend on the model: none is made
            clients = self.fleet.cohort(self.state.round_number).tolist()
            self._heard(self._hearing(self.people, clients), clients)
            return replace(self, state=replace(self.state, round_number=self.state.round_number + 1))
        return replace(self, state=run_round(self.state, self.fleet, self.people, _Silent(), batched))

    def with_histories(self, histories: Interactions, like: Tensor) -> "Devices":
        """Others, who have not spoken yet: each with the size, and a vector of the kind, of a client of the run."""
        plan, private = self.people.plan, self.people.private
        own = {name: private[name][like].clone() for name in plan.architecture.own if name in private}
        if plan.algorithm.keeps == "acknowledged":
            own = {name: torch.zeros_like(rows) for name, rows in own.items()}
        sizes = replace(self.fleet, size=self.fleet.size[like], taking_part=torch.arange(len(like)))
        return Devices(sizes, People(plan, histories, own), self.state, self.numbers)

    def words(self, clients: list[int]) -> Iterator[Seen]:
        """What each of some clients says, as its algorithm specifies."""
        return (seen for seen, _ in self.words_and_secrets(clients))

    def words_and_secrets(self, clients: list[int]) -> Iterator[tuple[Seen, Weights]]:
        """The same beside the private tensors that each is made with: what an attack is judged by."""
        plan, number = self.fleet.plan, self.state.round_number
        for visit in self.fleet.visits(self.state, clients):
            client = self.people.client(visit.client, number)
            answer, own = plan.algorithm.answer(plan, visit.sent, client)
            yield Seen(visit.sent, answer.dense()), own if plan.algorithm.from_history else client.own

    def sums(self, clients: list[int], *, rough: bool = False) -> list[Seen]:
        """What the server hears of some clients together at the level of the settings: sums, by size or of all sizes.

        At the level ``"plain"`` these are sums that the server makes itself, of words that it sees one by one. Those
        that are ``rough``, for what is usual, leave out the rounding of each word, which takes time.
        """
        chosen, algorithm = self.fleet.plan.settings.privacy, self.fleet.plan.algorithm
        people = _Unchanged(self.people)
        rounds_only = rough and not isinstance(chosen, PrivatePrivacy) and not algorithm.grids
        return self._heard(Hearing(people) if rounds_only else self._hearing(people, clients), clients)

    def _hearing(self, people: People, clients: list[int]) -> Hearing:
        return hearing_of(people, self.fleet.size[clients].tolist())

    def _heard(self, hearing: Hearing, clients: list[int]) -> list[Seen]:
        plan, visits = self.fleet.plan, self.fleet.visits(self.state, clients)
        if isinstance(plan.settings.privacy, PrivatePrivacy):
            visits = self._as_of_another_round(visits)
        for word in batched(hearing.people, visits, hearing.apart(clients, {})):
            if plan.algorithm.problem(plan, word.sent, word.answer) is None:
                hearing.add(word, word.answer)
        return [Seen(sent, answer) for sent, answer in hearing.totals([]).parts()]

    def _as_of_another_round(self, visits: Iterator[Visit]) -> Iterator[Visit]:
        """The same with a number of their own: a simulation's noise follows from it, and must not be known before."""
        known, number = dict[int, Sent](), next(self.numbers)
        for visit in visits:
            sent = known.setdefault(id(visit.sent), replace(visit.sent, round_number=number))
            yield Visit(visit.client, sent)

    def exact_sums(self, clients: list[int]) -> list[Seen]:
        """Sums by size of the words as they are, whatever the level: what an attack on noise is judged by."""
        return self._heard(Hearing(_Unchanged(self.people)), clients)

    def cohorts(self, size: int, users: int, source: torch.Generator) -> "list[Cohort]":
        """Sets of clients drawn by chance, with as many targets as ``users`` in all; half at least of others are aside.

        Where a set would be everybody some are left out, to compare with, as far as a sum may do without them. Where a
        set is most of the clients a few sets have all the targets: others would be much the same.
        """
        everybody, smallest = self.fleet.taking_part, getattr(self.people.plan.settings.privacy, "smallest_cohort", 1)
        size = min(size, len(everybody) - max(0, min(len(everybody) // 5, len(everybody) - smallest)))
        at_once = min(max(AT_ONCE, -(-users // LARGE) if 2 * size >= len(everybody) else 0), size, users)
        found = []
        for first in range(0, users, at_once):
            drawn, many = torch.randperm(len(everybody), generator=source), min(at_once, users - first)
            members, others = everybody[drawn[:size]].tolist(), everybody[drawn[size:]].tolist()
            replacing = min(many, len(others) // 2)
            found.append(Cohort(members, members[:many], others[:replacing], others[replacing:]))
        return found

    def made_up(self, many: int, source: torch.Generator) -> "Devices":
        """Devices with histories drawn by popularity, as long as real ones: what anybody can simulate."""
        train = self.people.train
        like = self.fleet.taking_part[torch.randint(len(self.fleet.taking_part), (many,), generator=source)]
        popularity = train.counts_by_item.double()
        known = int((popularity > 0).sum())
        users, items = list[Tensor](), list[Tensor]()
        for user, length in enumerate(train.counts_by_user[like].tolist()):
            # Drawn without repeats: the largest of popularity^(1/u)-like keys (Efraimidis and Spirakis).
            keys = torch.rand(len(popularity), generator=source, dtype=torch.float64).log() / popularity
            mine = keys.topk(min(length, known)).indices
            users.append(torch.full_like(mine, user))
            items.append(mine)
        ratings = None
        if train.ratings is not None:
            drawn = torch.randint(len(train), (sum(map(len, items)),), generator=source)
            ratings = train.ratings[drawn]
        return self.with_histories(
            Interactions.from_pairs(torch.cat(users), torch.cat(items), many, train.num_items, ratings), like
        )
