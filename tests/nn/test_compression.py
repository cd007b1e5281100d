"""compress is reduction and expand is recovery, layer by layer or in one memory."""

from typing import Any

import pytest
import torch
from torch import nn

from fairfold import compress, expand
from fairfold.errors import InvalidCapacity, InvalidSettings
from fairfold.nn import FairConv2d, FairEmbedding, FairEmbeddingBag, FairLinear, SharedMemory, active


class Everything(nn.Module):
    """One of each layer, a norm, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.tags = nn.EmbeddingBag(30, 8, mode="sum", padding_idx=0)
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.words.weight
        self.again = self.hidden

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.norm(self.words(ids) + self.tags(ids % 30)[:, None])
        image: torch.Tensor = self.conv(features.view(len(ids), 2, 2, -1)).mean(1).view(len(ids), -1)
        result: torch.Tensor = self.head(self.again(self.hidden(features)))
        return result + image.sum(1)[:, None, None]


def ids() -> torch.Tensor:
    return torch.randint(0, 40, (3, 4))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("chunk", [1, 4])
def test_at_full_capacity_nothing_changes(shared: bool, chunk: int) -> None:
    model, given = Everything(), ids()
    twin: Any = compress(model, 1, shared=shared, chunk=chunk, min_size=0)
    assert isinstance(twin.words, FairEmbedding)
    assert isinstance(twin.tags, FairEmbeddingBag)
    assert isinstance(twin.conv, FairConv2d)
    assert isinstance(twin.hidden, FairLinear)
    assert twin.again is twin.hidden
    torch.testing.assert_close(twin(given), model(given))
    torch.testing.assert_close(expand(twin)(given), twin(given))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("options", [{}, {"chunk": 3}, {"mapping": "ranked"}, {"sign": False}], ids=str)
def test_expand_gives_the_same_function(shared: bool, options: dict[str, Any]) -> None:
    model, given = Everything(), ids()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    twin: Any = compress(model, 1 / 3, shared=shared, min_size=0, **options)
    assert torch.equal(torch.get_rng_state(), random_state), "compressing draws no random numbers"
    full: Any = expand(twin)
    assert {type(layer) for layer in full.modules()} == {type(layer) for layer in model.modules()}
    assert full.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(full(given), twin(given))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), "the given model is left as it is"
    full(given).sum().backward()
    assert full.head.weight is full.words.weight
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model.norm.weight, torch.ones(8)), "the twin shares no tensor with the model"


def test_memories_are_reductions() -> None:
    model = Everything()
    twin: Any = compress(model, 1 / 4, seed=7, min_size=0)
    for name in ("words", "tags", "conv", "hidden"):
        layer: Any = twin.get_submodule(name)
        weight: Any = model.get_submodule(name).weight
        torch.testing.assert_close(layer.compact.detach(), layer.subspace.reduce(weight.detach().reshape(-1)))
        assert layer.subspace.size == weight.numel() // 4
    assert twin.head.compact is twin.words.compact, "tied weights stay tied"
    assert twin.words.subspace.seed == 7
    assert twin.tags.subspace.seed == 8


def test_one_memory_for_all() -> None:
    twin: Any = compress(Everything(), 1 / 4, shared=True, min_size=0)
    memory: Any = twin.words.shared_memory
    assert [type(module) for module in twin.words.children()] == [SharedMemory]
    weights = 40 * 8 + 30 * 8 + 6 * 2 * 9 + 8 * 8
    assert abs(memory.compact.numel() - weights / 4) <= 1
    assert sum(name.endswith("compact") for name in twin.state_dict()) == 1
    assert twin.words.compact is None
    twin(ids()).sum().backward()
    assert memory.compact.grad.abs().sum() > 0
    ranges = sorted((layer.offset, layer.weights) for layer in twin.modules() if isinstance(layer, FairLinear))
    assert len({start for start, _ in ranges}) == len(ranges)


def test_one_memory_is_the_reduction_of_the_concatenation() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    twin: Any = compress(model, 1 / 2, shared=True, min_size=0)
    memory = twin[0].shared_memory
    joined = torch.cat([layer.weight.detach().reshape(-1) for layer in model])  # type: ignore[operator]
    torch.testing.assert_close(memory.compact.detach(), memory.subspace.reduce(joined))
    torch.testing.assert_close(
        torch.cat([twin[0].full_weight().view(-1), twin[1].full_weight().view(-1)]),
        memory.subspace.recover(memory.compact.detach()),
    )


def test_small_layers_stay_dense() -> None:
    twin: Any = compress(nn.Sequential(nn.Linear(10, 10), nn.Linear(100, 100)), "4x")
    assert type(twin[0]) is nn.Linear
    assert type(twin[1]) is FairLinear
    assert twin[1].bias is not None
    assert type(compress(nn.Linear(3, 3))) is nn.Linear


def test_which_layers() -> None:
    model = Everything()
    by_name = compress(model, 0.5, layers=["hidden", "again"])
    assert [name for name, layer in by_name.named_modules() if isinstance(layer, FairLinear)] == ["hidden"]
    assert type(by_name.words) is nn.Embedding
    assert by_name.words.weight is not model.words.weight
    by_rule = compress(model, 0.5, layers=lambda name, layer: isinstance(layer, nn.Embedding))
    assert type(by_rule.words) is FairEmbedding
    assert type(by_rule.head) is nn.Linear, "chosen apart, tied layers part"
    assert by_rule.head.weight is not model.words.weight
    for wrong in (["norm"], ["nothing"], "conv."):
        with pytest.raises(InvalidSettings, match="names among"):
            compress(model, 0.5, layers=wrong)


def test_layers_without_a_twin_stay_as_they_are() -> None:
    model = nn.ModuleList(
        [
            nn.Embedding(100, 20, max_norm=1.0),
            nn.EmbeddingBag(100, 20, scale_grad_by_freq=True),
            nn.MultiheadAttention(32, 4),
            nn.Conv1d(32, 32, 3),
        ]
    )
    twin = compress(model, 0.5)
    assert [type(layer) for layer in twin.modules()] == [type(layer) for layer in model.modules()]


def test_a_single_layer_may_be_compressed() -> None:
    layer = compress(nn.Linear(100, 100), "4x", shared=True)
    assert isinstance(layer, FairLinear)
    assert layer.subspace.size == 2500
    assert type(expand(layer)) is nn.Linear


def test_a_budget_is_for_the_whole_model() -> None:
    model = Everything()
    for shared in (False, True):
        twin = compress(model, "2kB", min_size=0, shared=shared)
        total = sum(parameter.nbytes for parameter in twin.parameters())
        assert 1900 < total <= 2000
    with pytest.raises(InvalidCapacity, match="stay dense"):
        compress(model, "100B", min_size=0)


def test_frozen_and_evaluating_layers_stay_so() -> None:
    layer = nn.Linear(100, 100).eval()
    layer.weight.requires_grad_(False)
    twin = compress(layer, "4x")
    assert isinstance(twin, FairLinear)
    assert twin.compact is not None
    assert not twin.compact.requires_grad
    assert not twin.training
    back: Any = expand(twin)
    assert not back.training
    assert not back.weight.requires_grad


def test_one_memory_needs_one_dtype() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40).double())
    with pytest.raises(InvalidSettings, match="float64"):
        compress(model, 0.5, shared=True)


def test_tables_in_a_shared_memory_are_not_trained_apart() -> None:
    twin: Any = compress(nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100)), 0.5, shared=True)
    with pytest.raises(InvalidSettings, match="shared"), active(twin[0], torch.tensor([1])):
        pass
    with pytest.raises(InvalidSettings, match="shared"):
        twin[0].update_in_backward(None)
