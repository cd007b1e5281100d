"""Sentences of ``fairfold audit --fleet``: how many devices promote an item, halve the quality, and read a user.

All is played by :mod:`.fleet` on the settings and data of a run. Under masks the server bounds sums alone, so one
device may claim all users of its cohort, and as such it is played. A lying server invents all devices but one:
they send zeros, and the readers of :mod:`.reconstruction` get what is left of the sum.
"""

import torch

from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.ratings import BayesianRatings
from fairfold.config import Settings
from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy
from fairfold.data import Dataset
from fairfold.federation.aggregation import (
    CombinesRobustly,
    fixed_point_encoding,
    from_weighted_change,
    weighted_change,
)
from fairfold.federation.federation import Federation
from fairfold.privacy.audit.fleet import attacks_of, promotion, quality_under_attack, quality_with_profiles
from fairfold.privacy.audit.groups import promotion_in_groups
from fairfold.privacy.audit.reconstruction import can_decode, decode_histories, score_decoding
from fairfold.privacy.audit.replay import Observation
from fairfold.privacy.fixed_point import MeasuredUpdate

RARE, TARGETS = 3, 2  # a promoted item has at most so many users; how many are tried
PROMOTED = 0.05  # share of the others from which on an item counts as promoted
READ_USERS = 10  # whose histories a lying server reads
ONE_ROUND = {"fleet.capacities": "1x", "fleet.clients_per_round": None, "algorithm.tune": False, "run.rounds": 1,
             "run.evaluate_every": 1}  # fmt: skip


def fleet_findings(settings: Settings, data: Dataset, users: int, seed: int) -> list[str]:
    """Sentences on some users of the data, each a device of a fleet."""
    few = some_users(data, users, seed)
    algorithm, privacy = settings.algorithm, settings.privacy
    masked, found = privacy.uses_secure_aggregation, list[str]()
    noisy = isinstance(privacy, DifferentialPrivacy)
    claims = few.num_users if masked else 1
    groups = settings.fleet.secure_groups
    if groups > 1:
        each = f"one of {few.num_users} devices of one user may claim all of its group"
        found.append(f"Under masks sums of {groups} groups are bounded: {each}, and is not named.")
    elif masked:
        who = f"{few.num_users} devices of one user"
        found.append(f"Under masks sums alone are bounded: one of {who} may claim all of them, and is not named.")
    if isinstance(algorithm, CoOccurrence) and groups > 1:
        found += _groups_findings(settings, few, seed)
    elif isinstance(algorithm, CoOccurrence) and not noisy:
        played = _plain(settings).with_changes(ONE_ROUND)
        found += _promotion_findings(played, few, claims, seed)
        found += _profile_findings(played, few, claims)
    elif isinstance(algorithm, CombinesRobustly | BayesianRatings) and not masked:
        found += _destruction_findings(settings, few)
    else:
        found.append("What hostile devices do to the quality was not played with this algorithm and level.")
    return [*found, _reading_finding(settings, few)]


def some_users(data: Dataset, users: int, seed: int) -> Dataset:
    """The data of some users, drawn by a seed."""
    source = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(data.num_users, generator=source)[:users].sort().values
    return Dataset(data.name, data.train.of_users(chosen), data.test.of_users(chosen))


def _plain(settings: Settings) -> Settings:
    """The same sums without masks, in which a simulation of few devices needs no cohort."""
    if not settings.privacy.uses_secure_aggregation:
        return settings
    values = settings.plain()
    return Settings(**(values | {"privacy": {"level": "plain"}}))


def _hostile(number: int, claims: int, devices: int) -> str:
    each = f" that claims {claims} users" if claims > 1 else ""
    return f"{number} hostile{each} beside {devices} devices of one user"


def _rare_items(data: Dataset, seed: int) -> list[int]:
    rare = ((data.train.counts_by_item > 0) & (data.train.counts_by_item <= RARE)).nonzero().flatten()
    source = torch.Generator().manual_seed(seed)
    return list(rare[torch.randperm(len(rare), generator=source)[:TARGETS]].tolist())


