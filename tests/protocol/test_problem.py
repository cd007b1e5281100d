"""The only check of an answer, for every algorithm: what it lets pass, and what it says of the rest."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fairfold.protocol.words import Answer, Sent
from fairfold.simulate.world import World
from tests.federations import tiny_data, tiny_settings
from tests.flat import flat
from tests.pictures import SMALL, pictures

CASES: dict[str, dict[str, Any]] = {
    "gradient": {},
    "changes": {"aggregation": "delta"},
    "neumf": {"model": "neumf", "factors": 4},
    "fedhm": {"method": "fedhm", "capacities": "1x-2x", "factors": 4},
    "closed_form": {"solver": "closed_form"},
    "ratings": {"solver": "ratings", "tail_share": 0.5, "reference_factors": 3},
    "ratings streamed": {"solver": "ratings", "tail_share": 0.5, "reference_factors": 3, "streamed": True},
    "central": {"solver": "central"},
    "images": SMALL,
}


def answered(case: str) -> tuple[World, Sent, Answer]:
    if case == "images":
        world = World.of(flat(**CASES[case]), pictures())
    else:
        chosen = tiny_settings(**{"capacities": "1x-4x"} | CASES[case])
        world = World.of(chosen, tiny_data(2, 8, 40, ratings="ratings" in case))
    state = world.initial()
    (visit,) = world.fleet.visits(state, [world.people.num_clients - 1])
    plan = world.plan
    answer, _ = plan.algorithm.answer(plan, visit.sent, world.people.client(visit.client, 0))
    return world, visit.sent, answer


def spoiled(answer: Answer, how: str) -> Answer | None:
    name, *_ = answer.sums
    vector = answer.sums[name]
    middle = len(vector) // 2
    sums: dict[str, Any] = {
        "double": vector.double(),
        "half": vector.half(),
        "whole numbers": vector.long(),
        "short": vector[:-1],
        "a matrix": vector[None],
        "nothing": vector[:0],
        "nan": vector.clone().index_fill_(0, torch.tensor([middle]), math.nan),
        "infinite": vector.clone().index_fill_(0, torch.tensor([middle]), -math.inf),
        "far": vector.clone().index_fill_(0, torch.tensor([middle]), 1e30),
    }
    if how in sums:
        return replace(answer, sums=answer.sums | {name: sums[how]})
    others: dict[str, Answer | None] = {
        "silent": None,
        "another": replace(answer, sums=answer.sums | {"another": vector}),
        "missing": replace(answer, sums={key: of for key, of in answer.sums.items() if key != name}),
        "negative": replace(answer, weight=-1.0),
        "endless": replace(answer, weight=math.inf),
        "no weight": replace(answer, weight=math.nan),
    }
    return others[how]


REASONS = {
    "silent": "no answer in time",
    "another": "other tensors than were sent",
    "missing": "other tensors than were sent",
    "negative": "a weight out of range",
    "endless": "a weight out of range",
    "no weight": "a weight out of range",
    "double": "wrong size",
    "half": "wrong size",
    "whole numbers": "wrong size",
    "short": "wrong size",
    "a matrix": "wrong size",
    "nothing": "wrong size",
    "nan": "NaN or infinity",
    "infinite": "NaN or infinity",
    "far": "values out of range",
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_an_answer_has_to_be(case: str) -> None:
    world, sent, answer = answered(case)
    check = world.plan.algorithm.problem
    assert check(world.plan, sent, answer) is None
    found = {how: check(world.plan, sent, spoiled(answer, how)) for how in REASONS}
    assert found == REASONS


@pytest.mark.parametrize("case", list(CASES))
def test_answers_have_the_names_and_sizes_that_are_asked_for(case: str) -> None:
    world, sent, answer = answered(case)
    algorithm = world.plan.algorithm
    assert {name: len(vector) for name, vector in answer.sums.items()} == algorithm.answer_shapes(world.plan, sent)
    assert {vector.dtype for vector in answer.sums.values()} == {torch.float32}


def test_a_device_that_counts_nothing_has_nothing_to_divide_by() -> None:
    world, sent, answer = answered("gradient")
    silent = Answer({name: torch.zeros_like(vector) for name, vector in answer.sums.items()}, 0.0)
    assert world.plan.algorithm.problem(world.plan, sent, silent) is None
    loud = Answer({name: torch.full_like(vector, 1e5) for name, vector in answer.sums.items()}, 0.0)
    assert world.plan.algorithm.problem(world.plan, sent, loud) == "values out of range"
