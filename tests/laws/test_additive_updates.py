"""The law of updates, for every algorithm and method: they are additive.

``update(a) + update(b)`` is the update that a and b would have sent together. So clients may be aggregated one by one
or many at once, in any order and grouping, and the server makes the same of it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fairfold.backends.batched import batched
from fairfold.federation.algorithm import BatchedUpdates
from fairfold.federation.federation import Federation
from fairfold.federation.round import Backend, sequential
from fairfold.federation.updates import Aggregate, ClientTask, ClientUpdate, ScheduledTask, State, Update
from tests.support.federations import cloned, tiny_data, tiny_settings
from tests.support.parity import precision
from tests.support.pictures import SMALL, pictures
from tests.support.settings import make_settings

STEPS: dict[str, Any] = {"batch_size": 8}
IMAGES: dict[str, Any] = SMALL | {"capacities": "1x-4x", "data": {"name": "pictures", "clients": 8}, "local_epochs": 1}
CASES: dict[str, dict[str, Any]] = {
    "fair": STEPS,
    "fair_hom": STEPS | {"method": "fair_hom"},
    "full_trn": STEPS | {"method": "full_trn"},
    "fedavg": STEPS | {"method": "fedavg"},
    "fedhm": STEPS | {"method": "fedhm", "capacities": "1x-2x", "factors": 4},
    "heterofl": STEPS | {"method": "heterofl", "capacities": "1x-2x", "factors": 4},
    "inconsistent": STEPS | {"method": "inconsistent", "mapping": "element"},
    "changes": STEPS | {"aggregation": "delta", "server_optimizer": "adam"},
    "changes in place": STEPS | {"aggregation": "delta", "server_optimizer": "sgd", "server_lr": 0.5},
    "uploaded": STEPS | {"user_vectors": "uploaded", "model": "neumf"},
    "closed_form": {"algorithm": "closed_form", "aggregation": "delta"},
    "closed_form, Newton steps": {
        "algorithm": "closed_form",
        "aggregation": "delta",
        "server_optimizer": "newton",
        "server_lr": 1.0,
    },
    "closed_form, whole rows": {"algorithm": "closed_form", "tail_share": 0.5, "support": 2, "chunk": 3, "sign": False},
    "ratings": {"algorithm": "ratings", "tail_share": 0.5, "reference_factors": 3},
    "ratings streamed": {"algorithm": "ratings", "tail_share": 0.5, "reference_factors": 3, "streamed": True},
    "images": IMAGES,
    "images fedhm": IMAGES | {"method": "fedhm"},
    "images heterofl": IMAGES | {"method": "heterofl"},
}
CLIENTS = 8


def trained_federation(case: str) -> tuple[Federation, State]:
    """A federation some of whose clients have sent an update before, so that there is something to remember."""
    if case.startswith("images"):
        federation = Federation.of(make_settings(**CASES[case] | {"clients_per_round": None}), pictures(2))
    else:
        chosen = tiny_settings(**{"capacities": "1x-4x", "seed": 3} | CASES[case] | {"clients_per_round": None})
        federation = Federation.of(chosen, tiny_data(3, CLIENTS, 40, ratings="ratings" in case))
    state = federation.initial()
    earlier = compute(federation, state, federation.sampler.participants.tolist()[:2], sequential)
    for client_update in earlier:
        federation.clients.save_local_state(client_update.client_ids, client_update.local_state)
    return federation, after_step(federation, state, earlier)


def compute(federation: Federation, state: State, client_ids: list[int], backend: Backend) -> list[ClientUpdate]:
    """Updates of clients whose local state stays as it was."""
    before_state = cloned(federation.clients.local_state)
    updates = list(backend(federation.clients, federation.sampler.schedule(state, client_ids), {}))
    for name, rows in before_state.items():  # some backends save what clients learned at once
        federation.clients.local_state[name].copy_(rows)
    return updates


def aggregate_of(federation: Federation, updates: list[ClientUpdate]) -> Aggregate:
    aggregate = Aggregate()
    for client_update in updates:
        assert (
            federation.plan.algorithm.validate_update(federation.plan, client_update.task, client_update.update) is None
        )
        aggregate.add(client_update.task, client_update.update, alone=federation.plan.method.per_client)
    return aggregate


def after_step(federation: Federation, state: State, updates: list[ClientUpdate]) -> State:
    """The server's state after some updates, which stay as they were; so does the algorithm state."""
    fresh = replace(state, full=cloned(state.full))  # a model may be used up
    before = [cloned(client_update.update.sums) for client_update in updates] + [
        cloned(of) for of in state.algorithm_state.values()
    ]
    found = federation.plan.algorithm.server_update(federation.plan, fresh, aggregate_of(federation, updates))
    after = [client_update.update.sums for client_update in updates] + list(state.algorithm_state.values())
    assert all(one[name].equal(of[name]) for one, of in zip(before, after, strict=True) for name in one)
    return found


def plus(first: Aggregate, second: Aggregate) -> Aggregate:
    """Add the sums of two parts of a round."""
    result, totals = Aggregate(), dict[Any, tuple[ClientTask, Update]]()
    for task, update in [*first.parts(), *second.parts()]:
        key = tuple(task.projections.items())
        totals[key] = (task, totals[key][1] + update) if key in totals else (task, update)
    for task, update in totals.values():
        result._sums[(len(result),)] = task, update
    return result


def by_size(aggregate: Aggregate) -> dict[Any, Update]:
    """Sums by task: of one size, or of one client where each has a hash of its own."""
    return {tuple(task.projections.items()): update for task, update in aggregate.parts()}


