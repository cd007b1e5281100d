"""How long correlations take to their model, and what they hold on the way.

``python benchmarks/recommender_speed.py implicit``: a data set (MovieLens 1M, 70/30) beside the alternating least
squares of `implicit` (from PyPI; 32 factors, its defaults otherwise), both in one run on one thread, on all items, with
processor and wall seconds and what is found of the held-out items: with settings that are given, and with ``--tuned``
at last with all that trials choose, for which `implicit` has nothing.
``... large``: synthetic users and a large catalogue, through the path of `fairfold train`, with the peak of memory;
what lies outside the head, and how well held-out items are found, beside popularity.
``... device``: the peak of memory of a device, a process of its own, while it makes its update.
"""

import os

if __name__ == "__main__":  # before any library starts its threads
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TypeVar

import torch

import fairfold.data
from fairfold.algorithms.cooccurrence.scorer import ROWS
from fairfold.backends.batched import choose_backend
from fairfold.config import read_settings
from fairfold.data import Dataset, Interactions
from fairfold.data.partition import hold_out
from fairfold.federation.federation import Federation, number_items
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round
from fairfold.federation.updates import State
from fairfold.metrics.ranking import evaluate_ranking
from fairfold.metrics.ranking_baselines import Popularity

T = TypeVar("T")


def say(text: str) -> None:
    print(text, flush=True)


def peak_megabytes() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(what: str, work: Callable[[], T]) -> tuple[T, float]:
    """What some work gives, and its processor seconds, which are printed."""
    wall, used = time.perf_counter(), time.process_time()
    found = work()
    wall, used = time.perf_counter() - wall, time.process_time() - used
    say(f"{what:40s} {used:8.2f} processor s {wall:8.2f} wall s   peak {peak_megabytes():,.0f} MB")
    return found, used


def whole(data: Dataset) -> Interactions:
    """All interactions of a data set."""
    parts = [part for part in (data.train, data.valid, data.test) if part is not None]
    users, items = torch.cat([part.users for part in parts]), torch.cat([part.items for part in parts])
    return Interactions.from_pairs(users, items, data.num_users, data.num_items)


def modelled(
    train: Interactions, head: int, factors: int, test: Interactions | None = None, *, tune: bool = False
) -> float:
    """From interactions to the model, perhaps with trials: processor seconds. With a test set, what it finds of it."""
    settings = read_settings(
        {"model": {"factors": factors}, "fleet": {"capacities": "1x"},
         "algorithm": {"kind": "co_occurrence", "max_items": head, "tune": tune}}
    )  # fmt: skip
    nothing = train.where(torch.zeros(len(train), dtype=torch.bool))  # to be numbered beside it
    given = Dataset("speed", train, nothing if test is None else test)
    data, first = timed("items numbered by counts", lambda: number_items(given, settings))
    world, second = timed("statistics and plan", lambda: Federation.of(settings, data))
    backend = choose_backend(world.sampler, world.clients, torch.device("cpu"))

    def run(rounds: int) -> State:
        state = world.initial()
        for _ in range(rounds):
            state = run_round(state, world.sampler, world.clients, Rejections(), backend)
        return state

    rounds = settings.run.rounds if tune else 1
    what = f"{rounds} rounds: pairs, tuning, the model" if tune else "a round: all pairs, and the model"
    state, third = timed(what, lambda: run(rounds))
    assert float(state.full[ROWS].abs().max()) > 0
    known = world.plan.architecture.tables[ROWS][0]
    say(f"head {known:,} of {train.num_items:,} items, {len(train):,} interactions")
    if test is not None:
        outside = float((data.test.items >= known).double().mean())
        say(f"outside the head: {outside:.3f} of {len(data.test):,} held-out interactions")
        timed("... validated", lambda: validate(world, state))
        say(f"popularity: NDCG@20 {evaluate_ranking(Popularity(data.train), data.train, data.test).ndcg:.4f}")
    return first + second + third


def validate(world: Federation, state: State) -> None:
    """Of the server's model, by users with something held out."""
    plan, data = world.plan, world.interactions
    score = plan.algorithm.scorer(plan, state.full, plan.assignments(0), world.clients)
    say(f"{plan.algorithm.kind}: NDCG@20 {evaluate_ranking(score, data.train, data.test).ndcg:.4f}")


