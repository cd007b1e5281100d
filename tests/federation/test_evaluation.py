"""A size's own model evaluated on all users, where a user's vector follows from their history alone."""

from typing import Any

import pytest
import torch

from fairfold import simulate
from fairfold.data import Dataset
from fairfold.data.synthetic import SyntheticDataset
from fairfold.federation.evaluation import Evaluator
from fairfold.federation.federation import Federation
from fairfold.federation.updates import reduce_per_size
from tests.support.federations import tiny_data
from tests.support.settings import make_settings

SMALL: dict[str, Any] = {"clients_per_round": 8, "rounds": 3, "factors": 3, "capacities": "1x-3x-9x"}
STEPS = SMALL | {"algorithm": "closed_form", "chunk": 3}
RANKED = STEPS | {"support": 0, "tail_share": 0.5, "sign": False}
RATINGS = SMALL | {"algorithm": "ratings", "tail_share": 0.5, "reference_factors": 3, "group_similar": False}


def data_for(values: dict[str, Any]) -> Dataset:
    if values["algorithm"] == "ratings":
        return tiny_data(3, users=20, items=60, ratings=True)
    return SyntheticDataset(users=20, items=60, interactions_per_user=12).dataset()


@pytest.mark.parametrize("values", [STEPS, RANKED, RATINGS])
def test_all_users_are_the_users_of_all_sizes(values: dict[str, Any]) -> None:
    settings, data = make_settings(**values), data_for(values)
    result = simulate(settings, data=data)
    federation = Federation.of(settings, data)
    evaluator, held = Evaluator(federation, {}), federation.plan.assignments(0)
    # What the metric is a mean of: users who have anything to be tested on, or single ratings.
    tested = data.test.counts_by_user if settings.predicts_ratings else (data.test.counts_by_user > 0).long()
    for assignment, task, group in zip(held, reduce_per_size(result.state.full, held), result.groups, strict=True):
        assert task is not None
        assert assignment.projections is not None
        table = {name: projection.recover(task[name]) for name, projection in assignment.projections.items()}
        total = 0.0
        for number in range(len(held)):
            members = (federation.sampler.size == number).nonzero().flatten()
            total += evaluator.value(table, members, [assignment]) * float(tested[members].sum())
        assert group.everybody == pytest.approx(total / float(tested.sum()), abs=1e-6)
    assert len({group.everybody for group in result.groups}) == len(result.groups)


@pytest.mark.parametrize("values", [STEPS, RANKED, RATINGS])
def test_both_backends_say_the_same(values: dict[str, Any]) -> None:
    found = [
        simulate(make_settings(**values | {"backend": name}), data=data_for(values))
        for name in ("sequential", "batched")
    ]
    loop, batched = ([group.everybody for group in result.groups] for result in found)
    assert loop == pytest.approx(batched, abs=1e-5)


def test_devices_that_all_hold_the_same_have_the_servers_model() -> None:
    """The server's rows live in the space of its largest devices."""
    values = RATINGS | {"capacities": "9x"}
    result = simulate(make_settings(**values), data=data_for(values))
    assert [group.everybody for group in result.groups] == pytest.approx([result.quality])


def test_vectors_that_were_trained_with_one_size_say_nothing_of_another() -> None:
    values = STEPS | {"algorithm": "gradient", "aggregation": "paper"}
    result = simulate(make_settings(**values), data=data_for(values))
    assert [group.everybody for group in result.groups] == [None, None, None]
    assert all(group.quality is not None for group in result.groups)


def test_devices_left_out_have_no_model() -> None:
    values = SMALL | {"algorithm": "closed_form", "method": "full_trn"}
    result = simulate(make_settings(**values), data=data_for(values))
    assert [group.everybody is None for group in result.groups] == [False, True, True]
    assert torch.isfinite(torch.tensor(result.groups[0].everybody))
