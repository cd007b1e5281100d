"""Projections of the baselines: HeteroFL's columns, with the layers that read them, and FedHM's factors."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.backends.batched import batched
from fairfold.federation.updates import Aggregate, ClientTask, Update
from fairfold.subspace.blocks import KeptColumns, LowRank
from fairfold.subspace.projection import SizeSum
from tests.support.federations import after_rounds, cloned, make_federation, tiny_data, tiny_settings


@st.composite
def kept_columns(draw: st.DrawFn) -> KeptColumns:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    ends = sorted(draw(st.sets(st.integers(0, columns), min_size=2, max_size=6)))
    runs = tuple(zip(ends[::2], ends[1::2], strict=False))
    return KeptColumns((rows, columns), runs)


@given(kept_columns(), st.integers(0, 2**31))
def test_laws_of_a_projection(held: KeptColumns, seed: int) -> None:
    full = torch.randn(held.shape[0] * held.shape[1], generator=torch.Generator().manual_seed(seed))
    compact = held.reduce(full)
    assert compact.shape == (held.size,)
    assert torch.equal(held.reduce(held.recover(compact)), compact)
    slots, signs = held.places(torch.arange(len(full)))
    assert torch.equal(compact[slots] * signs, held.recover(compact))
    assert torch.equal(held.rows(compact, torch.arange(held.shape[0])).view(-1), held.whole(compact))


def heterofl(capacities: str, **changes: Any) -> Any:
    settings = tiny_settings(method="heterofl", model="neumf", capacities=capacities, factors=8, **changes)
    return make_federation(tiny_data(1, 9, 40), settings)


def test_the_next_layer_is_cut_with_the_table() -> None:
    world, _ = heterofl("1x-4x")
    whole, quarter = (held.projections for held in world.plan.assignments(0))
    assert quarter["item_network.weight"].runs == ((0, 2),)
    assert quarter["network.1.weight"].runs == ((0, 10),)  # 8 columns read the user, 2 the item
    assert quarter["output.weight"].runs == ((0, 2), (8, 16))  # 2 read the product, 8 the network
    assert whole["network.1.weight"].kept == whole["output.weight"].kept == 16


def test_what_nobody_holds_stays_under_both_rules() -> None:
    for rule in ("paper", "delta"):
        server = {"server_optimizer": "sgd", "server_lr": 1.0} if rule == "delta" else {}
        world, state = heterofl("4x", aggregation=rule, **server)
        first_state = cloned(state.full)
        after = after_rounds(world, state, backend=batched).full
        for name, first in (("item_product.weight", 2), ("network.1.weight", 10)):
            shape = world.plan.architecture.shapes[name]
            before, now = first_state[name].view(shape), after[name].view(shape)
            assert torch.equal(before[:, first:], now[:, first:])
            assert not torch.equal(before[:, :first], now[:, :first])


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (3.0, 120.0, 7.5), (2.0, 0.0, 4.0)])
def test_products_of_factors_are_averaged_by_weight(weights: tuple[float, ...]) -> None:
    held, aggregate = LowRank((6, 4), 2), Aggregate()
    task = ClientTask(0, 0, {"item": held}, {"item": torch.zeros(held.size)})
    devices = [torch.randn(held.size, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    for vector, weight in zip(devices, weights, strict=True):
        aggregate.add(task, Update({"item": vector * weight}, weight))
    ((_, update),) = aggregate.parts()
    mean = LowRank.mean(torch.zeros(24), [SizeSum(held, update.sums["item"], update.weight)], changes=False)
    products = torch.stack([held.recover(vector) for vector in devices])
    torch.testing.assert_close(mean, torch.tensor(weights) @ products / sum(weights))