def _groups_findings(settings: Settings, data: Dataset, seed: int) -> list[str]:
    groups, privacy = settings.fleet.secure_groups, settings.privacy
    targets = _rare_items(data, seed)
    assert isinstance(privacy, SecurePrivacy)
    if not targets or data.num_users < 2 * groups:
        return ["No item is so rare that its promotion would show, or users are too few for the groups."]
    fewest = max(2, min(privacy.min_cohort, data.num_users // groups))
    played = settings.with_changes(ONE_ROUND | {"privacy.min_cohort": fewest})
    share, attack = promotion_in_groups(played, data.train, targets)
    return [f"One of them promotes a rare item ({attack.description()}) to {share:.1%} of the others."]


def _promotion_findings(settings: Settings, data: Dataset, claims: int, seed: int) -> list[str]:
    targets = _rare_items(data, seed)
    if not targets:
        return ["No item is so rare that its promotion would show."]
    found, hostile = [], 1
    while hostile <= data.num_users // 2:
        share, beside = promotion(settings, data.train, targets, hostile, claims)
        many = _hostile(hostile, claims, data.num_users)
        found.append(f"{many} promote a rare item (beside {beside} popular ones) to {share:.1%} of the others.")
        if share >= PROMOTED or claims > 1:  # under masks a cohort has no more to claim
            break
        hostile *= 2
    return found


def _profile_findings(settings: Settings, data: Dataset, claims: int) -> list[str]:
    before = quality_with_profiles(settings, data, 0)
    found, hostile = [f"Without hostile devices the quality is {before:.4f}."], 1
    while hostile <= data.num_users // 2:
        left = quality_with_profiles(settings, data, hostile, claims)
        found.append(f"{_hostile(hostile, claims, data.num_users)} leave {left:.4f} (histories at random).")
        if left <= before / 2 or claims > 1:
            break
        hostile *= 4
    return found


def _destruction_findings(settings: Settings, data: Dataset) -> list[str]:
    before = quality_under_attack(settings, data, data.num_users, 0)
    errors = settings.smaller_is_better
    found = [f"Without hostile devices the {'error' if errors else 'quality'} is {before:.4f}."]
    hostile = 1
    while hostile <= data.num_users // 2:
        attacks = attacks_of(Federation.with_numbered_items(settings, data).plan)
        left = {attack: quality_under_attack(settings, data, data.num_users, hostile, attack) for attack in attacks}
        worst = (max if errors else min)(left, key=lambda attack: left[attack])
        found.append(f"{hostile} hostile of {data.num_users} devices leave {left[worst]:.4f} ({worst}).")
        if left[worst] >= 2 * before if errors else left[worst] <= before / 2:
            break
        hostile *= 4
    return found


def _reading_finding(settings: Settings, data: Dataset) -> str:
    privacy = settings.privacy
    if not isinstance(privacy, SecurePrivacy):
        return "A lying server reads every user by itself: updates are plain."
    invented = privacy.min_cohort - 1
    sum_of = f"a sum of {privacy.min_cohort}"
    if isinstance(privacy, DifferentialPrivacy):
        return f"A lying server that invents {invented} devices has {sum_of} with the noise of ε = {privacy.epsilon:g}."
    share = read_share(settings.with_changes(ONE_ROUND), data) if isinstance(settings.algorithm, CoOccurrence) else None
    what = "a user" if share is None else f"{share:.0%} of a user's items"
    by_roster = "Devices with a roster refuse invented ones; then as many enrolled ones have to collude."
    return f"A lying server that invents {invented} devices reads {what} without a roster from {sum_of}. {by_roster}"


def read_share(settings: Settings, data: Dataset) -> float:
    """The share of a user's items that a server reads from the secure sum of that user and of devices it invented."""
    federation = Federation.with_numbered_items(settings, data)
    plan, privacy = federation.plan, settings.privacy
    assert isinstance(privacy, SecurePrivacy)
    assert can_decode(plan)
    shares = []
    for user in range(min(READ_USERS, data.num_users)):
        (scheduled,) = federation.sampler.schedule(federation.initial(), [user])
        task, client = scheduled.task, federation.clients.client(user, 0)
        update, _ = plan.algorithm.client_update(plan, task, client)
        encoding = fixed_point_encoding(plan, {task.size: task}, privacy.min_cohort)
        total = encoding.encode(MeasuredUpdate(weighted_change(plan, task, update)), task.size)  # and zeros of others
        (segment,) = encoding.layout.segments
        summed = from_weighted_change(plan, task, encoding.decode({segment: total})[task.size].update)
        histories = {user: federation.clients.train.of(user)}
        shares.append(score_decoding(decode_histories(plan, Observation(task, summed)), histories).shares[user])
    return sum(shares) / len(shares)
