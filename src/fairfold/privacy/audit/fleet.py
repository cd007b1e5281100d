"""Attacks by devices of a fleet: replayed on settings and data, as far as the server's own checks let them through.

*Promotion.* Hostile devices of the default algorithm have histories of their choice: nothing else passes the server in
a plain run (``algorithms.cooccurrence.uploads``). Each has the target beside some popular items; the most
successful number of those counts. A device that claims several users (where its invitation or masks let it) has its
history as often.

*Destruction.* Hostile devices of an algorithm whose clients send changes of the model (local SGD) send the worst that
passes ``validate_update``: numbers at the bound, the others' mean turned round, or noise a little larger than theirs.
Their weight is the honest one; where users weigh by what they have, the most that theirs can weigh. They know what all
others send. Under masks each acts for the sum of its size in its group of devices (``fleet.secure_groups``), up to what
the encoding of so many devices holds.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from fairfold.backends.batched import batched
from fairfold.config import Settings
from fairfold.config.fleet import SecurePrivacy
from fairfold.data import Dataset, Interactions
from fairfold.federation.aggregation import CombinesRobustly, make_aggregate
from fairfold.federation.algorithm import WeighsUsers, mean_change
from fairfold.federation.evaluation import Evaluator
from fairfold.federation.federation import Federation, number_items
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import StepFailed, checked_server_update, run_round
from fairfold.federation.updates import ClientTask, ScheduledTask, State, Update

TOP = 20  # of a user's recommendations, in which a promoted item counts
PROFILES = (1, 2, 4, 8, 16, 32, 64)  # popular items beside the target in a hostile history
LONGEST_PROFILE = 64  # items of a history at random
Attack = Callable[[ClientTask, list[Update], Update, float], Update]


# -- promotion ---------------------------------------------------------------------------------------------------------


def with_profiles(train: Interactions, histories: list[list[int]]) -> Interactions:
    """Interactions with further users, who have some histories."""
    items = torch.tensor([item for history in histories for item in history], dtype=torch.int64)
    lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
    users = train.num_users + torch.repeat_interleave(torch.arange(len(histories)), lengths)
    every_user, every_item = torch.cat([train.users, users]), torch.cat([train.items, items])
    return Interactions.from_pairs(every_user, every_item, train.num_users + len(histories), train.num_items)


def recommended_share(settings: Settings, train: Interactions, targets: list[int], honest: int) -> list[float]:
    """Of the first users without an item, the share that gets it in the top 20; for every target."""
    empty = Interactions.from_pairs(torch.tensor([]), torch.tensor([]), train.num_users, train.num_items)
    data = number_items(Dataset("fleet", train, empty), settings)
    numbers = train.counts_by_item.argsort(descending=True, stable=True).argsort()
    federation = Federation.of(settings, data)
    state, rejections = federation.initial(), Rejections()
    for _ in range(settings.run.rounds):
        state = run_round(state, federation.sampler, federation.clients, rejections, batched)
    return shares_of_items(federation, state, [int(numbers[target]) for target in targets], honest)


def shares_of_items(federation: Federation, state: State, items: list[int], honest: int) -> list[float]:
    """Of the first users without an item, the share that gets it in the top 20; for each of some items."""
    users, plan = torch.arange(honest), federation.plan
    scores = plan.algorithm.scorer(plan, state.full, plan.assignments(0), federation.clients)(users).clone()
    train = federation.interactions.train
    for user in users.tolist():
        scores[user, train.of(user)] = -torch.inf
    top = scores.topk(TOP, dim=1).indices
    shares = []
    for item in items:
        lacking = torch.tensor([item not in train.of(user) for user in users.tolist()])
        got = (top == item).any(1) & lacking & torch.isfinite(scores[:, item])
        shares.append(float(got.sum()) / max(int(lacking.sum()), 1))
    return shares


def promotion(
    settings: Settings, train: Interactions, targets: list[int], hostile: int, users_each: int = 1
) -> tuple[float, int]:
    """The share of honest users who get a promoted item, a mean over targets; and the best number of popular items."""
    popular = train.counts_by_item.argsort(descending=True, stable=True).tolist()
    best = (0.0, 0)
    for number in PROFILES if hostile else PROFILES[:1]:
        shares = []
        for target in targets:
            beside = [item for item in popular if item != target][:number]
            poisoned = with_profiles(train, [sorted([target, *beside])] * (hostile * users_each))
            shares += recommended_share(settings, poisoned, [target], train.num_users)
        best = max(best, (sum(shares) / len(shares), number))
    return best


# -- destruction -------------------------------------------------------------------------------------------------------


def _like(own: Update, change: Mapping[str, Tensor], task: ClientTask, sends_weights: bool) -> Update:
    """An attacker's update: any wanted change, at the weight of its own honest update."""
    wanted = {name: of + task.vectors[name] if sends_weights else of for name, of in change.items()}
    return Update({name: (of * own.weight).to(own.sums[name].dtype) for name, of in wanted.items()}, own.weight)


