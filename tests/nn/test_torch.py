"""Compact layers among torch's own: the same numbers under every program that torch makes of a model."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap
from torch.nn import functional

from fairfold import compress
from fairfold.errors import InvalidRow
from fairfold.nn import FairConv2d, FairEmbedding, FairEmbeddingBag, FairLinear, FairModule
from fairfold.nn.compression import make_dense_layer

PLACES: dict[str, Any] = {"capacity": 1 / 3, "seed": 4}
IDS = torch.tensor([[1, 2, 5, 5], [0, 12, 2, 2], [2, 2, 2, 2]])
FLAT, OFFSETS = torch.tensor([3, 1, 1, 2, 12]), torch.tensor([0, 2, 2])


def bag(mode: str, padding: int | None) -> Callable[[], FairModule]:
    return lambda: FairEmbeddingBag(13, 6, mode=mode, padding_idx=padding, **PLACES)


LAYERS: dict[str, tuple[Callable[[], FairModule], tuple[Tensor, ...]]] = {
    "embedding": (lambda: FairEmbedding(13, 6, **PLACES), (IDS,)),
    "padding": (lambda: FairEmbedding(13, 6, padding_idx=2, **PLACES), (IDS,)),
    "max_norm": (lambda: FairEmbedding(13, 6, max_norm=1.5, **PLACES), (IDS,)),
    "norm_type": (lambda: FairEmbedding(13, 6, max_norm=1.5, norm_type=1.0, **PLACES), (IDS,)),
    **{
        f"bag {mode}{' offsets' if len(given) > 1 else ''}{' padding' if padding else ''}": (bag(mode, padding), given)
        for mode in ("sum", "mean", "max")
        for given in ((IDS,), (FLAT, OFFSETS))
        for padding in (None, 2)
    },
    "linear": (lambda: FairLinear(7, 10, **PLACES), (torch.linspace(-1, 1, 21).view(3, 7),)),
    "conv": (
        lambda: FairConv2d(4, 6, 3, padding=1, groups=2, **PLACES),
        (torch.linspace(-1, 1, 200).view(1, 4, 5, 10).repeat(2, 1, 1, 1),),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_ordinary_twin(name: str) -> None:
    torch.manual_seed(0)
    make, given = LAYERS[name]
    layer = make()
    twin = make_dense_layer(layer, None)
    mine, other = layer(*given), twin(*given)
    assert torch.allclose(mine, other, atol=1e-6)
    slope = torch.randn_like(mine)
    mine.backward(slope)
    other.backward(slope)
    (weight,) = (parameter for key, parameter in twin.named_parameters() if key == "weight")
    assert weight.grad is not None
    assert layer.compact is not None
    stored = FairModule.weight.fget(layer)  # type: ignore[attr-defined]
    wanted = torch.autograd.grad(stored, layer.compact, weight.grad)[0]  # Sᵀ of the twin's own
    assert layer.compact.grad is not None
    assert torch.allclose(layer.compact.grad, wanted, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_a_traced_layer_gives_the_eager_numbers(name: str) -> None:
    torch.manual_seed(0)
    make, given = LAYERS[name]
    layer = make()
    parameters: dict[str, Any] = dict(layer.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        found: Tensor = functional_call(layer, weights, given)
        return found.square().sum()

    slopes = grad(loss)(parameters)  # as torch's transforms see it
    loss(parameters).backward()  # type: ignore[no-untyped-call]
    for key, parameter in parameters.items():
        assert torch.allclose(slopes[key], parameter.grad, atol=1e-4), key
    exported = torch.export.export(layer, given).module()
    assert torch.allclose(exported(*given), layer(*given), atol=1e-6)


@pytest.mark.parametrize("name", ["embedding", "padding", "bag mean", "bag max", "linear", "conv"])
def test_slopes_of_every_sample(name: str) -> None:
    torch.manual_seed(0)
    make, (given,) = LAYERS[name]
    layer = make()
    parameters: dict[str, Any] = dict(layer.named_parameters())

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        found: Tensor = functional_call(layer, weights, (sample[None],))
        return found.square().sum()

    together = vmap(grad(loss), (None, 0))(parameters, given)
    for place, sample in enumerate(given):
        alone = grad(loss)(parameters, sample)
        for key in parameters:
            assert torch.allclose(together[key][place], alone[key], atol=1e-5), key
    found = vmap(lambda vector: functional_call(layer, {"compact": vector}, (given,)))(layer.memory.expand(2, -1))
    assert torch.allclose(found[1], layer(given), atol=1e-6)


class Model(nn.Module):
    """Two tables of different sizes, a bag and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8), nn.Embedding(70, 8)
        self.words = nn.EmbeddingBag(40, 8, mode="max")
        self.network = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, users: Tensor, items: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.network(torch.cat([self.users(users), self.items(items), self.words(words)], dim=1))
        return found


