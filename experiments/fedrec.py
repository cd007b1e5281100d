"""A cell of the fair table of federated recommendation: a method, a data set, a way to draw negatives.

Every user's newest item is the test. Settings, and when to stop, are chosen by the item before it; then a method trains
on both. Quality comes with its standard error over users, and with what a device holds and moves.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy
import polars
import torch
from torch import Tensor

from experiments import baselines
from experiments.baselines.pointwise import Pointwise
from experiments.cells import ReportProgress, with_partial_counts
from experiments.combine import pack_per_user
from experiments.leave_one_out import LeaveOneOutRanks, leave_one_out_ranks
from fairfold.backends.batched import batched
from fairfold.config import Settings, merge_tables, read_settings
from fairfold.data.download import resolve
from fairfold.data.files import existing_path
from fairfold.data.interactions import Dataset, Interactions
from fairfold.errors import InvalidData, InvalidSettings, InvalidVector
from fairfold.federation.algorithm import Centralized, Tunable
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round
from fairfold.federation.updates import State, reduce_per_size
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.ranking_baselines import BinaryMatrix, Popularity
from fairfold.metrics.tuned_baselines import STRONG_BASELINES
from fairfold.typing import FLOAT_BYTES

BASELINES = {kind.model_fields["kind"].default for kind in map(baselines.__dict__.__getitem__, baselines.__all__)}
SEARCHED = {"EASE", "iALS"}
CENTRAL = {*SEARCHED, "popularity", "counter", "ncf"}
SEARCH_SEED = 1000
After = Callable[[int, Callable[[], Scorer]], None]
MEASURES = ("HR@10 of 100", "NDCG@10 of 100", "HR@10", "NDCG@10")


@dataclass(frozen=True)
class FedRecSettings:
    """Settings of one cell."""

    method: str  # a baseline, "ours", or what needs no federation
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
        known = sorted(BASELINES | CENTRAL | {"ours"})
        if self.method not in known:
            raise InvalidSettings(f"method {self.method!r}", f"one of {', '.join(known)}", "Check the spelling.")

    @property
    def combined(self) -> list[dict[str, float]]:
        """All candidate settings; without a search the first one is used."""
        return [
            dict(zip(self.tried, each, strict=True)) for each in itertools.product(*self.tried.values())
        ] + self.also


def trial_settings(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of all trials of a cell by name; independent of how negatives are drawn."""
    given = FedRecSettings(**values)
    if not given.search_rounds or not given.tried:
        return {}
    kept = {key: value for key, value in values.items() if key not in ("outside", "tried", "also", "search_rounds")}
    return {_name(trial): kept | {"rounds": given.search_rounds, "trial": trial} for trial in given.combined}


def _name(trial: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in trial.items())


def tried(given: FedRecSettings, report: ReportProgress) -> list[tuple[float, float]]:
    """Run a trial: NDCG@10 of the item before the newest among all items, by number of rounds."""
    data, found = leave_newest_out(given.data), list[tuple[float, float]]()
    assert data.valid is not None
    held = data.valid
    held_back = replace(data, test=data.valid, valid=None)
    rounds_done = list[int]()

    def after(done: int, scorer: Callable[[], Scorer]) -> None:
        rounds_done.append(done)
        report(done, given.rounds)
        if done % given.check_every == 0 or done == given.rounds:
            found.append((float(done), float(leave_one_out_ranks(scorer(), data.train, held, 0).gains()[1].mean())))

    _trained(given, held_back, given.trial, SEARCH_SEED, given.rounds, after)
    diverged = given.rounds not in rounds_done  # a finding like any other, and the worst
    return [(float(given.rounds), 0.0)] if diverged else found


