"""State goes out and comes back: state_dict, pickle, deepcopy, .to, safetensors; a foreign state is refused."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from fairfold import compress
from fairfold.errors import InvalidCapacity, InvalidState
from fairfold.nn import FairEmbedding, FairModule
from tests.support.modules import example_input, layers

KINDS = sorted(layers(capacity=1))


def models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    found: dict[str, tuple[nn.Module, torch.Tensor]] = {}
    for kind, layer in layers(capacity=0.5, seed=2**64 - 3, chunk=3).items():
        found[kind] = layer, example_input(layer)
    dense = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    found["shared"] = compress(dense, 0.5, shared=True, min_size=0), torch.randint(0, 13, (5, 4))
    return found


ALL = sorted(models())


@pytest.mark.parametrize("kind", ALL)
def test_state_round_trips(kind: str, tmp_path: Path) -> None:
    model, inputs = models()[kind]
    expected = model(inputs)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    assert not torch.equal(other(inputs), expected)

    through_memory = io.BytesIO()
    torch.save(model.state_dict(), through_memory)
    through_memory.seek(0)
    other.load_state_dict(torch.load(through_memory, weights_only=True))
    assert torch.equal(other(inputs), expected)

    nn.init.zeros_(next(other.parameters()))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(inputs), expected)


@pytest.mark.parametrize("kind", ALL)
def test_deepcopy_and_pickle(kind: str) -> None:
    model, inputs = models()[kind]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(inputs), model(inputs))
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert not torch.equal(other(inputs), model(inputs))
        assert sum(1 for _ in other.parameters()) == sum(1 for _ in model.parameters())


@pytest.mark.parametrize("kind", ALL)
def test_to_another_dtype_and_device(kind: str) -> None:
    model, inputs = models()[kind]
    expected = model(inputs)
    model.to(torch.float64)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    assert model(inputs).dtype == torch.float64
    torch.testing.assert_close(model(inputs).float(), expected)
    model.to("meta")
    assert model(inputs.to("meta")).device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ALL)
def test_on_cuda(kind: str) -> None:
    model, inputs = models()[kind]
    expected = model(inputs)
    model.to("cuda")
    result = model(inputs.to("cuda"))
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-3, atol=1e-3)
    result.sum().backward()


@pytest.mark.parametrize(
    "options",
    [{"size": 36}, {"seed": 1}, {"chunk": 3}, {"mapping": "ranked", "size": 38}, {"sign": False}],
    ids=str,
)
def test_the_state_of_another_subspace_is_refused(options: dict[str, Any]) -> None:
    mine = FairEmbedding(13, 6, size=39)
    before = mine.full_weight()
    other = FairEmbedding(13, 6, **({"size": 39} | options))
    with pytest.raises(InvalidState):
        mine.load_state_dict(other.state_dict())
    assert torch.equal(mine.full_weight(), before), "a refused state must change nothing"


def test_a_vector_of_another_size_is_refused_also_without_a_layout() -> None:
    layer = FairEmbedding(13, 6, size=39)
    with pytest.raises(InvalidState, match="39"):
        layer.load_state_dict({"compact": torch.zeros(40)}, strict=False)


def test_a_state_without_a_layout_is_reported_as_torch_does() -> None:
    layer = FairEmbedding(13, 6, size=39)
    with pytest.raises(RuntimeError, match="_extra_state"):
        layer.load_state_dict({"compact": torch.zeros(39)})
    layer.load_state_dict({"compact": torch.zeros(39)}, strict=False)
    assert not layer.full_weight().any()
    with pytest.raises(InvalidState, match="integers"):
        layer.load_state_dict({"compact": torch.zeros(39), "_extra_state": 3})


def test_a_state_holds_the_compact_vector_and_a_few_integers() -> None:
    state = FairEmbedding(10_000, 64, capacity=1 / 64).state_dict()
    assert sum(value.numel() for value in state.values()) <= 10_000 + 16


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 4, "capacity": 0.5},
        {"capacity": 2},
        {"budget": "half"},
        {"budget": 0},
        {"budget": "0.5"},
        {"capacity": 0.01},
        {"capacity": 0.5, "head": 38, "chunk": 2},
    ],
    ids=str,
)
def test_capacities_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidCapacity):
        FairEmbedding(13, 6, **options)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"capacity": "2x"}, 39),
        ({"capacity": 1 / 2}, 39),
        ({"capacity": "1/2", "chunk": 5}, 35),
        ({"budget": "100B"}, 25),
        ({"budget": 100}, 25),
        ({"budget": 100, "dtype": torch.float64}, 12),
        ({"budget": "1GB"}, 78),
        ({"size": 7}, 7),
        ({"capacity": 1 / 2, "mapping": "ranked"}, 38),
        ({"capacity": 1 / 2, "head": 10, "chunk": 2}, 38),
    ],
    ids=str,
)
def test_sizes(options: dict[str, Any], size: int) -> None:
    layer = FairEmbedding(13, 6, **options)
    assert layer.compact is not None
    assert layer.subspace.size == layer.compact.numel() == size


def test_no_table_without_rows() -> None:
    with pytest.raises(ValueError, match="at least one weight"):
        FairEmbedding(0, 6, capacity=1)


@pytest.mark.parametrize("kind", KINDS)
def test_representation_names_the_sizes(kind: str) -> None:
    layer: FairModule = layers(capacity=0.5)[kind]
    assert f"size={layer.subspace.size}" in repr(layer)
