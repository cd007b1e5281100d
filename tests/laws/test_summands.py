"""The one law, for every algorithm and method: what a device says is a summand.

``answer(a) + answer(b)`` is what a and b would have said together. So clients may be heard one by one or many at once,
in any order and any grouping, and the server makes the same of it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fairfold.backends.batched import batched
from fairfold.protocol.round import Backend, in_turn
from fairfold.protocol.words import Answer, State, Totals, Visit, Word
from fairfold.simulate.world import World
from tests.federations import copied, tiny_data, tiny_settings
from tests.flat import flat
from tests.parity.rounds import precision
from tests.pictures import SMALL, pictures

STEPS: dict[str, Any] = {"batch_size": 8}
IMAGES: dict[str, Any] = SMALL | {"capacities": "1x-4x", "images": {"devices": 8}, "local_epochs": 1}
CASES: dict[str, dict[str, Any]] = {
    "fair": STEPS,
    "fair_hom": STEPS | {"method": "fair_hom"},
    "full_trn": STEPS | {"method": "full_trn"},
    "fedavg": STEPS | {"method": "fedavg"},
    "fedhm": STEPS | {"method": "fedhm", "capacities": "1x-2x", "factors": 4},
    "heterofl": STEPS | {"method": "heterofl", "capacities": "1x-2x", "factors": 4},
    "inconsistent": STEPS | {"method": "inconsistent", "mapping": "element"},
    "changes": STEPS | {"aggregation": "delta", "server_optimiser": "adam"},
    "changes in place": STEPS | {"aggregation": "delta", "server_optimiser": "sgd", "server_step": 0.5},
    "uploaded": STEPS | {"user_vectors": "uploaded", "model": "neumf"},
    "closed_form": {"solver": "closed_form", "aggregation": "delta"},
    "closed_form, whole rows": {"solver": "closed_form", "tail_share": 0.5, "support": 2, "chunk": 3, "sign": False},
    "ratings": {"solver": "ratings", "tail_share": 0.5, "reference_factors": 3},
    "ratings streamed": {"solver": "ratings", "tail_share": 0.5, "reference_factors": 3, "streamed": True},
    "images": IMAGES,
    "images fedhm": IMAGES | {"method": "fedhm"},
    "images heterofl": IMAGES | {"method": "heterofl"},
}
CLIENTS = 8


def world_of(case: str) -> tuple[World, State]:
    """A federation some of whose clients have spoken before: sums that remember have something to remember."""
    if case.startswith("images"):
        world = World.of(flat(**CASES[case] | {"clients_per_round": None}), pictures(2))
    else:
        chosen = tiny_settings(**{"capacities": "1x-4x", "seed": 3} | CASES[case] | {"clients_per_round": None})
        world = World.of(chosen, tiny_data(3, CLIENTS, 40, ratings="ratings" in case))
    state = world.initial()
    spoken = said(world, state, world.fleet.taking_part.tolist()[:2], in_turn)
    for word in spoken:
        world.people.keep(word.clients, word.own)
    return world, applied(world, state, spoken)


def said(world: World, state: State, clients: list[int], backend: Backend) -> list[Word]:
    """What clients say, and nobody keeps anything."""
    private = copied(world.people.private)
    words = list(backend(world.people, world.fleet.visits(state, clients), {}))
    for name, rows in private.items():  # some backends let clients keep what they learned at once
        world.people.private[name].copy_(rows)
    return words


def totals_of(world: World, words: list[Word]) -> Totals:
    totals = Totals()
    for word in words:
        assert world.plan.algorithm.problem(world.plan, word.sent, word.answer) is None
        totals.add(word.sent, word.answer, alone=world.plan.method.per_client)
    return totals


def applied(world: World, state: State, words: list[Word]) -> State:
    """What the server makes of words, which stay as they were; so does what the state remembers."""
    fresh = replace(state, full=copied(state.full))  # a model may be used up
    before = [copied(word.answer.sums) for word in words] + [copied(of) for of in state.moments.values()]
    found = world.plan.algorithm.apply(world.plan, fresh, totals_of(world, words))
    after = [word.answer.sums for word in words] + list(state.moments.values())
    assert all(one[name].equal(of[name]) for one, of in zip(before, after, strict=True) for name in one)
    return found


def plus(first: Totals, second: Totals) -> Totals:
    """The sums of two parts of a round."""
    result, known = Totals(), by_size(first)
    for sent, answer in [*first.parts(), *second.parts()]:
        key = tuple(sent.projections.items())
        if key in known and answer is not known[key]:
            continue
        other = by_size(second).get(key) if key in known else None
        number = len(result.by_size)
        result.sent[number], result.by_size[number] = sent, answer if other is None else answer + other
    return result


def by_size(totals: Totals) -> dict[Any, Answer]:
    """Sums by what was sent: those of one size, or of one client where each has a hash of its own."""
    return {tuple(sent.projections.items()): answer for sent, answer in totals.parts()}


def assert_same(found: Totals, expected: Totals) -> None:
    one, other = by_size(found), by_size(expected)
    assert one.keys() == other.keys()
    for key, answer in other.items():
        assert one[key].weight == pytest.approx(answer.weight)
        assert one[key].sums.keys() == answer.sums.keys()
        for name, tensor in answer.sums.items():
            torch.testing.assert_close(one[key].sums[name], tensor, rtol=1e-9, atol=1e-11)


def assert_same_state(found: State, expected: State) -> None:
    assert found.round_number == expected.round_number
    assert found.moments.keys() == expected.moments.keys()
    for one, other in [
        (found.full, expected.full),
        *((found.moments[key], of) for key, of in expected.moments.items()),
    ]:
        for name, tensor in other.items():
            torch.testing.assert_close(one[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", list(CASES))
def test_together_is_the_sum_of_one_by_one(case: str) -> None:
    with precision():
        world, state = world_of(case)
        clients = world.fleet.taking_part.tolist()
        alone, together = (said(world, state, clients, backend) for backend in (in_turn, batched))
        assert len(alone) == len(clients)
        assert sorted(client for word in together for client in word.clients) == sorted(clients)
        assert any(vector.any() for word in alone for vector in word.answer.sums.values())
        assert_same(totals_of(world, together), totals_of(world, alone))


@pytest.mark.parametrize("case", ["closed_form", "closed_form, whole rows", "ratings", "ratings streamed"])
def test_an_algorithms_own_way_speaks_for_many(case: str) -> None:
    with precision():
        world, state = world_of(case)
        visits = list(world.fleet.visits(state, world.fleet.taking_part.tolist()))
        words = world.plan.algorithm.answers(world.plan, world.people, visits)
        assert words is not None
        found = list(words)
        assert len(found) == 2  # one of each size
        assert_same(totals_of(world, found), totals_of(world, list(in_turn(world.people, visits, {}))))


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("backend", [in_turn, batched])
def test_order_and_grouping_do_not_matter(case: str, backend: Backend) -> None:
    with precision():
        world, state = world_of(case)
        clients = world.fleet.taking_part.tolist()
        expected = totals_of(world, said(world, state, clients, backend))
        order = torch.randperm(len(clients), generator=torch.Generator().manual_seed(4)).tolist()
        mixed = [clients[place] for place in order]
        assert mixed != clients
        assert_same(totals_of(world, said(world, state, mixed, backend)), expected)
        third = len(mixed) // 3
        parts = [mixed[:third], mixed[third : third + 1], mixed[third + 1 :]]
        grouped = [word for part in parts for word in said(world, state, part, backend)]
        assert_same(totals_of(world, grouped), expected)


@pytest.mark.parametrize("case", list(CASES))
def test_the_server_makes_the_same_of_sums_and_of_their_summands(case: str) -> None:
    with precision():
        world, state = world_of(case)
        words = said(world, state, world.fleet.taking_part.tolist(), in_turn)
        plan, half = world.plan, len(words) // 2
        first, second = totals_of(world, words[:half]), totals_of(world, words[half:])
        expected = applied(world, state, words)
        fresh = replace(state, full=copied(state.full))
        assert_same_state(plan.algorithm.apply(plan, fresh, plus(first, second)), expected)
        assert_same_state(applied(world, state, words[::-1]), expected)
        assert any(not torch.equal(expected.full[name], tensor) for name, tensor in state.full.items())


@pytest.mark.parametrize("case", ["ratings", "ratings streamed"])
def test_sums_that_remember_need_not_come_in_one_round(case: str) -> None:
    """What is said in two rounds adds up to what is said in one: who spoke when does not matter to the sums."""
    with precision():
        world, state = world_of(case)
        words = said(world, state, world.fleet.taking_part.tolist(), in_turn)
        algorithm, plan = world.plan.algorithm, world.plan
        together = applied(world, state, words)
        first = applied(world, state, words[:3])
        later = replace(first, round_number=state.round_number)  # as if of the same round: windows move on with rounds
        apart = algorithm.apply(plan, later, totals_of(world, words[3:]))
        # What is believed goes on from what was believed before; the sums do not.
        apart, together = (replace(of, full={}) for of in (apart, together))
        assert_same_state(apart, together)


@pytest.mark.parametrize("rule", ["changes", "changes in place", "fair"])
def test_sizes_that_hold_the_same_are_heard_without_harm(rule: str) -> None:
    """One answer a size, and one subspace for all sizes: what is added up is nobody's own vector."""
    with precision():
        world, state = world_of("fair_hom")
        steps = tiny_settings(**{"capacities": "1x-4x"} | CASES[rule] | {"method": "fair_hom"})
        world = World.of(steps, world.interactions)
        state = world.initial()
        one, *_, other = world.fleet.taking_part.tolist()
        assert world.fleet.size[one] != world.fleet.size[other]
        applied(world, state, said(world, state, [one, other], in_turn))


def test_a_visit_is_the_same_object_for_a_size() -> None:
    """What groups clients is what they were sent, not an equal copy of it."""
    world, state = world_of("fair")
    visits: list[Visit] = list(world.fleet.visits(state, list(range(CLIENTS))))
    assert len({id(visit.sent) for visit in visits}) == 2
