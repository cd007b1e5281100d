"""HeteroFL: a device holds the leading columns of a table and of the next layer what reads them."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.backends.batched import batched
from fairfold.projections import KeptColumns
from tests.federations import after_rounds, copied, tiny_data, tiny_settings, tiny_world


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
    return tiny_world(tiny_data(1, 9, 40), settings)


def test_the_next_layer_is_cut_with_the_table() -> None:
    world, _ = heterofl("1x-4x")
    whole, quarter = (held.projections for held in world.plan.assignments(0))
    assert quarter["item_network.weight"].runs == ((0, 2),)
    assert quarter["network.1.weight"].runs == ((0, 10),)  # 8 columns read the user, 2 the item
    assert quarter["output.weight"].runs == ((0, 2), (8, 16))  # 2 read the product, 8 the network
    assert whole["network.1.weight"].kept == whole["output.weight"].kept == 16


def test_what_nobody_holds_stays_under_both_rules() -> None:
    for rule in ("paper", "delta"):
        server = {"server_optimiser": "sgd", "server_step": 1.0} if rule == "delta" else {}
        world, state = heterofl("4x", aggregation=rule, **server)
        first_state = copied(state.full)
        after = after_rounds(world, state, backend=batched).full
        for name, first in (("item_product.weight", 2), ("network.1.weight", 10)):
            shape = world.plan.architecture.shapes[name]
            before, now = first_state[name].view(shape), after[name].view(shape)
            assert torch.equal(before[:, first:], now[:, first:])
            assert not torch.equal(before[:, :first], now[:, :first])
