"""A trial round of plug-ins with three users, so that mistakes show before the first real round."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fairfold.data import Interactions
from fairfold.errors import FairfoldError, InvalidSettings
from fairfold.federation.algorithm import Centralized
from fairfold.federation.clients import Clients
from fairfold.federation.plan import Plan
from fairfold.federation.updates import Aggregate, ClientTask, PublicStatistics, State, Update
from fairfold.subspace.projection import describe_projection, make_projection

if TYPE_CHECKING:
    from fairfold.config import Settings

ITEMS, USERS = 24, 3
REMEDY = "Correct the plug-in; docs/architecture.md says what is asked of it."


def check_plugins(settings: "Settings") -> None:
    """Run a small round with the plug-ins that settings name; refuse one that fails, with the failing part."""
    algorithm = settings.algorithm
    names = f"algorithm {algorithm.kind!r}, method {settings.subspace.method!r}, model {settings.model.kind!r}"
    call = _CheckedCalls(names)
    train = _example_histories(settings.predicts_ratings)
    statistics = call("client_statistics", algorithm.client_statistics, settings, train, range(ITEMS))
    plan: Plan = call("the model and the sizes", _small_plan, settings, statistics)
    state, local_state = call("init", plan.initial)
    call.require(isinstance(state, State), "init", "a State")
    if settings.model.is_custom:
        _check_scores(call, plan, state)
    clients = Clients(plan, train, local_state)
    held = call("the sizes", plan.assignments, 0)
    count = len(plan.capacities)
    call.require(len(held) == count, "divide", f"an Assignment per capacity, {count}, not {len(held)}")
    sizes = [size for size, one in enumerate(held) if one.projections is not None]
    aggregate = Aggregate()
    for task in call("tasks", algorithm.tasks, plan, state, sizes):
        _check_task(call, task, state)
        for user in range(USERS):
            client = clients.client(0 if isinstance(algorithm, Centralized) else user, 0)
            found = call("client_update", algorithm.client_update, plan, task, client)
            pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Update)
            call.require(pair, "client_update", "an Update and a dict of local state")
            problem = call("validate_update", algorithm.validate_update, plan, task, found[0])
            valid = problem in (None, "values out of range")  # the range is a setting
            call.require(valid, "client_update", f"an update that validate_update accepts, not one with {problem!r}")
            call("the sum of updates", partial(aggregate.add, alone=plan.method.per_client), task, found[0])
    before = {name: vector.shape for name, vector in state.full.items()}
    state = call("server_update", algorithm.server_update, plan, state, aggregate)
    call.require(isinstance(state, State) and state.round_number == 1, "server_update", "a State of the next round")
    after = {name: vector.shape for name, vector in state.full.items()}
    call.require(after == before, "server_update", f"tensors of the same sizes, not {after}")
    if not settings.predicts_ratings:
        score = call("scorer", algorithm.scorer, plan, state.full, plan.assignments(0), clients)
        scores = call("scorer", score, torch.arange(USERS))
        call.require(tuple(scores.shape) == (USERS, ITEMS), "scorer", f"scores of {USERS} users for {ITEMS} items")


class _CheckedCalls:
    """Calls parts of a plug-in, and names the part that fails."""

    def __init__(self, plugin: str) -> None:
        self._plugin = plugin

    def __call__(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except FairfoldError:
            raise
        except Exception as error:  # foreign code may raise anything
            failed = f"{self._plugin}: {part} raised {type(error).__name__}: {error}"
            raise InvalidSettings(failed, "a plug-in that runs a small round", REMEDY) from error

    def require(self, holds: bool, part: str, needed: str) -> None:
        """Refuse a part that returned something else than needed."""
        if not holds:
            raise InvalidSettings(f"{self._plugin}: {part} gave something else", needed, REMEDY)


def _check_scores(call: _CheckedCalls, plan: Plan, state: State) -> None:
    """Check that a model's ``combine`` broadcasts; else it would train on wrong pairs without an error."""
    architecture = plan.architecture
    source = torch.Generator().manual_seed(0)
    users = [torch.randn(USERS, length, generator=source) for length in architecture.user_vectors.values()]
    items = [torch.randn(ITEMS, shape[1], generator=source) for shape in architecture.tables.values()]
    score = partial(architecture.scores, state.full)
    with torch.no_grad():
        table = call("combine", score, [vectors[:, None] for vectors in users], [rows[None] for rows in items])
        given = f"of shape {tuple(table.shape)}" if isinstance(table, torch.Tensor) else repr(table)[:60]
        good = isinstance(table, torch.Tensor) and tuple(table.shape) == (USERS, ITEMS)
        needed = f"scores [{USERS}, {ITEMS}] of users [{USERS}, 1, factors] and items [1, {ITEMS}, factors]"
        call.require(good, "combine", f"{needed}, not {given}")
        for user in range(USERS):  # one user with many items, as clients train
            alone = call("combine", score, [vectors[user] for vectors in users], items)
            same = tuple(alone.shape) == (ITEMS,) and torch.allclose(alone, table[user], atol=1e-4, equal_nan=True)
            call.require(same, "combine", f"of one user [factors] and {ITEMS} items the same scores as among others")


def _small_plan(settings: "Settings", statistics: Update) -> Plan:
    public = PublicStatistics(ITEMS, USERS, statistics.sums)
    try:
        return Plan.of(settings, public)
    except FairfoldError:  # the catalogue may be too small for the run's capacities
        return Plan.of(settings.with_changes({"fleet.capacities": "1x"}), public)


def _check_task(call: _CheckedCalls, task: Any, state: State) -> None:
    call.require(isinstance(task, ClientTask), "tasks", "a list of ClientTask")
    for name, held in task.projections.items():
        compact = call(f"{held.kind!r}.reduce", held.reduce, state.full[name])
        call.require(tuple(compact.shape) == (held.size,), f"{held.kind!r}.reduce", f"a vector of {held.size} numbers")
        full = call(f"{held.kind!r}.recover", held.recover, compact)
        call.require(full.shape == state.full[name].shape, f"{held.kind!r}.recover", "a vector of the tensor's size")
        again = make_projection(call(f"{held.kind!r}.describe", describe_projection, held))
        call.require(again == held, f"{held.kind!r}.describe", "plain values that define the same projection")


def _example_histories(rated: bool) -> Interactions:
    users = torch.arange(USERS).repeat_interleave(6)
    items = torch.cat([torch.arange(6) * (user + 1) % ITEMS for user in range(USERS)])
    return Interactions.from_pairs(users, items, USERS, ITEMS, (items % 5 + 1).float() if rated else None)
