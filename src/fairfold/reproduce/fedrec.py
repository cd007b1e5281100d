"""One cell of the fair table of federated recommendation: a method, a data set, one way to draw negatives.

Every user's newest item is the test. Settings, and when to stop, are chosen by the item before it; then a method trains
on both. Quality comes with its standard error over users, and with what a device holds and moves.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from fairfold.backends.batched import batched
from fairfold.data.interactions import Dataset, Interactions
from fairfold.errors import InvalidSettings, InvalidVector
from fairfold.metrics.one_left_out import OneLeftOut, rank_one_left_out
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.reference_rows import STRONG
from fairfold.metrics.references import BinaryMatrix, Popularity
from fairfold.protocol.faults import Rejections
from fairfold.protocol.round import run_round
from fairfold.protocol.words import State, reduced
from fairfold.reproduce import rivals
from fairfold.reproduce.federated import counted_by
from fairfold.reproduce.memory import Tell
from fairfold.reproduce.newest import newest_left_out
from fairfold.reproduce.paired import packed
from fairfold.settings import Settings, merged, read_settings
from fairfold.simulate.world import World
from fairfold.values import BYTES

RIVALS = {kind.model_fields["kind"].default for kind in map(rivals.__dict__.__getitem__, rivals.__all__)}
SEARCHED = {"EASE", "iALS"}
CENTRAL = {*SEARCHED, "popularity", "counter", "ncf"}
SEARCH_SEED = 1000
After = Callable[[int, Callable[[], Scorer]], None]
MEASURES = ("HR@10 of 100", "NDCG@10 of 100", "HR@10", "NDCG@10")


@dataclass(frozen=True)
class FedRecSettings:
    """Of one cell."""

    method: str  # a rival, "ours", or what needs no federation
    data: str = "ml-100k"
    outside: Literal["train", "all ratings"] = "train"  # negatives: from outside the training set, or of the test too
    capacities: str = "1x"
    factors: int = 32
    rounds: int = 100
    clients: int = 200  # per round
    search_rounds: int = 30  # of every trial; 0 leaves the search out
    check_every: int = 10  # rounds of a trial, to find when to stop
    tried: dict[str, list[float]] = field(default_factory=dict)  # keys of [algorithm] and their values: all combined
    also: list[dict[str, float]] = field(default_factory=list)  # combinations beside these, beyond their edges
    trial: dict[str, float] = field(default_factory=dict)  # of these one each: what a trial tries
    level: Literal["plain", "secure"] = "plain"  # secure: ours counts and trains by sums under masks alone
    order_from: float = 1.0  # the share of the users, drawn by chance, whose counts are known: for order and support

    def __post_init__(self) -> None:
        known = sorted(RIVALS | CENTRAL | {"ours"})
        if self.method not in known:
            raise InvalidSettings(f"method {self.method!r}", f"one of {', '.join(known)}", "Check the spelling.")

    @property
    def combined(self) -> list[dict[str, float]]:
        """All that is tried, the first of it where there is no search."""
        return [
            dict(zip(self.tried, each, strict=True)) for each in itertools.product(*self.tried.values())
        ] + self.also


def trials_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of all trials of a cell, by what they try: every combination. How negatives are drawn is no part."""
    given = FedRecSettings(**values)
    if not given.search_rounds or not given.tried:
        return {}
    kept = {key: value for key, value in values.items() if key not in ("outside", "tried", "also", "search_rounds")}
    return {_name(trial): kept | {"rounds": given.search_rounds, "trial": trial} for trial in given.combined}


def _name(trial: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in trial.items())


def tried(given: FedRecSettings, tell: Tell) -> list[tuple[float, float]]:
    """How well a trial finds the item before the newest among all items, NDCG@10, after so many rounds each time."""
    data, found = newest_left_out(given.data), list[tuple[float, float]]()
    assert data.valid is not None
    held, held_back, told = data.valid, replace(data, test=data.valid, valid=None), list[int]()

    def after(done: int, scorer: Callable[[], Scorer]) -> None:
        told.append(done)
        tell(done, given.rounds)
        if done % given.check_every == 0 or done == given.rounds:
            found.append((float(done), float(rank_one_left_out(scorer(), data.train, held, 0).gains()[1].mean())))

    _trained(given, held_back, given.trial, SEARCH_SEED, given.rounds, after)
    diverged = given.rounds not in told  # a finding like any other, and the worst
    return [(float(given.rounds), 0.0)] if diverged else found