def _changes(plan: Plan, task: ClientTask, updates: list[Update]) -> dict[str, Tensor]:
    """The changes that some updates ask for, a row each."""
    names = updates[0].sums
    return {
        name: torch.stack([mean_change(plan.algorithm, task, name, one.sums[name], one.weight) for one in updates])
        for name in names
    }


def attacks_of(plan: Plan, devices: int = 1) -> dict[str, Attack]:
    """The changes that hostile clients of a plan send, by name; under masks in sums of so many devices."""
    sends_weights, privacy = plan.algorithm.sends_weights, plan.settings.privacy
    bound = 0.99 * plan.algorithm.max_change

    def at_bound(task: ClientTask, honest: list[Update], own: Update, _: float) -> Update:
        signs = {name: of.mean(0).sign() for name, of in _changes(plan, task, honest).items()}
        room = devices * privacy.clip / own.weight if isinstance(privacy, SecurePrivacy) else bound
        return _like(own, {name: -room * of for name, of in signs.items()}, task, sends_weights)

    def turned(times: float) -> Attack:
        def change(task: ClientTask, honest: list[Update], own: Update, hostile_share: float) -> Update:
            means = {name: of.mean(0) for name, of in _changes(plan, task, honest).items()}
            scale = times * (1 if times < 2 else 1 / hostile_share)
            wanted = {name: (-scale * of).clamp(-bound, bound) for name, of in means.items()}
            return _like(own, wanted, task, sends_weights)

        return change

    def little(task: ClientTask, honest: list[Update], own: Update, _: float) -> Update:
        found = _changes(plan, task, honest)
        return _like(own, {name: of.mean(0) - 1.5 * of.std(0) for name, of in found.items()}, task, sends_weights)

    def noise(task: ClientTask, honest: list[Update], own: Update, _: float) -> Update:
        found = _changes(plan, task, honest)
        source = torch.Generator().manual_seed(len(honest))
        drawn = {name: torch.randn(of.shape[1], generator=source).to(of.dtype) for name, of in found.items()}
        norms = {name: float(of.norm(dim=1).median()) for name, of in found.items()}
        scaled = {name: of * norms[name] / max(float(of.norm()), 1e-30) for name, of in drawn.items()}
        return _like(own, scaled, task, sends_weights)

    return {"at the bound": at_bound, "turned round": turned(2.0), "a little": little, "noise": noise}


def device_groups(federation: Federation, devices: int) -> list[list[int]]:
    """Users shared out to devices, each of one size."""
    sizes = federation.sampler.size
    found: list[list[int]] = []
    for size in sorted(set(sizes.tolist())):
        members = (sizes == size).nonzero().flatten()
        share = max(1, round(devices * len(members) / len(sizes)))
        found += [part.tolist() for part in members.chunk(share)]
    return found


