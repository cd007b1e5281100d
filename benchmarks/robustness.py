"""Quality with and without hostile devices: docs/robustness.md's figures, a line each.

    FAIRFOLD_DATA=... python benchmarks/robustness.py gradient --data ml-100k >> benchmarks/results/robustness.csv
    FAIRFOLD_DATA=... python benchmarks/robustness.py promotion --data ml-100k

``gradient``: local SGD on FAIR's subspaces by 40 devices, of which some are hostile, for every rule and attack.
``fair``: the recipe, whose users are solved exactly: rules delta and unbounded.
``paper``: the recipe, with all devices in every round: rules paper and unbounded.
With ``--masked 5`` all three are under masks, in five groups of devices.
``groups``: the default algorithm under masks in groups of devices, of which some send numbers of their choice; without
an attack its quality with all users of the data.
``promotion``: 100 devices of one user each, of which some push an item that three honest ones have.
"""

import argparse
import csv
import sys
import time
from typing import Any

import torch

from fairfold.algorithms.closed_form import ClosedForm
from fairfold.algorithms.gradient import Gradient
from fairfold.config.files import load_settings
from fairfold.data import Interactions
from fairfold.federation.aggregation import CombinesRobustly
from fairfold.federation.federation import load_interactions, load_unnumbered
from fairfold.federation.simulation import simulate
from fairfold.privacy.audit.fleet import promotion, quality_under_attack
from fairfold.privacy.audit.groups import NOTHING, promotion_in_groups, share_of_attack

GRADIENT: dict[str, Any] = {
    "model.kind": "mf", "model.factors": 32, "algorithm.kind": "gradient", "subspace.method": "fair",
    "subspace.mapping": "ranked", "subspace.popularity": "counts", "run.baselines": False,
    "fleet.capacities": "1x-4x-16x", "fleet.clients_per_round": None,
}  # fmt: skip
FLEET: dict[str, Any] = {
    "run.baselines": False, "fleet.capacities": "1x-4x-16x", "fleet.clients_per_round": None,
}  # fmt: skip
TIMES = {"closed_form": ClosedForm.times_median, "gradient": Gradient.times_median}
ATTACKS = ("at the bound", "turned round", "a little", "noise")
RULES = ("delta", "clipped", "trimmed", "median", "multi-krum")
UNBOUNDED = "unbounded"  # the mean without the bound that a server sets by default


def gradient(
    data: str,
    rules: list[str],
    hostile: list[int],
    rounds: int,
    devices: int,
    seed: int,
    masked: int,
    recipe: str | None,
) -> None:
    """Lines of local SGD, or of a recipe whose devices send changes of the model."""
    for rule in rules:
        share = {"algorithm.byzantine_share": 0.2} if rule in ("trimmed", "multi-krum") else {}
        changes = (GRADIENT | share) if recipe is None else FLEET
        changes = changes | {"data.name": data, "run.rounds": rounds, "run.evaluate_every": rounds, "run.seed": seed}
        usual = "paper" if recipe == "paper" else "delta"
        changes["algorithm.aggregation"] = usual if rule == UNBOUNDED else rule
        if masked:
            changes |= {"privacy.level": "secure", "privacy.min_cohort": 2, "fleet.secure_groups": masked}
        settings = load_settings(None, changes, recipe)
        assert isinstance(settings.algorithm, CombinesRobustly)
        type(settings.algorithm).times_median = float("inf") if rule == UNBOUNDED else TIMES[settings.algorithm.kind]
        loaded = load_unnumbered(settings)[0]
        for number in hostile:
            for attack in ATTACKS if number else ("",):
                started = time.monotonic()
                quality = quality_under_attack(settings, loaded, devices, number, attack)
                words = f"{rule}, {masked} groups" if masked else rule
                cells = [recipe or "gradient", data, words, devices, number, attack, f"{quality:.4f}"]
                _write([*cells, rounds, seed], started)


def hundred_users(train: Interactions, seed: int, users: int) -> Interactions:
    """Some users drawn by a seed."""
    chosen = torch.randperm(train.num_users, generator=torch.Generator().manual_seed(seed))[:users].sort().values
    mask = torch.isin(train.users, chosen)
    place = torch.zeros(train.num_users, dtype=torch.int64)
    place[chosen] = torch.arange(users)
    return Interactions.from_pairs(place[train.users[mask]], train.items[mask], users, train.num_items)


