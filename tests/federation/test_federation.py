"""Where a federation starts."""

from typing import Any

import pytest
import torch

from fairfold.errors import InvalidSettings
from fairfold.federation.federation import Federation
from fairfold.federation.updates import reduce_per_size
from tests.support.federations import tiny_data
from tests.support.pictures import SMALL, pictures
from tests.support.settings import make_settings


def made(**changes: object) -> Federation:
    settings = make_settings(**SMALL | {"capacities": "2x-16x", "mapping": "element"} | changes)
    return Federation.of(settings, pictures(side=28))


@pytest.mark.parametrize("compress", ["all", "model"])
def test_a_start_in_the_subspace_is_as_large_at_every_size(compress: str) -> None:
    near, apart = made(start="subspace", compress=compress), made(compress=compress)
    full, random = near.initial().full, apart.initial().full
    name = max(full, key=lambda known: full[known].numel())
    wanted = random[name].std()
    torch.testing.assert_close(full[name].std(), wanted, rtol=0.05, atol=0.0)
    for task in reduce_per_size(full, near.plan.assignments(0)):  # the collisions of what was drawn there cost nothing
        assert task is not None
        torch.testing.assert_close(task[name][task[name] != 0].std(), wanted, rtol=0.1, atol=0.0)
    smallest = reduce_per_size(random, apart.plan.assignments(0))[-1]
    assert smallest is not None
    assert float(smallest[name].std()) < 0.5 * float(wanted)


def test_a_start_in_the_subspace_stays_there() -> None:
    near = made(start="subspace")
    full = near.initial().full
    held = near.plan.assignments(0)[-1].projections
    assert held is not None
    for name, projection in held.items():
        torch.testing.assert_close(projection.recover(projection.reduce(full[name])), full[name])


def test_longer_rows_for_the_same_bytes_in_both_tables_of_a_network() -> None:
    chosen: dict[str, Any] = {
        "model": "neumf",
        "clients_per_round": 4,
        "factors": 6,
        "capacities": "1x-2x",
        "mapping": "element",
    }
    sizes = []
    for values in (chosen | {"reference_factors": 3}, chosen | {"factors": 3}):
        plan = Federation.of(make_settings(**values), tiny_data(items=40)).plan
        held = [assignment.projections or {} for assignment in plan.assignments(0)]
        sizes.append([[projections[name].size for name in plan.architecture.tables] for projections in held])
    assert sizes[0] == sizes[1] == [[120, 120], [60, 60]]
    with pytest.raises(InvalidSettings, match="neumf"):
        make_settings(model="neumf-mlp", reference_factors=3)


def test_tables_have_no_such_start() -> None:
    with pytest.raises(InvalidSettings, match="images"):
        make_settings(algorithm="gradient", compress="all", start="subspace")