def measured(
    given: FedRecSettings, seed: int, found: dict[str, tuple[float, float]], tell: Tell
) -> tuple[dict[str, Any], dict[str, str]]:
    """All that is found of a cell, by name, and what each user got; ``found``: rounds and value of every trial."""
    data = newest_left_out(given.data)
    assert data.valid is not None
    both = _joined(data.train, data.valid)
    final = replace(data, train=both, valid=None)
    final = final if given.order_from == 1 else counted_by(final, given.order_from, seed)
    if given.method in SEARCHED:
        chosen, reached, score = _searched(given, data, both)
        cost = dict[str, float]()
    else:
        first = max(given.combined, key=lambda trial: found.get(_name(trial), (0, 0.0))[1])  # where nothing was tried
        rounds = int(found.get(_name(first), (given.rounds, 0.0))[0])
        score, cost = _trained(given, final, first, seed, rounds, lambda done, _: tell(min(done, rounds), rounds))
        chosen, reached = first | ({"rounds": rounds} if found else {}), dict(found)
    values, errors, by_user = _summary(rank_one_left_out(score, final.train, final.test, seed))
    facts = {"measures": values | cost, "errors": errors, "chosen": chosen, "tried on held-out items": reached}
    return facts, by_user


def _searched(
    given: FedRecSettings, data: Dataset, both: Interactions
) -> tuple[dict[str, Any], dict[str, Any], Scorer]:
    """EASE or iALS: what was chosen by the item before the newest, what was tried, and a model of both."""
    assert data.valid is not None
    kind = next(kind for kind in STRONG if kind.name == given.method)
    matrix, found = BinaryMatrix(data.train), dict[tuple[float, ...], float]()
    for value in (*kind.values, *(tuple(more.values()) for more in given.also)):
        ranks = rank_one_left_out(kind.made(matrix, value), data.train, data.valid, 0)
        found[value] = float(ranks.gains()[1].mean())
    best = max(found, key=found.__getitem__)
    tried_there = {kind.words.format(*value): of for value, of in found.items()}
    return {"settings": kind.words.format(*best)}, tried_there, kind.made(BinaryMatrix(both), best)


