"""Every compact layer is the standard layer with the recovered weight, forwards and backwards."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

from fairfold.errors import InvalidDtype, InvalidRow, InvalidSettings, InvalidVector
from fairfold.nn import FairConv2d, FairEmbedding, FairEmbeddingBag, FairLinear, FairModule
from tests.support.modules import OPTIONS, example_input, layers, ordinary

KINDS = sorted(layers(capacity=1))


def check_like_standard(layer: FairModule, *inputs: Any) -> None:
    """Same output; the same gradients, those of the weight taken through Sᵀ."""
    dense: Any = ordinary(layer)
    inputs_dense = [_leaf(value) for value in inputs]
    inputs_compact = [_leaf(value) for value in inputs]
    expected, result = dense(*inputs_dense), layer(*inputs_compact)
    torch.testing.assert_close(result, expected)
    slope = torch.randn_like(expected)
    expected.backward(slope)
    result.backward(slope)
    of_weight = layer.subspace.accumulate(dense.weight.grad.reshape(-1))
    assert layer.compact is not None
    torch.testing.assert_close(layer.compact.grad, of_weight)
    for ours, theirs in zip(inputs_compact, inputs_dense, strict=True):
        if isinstance(ours, Tensor) and ours.requires_grad:
            torch.testing.assert_close(ours.grad, theirs.grad)
    if getattr(layer, "bias", None) is not None:
        torch.testing.assert_close(layer.bias.grad, dense.bias.grad)


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_equals_the_standard_one(kind: str, options: dict[str, Any]) -> None:
    layer = layers(dtype=torch.float64, **options)[kind]
    check_like_standard(layer, example_input(layer, torch.float64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(kind: str, options: dict[str, Any]) -> None:
    layer = layers(dtype=torch.float64, **options)[kind]
    given_input = example_input(layer, torch.float64)
    if kind == "conv":
        given_input = given_input[:1, :, :3, :4]  # one forward a number of the input: keep them few
    given_input = _leaf(given_input)

    def function(compact: Tensor, *rest: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(layer, {"compact": compact}, (rest[0] if rest else given_input,))
        return result

    assert layer.compact is not None
    compact = layer.compact.detach().clone().requires_grad_()
    inputs = (compact, given_input) if given_input.is_floating_point() else (compact,)
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("limit", [1, 40, 75])
def test_weights_may_come_in_any_number_of_blocks(kind: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layers(capacity=1 / 3, dtype=torch.float64)[kind]
    images = example_input(layer, torch.float64)
    monkeypatch.setattr("fairfold.nn.layers.BLOCK_WEIGHTS", limit)
    check_like_standard(layer, images)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # raised by torch's own layer, which ours is held to
@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.one_of(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.sampled_from(["same", "valid"])),
    dilation=st.integers(1, 2),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    chunk=st.integers(1, 3),
)
def test_any_convolution(
    groups: int,
    channels: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: Any,
    dilation: int,
    mode: str,
    chunk: int,
) -> None:
    weights = groups * channels[0] * channels[1] * kernel[0] * kernel[1]
    layer = FairConv2d(
        groups * channels[0],
        groups * channels[1],
        kernel,
        (1, 1) if padding == "same" else stride,
        padding,
        dilation,
        groups,
        padding_mode=mode,
        dtype=torch.float64,
        size=weights if weights <= chunk else max(weights // 2 // chunk, 1) * chunk,
        chunk=chunk,
    )
    check_like_standard(layer, torch.randn(2, groups * channels[0], 8, 7, dtype=torch.float64))


def test_convolution_of_one_image() -> None:
    layer = FairConv2d(3, 4, 3, capacity=0.5)
    image = torch.randn(3, 6, 6)
    torch.testing.assert_close(layer(image), layer(image[None])[0])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 9),
    shape=st.lists(st.integers(0, 4), max_size=3),
    share=st.floats(0.05, 1),
    chunk=st.integers(1, 5),
    seed=st.integers(0, 2**64 - 1),
    int32=st.booleans(),
    data=st.data(),
)
def test_any_lookup(
    rows: int, columns: int, shape: list[int], share: float, chunk: int, seed: int, int32: bool, data: st.DataObject
) -> None:
    size = min(max(int(rows * columns * share) // chunk, 1) * chunk, rows * columns)
    if size < rows * columns and size % chunk:
        size = rows * columns
    layer = FairEmbedding(rows, columns, size=size, chunk=chunk, seed=seed, dtype=torch.float64)
    count = int(torch.tensor(shape).prod()) if shape else 1
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count)), dtype=torch.int64)
    ids = ids.reshape(shape)
    check_like_standard(layer, ids.int() if int32 else ids)


def test_non_contiguous_inputs() -> None:
    table = FairEmbedding(13, 6, capacity=0.5, dtype=torch.float64)
    check_like_standard(table, torch.randint(0, 13, (5, 8)).T[::2])
    linear = FairLinear(7, 10, capacity=0.5, dtype=torch.float64)
    check_like_standard(linear, torch.randn(7, 3, dtype=torch.float64).T)
    conv = FairConv2d(4, 6, 3, capacity=0.5, dtype=torch.float64)
    check_like_standard(conv, torch.randn(2, 9, 8, 4, dtype=torch.float64).permute(0, 3, 1, 2))


def test_a_gradient_that_is_not_contiguous() -> None:
    layer = FairEmbedding(13, 6, capacity=0.5)
    layer(torch.tensor([1, 2, 2])).sum().backward()  # sum expands one number over the whole gradient
    assert layer.compact is not None
    expected = layer.subspace.accumulate_rows(torch.ones(3, 6), torch.tensor([1, 2, 2]))
    torch.testing.assert_close(layer.compact.grad, expected)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_lookup_without_gradients_reads_the_same(sparse: bool) -> None:
    layer = FairEmbedding(13, 6, capacity=1 / 4, sparse=sparse)
    ids = example_input(layer)
    followed = layer(ids)
    assert followed.requires_grad
    with torch.no_grad():
        assert torch.equal(layer(ids), followed)
        assert not layer(ids).requires_grad
    with torch.inference_mode():
        assert layer(ids).is_inference()
    frozen = layer.requires_grad_(False)(ids)
    assert torch.equal(frozen, followed)
    assert not frozen.requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, when it makes a dual number
def test_derivatives_that_are_not_there_are_refused() -> None:
    layer = FairEmbedding(13, 6, capacity=1 / 4)
    ids, vector = example_input(layer), layer.memory.detach()

    def look_up(compact: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(layer, {"compact": compact}, (ids,))
        return found

    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        look_up(forward_ad.make_dual(vector, torch.ones_like(vector)))  # type: ignore[no-untyped-call]
    scale = torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad((layer(ids) * scale).sum(), layer.memory, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()  # type: ignore[no-untyped-call]


def test_padding_reads_zero_and_is_not_trained() -> None:
    layer = FairEmbedding(13, 6, padding_idx=2, capacity=0.5)
    ids = torch.tensor([2, 2])
    found = layer(ids)
    assert torch.equal(found, torch.zeros(2, 6))
    found.sum().backward()
    assert layer.compact is not None
    assert layer.compact.grad is not None
    assert not layer.compact.grad.any()


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("ends", [False, True])
def test_bags_by_offsets(mode: str, padding: int | None, ends: bool) -> None:
    layer = FairEmbeddingBag(
        13, 6, mode, padding_idx=padding, include_last_offset=ends, capacity=0.5, dtype=torch.float64
    )
    ids = torch.tensor([0, 3, 3, 12, 0, 5])
    check_like_standard(layer, ids, torch.tensor([0, 2, 2, 5, 6] if ends else [0, 2, 2, 5]))


def test_bags_with_weights() -> None:
    layer = FairEmbeddingBag(13, 6, "sum", capacity=0.5, dtype=torch.float64)
    weights = torch.randn(6, dtype=torch.float64)
    check_like_standard(layer, torch.tensor([0, 3, 3, 12, 0, 5]), torch.tensor([0, 2, 5]), weights)
    with pytest.raises(InvalidSettings, match="mode='sum'"):
        FairEmbeddingBag(13, 6, "mean", capacity=0.5)(torch.tensor([[1]]), None, torch.ones(1, 1))
    with pytest.raises(InvalidVector, match="Give one weight per id"):
        layer(torch.tensor([[1]]), None, weights)
    with pytest.raises(InvalidDtype):
        layer(torch.tensor([[1]]), None, torch.ones(1, 1))


@pytest.mark.parametrize("offsets", [[1, 2], [0, 7], [0, 3, 2], [0.0, 1.0]])
def test_offsets_that_make_no_bags(offsets: list[float]) -> None:
    layer = FairEmbeddingBag(13, 6, capacity=0.5)
    with pytest.raises(InvalidVector, match="offsets"):
        layer(torch.tensor([0, 3, 3, 12, 0, 5]), torch.tensor(offsets))


def test_bags_of_nothing() -> None:
    layer = FairEmbeddingBag(13, 6, capacity=0.5)
    no_ids = torch.zeros(0, dtype=torch.int64)
    assert layer(no_ids, no_ids).shape == (0, 6)
    assert torch.equal(layer(no_ids, torch.tensor([0, 0])), torch.zeros(2, 6))
    assert layer(torch.zeros(3, 0, dtype=torch.int64)).shape == (3, 6)
    with pytest.raises(InvalidVector):
        layer(torch.tensor([1, 2]))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_empty_batches(shape: tuple[int, ...]) -> None:
    table = FairEmbedding(13, 6, capacity=0.5)
    found = table(torch.zeros(shape, dtype=torch.int64))
    assert found.shape == (*shape, 6)
    found.sum().backward()
    assert FairLinear(7, 10, capacity=0.5)(torch.zeros(*shape, 7)).shape == (*shape, 10)


def test_empty_batch_of_images() -> None:
    layer = FairConv2d(4, 6, 3, capacity=0.5)
    images = torch.zeros(0, 4, 9, 8, requires_grad=True)
    result = layer(images)
    assert result.shape == nn.Conv2d(4, 6, 3)(images).shape
    result.sum().backward()
    assert layer.compact is not None
    assert layer.compact.grad is not None
    assert not layer.compact.grad.any()


@pytest.mark.parametrize("bad", [[13], [-1], [0, 100], [-(2**62)], [2**62]])
def test_ids_out_of_range_are_refused(bad: list[int]) -> None:
    for layer in (FairEmbedding(13, 6, capacity=0.5), FairEmbeddingBag(13, 6, capacity=0.5)):
        with pytest.raises(InvalidRow, match="0 to 12") as caught:
            layer(torch.tensor([bad]))
        assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.int16), [1]])
def test_ids_of_another_type_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidDtype):
        FairEmbedding(13, 6, capacity=0.5)(ids)


def test_dtypes_and_shapes_do_not_mix() -> None:
    linear = FairLinear(7, 10, capacity=0.5)
    with pytest.raises(InvalidDtype, match="float64"):
        linear(torch.zeros(2, 7, dtype=torch.float64))
    with pytest.raises(InvalidVector, match=r"\(2, 6\)"):
        linear(torch.zeros(2, 6))
    conv = FairConv2d(4, 6, 3, capacity=0.5)
    with pytest.raises(InvalidDtype):
        conv(torch.zeros(2, 4, 5, 5, dtype=torch.float64))
    with pytest.raises(InvalidVector):
        conv(torch.zeros(2, 3, 5, 5))


def test_devices_do_not_mix() -> None:
    table = FairEmbedding(13, 6, capacity=0.5, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        table(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="meta"):
        FairLinear(7, 10, capacity=0.5)(torch.zeros(2, 7, device="meta"))


def test_a_compact_vector_of_the_wrong_size_is_refused() -> None:
    layer = FairEmbedding(13, 6, capacity=0.5)
    layer.compact = nn.Parameter(torch.zeros(5))
    with pytest.raises(InvalidVector, match=r"\(39,\)"):
        layer(torch.tensor([1]))


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 3},
        {"groups": 0},
        {"padding": "some"},
        {"padding": "same", "stride": 2},
        {"padding_mode": "odd"},
        {"stride": 0},
        {"padding": -1},
    ],
    ids=str,
)
def test_convolutions_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        FairConv2d(4, 6, 3, capacity=0.5, **options)


def test_initial_values_are_those_of_the_standard_layers() -> None:
    torch.manual_seed(0)
    table = FairEmbedding(1000, 64, capacity=0.25).full_weight()
    assert abs(float(table.mean())) < 0.05
    assert abs(float(table.std()) - 1) < 0.05
    for layer, like in (
        (FairLinear(100, 300, capacity=0.25), nn.Linear(100, 300)),
        (FairConv2d(32, 64, 3, capacity=0.25), nn.Conv2d(32, 64, 3)),
    ):
        ours, theirs = layer.full_weight(), like.weight.detach()
        assert ours.shape == theirs.shape
        assert abs(float(ours.std() / theirs.std()) - 1) < 0.05
        assert abs(float(ours.abs().max() / theirs.abs().max()) - 1) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str, dtype: torch.dtype) -> None:
    layer = layers(capacity=0.5)[kind].to(dtype)
    result = layer(example_input(layer, dtype))
    assert result.dtype == dtype
    torch.testing.assert_close(result, ordinary(layer)(example_input(layer, dtype)), rtol=0.02, atol=0.02)
    result.float().sum().backward()
    assert layer.compact is not None
    assert layer.compact.grad is not None
    assert layer.compact.grad.dtype == dtype


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_autocast(kind: str) -> None:
    layer = layers(capacity=0.5)[kind]
    images = example_input(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(images)
        expected = ordinary(layer)(images)
    assert result.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
    result.float().sum().backward()
    assert layer.compact is not None
    assert layer.compact.grad is not None
    assert layer.compact.grad.dtype == torch.float32


@pytest.mark.parametrize(("kind", "shape"), [(FairEmbedding, (9, 4)), (FairLinear, (9, 4)), (FairConv2d, (9, 4, 3))])
def test_an_option_that_is_nearly_right_is_named(kind: type, shape: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no option 'capacty' .did you mean 'capacity'"):
        kind(*shape, capacty=1 / 4)


def test_an_option_of_the_layer_is_suggested_too() -> None:
    with pytest.raises(TypeError, match="did you mean 'padding_idx'"):
        FairEmbedding(9, 4, capacity=1 / 2, padding_indx=3)  # type: ignore[call-arg]
