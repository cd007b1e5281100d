"""The server's step fails safe: culprits are found by bisection, and a failed step leaves the state as it was."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.errors import InvalidState
from fairfold.federation.federation import Federation
from fairfold.federation.round import (
    Contribution,
    StepFailed,
    checked_server_update,
    find_culprits,
    step_without_culprits,
)
from fairfold.federation.updates import Aggregate, State, Update
from tests.support.federations import tiny_data, tiny_settings

LISTS = st.lists(st.integers(-3, 9), min_size=1, max_size=40)


@given(LISTS, st.integers(1, 40))
def test_single_culprits_are_exactly_those_found(numbers: list[int], most: int) -> None:
    """Where each culprit fails alone, those found are the first of them, no honest member among them."""
    indexed = list(enumerate(numbers))
    found = find_culprits(lambda members: all(number >= 0 for _, number in members), indexed, most)
    assert found == [one for one in indexed if one[1] < 0][:most]


@given(LISTS, st.integers(0, 60))
def test_without_culprits_it_works_where_only_sums_fail(numbers: list[int], limit: int) -> None:
    """Sums with a limit, none of whose members need fail alone: the rest works, and any found was needed."""
    members = sorted(abs(number) for number in numbers)

    def works(some: Sequence[int]) -> bool:
        return sum(some) <= limit

    found = find_culprits(works, members, len(members))
    rest = list(members)
    for one in found:
        assert not works(rest), "none is left out of what works"
        rest.remove(one)
    assert works(rest)


def test_bisection_takes_few_trials() -> None:
    trials = 0

    def works(members: Sequence[int]) -> bool:
        nonlocal trials
        trials += 1
        return 777 not in members

    assert find_culprits(works, range(1000), 8) == [777]
    assert trials <= 2 + 10


def gradient(optimizer: str = "sgd") -> tuple[Federation, State, list[Contribution[int]]]:
    """A federation, its first state, and the updates of its clients to the first round's tasks."""
    settings = tiny_settings(aggregation="delta", server_optimizer=optimizer, capacities="1x-2x", clients_per_round=6)
    federation = Federation.of(settings, tiny_data(1, 6, 12))
    state, found = federation.initial(), []
    for scheduled in federation.sampler.schedule(state, list(range(6))):
        client = federation.clients.client(scheduled.client, 0)
        update, _ = federation.plan.algorithm.client_update(federation.plan, scheduled.task, client)
        found.append(Contribution(scheduled.client, scheduled.task, update))
    return federation, state, found


def summed(contributions: list[Contribution[int]]) -> Aggregate:
    aggregate = Aggregate()
    for one in contributions:
        aggregate.add(one.task, one.update)
    return aggregate


def spoiled(one: Contribution[int], value: float) -> Contribution[int]:
    sums = {name: torch.full_like(vector, value) for name, vector in one.update.sums.items()}
    return one._replace(update=replace(one.update, sums=sums))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_culprits_are_left_out_and_the_step_is_that_of_the_others(optimizer: str, value: float) -> None:
    federation, state, updates = gradient(optimizer)
    plan, before = federation.plan, state.copy()
    honest = [one for one in updates if one.sender not in (1, 4)]
    both = [spoiled(one, value) if one.sender in (1, 4) else one for one in updates]
    with pytest.raises(StepFailed, match="not finite"):
        checked_server_update(plan, state, summed(both))
    after, culprits = step_without_culprits(plan, state, both)
    for name, tensor in before.full.items():
        assert torch.equal(state.full[name], tensor), "as it was, though a step may change tensors in place"
    assert sorted(culprits) == [1, 4]
    expected = plan.algorithm.server_update(plan, state.copy(), summed(honest))
    for name, tensor in expected.full.items():
        torch.testing.assert_close(after.full[name], tensor)


def test_where_nobody_can_be_used_the_step_fails() -> None:
    federation, state, updates = gradient()
    with pytest.raises(StepFailed, match="none of the updates"):
        step_without_culprits(federation.plan, state, [spoiled(one, float("nan")) for one in updates])


@pytest.mark.parametrize(
    ("error", "caught"),
    [
        (torch.linalg.LinAlgError("not positive-definite"), True),  # type: ignore[attr-defined]
        (OverflowError("too large"), True),
        (ZeroDivisionError(), True),
        (IndexError("out of range"), True),
        (InvalidState("a", "b", "c"), False),
        (torch.OutOfMemoryError("full"), False),
        (TypeError("a mistake in the code"), False),
    ],
)
def test_what_sums_can_cause_is_caught_and_nothing_else(
    error: Exception, caught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, state, updates = gradient()

    def fail(*_: Any) -> State:
        raise error

    monkeypatch.setattr(type(federation.plan.algorithm), "server_update", fail)
    with pytest.raises(StepFailed if caught else type(error)):
        checked_server_update(federation.plan, state, summed(updates))


def test_a_model_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, state, updates = gradient()
    broken = replace(state, full={name: tensor / 0 for name, tensor in state.full.items()})
    monkeypatch.setattr(type(federation.plan.algorithm), "server_update", lambda *_: broken)
    with pytest.raises(StepFailed, match="a model that is not finite"):
        checked_server_update(federation.plan, state, summed(updates))
    empty = Aggregate()
    empty.add(updates[0].task, Update({}, 0.0))
    monkeypatch.undo()
    assert checked_server_update(federation.plan, state, empty).round_number == 1