def quality_under_attack(settings: Settings, data: Dataset, devices: int, hostile: int, attack: str = "") -> float:
    """Quality after a run of some devices, the last ``hostile`` of which (in a drawn order) attack."""
    federation = Federation.with_numbered_items(settings, data)
    plan, clients = federation.plan, federation.clients
    state = federation.initial()
    groups = device_groups(federation, devices)
    change = attacks_of(plan, len(groups) // settings.fleet.secure_groups)[attack] if attack else None
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(settings.run.seed)).tolist()
    bad = set(order[:hostile])
    sizes = [int(federation.sampler.size[group[0]]) for group in groups]
    for _ in range(settings.run.rounds):
        state = _attacked_round(federation, state, groups, sizes, bad, change)
    evaluator = Evaluator(replace(federation, clients=clients), {})
    return evaluator.quality(state, plan.assignments(state.round_number - 1)).server


def _sums_of_groups(
    groups: int, updates: list[Update], users: list[int], sizes: list[int], hostile: set[int]
) -> tuple[list[Update], list[int], list[int], set[int]]:
    """The sums of groups of devices of each size, with their users and sizes, and those that have a hostile device."""
    rank, places = Counter[int](), dict[tuple[int, int], list[int]]()
    for place, size in enumerate(sizes):
        places.setdefault((size, rank[size] % groups), []).append(place)
        rank[size] += 1
    sums = [reduce(add, [updates[place] for place in of]) for of in places.values()]
    together = [sum(users[place] for place in of) for of in places.values()]
    return (
        sums,
        together,
        [size for size, _ in places],
        {at for at, of in enumerate(places.values()) if hostile & set(of)},
    )


def _attacked_round(
    federation: Federation,
    state: State,
    groups: list[list[int]],
    sizes: list[int],
    bad: set[int],
    change: Attack | None,
) -> State:
    plan, clients = federation.plan, federation.clients
    masked = plan.settings.privacy.uses_secure_aggregation
    claim = WeighsUsers.of(plan.algorithm).max_user_weight(plan)
    distinct = sorted(set(sizes))
    tasks = dict(zip(distinct, plan.algorithm.tasks(plan, state, distinct), strict=True))
    updates: list[Update] = []
    for group, size in zip(groups, sizes, strict=True):
        parts = []
        for trained in batched(clients, [ScheduledTask(user, tasks[size]) for user in group], {}):
            clients.save_local_state(trained.client_ids, trained.local_state)
            parts.append(trained.update)
        updates.append(reduce(add, parts))
    users = [len(group) for group in groups]
    if masked:
        updates, users, sizes, bad = _sums_of_groups(plan.settings.fleet.secure_groups, updates, users, sizes, bad)
    aggregate = make_aggregate(plan.settings, bounded=True)
    for place, (update, size, most) in enumerate(zip(updates, sizes, users, strict=True)):
        sent, task = update, tasks[size]
        if place in bad and change is not None:
            honest = [updates[other] for other in range(len(updates)) if sizes[other] == size and other not in bad]
            sent = change(task, honest or [update], update, max(len(bad), 1) / len(updates))
            if CombinesRobustly.of(plan.algorithm).weighs_samples:
                times = most * claim / sent.weight
                sent = Update({name: total * times for name, total in sent.sums.items()}, most * claim)
        if masked or plan.algorithm.validate_update(plan, task, sent) is None:
            aggregate.add(task, sent, users=most)
    try:
        return checked_server_update(plan, state, aggregate)
    except StepFailed:
        return replace(state, round_number=state.round_number + 1)


def quality_with_profiles(settings: Settings, data: Dataset, hostile: int, users_each: int = 1) -> float:
    """Quality for honest users where hostile devices have histories of items at random, each as often as it claims."""
    source = torch.Generator().manual_seed(settings.run.seed)
    length = min(LONGEST_PROFILE, data.num_items)
    drawn = [torch.randperm(data.num_items, generator=source)[:length].sort().values.tolist() for _ in range(hostile)]
    histories = [history for history in drawn for _ in range(users_each)]
    poisoned = Dataset(data.name, with_profiles(data.train, histories), with_profiles(data.test, [[]] * len(histories)))
    federation = Federation.with_numbered_items(settings, poisoned)
    state, rejections = federation.initial(), Rejections()
    for _ in range(settings.run.rounds):
        state = run_round(state, federation.sampler, federation.clients, rejections, batched)
    held = federation.plan.assignments(state.round_number - 1)
    return Evaluator(federation, {}).quality(state, held).server
