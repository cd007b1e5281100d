"""FedHM and HeteroFL for networks: what they hold, and that it is within what a device can hold."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.errors import InvalidCapacity
from fairfold.methods.baselines import low_rank_network, narrow_network
from fairfold.models import MLP, LeNet
from fairfold.subspace import Capacity
from fairfold.subspace.blocks import LowRank
from fairfold.subspace.projection import LeadingBlock, SizeSum

MODELS = {"mlp": MLP(), "lenet": LeNet()}
SHAPES = {
    name: {tensor: tuple(value.shape) for tensor, value in model.named_parameters()} for name, model in MODELS.items()
}


def ranks(shapes: dict[str, tuple[int, ...]], capacity: str) -> dict[str, int]:
    held = low_rank_network(shapes, Capacity.parse(capacity)).projections or {}
    return {name: one.rank for name, one in held.items() if isinstance(one, LowRank)}


@settings(max_examples=60, deadline=None)
@given(model=st.sampled_from(["mlp", "lenet"]), ratio=st.floats(1, 80), rule=st.sampled_from(["fedhm", "heterofl"]))
def test_within_the_capacity_and_no_more_would_fit(model: str, ratio: float, rule: str) -> None:
    shapes, capacity = SHAPES[model], Capacity.parse(f"{ratio:.3f}x")
    limit = capacity.limit(sum(prod(shape) for shape in shapes.values()))
    make = low_rank_network if rule == "fedhm" else narrow_network
    if limit < 1_600:  # less than factors of rank 1 need, which is asked for below
        return
    held = make(shapes, capacity)
    assert list(held.projections or {}) == list(shapes)
    assert held.size() <= limit
    assert held.size() >= 0.55 * limit  # a share of every layer at once leaves something over, but not the half


def test_ranks_of_the_paper_s_schemes() -> None:
    assert ranks(SHAPES["mlp"], "1x") == {}
    assert list(ranks(SHAPES["mlp"], "4x")) == ["hidden.weight"]  # the output layer is whole
    assert ranks(SHAPES["mlp"], "64x") == {"hidden.weight": 4, "output.weight": 1}  # where it cannot be
    with pytest.raises(InvalidCapacity, match="N/A: factors of rank 1"):
        low_rank_network(SHAPES["lenet"], Capacity.parse("64x"))


@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("capacity", ["1x", "3x", "16x"])
def test_a_narrow_network_is_the_padded_one(model: str, capacity: str) -> None:
    """HeteroFL clients run fewer units; on the server the missing ones are zero and have no effect."""
    held = narrow_network(SHAPES[model], Capacity.parse(capacity)).projections or {}
    full = {name: tensor.detach().reshape(-1) for name, tensor in MODELS[model].named_parameters()}
    narrow, padded = (MLP(), MLP()) if model == "mlp" else (LeNet(), LeNet())
    for name, block in held.items():
        assert isinstance(block, LeadingBlock)
        compact = block.reduce(full[name])
        owner, _, last = name.rpartition(".")
        for network, tensor in (
            (narrow, compact.view(block.kept)),
            (padded, block.recover(compact).view(SHAPES[model][name])),
        ):
            setattr(network.get_submodule(owner), last, torch.nn.Parameter(tensor))
    images = torch.rand(5, 28, 28)
    torch.testing.assert_close(narrow(images), padded(images))


def test_a_number_is_averaged_over_those_who_hold_it() -> None:
    small, big = LeadingBlock((2, 3), (1, 2)), LeadingBlock((2, 3), (2, 2))
    parts = [SizeSum(small, torch.tensor([1.0, 2.0]), 1.0), SizeSum(big, torch.tensor([12.0, 15.0, 18.0, 21.0]), 3.0)]
    full = torch.full((6,), 9.0)
    assert LeadingBlock.mean(full, parts, changes=False).tolist() == [13 / 4, 17 / 4, 9.0, 6.0, 7.0, 9.0]
    assert LeadingBlock.mean(full, parts, changes=True).tolist() == [13 / 4, 17 / 4, 0.0, 6.0, 7.0, 0.0]


@pytest.mark.parametrize("shape", [(7, 5), (5, 7)])
def test_the_best_factors(shape: tuple[int, int]) -> None:
    table = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    held = LowRank(shape, 3)
    left, values, right = torch.linalg.svd(table, full_matrices=False)
    best = left[:, :3] * values[:3] @ right[:3]
    torch.testing.assert_close(held.recover(held.reduce(table.view(-1))).view(shape), best)
    first, second = held.factors(held.reduce(table.view(-1)))
    torch.testing.assert_close(first.norm(dim=0).sort().values, second.norm(dim=1).sort().values)


def test_the_rule_in_favour_of_fedhm() -> None:
    """Biases and output layer on top of the budget: rank 4 of 512 at 64x, as the paper must have had it."""

    def generous(model: str, capacity: str) -> dict[str, int]:
        held = low_rank_network(SHAPES[model], Capacity.parse(capacity), free_ends=True).projections or {}
        return {name: one.rank for name, one in held.items() if isinstance(one, LowRank)}

    assert generous("mlp", "64x") == {"hidden.weight": 4}
    assert generous("lenet", "8x") == {"second.weight": 1, "third.weight": 11, "fourth.weight": 6}
    with pytest.raises(InvalidCapacity, match=r"N/A: second\.weight needs 166"):
        low_rank_network(SHAPES["lenet"], Capacity.parse("64x"), free_ends=True)
