"""The validation of updates, for every algorithm: what it accepts, and its reasons to refuse."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fairfold.federation.federation import Federation
from fairfold.federation.updates import ClientTask, Update
from tests.support.federations import tiny_data, tiny_settings
from tests.support.pictures import SMALL, pictures
from tests.support.settings import make_settings

CASES: dict[str, dict[str, Any]] = {
    "gradient": {},
    "changes": {"aggregation": "delta"},
    "neumf": {"model": "neumf", "factors": 4},
    "fedhm": {"method": "fedhm", "capacities": "1x-2x", "factors": 4},
    "closed_form": {"algorithm": "closed_form"},
    "ratings": {"algorithm": "ratings", "tail_share": 0.5, "reference_factors": 3},
    "ratings streamed": {"algorithm": "ratings", "tail_share": 0.5, "reference_factors": 3, "streamed": True},
    "central": {"algorithm": "central"},
    "images": SMALL,
}


def computed(case: str) -> tuple[Federation, ClientTask, Update]:
    if case == "images":
        federation = Federation.of(make_settings(**CASES[case]), pictures())
    else:
        chosen = tiny_settings(**{"capacities": "1x-4x"} | CASES[case])
        federation = Federation.of(chosen, tiny_data(2, 8, 40, ratings="ratings" in case))
    state = federation.initial()
    (scheduled_task,) = federation.sampler.schedule(state, [federation.clients.num_clients - 1])
    plan = federation.plan
    update, _ = plan.algorithm.client_update(
        plan, scheduled_task.task, federation.clients.client(scheduled_task.client, 0)
    )
    return federation, scheduled_task.task, update


def spoiled(update: Update, how: str) -> Update | None:
    name, *_ = update.sums
    vector = update.sums[name]
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
        return replace(update, sums=update.sums | {name: sums[how]})
    others: dict[str, Update | None] = {
        "silent": None,
        "another": replace(update, sums=update.sums | {"another": vector}),
        "missing": replace(update, sums={key: of for key, of in update.sums.items() if key != name}),
        "negative": replace(update, weight=-1.0),
        "endless": replace(update, weight=math.inf),
        "no weight": replace(update, weight=math.nan),
    }
    return others[how]


REASONS = {
    "silent": "no update in time",
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
def test_what_an_update_has_to_be(case: str) -> None:
    federation, task, update = computed(case)
    check = federation.plan.algorithm.validate_update
    assert check(federation.plan, task, update) is None
    found = {how: check(federation.plan, task, spoiled(update, how)) for how in REASONS}
    assert found == REASONS


@pytest.mark.parametrize("case", list(CASES))
def test_updates_have_the_names_and_sizes_of_update_shapes(case: str) -> None:
    federation, task, update = computed(case)
    algorithm = federation.plan.algorithm
    assert {name: len(vector) for name, vector in update.sums.items()} == algorithm.update_shapes(federation.plan, task)
    assert {vector.dtype for vector in update.sums.values()} == {torch.float32}


def test_a_device_that_counts_nothing_has_nothing_to_divide_by() -> None:
    federation, task, update = computed("gradient")
    silent = Update({name: torch.zeros_like(vector) for name, vector in update.sums.items()}, 0.0)
    assert federation.plan.algorithm.validate_update(federation.plan, task, silent) is None
    loud = Update({name: torch.full_like(vector, 1e5) for name, vector in update.sums.items()}, 0.0)
    assert federation.plan.algorithm.validate_update(federation.plan, task, loud) == "values out of range"
