"""Models: shapes, fast scores of the catalogue equal to pairwise ones, and layers that can be swapped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fairfold.errors import InvalidSettings
from fairfold.models import MF, MLP, LeNet, NeuMF, NeuMFMLP, scorer
from fairfold.models.factorization import weight_and_bias


def large(model: nn.Module) -> nn.Module:
    """Weights far from their small start, so that a slip shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def makers(users: int, items: int) -> list[nn.Module]:
    return [
        MF(users, items, factors=3),
        NeuMF(users, items, factors=4),
        NeuMFMLP(users, items, factors=5),
        MF(users, items, factors=3, item_bias=True),
        NeuMF(users, items, factors=2, depth=3, dropout=0.5),
    ]


@given(users=st.integers(1, 6), items=st.integers(1, 30), block=st.integers(1, 60), kind=st.integers(0, 4))
@settings(deadline=None, max_examples=60)
def test_scores_of_the_catalogue_equal_those_of_pairs(users: int, items: int, block: int, kind: int) -> None:
    torch.manual_seed(0)
    model = large(makers(users, items)[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairfold.models.recommender.BLOCK_PAIRS", block)
        asked = torch.arange(users).flip(0)
        found = scorer(model)(asked)
    assert model.training
    model.eval()
    pairs = torch.cartesian_prod(asked, torch.arange(items))
    expected = model(pairs[:, 0], pairs[:, 1]).view(users, items)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", range(5))
def test_users_and_items_broadcast(kind: int) -> None:
    model = large(makers(5, 9)[kind]).eval()
    users, items = torch.tensor([[3], [0], [4]]), torch.tensor([[1, 2], [8, 0], [5, 5]])
    expected = torch.stack([model(users[:, 0], items[:, column]) for column in range(2)], dim=1)
    assert torch.allclose(model(users, items), expected, atol=1e-5)


def test_a_model_without_score_block_cannot_rank() -> None:
    with pytest.raises(InvalidSettings, match="MLP"):
        scorer(MLP())


def test_the_paper_sizes() -> None:
    neumf = NeuMF(99, 1000)
    shapes = {name: tuple(parameter.shape) for name, parameter in neumf.named_parameters()}
    assert shapes == {
        "user_product.weight": (99, 8),
        "item_product.weight": (1000, 8),
        "user_network.weight": (99, 8),
        "item_network.weight": (1000, 8),
        "network.1.weight": (8, 16),
        "network.1.bias": (8,),
        "output.weight": (1, 16),
        "output.bias": (1,),
    }
    deep = {name: tuple(parameter.shape) for name, parameter in NeuMF(99, 1000, 8, depth=3).named_parameters()}
    assert [deep[f"network.{step}.weight"] for step in (1, 4, 7)] == [(32, 64), (16, 32), (8, 16)]
    assert [deep[f"{side}_network.weight"] for side in ("user", "item")] == [(99, 32), (1000, 32)]
    assert deep["output.weight"] == (1, 16)
    rating = NeuMFMLP(99, 1000)
    linears = [tuple(module.weight.shape) for module in rating.modules() if isinstance(module, nn.Linear)]
    assert linears == [(10, 64), (10, 10), (1, 10)]
    assert rating(torch.tensor([1]), torch.tensor([2])).item() == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("classes", [10, 62])
@pytest.mark.parametrize("shape", [(3, 28, 28), (3, 1, 28, 28)])
def test_image_models(classes: int, shape: tuple[int, ...]) -> None:
    for model in (MLP(classes=classes), LeNet(classes)):
        assert model(torch.rand(shape)).shape == (3, classes)


def test_weights_are_read_through_calls() -> None:
    class Negated(nn.Linear):
        def forward(self, values: Tensor) -> Tensor:
            return -super().forward(values)

    layer = Negated(5, 3)
    weight, bias = weight_and_bias(layer, 5)
    assert torch.allclose(weight, -layer.weight, atol=1e-6)
    assert torch.allclose(bias, -layer.bias, atol=1e-6)
