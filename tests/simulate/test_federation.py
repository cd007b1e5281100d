"""Where a federation starts."""

from typing import Any

import pytest
import torch

from fairfold.errors import InvalidSettings
from fairfold.protocol.words import reduced
from fairfold.simulate.world import World
from tests.federations import tiny_data
from tests.flat import flat
from tests.pictures import SMALL, pictures


def made(**changes: object) -> World:
    settings = flat(**SMALL | {"capacities": "2x-16x", "mapping": "element"} | changes)
    return World.of(settings, pictures(side=28))


@pytest.mark.parametrize("compress", ["all", "model"])
def test_a_start_in_the_subspace_is_as_large_at_every_size(compress: str) -> None:
    near, apart = made(start="subspace", compress=compress), made(compress=compress)
    full, random = near.initial().full, apart.initial().full
    name = max(full, key=lambda known: full[known].numel())
    wanted = random[name].std()
    torch.testing.assert_close(full[name].std(), wanted, rtol=0.05, atol=0.0)
    for sent in reduced(full, near.plan.assignments(0)):  # the collisions of what was drawn there cost nothing
        assert sent is not None
        torch.testing.assert_close(sent[name][sent[name] != 0].std(), wanted, rtol=0.1, atol=0.0)
    smallest = reduced(random, apart.plan.assignments(0))[-1]
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
        plan = World.of(flat(**values), tiny_data(items=40)).plan
        held = [assignment.projections or {} for assignment in plan.assignments(0)]
        sizes.append([[projections[name].size for name in plan.architecture.tables] for projections in held])
    assert sizes[0] == sizes[1] == [[120, 120], [60, 60]]
    with pytest.raises(InvalidSettings, match="neumf"):
        flat(model="neumf-mlp", reference_factors=3)


def test_tables_have_no_such_start() -> None:
    with pytest.raises(InvalidSettings, match="images"):
        flat(solver="gradient", compress="all", start="subspace")