def measured(
    given: FedRecSettings, seed: int, found: dict[str, tuple[float, float]], report: ReportProgress
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run a cell: facts, and values by user; ``found`` has rounds and value of every trial."""
    data = leave_newest_out(given.data)
    assert data.valid is not None
    both = _joined(data.train, data.valid)
    final = replace(data, train=both, valid=None)
    final = final if given.order_from == 1 else with_partial_counts(final, given.order_from, seed)
    if given.method in SEARCHED:
        chosen, reached, score = _searched(given, data, both)
        cost = dict[str, float]()
    else:
        first = max(given.combined, key=lambda trial: found.get(_name(trial), (0, 0.0))[1])  # where nothing was tried
        rounds = int(found.get(_name(first), (given.rounds, 0.0))[0])
        score, cost = _trained(given, final, first, seed, rounds, lambda done, _: report(min(done, rounds), rounds))
        chosen, reached = first | ({"rounds": rounds} if found else {}), dict(found)
    values, errors, by_user = _summary(leave_one_out_ranks(score, final.train, final.test, seed))
    facts = {"measures": values | cost, "errors": errors, "chosen": chosen, "tried on held-out items": reached}
    return facts, by_user


def _searched(
    given: FedRecSettings, data: Dataset, both: Interactions
) -> tuple[dict[str, Any], dict[str, Any], Scorer]:
    """Tune EASE or iALS on the item before the newest: chosen settings, all trials, and the final scorer."""
    assert data.valid is not None
    kind = next(kind for kind in STRONG_BASELINES if kind.name == given.method)
    matrix, found = BinaryMatrix(data.train), dict[tuple[float, ...], float]()
    for value in (*kind.values, *(tuple(more.values()) for more in given.also)):
        ranks = leave_one_out_ranks(kind.fit(matrix, value), data.train, data.valid, 0)
        found[value] = float(ranks.gains()[1].mean())
    best = max(found, key=found.__getitem__)
    tried_there = {kind.template.format(*value): of for value, of in found.items()}
    return {"settings": kind.template.format(*best)}, tried_there, kind.fit(BinaryMatrix(both), best)


def _summary(found: LeaveOneOutRanks) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Means over users, their standard errors, and packed values by user."""
    (hit, hit_of_all), (gain, gain_of_all) = found.hits(), found.gains()
    each = dict(zip(MEASURES, (hit, gain, hit_of_all, gain_of_all), strict=True))
    errors = {name: float(of.std()) / len(of) ** 0.5 for name, of in each.items()}
    return (
        {name: float(of.mean()) for name, of in each.items()},
        errors,
        {name: pack_per_user(of.numpy()) for name, of in each.items()},
    )


def _trained(
    given: FedRecSettings, data: Dataset, chosen: dict[str, float], seed: int, rounds: int, after: After
) -> tuple[Scorer, dict[str, float]]:
    """Train a method: its scorer, and the cost of a device; ``after`` is called after every round.

    Where steps diverge, training ends with what it had before: ``after`` is not called for the rounds that are left.
    """
    if given.method in CENTRAL - {"ncf"}:
        return Popularity(data.train) if given.method == "popularity" else _counter(given, data, rounds, seed), {}
    settings = run_settings(given, chosen, seed, rounds, data.num_users)
    federation = Federation.of(settings, data)
    if given.outside == "all ratings":
        federation.clients.outside = _joined(data.train, data.test)
    state, rejections = federation.initial(), Rejections()
    moved, done = torch.zeros(2, dtype=torch.float64), 0
    for number in range(settings.run.rounds):
        plan = Tunable.of(settings.algorithm).resolve(federation.plan, state)
        each = [settings.algorithm.traffic(plan, size, number) for size in range(len(plan.capacities))]
        moved += torch.tensor(each, dtype=torch.float64)[
            federation.sampler.size[federation.sampler.cohort(number)]
        ].sum(0)
        try:
            state = run_round(state, federation.sampler, federation.clients, rejections, batched)
        except InvalidVector:
            break
        done = number + 1
        after(done, lambda state=state: _by_size(federation, state))  # type: ignore[misc]
    plan = Tunable.of(settings.algorithm).resolve(federation.plan, state)
    bits = settings.algorithm.BITS if isinstance(settings.algorithm, Pointwise) else 8 * FLOAT_BYTES
    held = [one.bytes() * bits // (8 * FLOAT_BYTES) for one in plan.assignments(0)]
    own = sum(plan.architecture.user_vectors.values()) * bits // 8
    down, up = (moved / data.num_users).tolist()
    cost = {
        "bytes held": mean(held[size] for size in federation.sampler.size.tolist()) + own,
        "bytes down": down,
        "bytes up": up,
        "rounds": done,
    }
    return _by_size(federation, state), {} if isinstance(settings.algorithm, Centralized) else cost


def run_settings(given: FedRecSettings, chosen: dict[str, float], seed: int, rounds: int, users: int) -> Settings:
    """Settings of the run behind a cell."""
    data = {"data": {"kind": "interactions", "name": given.data}, "run": {"seed": seed}}
    if given.method == "ours":
        fleet = {"capacities": given.capacities, "clients_per_round": None}
        return read_settings(merge_tables(data, {"fleet": fleet, "privacy": {"level": given.level}}))
    tables: dict[str, Any] = {
        "model": {"kind": "mf", "factors": given.factors},
        "algorithm": {"kind": given.method} | chosen,
        "subspace": {"method": "heterofl" if given.method == "hetefedrec" else "fedavg"},
        "fleet": {"capacities": given.capacities, "clients_per_round": min(given.clients, users)},
        "run": {"rounds": rounds},
    }
    if given.method == "ncf":
        tables["model"]["kind"] = "neumf"
        tables["algorithm"] = {"kind": "central", "local_optimizer": "adam", "num_negatives": 4} | chosen
        tables["fleet"] = {"capacities": "1x"}
    return read_settings(merge_tables(data, tables))


def _by_size(federation: Federation, state: State) -> Scorer:
    """Score every user by the model that their device holds."""
    plan = Tunable.of(federation.plan.algorithm).resolve(federation.plan, state)
    held = plan.assignments(max(state.round_number - 1, 0))
    scorers = []
    for one, task in zip(held, reduce_per_size(state.full, held), strict=True):
        full = {name: of.recover((task or {})[name]) for name, of in (one.projections or {}).items()}
        scorers.append(plan.algorithm.scorer(plan, full, [one], federation.clients))
    sizes = torch.zeros(len(federation.data.test.offsets) - 1, dtype=torch.int64)  # type: ignore[union-attr]
    sizes = sizes if isinstance(plan.algorithm, Centralized) else federation.sampler.size

    def score(users: Tensor) -> Tensor:
        found = torch.empty(len(users), plan.public.num_items)
        for size, scorer in enumerate(scorers):
            mine = (sizes[users] == size).nonzero().flatten()
            if len(mine):
                found[mine] = scorer(users[mine]).detach().float()
        return found

    return score


def _counter(given: FedRecSettings, data: Dataset, rounds: int, seed: int) -> Scorer:
    """Score an item by how rarely it was drawn as a negative of the user, without learning anything."""
    outside = _joined(data.train, data.test) if given.outside == "all ratings" else data.train
    random = numpy.random.default_rng([seed, 7])
    draws = (
        rounds * min(given.clients, data.num_users) / data.num_users * 5 * 4
    )  # as the baselines draw: steps, negatives
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


# -- leave one out by time: the newest item of every user is the test, the one before it validation --------------------
# The readers of fairfold.data keep no times, so MovieLens's files are read here.

FILES = {"u.data": "\t", "*.rating": "\t", "ratings.dat": "::", "ratings.csv": ","}
"""Files of user, item, rating and time, and their separators."""


@cache
def leave_newest_out(name: str) -> Dataset:
    """Split a MovieLens set by time (leave one out); users with fewer than three items are dropped."""
    frame = (
        _read(existing_path(name) or resolve(name))
        .sort("user", "time", "row")
        .unique(["user", "item"], keep="last", maintain_order=True)
    )
    frame = frame.filter(polars.len().over("user") >= 3)
    users, items = (frame[role].rank("dense").cast(polars.Int64) - 1 for role in ("user", "item"))
    from_end = frame.select(polars.len().over("user") - 1 - polars.int_range(polars.len()).over("user"))
    who, what = torch.from_numpy(users.to_numpy().copy()), torch.from_numpy(items.to_numpy().copy())
    back = torch.from_numpy(from_end.to_series().cast(polars.Int64).to_numpy().copy())
    sizes = int(who.max()) + 1, int(what.max()) + 1
    what = _by_popularity(what, back >= 2, sizes[1])

    def part(chosen: Tensor) -> Interactions:
        return Interactions.from_pairs(who[chosen], what[chosen], *sizes)

    ids = [[str(number) for number in range(size)] for size in sizes]
    return Dataset(
        name=f"{name}, newest left out", train=part(back >= 2), test=part(back == 0), valid=part(back == 1),
        user_ids=ids[0], item_ids=ids[1], titles=None,
    )  # fmt: skip


def _read(path: Path) -> polars.DataFrame:
    """Read all ratings of a set with their row numbers."""
    for pattern, between in FILES.items():
        found = [path] if path.is_file() and path.match(pattern) else sorted(path.glob(pattern))
        if found:
            lines = [
                line.split(between)[:4] for file in found for line in file.read_text(encoding="latin-1").splitlines()
            ]
            rows = [[int(word) for word in (line[0], line[1], line[3])] for line in lines if line[0].isdecimal()]
            return polars.DataFrame(rows, schema=["user", "item", "time"], orient="row").with_row_index("row")
    needed = "files of user, item, rating and time: " + ", ".join(FILES)
    raise InvalidData(f"{path}", needed, "Use ml-100k or ml-1m.")


def _by_popularity(items: Tensor, train: Tensor, count: int) -> Tensor:
    order = torch.bincount(items[train], minlength=count).argsort(descending=True, stable=True)
    place = torch.empty(count, dtype=torch.int64)
    place[order] = torch.arange(count)
    return place[items]