def _summary(found: OneLeftOut) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Means over users, their standard errors, and what each user got."""
    (hit, hit_of_all), (gain, gain_of_all) = found.hits(), found.gains()
    each = dict(zip(MEASURES, (hit, gain, hit_of_all, gain_of_all), strict=True))
    errors = {name: float(of.std()) / len(of) ** 0.5 for name, of in each.items()}
    return (
        {name: float(of.mean()) for name, of in each.items()},
        errors,
        {name: packed(of.numpy()) for name, of in each.items()},
    )


def _trained(
    given: FedRecSettings, data: Dataset, chosen: dict[str, float], seed: int, rounds: int, after: After
) -> tuple[Scorer, dict[str, float]]:
    """A scorer, and what it costs a device; ``after`` every round it can be asked for another.

    Where steps diverge, training ends with what it had before: ``after`` is not called for the rounds that are left.
    """
    if given.method in CENTRAL - {"ncf"}:
        return Popularity(data.train) if given.method == "popularity" else _counter(given, data, rounds, seed), {}
    settings = settings_of(given, chosen, seed, rounds, data.num_users)
    world = World.of(settings, data)
    if given.outside == "all ratings":
        world.people.outside = _joined(data.train, data.test)
    state, rejections = world.initial(), Rejections()
    moved, done = torch.zeros(2, dtype=torch.float64), 0
    for number in range(settings.run.rounds):
        plan = settings.algorithm.settled(world.plan, state)
        each = [settings.algorithm.traffic(plan, size, number) for size in range(len(plan.capacities))]
        moved += torch.tensor(each, dtype=torch.float64)[world.fleet.size[world.fleet.cohort(number)]].sum(0)
        try:
            state = run_round(state, world.fleet, world.people, rejections, batched)
        except InvalidVector:
            break
        done = number + 1
        after(done, lambda state=state: _by_size(world, state))  # type: ignore[misc]
    plan = settings.algorithm.settled(world.plan, state)
    bits = getattr(settings.algorithm, "BITS", 8 * BYTES)
    held = [one.bytes() * bits // (8 * BYTES) for one in plan.assignments(0)]
    own = sum(plan.architecture.own.values()) * bits // 8
    down, up = (moved / data.num_users).tolist()
    cost = {
        "bytes held": mean(held[size] for size in world.fleet.size.tolist()) + own,
        "bytes down": down,
        "bytes up": up,
        "rounds": done,
    }
    return _by_size(world, state), {} if settings.algorithm.pooled else cost


def settings_of(given: FedRecSettings, chosen: dict[str, float], seed: int, rounds: int, users: int) -> Settings:
    """Of the run of a cell."""
    data = {"data": {"kind": "interactions", "name": given.data}, "run": {"seed": seed}}
    if given.method == "ours":
        fleet = {"capacities": given.capacities, "clients_per_round": None}
        return read_settings(merged(data, {"fleet": fleet, "privacy": {"level": given.level}}))
    tables: dict[str, Any] = {
        "model": {"kind": "mf", "factors": given.factors},
        "algorithm": {"kind": given.method} | chosen,
        "subspace": {"method": "heterofl" if given.method == "hetefedrec" else "fedavg"},
        "fleet": {"capacities": given.capacities, "clients_per_round": min(given.clients, users)},
        "run": {"rounds": rounds},
    }
    if given.method == "ncf":
        tables["model"]["kind"] = "neumf"
        tables["algorithm"] = {"kind": "central", "local_optimiser": "adam", "negatives": 4} | chosen
        tables["fleet"] = {"capacities": "1x"}
    return read_settings(merged(data, tables))


def _by_size(world: World, state: State) -> Scorer:
    """Every user by the model of their own size, as their device holds it."""
    plan = world.plan.algorithm.settled(world.plan, state)
    held = plan.assignments(max(state.round_number - 1, 0))
    scorers = []
    for one, sent in zip(held, reduced(state.full, held), strict=True):
        full = {name: of.recover((sent or {})[name]) for name, of in (one.projections or {}).items()}
        scorers.append(plan.algorithm.scorer(plan, full, [one], world.people))
    sizes = torch.zeros(len(world.data.test.offsets) - 1, dtype=torch.int64)  # type: ignore[union-attr]
    sizes = sizes if plan.algorithm.pooled else world.fleet.size

    def score(users: Tensor) -> Tensor:
        found = torch.empty(len(users), plan.public.items)
        for size, scorer in enumerate(scorers):
            mine = (sizes[users] == size).nonzero().flatten()
            if len(mine):
                found[mine] = scorer(users[mine]).detach().float()
        return found

    return score


def _counter(given: FedRecSettings, data: Dataset, rounds: int, seed: int) -> Scorer:
    """Scores an item by how rarely it was drawn as a negative of the user: it learns nothing of anybody's taste."""
    outside = _joined(data.train, data.test) if given.outside == "all ratings" else data.train
    random = numpy.random.default_rng([seed, 7])
    draws = rounds * min(given.clients, data.num_users) / data.num_users * 5 * 4  # as the rivals draw: steps, negatives
    drawn = torch.zeros(data.num_users, data.num_items)
    for user in range(data.num_users):
        others = torch.ones(data.num_items, dtype=torch.bool)
        others[outside.of(user)] = False
        many = int(others.sum())
        counts = random.multinomial(round(draws * len(data.train.of(user))), numpy.full(many, 1 / many))
        drawn[user, others] = torch.from_numpy(counts).float()
    return lambda users: -drawn[users]


def _joined(first: Interactions, second: Interactions) -> Interactions:
    users, items = torch.cat([first.users, second.users]), torch.cat([first.items, second.items])
    return Interactions.from_pairs(users, items, first.num_users, first.num_items)
