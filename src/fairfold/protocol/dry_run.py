"""A round of a plug-in in a world of three users, before any real one: what is wrong with it is told at the start."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fairfold.data import Interactions
from fairfold.errors import FairfoldError, InvalidSettings
from fairfold.projections import facts_of, projection_of
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Answer, Public, Sent, State, Totals

if TYPE_CHECKING:
    from fairfold.settings import Settings

ITEMS, USERS = 24, 3
REMEDY = "Correct the plug-in; docs/architecture.md says what is asked of it."


def try_out(settings: "Settings") -> None:
    """Run a round of a plug-in that settings name in a small world; refused with what went wrong, and where."""
    parts = (settings.algorithm, settings.subspace)
    foreign = settings.model.own or any(not type(part).__module__.startswith("fairfold.") for part in parts)
    if not foreign or settings.model.reads_images:
        return
    what = f"algorithm {settings.algorithm.kind!r}, method {settings.subspace.method!r}, model {settings.model.kind!r}"
    tried = _Tried(what)
    train = _histories(settings.predicts_ratings)
    survey = tried("survey", settings.algorithm.survey, settings, train, range(ITEMS))
    plan: Plan = tried("the model and the sizes", _plan, settings, survey)
    state, own = tried("init", plan.initial)
    tried.need(isinstance(state, State), "init", "a State")
    if settings.model.own:
        _check_scores(tried, plan, state)
    people = People(plan, train, own)
    held_by_size = tried("the sizes", plan.assignments, 0)
    many = len(plan.capacities)
    tried.need(len(held_by_size) == many, "divide", f"an Assignment per capacity, {many}, not {len(held_by_size)}")
    sizes = [size for size, held in enumerate(held_by_size) if held.projections is not None]
    totals = Totals()
    for sent in tried("send", plan.algorithm.send, plan, state, sizes):
        _check_sent(tried, sent, state)
        for user in range(USERS):
            client = people.client(0 if plan.algorithm.pooled else user, 0)
            found = tried("answer", plan.algorithm.answer, plan, sent, client)
            two = isinstance(found, tuple) and len(found) == 2
            tried.need(two, "answer", "an Answer and a dict of private tensors")
            tried.need(isinstance(found[0], Answer), "answer", "an Answer first")
            problem = tried("problem", plan.algorithm.problem, plan, sent, found[0])
            accepted = problem in (None, "values out of range")  # how far is the settings' business
            tried.need(accepted, "answer", f"an answer that its own check accepts, not one with {problem!r}")
            tried("the sum of answers", partial(totals.add, alone=plan.method.per_client), sent, found[0])
    shapes = {name: vector.shape for name, vector in state.full.items()}
    after = tried("apply", plan.algorithm.apply, plan, state, totals)
    tried.need(isinstance(after, State) and after.round_number == 1, "apply", "a State of the next round")
    kept = {name: vector.shape for name, vector in after.full.items()}
    tried.need(kept == shapes, "apply", f"tensors of the same sizes, not {kept}")
    if not settings.predicts_ratings:
        score = tried("scorer", plan.algorithm.scorer, plan, after.full, plan.assignments(0), people)
        scores = tried("scorer", score, torch.arange(USERS))
        tried.need(tuple(scores.shape) == (USERS, ITEMS), "scorer", f"scores of {USERS} users for {ITEMS} items")


def _check_scores(tried: "_Tried", plan: Plan, state: State) -> None:
    """A model's ``combine`` has to broadcast: else it may train on sums of the wrong pairs, and nobody be told."""
    architecture, source = plan.architecture, torch.Generator().manual_seed(0)
    users = [torch.randn(USERS, length, generator=source) for length in architecture.own.values()]
    items = [torch.randn(ITEMS, shape[1], generator=source) for shape in architecture.tables.values()]
    ask = partial(architecture.scores, state.full)
    with torch.no_grad():
        grid = tried("combine", ask, [of[:, None] for of in users], [of[None] for of in items])
        fine = isinstance(grid, torch.Tensor) and tuple(grid.shape) == (USERS, ITEMS)
        given = f"of shape {tuple(grid.shape)}" if isinstance(grid, torch.Tensor) else repr(grid)[:60]
        words = f"scores [{USERS}, {ITEMS}] of users [{USERS}, 1, factors] and items [1, {ITEMS}, factors], not {given}"
        tried.need(fine, "combine", words)
        for user in range(USERS):  # one user with many items, as a device trains, gives the same
            alone = tried("combine", ask, [of[user] for of in users], items)
            same = tuple(alone.shape) == (ITEMS,) and torch.allclose(alone, grid[user], atol=1e-4, equal_nan=True)
            tried.need(same, "combine", f"of one user [factors] and {ITEMS} items the same scores as among others")


def _plan(settings: "Settings", survey: Answer) -> Plan:
    try:
        return Plan.of(settings, Public(ITEMS, USERS, survey.sums))
    except FairfoldError:  # so small a catalogue need not serve the run's capacities: everybody holds everything
        return Plan.of(settings.with_changes({"fleet.capacities": "1x"}), Public(ITEMS, USERS, survey.sums))


def _check_sent(tried: "_Tried", sent: Any, state: State) -> None:
    tried.need(isinstance(sent, Sent), "send", "a list of Sent")
    for name, held in sent.projections.items():
        compact = tried(f"{held.kind!r}.reduce", held.reduce, state.full[name])
        tried.need(tuple(compact.shape) == (held.size,), f"{held.kind!r}.reduce", f"a vector of {held.size} numbers")
        full = tried(f"{held.kind!r}.recover", held.recover, compact)
        tried.need(full.shape == state.full[name].shape, f"{held.kind!r}.recover", "a vector of the tensor's size")
        again = projection_of(tried(f"{held.kind!r}.facts", facts_of, held))
        tried.need(again == held, f"{held.kind!r}.facts", "plain values that define the same projection")


def _histories(rated: bool) -> Interactions:
    users = torch.arange(USERS).repeat_interleave(6)
    items = torch.cat([torch.arange(6) * (user + 1) % ITEMS for user in range(USERS)])
    return Interactions.from_pairs(users, items, USERS, ITEMS, (items % 5 + 1).float() if rated else None)


class _Tried:
    """Calls parts of a plug-in, and says which one failed."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, part: str, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except FairfoldError:
            raise
        except Exception as error:  # somebody else's code: whatever it raises is told with its place
            failed = f"{self._what}: {part} raised {type(error).__name__}: {error}"
            raise InvalidSettings(failed, "a plug-in that runs a small round", REMEDY) from error

    def need(self, holds: bool, part: str, wanted: str) -> None:
        """Refuse a part that gives something else."""
        if not holds:
            raise InvalidSettings(f"{self._what}: {part} gave something else", wanted, REMEDY)