def beside_implicit(chosen: argparse.Namespace) -> None:
    """Both, by turns."""
    als, sparse = import_module("implicit.als"), import_module("scipy.sparse")
    data = fairfold.data.load(chosen.data)
    train, test = (data.train, data.test) if chosen.published else hold_out(whole(data), 0.3, 0)
    shape = (train.num_users, train.num_items)
    matrix = sparse.csr_matrix((torch.ones(len(train)).numpy(), train.items.numpy(), train.offsets.numpy()), shape)
    ours, theirs = list[float](), list[float]()
    for repeat in range(chosen.repeats):
        last = repeat == chosen.repeats - 1
        ours.append(modelled(train, train.num_items, chosen.factors, test if last else None))
        model = als.AlternatingLeastSquares(factors=32, num_threads=1)
        theirs.append(timed("implicit", partial(model.fit, matrix, show_progress=False))[1])
    users, items = torch.from_numpy(model.user_factors), torch.from_numpy(model.item_factors)
    say(f"implicit: NDCG@20 {evaluate_ranking(lambda of: users[of] @ items.T, train, test).ndcg:.4f}")
    for mine, other in zip(ours, theirs, strict=True):
        say(f"correlations {mine:.2f} s, implicit {other:.2f} s of processor time: {mine / other:.2f} times")
    if chosen.tuned:
        used, least = modelled(train, train.num_items, 384, test, tune=True), min(theirs)
        say(f"with all that trials choose {used:.2f} s: {used / least:.2f} times implicit with settings that are given")


def invented(users: int, items: int) -> Interactions:
    """Users of 20 to 30 items: some of their own one of a hundred kinds, some of any, the popular ones more often."""
    source = torch.Generator().manual_seed(0)
    popularity = torch.arange(1, items + 1, dtype=torch.float64).pow_(-0.8).cumsum_(0)
    parts_of_users, parts_of_items = [], []
    for start in range(0, users, 100_000):
        mine = torch.arange(start, min(start + 100_000, users))
        many = torch.randint(20, 31, (len(mine),), generator=source)
        owner = torch.repeat_interleave(mine, many)
        chance = torch.rand(len(owner), generator=source, dtype=torch.float64) * popularity[-1]
        drawn = torch.searchsorted(popularity, chance).clamp(max=items - 1)
        alike = drawn // 100 * 100 + owner % 100
        own = torch.rand(len(owner), generator=source) < 0.6
        parts_of_users.append(owner)
        parts_of_items.append(torch.where(own, alike.clamp(max=items - 1), drawn))
    return Interactions.from_pairs(torch.cat(parts_of_users), torch.cat(parts_of_items), users, items)


def large(chosen: argparse.Namespace) -> None:
    """Many users, a large catalogue."""
    everything, _ = timed("invented", lambda: invented(chosen.users, chosen.items))
    judges = everything.users % max(chosen.users // chosen.judges, 1) == 0
    test = torch.zeros(len(everything), dtype=torch.bool)
    test[judges.nonzero().flatten()[::5]] = True  # a fifth of some histories
    train, test_set = (
        Interactions.from_pairs(everything.users[part], everything.items[part], chosen.users, chosen.items)
        for part in (~test, test)
    )
    del everything
    used = modelled(train, chosen.head, chosen.factors, test_set)
    say(f"{used:,.0f} processor s in all, peak {peak_megabytes():,.0f} MB")


def device(chosen: argparse.Namespace) -> None:
    """A process that has nothing but its history, before and after it makes its update."""
    code = f"""
import resource, torch
from fairfold.algorithms.cooccurrence.cooccurrence import CoOccurrenceUpload
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
history = torch.randperm({chosen.head})[:{chosen.history}].sort().values
def upload(mine, head, listed):
    found = CoOccurrenceUpload.of(mine, torch.tensor([len(mine)]), len(mine))
    return found.shortest(head, torch.float32) if listed else found.dense(head, torch.float32)
for listed in (True, False):
    upload(history[:5], 50, listed)
for listed in (True, False):
    before, update = peak(), upload(history, {chosen.head}, listed)
    size = 8 * update.values().numel() if update.is_sparse else 4 * len(update)
    how, more = "a list of pairs" if update.is_sparse else "all numbers", peak() - before
    print(f"{{len(history)}} items: an update of {{size / 2**20:.1f}} MB ({{how}}), peak {{more:.1f}} MB more")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--factors", type=int, default=128)
    kinds = parser.add_subparsers(required=True)
    beside = kinds.add_parser("implicit")
    beside.add_argument("--data", default="ml-1m")
    beside.add_argument("--repeats", type=int, default=3)
    beside.add_argument("--published", action="store_true", help="the split of the data's publishers")
    beside.add_argument("--tuned", action="store_true")
    beside.set_defaults(run=beside_implicit)
    synthetic = kinds.add_parser("large")
    synthetic.add_argument("--users", type=int, default=1_000_000)
    synthetic.add_argument("--items", type=int, default=100_000)
    synthetic.add_argument("--head", type=int, default=10_000)
    synthetic.add_argument("--judges", type=int, default=1_000)
    synthetic.set_defaults(run=large)
    alone = kinds.add_parser("device")
    alone.add_argument("--head", type=int, default=3_500)
    alone.add_argument("--history", type=int, default=300)
    alone.set_defaults(run=device)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    chosen.run(chosen)


if __name__ == "__main__":
    main()