def trained(model: nn.Module, called: Callable[..., Tensor]) -> list[float]:
    """Losses of some steps."""
    source = torch.Generator().manual_seed(5)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for size in (6, 6, 9):  # another batch size makes torch compile anew, with symbols in the place of numbers
        users, items, labels = (torch.randint(0, many, (size,), generator=source) for many in (50, 70, 3))
        words = torch.randint(0, 40, (size, 4), generator=source)
        loss = functional.cross_entropy(called(users, items, words), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compiled_is_eager(backend: str, shared: bool) -> None:
    torch.manual_seed(0)
    model = compress(Model(), "4x", min_size=100, shared=shared)
    other = deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert trained(model, compiled) == pytest.approx(trained(other, other), rel=1e-4)
    for mine, eager in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, eager, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it compiles
def test_a_compiled_model_trains_as_the_eager_one(shared: bool) -> None:
    compiled_is_eager("aot_eager", shared)


@pytest.mark.slow  # a C++ compiler works for half a minute
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_inductor_gives_the_eager_numbers(shared: bool) -> None:
    compiled_is_eager("inductor", shared)


def test_export_with_any_batch() -> None:
    model = compress(Model(), "4x", min_size=100)
    given = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), torch.ones(3, 4, dtype=torch.int64)
    many = torch.export.Dim("many", min=2)
    exported = torch.export.export(model, given, dynamic_shapes=({0: many}, {0: many}, {0: many}))
    more = tuple(torch.cat([one, one]) for one in given)
    assert torch.allclose(exported.module()(*more), model(*more), atol=1e-6)
    assert any("fairfold.rows" in str(node.target) for node in exported.graph.nodes)


def test_compiled_programs_refuse_what_names_no_row() -> None:
    layer = FairEmbedding(13, 6, **PLACES)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(InvalidRow):
        compiled(torch.tensor([13]))


def test_made_on_meta_and_filled_later() -> None:
    with torch.device("meta"):
        model = nn.Sequential(FairEmbedding(50, 8, capacity=1 / 4))
        assert model(torch.zeros(3, dtype=torch.int64)).shape == (3, 8)
    real = nn.Sequential(FairEmbedding(50, 8, capacity=1 / 4))
    model.to_empty(device="cpu").load_state_dict(real.state_dict())
    ids = torch.arange(50)
    assert torch.equal(model(ids), real(ids))


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_on_meta_is_compressed_to_one_that_is_filled_later(shared: bool) -> None:
    with torch.device("meta"):
        sketch = Model()
    empty = compress(sketch, "4x", min_size=100, shared=shared)
    assert all(parameter.is_meta for parameter in empty.parameters())
    real = compress(Model(), "4x", min_size=100, shared=shared)
    empty.to_empty(device="cpu").load_state_dict(real.state_dict())
    given = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), torch.ones(3, 4, dtype=torch.int64)
    assert torch.equal(empty(*given), real(*given))


@pytest.mark.parametrize("name", ["embedding", "padding", "bag mean", "linear", "conv"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it prepares forward slopes
def test_slopes_forward(name: str) -> None:
    torch.manual_seed(0)
    make, given = LAYERS[name]
    layer = make()
    assert layer.compact is not None

    def loss(memory: Tensor) -> Tensor:
        found: Tensor = functional_call(layer, {"compact": memory}, given)
        return found.pow(4).sum()

    at = layer.compact.detach()
    assert torch.allclose(jacfwd(loss)(at), grad(loss)(at), rtol=1e-4, atol=1e-4)
    assert torch.allclose(hessian(loss)(at), jacrev(jacrev(loss))(at), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [FairEmbedding, FairEmbeddingBag])
def test_from_a_table_that_there_is(kind: Any) -> None:
    table = torch.randn(13, 6)
    whole = kind.from_pretrained(table, capacity=1)
    assert torch.equal(whole.weight, table)
    assert not whole.compact.requires_grad
    part = kind.from_pretrained(table, freeze=False, padding_idx=3, **PLACES)
    assert part.compact.requires_grad
    assert torch.equal(part.compact, part.subspace.reduce(table.reshape(-1)))
    assert not part.weight[3].any()


def test_the_weight_is_what_the_layer_uses() -> None:
    layer = FairLinear(7, 10, **PLACES)
    given = torch.randn(3, 7)
    assert torch.allclose(functional.linear(given, layer.weight, layer.bias), layer(given), atol=1e-6)
    assert torch.equal(layer.weight, layer.full_weight())
    assert layer.compact is not None
    (slope,) = torch.autograd.grad(layer.weight.square().sum(), layer.compact, create_graph=True)
    (twice,) = torch.autograd.grad(slope.sum(), layer.compact)  # linear both ways: derivatives of any order
    counts = torch.autograd.grad(layer.weight.square().sum() / 2, layer.compact)[0] / layer.compact
    assert torch.allclose(twice, 2 * counts, atol=1e-4)
    tied = FairEmbedding(10, 7, **PLACES)
    functional.linear(given, tied.weight).square().sum().backward()  # type: ignore[no-untyped-call]
    assert tied.compact is not None
    assert tied.compact.grad is not None