def push(data: str, hostile: list[int], claims: list[int], targets: int, seed: int, changes: dict[str, Any]) -> None:
    """Lines of promotion."""
    base = {"data.name": data, "fleet.capacities": "1x", "run.baselines": False}
    settings = load_settings(None, base | changes)
    train = load_interactions(settings)[0].train
    for number in hostile:
        for users in claims if number else [1]:
            started = time.monotonic()
            honest = hundred_users(train, seed, 100 - number)
            rare = (honest.counts_by_item == 3).nonzero().flatten()
            source = torch.Generator().manual_seed(seed)
            chosen = rare[torch.randperm(len(rare), generator=source)[:targets]].tolist()
            share, popular = promotion(settings, honest, chosen, number, users)
            chosen_by = f"exponent {changes['algorithm.history_exponent']:g}, support {changes['algorithm.support']}"
            cells = ["promotion", data, f"x{users}, {chosen_by}", 100, number, f"{popular} popular", f"{share:.4f}"]
            _write([*cells, targets, seed], started)


def groups(
    data: str, numbers: list[int], hostile: list[int], targets: int, held: int, seed: int, changes: dict[str, Any]
) -> None:
    """Lines of promotion under masks by some of 100 devices, and of the quality without attack."""
    masked = {"data.name": data, "privacy.level": "secure", "fleet.capacities": "1x", "run.baselines": False}
    masked |= {"fleet.clients_per_round": None, "run.evaluate_every": 1} | changes
    for number in numbers:
        started = time.monotonic()
        fewest = {"fleet.secure_groups": number, "privacy.min_cohort": 99 // number}
        settings = load_settings(None, masked | fewest)
        whole = load_unnumbered(settings)[0]
        rule = f"{number} groups, min_item_users {changes['algorithm.min_item_users']}"
        quality = simulate(settings, data=whole).history[-1].quality
        assert quality is not None
        _write(["groups", data, rule, whole.num_users, 0, "", f"{quality.server:.4f}", 1, seed], started)
        for bad in hostile if number > 1 else []:
            started = time.monotonic()
            honest = hundred_users(whole.train, seed, 100 - max(bad, 1))
            counts = honest.counts_by_item
            having = ((counts >= held) & (counts <= 1.2 * held)).nonzero().flatten()
            source = torch.Generator().manual_seed(seed)
            chosen = having[torch.randperm(len(having), generator=source)[:targets]].tolist()
            share, attack = share_of_attack(settings, honest, chosen, NOTHING), NOTHING
            if bad:
                share, attack = promotion_in_groups(settings, honest, chosen, bad)
            words = attack.description() if bad else ""
            cells = ["groups", data, f"{rule}, an item of {held} users", 100, bad, words, f"{share:.4f}"]
            _write([*cells, targets, seed], started)


def _write(cells: list[Any], started: float) -> None:
    csv.writer(sys.stdout, lineterminator="\n").writerow([*cells, f"{time.monotonic() - started:.0f}"])
    sys.stdout.flush()


def main() -> None:
    """Print the lines that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["gradient", "fair", "paper", "groups", "promotion"])
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--rules", nargs="+", default=list(RULES), help=f"of local SGD; also {UNBOUNDED}")
    parser.add_argument("--hostile", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--claims", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--devices", type=int, default=40)
    parser.add_argument("--targets", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exponent", type=float, default=0.5, help="algorithm.history_exponent, of promotion")
    parser.add_argument(
        "--groups", nargs="+", type=int, default=[1, 5, 10], help="devices under masks, in so many groups"
    )
    parser.add_argument("--min-item-users", type=int, default=10, help="algorithm.min_item_users, of groups")
    parser.add_argument("--masked", type=int, default=0, help="groups of devices under masks, of local SGD and recipes")
    parser.add_argument("--held", type=int, default=3, help="honest users who have a promoted item, of groups")
    parser.add_argument("--support", type=int, default=3, help="algorithm.support, of promotion")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part == "groups":
        untuned = {"algorithm.tune": False, "run.rounds": 1, "algorithm.min_item_users": given.min_item_users}
        groups(given.data, given.groups, given.hostile, given.targets, given.held, given.seed, untuned)
    elif given.part != "promotion":
        recipe = None if given.part == "gradient" else given.part
        gradient(given.data, given.rules, given.hostile, given.rounds, given.devices, given.seed, given.masked, recipe)
    else:
        untuned = {"algorithm.tune": False, "run.rounds": 1, "algorithm.support": given.support}
        untuned["algorithm.history_exponent"] = given.exponent
        push(given.data, given.hostile, given.claims, given.targets, given.seed, untuned)


if __name__ == "__main__":
    main()