def assert_same(found: Aggregate, expected: Aggregate) -> None:
    one, other = by_size(found), by_size(expected)
    assert one.keys() == other.keys()
    for key, update in other.items():
        assert one[key].weight == pytest.approx(update.weight)
        assert one[key].sums.keys() == update.sums.keys()
        for name, tensor in update.sums.items():
            torch.testing.assert_close(one[key].sums[name], tensor, rtol=1e-9, atol=1e-11)


def assert_same_state(found: State, expected: State) -> None:
    assert found.round_number == expected.round_number
    assert found.algorithm_state.keys() == expected.algorithm_state.keys()
    for one, other in [
        (found.full, expected.full),
        *((found.algorithm_state[key], of) for key, of in expected.algorithm_state.items()),
    ]:
        for name, tensor in other.items():
            torch.testing.assert_close(one[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", list(CASES))
def test_together_is_the_sum_of_one_by_one(case: str) -> None:
    with precision():
        federation, state = trained_federation(case)
        client_ids = federation.sampler.participants.tolist()
        alone, together = (compute(federation, state, client_ids, backend) for backend in (sequential, batched))
        assert len(alone) == len(client_ids)
        assert sorted(client for client_update in together for client in client_update.client_ids) == sorted(client_ids)
        assert any(vector.any() for client_update in alone for vector in client_update.update.sums.values())
        assert_same(aggregate_of(federation, together), aggregate_of(federation, alone))


@pytest.mark.parametrize(
    "case", ["closed_form", "closed_form, Newton steps", "closed_form, whole rows", "ratings", "ratings streamed"]
)
def test_batched_updates_of_an_algorithm_are_the_sum_of_single_ones(case: str) -> None:
    with precision():
        federation, state = trained_federation(case)
        scheduled = list(federation.sampler.schedule(state, federation.sampler.participants.tolist()))
        algorithm = federation.plan.algorithm
        assert isinstance(algorithm, BatchedUpdates)
        found = list(algorithm.client_updates(federation.plan, federation.clients, scheduled))
        assert len(found) == 2  # one of each size
        assert_same(
            aggregate_of(federation, found),
            aggregate_of(federation, list(sequential(federation.clients, scheduled, {}))),
        )


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("backend", [sequential, batched])
def test_order_and_grouping_do_not_matter(case: str, backend: Backend) -> None:
    with precision():
        federation, state = trained_federation(case)
        client_ids = federation.sampler.participants.tolist()
        expected = aggregate_of(federation, compute(federation, state, client_ids, backend))
        order = torch.randperm(len(client_ids), generator=torch.Generator().manual_seed(4)).tolist()
        mixed = [client_ids[place] for place in order]
        assert mixed != client_ids
        assert_same(aggregate_of(federation, compute(federation, state, mixed, backend)), expected)
        third = len(mixed) // 3
        parts = [mixed[:third], mixed[third : third + 1], mixed[third + 1 :]]
        grouped = [client_update for part in parts for client_update in compute(federation, state, part, backend)]
        assert_same(aggregate_of(federation, grouped), expected)


@pytest.mark.parametrize("case", list(CASES))
def test_the_server_makes_the_same_of_sums_and_of_sums_of_sums(case: str) -> None:
    with precision():
        federation, state = trained_federation(case)
        updates = compute(federation, state, federation.sampler.participants.tolist(), sequential)
        plan, half = federation.plan, len(updates) // 2
        first, second = aggregate_of(federation, updates[:half]), aggregate_of(federation, updates[half:])
        expected = after_step(federation, state, updates)
        fresh = replace(state, full=cloned(state.full))
        assert_same_state(plan.algorithm.server_update(plan, fresh, plus(first, second)), expected)
        assert_same_state(after_step(federation, state, updates[::-1]), expected)
        assert any(not torch.equal(expected.full[name], tensor) for name, tensor in state.full.items())


@pytest.mark.parametrize("case", ["ratings", "ratings streamed"])
def test_remembered_updates_need_not_come_in_one_round(case: str) -> None:
    """Updates of two rounds add up to those of one: when they were sent does not matter to the sums."""
    with precision():
        federation, state = trained_federation(case)
        updates = compute(federation, state, federation.sampler.participants.tolist(), sequential)
        algorithm, plan = federation.plan.algorithm, federation.plan
        together = after_step(federation, state, updates)
        first = after_step(federation, state, updates[:3])
        later = replace(first, round_number=state.round_number)  # as if of the same round: windows move on with rounds
        apart = algorithm.server_update(plan, later, aggregate_of(federation, updates[3:]))
        # What is believed goes on from what was believed before; the sums do not.
        apart, together = (replace(of, full={}) for of in (apart, together))
        assert_same_state(apart, together)


@pytest.mark.parametrize("rule", ["changes", "changes in place", "fair"])
def test_sums_of_sizes_that_hold_the_same_are_separate(rule: str) -> None:
    """One update a size, and one subspace for all sizes: adding up changes no client's vector."""
    with precision():
        federation, state = trained_federation("fair_hom")
        steps = tiny_settings(**{"capacities": "1x-4x"} | CASES[rule] | {"method": "fair_hom"})
        federation = Federation.of(steps, federation.interactions)
        state = federation.initial()
        one, *_, other = federation.sampler.participants.tolist()
        assert federation.sampler.size[one] != federation.sampler.size[other]
        after_step(federation, state, compute(federation, state, [one, other], sequential))


def test_clients_of_a_size_share_one_task_object() -> None:
    """Clients are grouped by the identity of their task, not by an equal copy."""
    federation, state = trained_federation("fair")
    scheduled: list[ScheduledTask] = list(federation.sampler.schedule(state, list(range(CLIENTS))))
    assert len({id(scheduled_task.task) for scheduled_task in scheduled}) == 2
