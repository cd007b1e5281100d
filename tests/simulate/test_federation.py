"""Where a federation starts."""

import pytest
import torch

from fairfold.errors import InvalidSettings
from fairfold.federation.image_task import task_of
from fairfold.federation.send import send
from fairfold.federation.settings import read_settings
from fairfold.federation.task import Task
from fairfold.simulate.federation import Federation
from tests.federations import tiny_data
from tests.pictures import SMALL, pictures


def federation(**changes: object) -> Federation:
    settings = read_settings(SMALL | {"capacities": "2x-16x", "mapping": "element"} | changes)
    return Federation.of(settings, task_of(pictures(side=28), settings))


@pytest.mark.parametrize("compress", ["all", "model"])
def test_a_start_in_the_subspace_is_as_large_at_every_size(compress: str) -> None:
    near, apart = federation(start="subspace", compress=compress), federation(compress=compress)
    (full, _), (random, _) = near.initial(), apart.initial()
    name = max(full, key=lambda known: full[known].numel())
    wanted = random[name].std()
    torch.testing.assert_close(full[name].std(), wanted, rtol=0.05, atol=0.0)
    for sent in send(full, near.assignments(0)):  # the collisions of what was drawn there cost nothing
        assert sent is not None
        torch.testing.assert_close(sent[name][sent[name] != 0].std(), wanted, rtol=0.1, atol=0.0)
    smallest = send(random, apart.assignments(0))[-1]
    assert smallest is not None
    assert float(smallest[name].std()) < 0.5 * float(wanted)


def test_a_start_in_the_subspace_stays_there() -> None:
    near = federation(start="subspace")
    full, _ = near.initial()
    held = near.assignments(0)[-1].projections
    assert held is not None
    for name, projection in held.items():
        torch.testing.assert_close(projection.recover(projection.reduce(full[name])), full[name])


def test_longer_rows_for_the_same_bytes_in_both_tables_of_a_network() -> None:
    chosen = {"model": "neumf", "clients_per_round": 4, "factors": 6, "capacities": "1x-2x", "mapping": "element"}
    sizes = []
    for values in (chosen | {"reference_factors": 3}, chosen | {"factors": 3}):
        settings = read_settings(values)
        made = Federation.of(settings, Task(tiny_data(items=40), settings))
        held = [assignment.projections or {} for assignment in made.assignments(0)]
        sizes.append([[projections[name].size for name in made.task.tables] for projections in held])
    assert sizes[0] == sizes[1] == [[120, 120], [60, 60]]
    with pytest.raises(InvalidSettings, match="neumf"):
        read_settings({"model": "neumf-mlp", "reference_factors": 3})


def test_tables_have_no_such_start() -> None:
    with pytest.raises(InvalidSettings, match="images"):
        read_settings({"start": "subspace"})
