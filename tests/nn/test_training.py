"""Training touched slots alone gives the numbers of dense training, and torch's optimisers take sparse gradients."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairfold.errors import InvalidRow, InvalidSettings
from fairfold.nn import FairEmbedding, FairEmbeddingBag, active
from fairfold.nn.embedding import FairTable
from fairfold.nn.lookup import FusedSGD

Maker = Callable[[Iterable[Any]], torch.optim.Optimizer]
DENSE: dict[str, Maker] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad-decay": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}
TAKE_SPARSE = ["adagrad", "adagrad-decay", "sgd"]  # with the numbers of dense gradients

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # raised within torch's optimisers


def table(sparse: bool = False, rows: int = 30, columns: int = 4, **options: Any) -> FairEmbedding:
    torch.manual_seed(0)
    return FairEmbedding(rows, columns, sparse=sparse, dtype=torch.float64, **({"capacity": 1 / 5} | options))


def loss_of(found: Tensor, step: int) -> Tensor:
    """Any loss will do that is not the same at every step."""
    target = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found) * (step + 1)
    return (found - target).square().mean() + found.prod(-1).sum()


def train(layer: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for step, ids in enumerate(batches):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(layer(ids), step))
        optimizer.step()


def vector(layer: FairTable) -> Tensor:
    return layer.memory.detach()


BATCHES = [torch.tensor([1, 2, 2, 7]), torch.tensor([[3, 7], [7, 29]]), torch.tensor([1, 1, 1]), torch.tensor([0])]

shapes = {
    "rows": st.integers(2, 30),
    "columns": st.integers(1, 6),
    "share": st.floats(0.05, 1),
    "chunk": st.integers(1, 3),
    "seed": st.integers(0, 2**32),
    "data": st.data(),
}


def drawn(rows: int, columns: int, share: float, chunk: int, seed: int, data: st.DataObject) -> tuple[Any, Any]:
    size = max(int(rows * columns * share) // chunk, 1) * chunk
    size = min(size, rows * columns)
    options = {"rows": rows, "columns": columns, "capacity": None, "size": size, "seed": seed}
    options["chunk"] = chunk if size % chunk == 0 else 1
    ids = st.lists(st.integers(0, rows - 1), max_size=8)
    batches = [torch.tensor(batch, dtype=torch.int64) for batch in data.draw(st.lists(ids, min_size=1, max_size=5))]
    return options, batches


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(TAKE_SPARSE), **shapes)
def test_sparse_gradients_train_as_dense_ones_do(
    rows: int, columns: int, share: float, chunk: int, seed: int, kind: str, data: st.DataObject
) -> None:
    options, batches = drawn(rows, columns, share, chunk, seed, data)
    ours, theirs = table(sparse=True, **options), table(**options)
    train(ours, DENSE[kind](ours.parameters()), batches)
    train(theirs, DENSE[kind](theirs.parameters()), batches)
    torch.testing.assert_close(vector(ours), vector(theirs), rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(DENSE)), **shapes)
def test_training_the_active_set_equals_dense_training(
    rows: int, columns: int, share: float, chunk: int, seed: int, kind: str, data: st.DataObject
) -> None:
    options, batches = drawn(rows, columns, share, chunk, seed, data)
    ours, theirs = table(**options), table(**options)
    with active(ours, torch.cat(batches)) as view:
        train(ours, DENSE[kind](view.parameters()), batches)
    train(theirs, DENSE[kind](theirs.parameters()), batches)
    torch.testing.assert_close(vector(ours), vector(theirs), rtol=1e-9, atol=1e-9)


def test_updates_in_the_backward_equal_dense_training() -> None:
    ours, theirs = table(), table()
    ours.update_in_backward(FusedSGD(0.1))
    for step, ids in enumerate(BATCHES):
        torch.autograd.backward(loss_of(ours(ids), step))
    assert ours.memory.grad is None
    train(theirs, DENSE["sgd"](theirs.parameters()), BATCHES)
    torch.testing.assert_close(vector(ours), vector(theirs))
    ours.update_in_backward(None)
    ours(BATCHES[0]).sum().backward()
    assert ours.memory.grad is not None


def test_a_rate_below_zero_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="lr"):
        FusedSGD(-1)


def test_sgd_in_the_backward_is_exact_for_several_lookups() -> None:
    ours, theirs = table(), table()
    ours.update_in_backward(FusedSGD(0.1))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for layer in (ours, theirs):
        (layer(BATCHES[0]).square().sum() + layer(BATCHES[0]).prod()).backward()
    optimizer.step()
    torch.testing.assert_close(vector(ours), vector(theirs))


def test_sparse_adam_steps_as_adam_where_every_step_touches_the_same_slots() -> None:
    ours, theirs = table(sparse=True), table()
    batches = BATCHES[:1] * 4
    train(ours, torch.optim.SparseAdam(ours.parameters(), lr=0.1), batches)
    train(theirs, torch.optim.Adam(theirs.parameters(), lr=0.1), batches)
    torch.testing.assert_close(vector(ours), vector(theirs), rtol=1e-4, atol=1e-5)  # eps enters at another place


def test_sparse_adam_leaves_untouched_slots_alone() -> None:
    layer = table(sparse=True, rows=1000, capacity=1 / 2)
    before = vector(layer).clone()
    train(layer, torch.optim.SparseAdam(layer.parameters()), [torch.tensor([5, 6]), torch.tensor([6])])
    moved = (vector(layer) != before).nonzero().flatten()
    assert set(moved.tolist()) <= set(layer.activate(torch.tensor([5, 6])).slots.tolist())
    assert len(moved) > 0


def test_the_active_set_is_written_back_at_the_end_only() -> None:
    layer = table()
    before = vector(layer).clone()
    with active(layer, torch.tensor([3, 3, 4])) as view:
        torch.testing.assert_close(layer(torch.tensor([3])), layer.full_weight()[3:4])
        assert layer(torch.tensor([], dtype=torch.int64)).shape == (0, 4)
        train(layer, torch.optim.Adam(view.parameters(), lr=0.1), [torch.tensor([3, 4])])
        assert torch.equal(vector(layer), before)
    assert not torch.equal(vector(layer), before)


def failing(layer: FairTable) -> None:
    with active(layer, torch.tensor([3])) as view:
        with torch.no_grad():
            view.values.fill_(float("nan"))
        raise RuntimeError("diverged")


def test_a_round_that_fails_leaves_the_table_as_it_was() -> None:
    layer = table()
    before = vector(layer).clone()
    with pytest.raises(RuntimeError, match="diverged"):
        failing(layer)
    assert torch.equal(vector(layer), before)
    assert layer(torch.tensor([9])).shape == (1, 4)


def test_ids_outside_of_the_active_set_are_refused() -> None:
    layer = table()
    view = layer.activate(torch.tensor([3, 5], dtype=torch.int32))
    assert view(torch.tensor([5, 3], dtype=torch.int32)).shape == (2, 4)
    for wrong in ([4], [29], [0], [3, 5, 6]):
        with pytest.raises(InvalidRow, match="active set"):
            view(torch.tensor(wrong))
    for out_of_range in ([30], [-1]):
        with pytest.raises(InvalidRow, match="0 to 29"):
            view(torch.tensor(out_of_range))
    with pytest.raises(InvalidRow):
        layer.activate(torch.tensor([30]))
    empty = layer.activate(torch.tensor([], dtype=torch.int64))
    with pytest.raises(InvalidRow):
        empty(torch.tensor([1]))
    empty.commit()


def test_bags_and_padding_train_on_their_active_rows() -> None:
    torch.manual_seed(1)
    ours = FairEmbeddingBag(30, 4, padding_idx=1, capacity=0.2, dtype=torch.float64)
    theirs = copy.deepcopy(ours)
    batches = [torch.tensor([[1, 2], [7, 7]]), torch.tensor([[1, 1], [2, 3]])]
    with active(ours, torch.cat(batches)) as view:
        train(ours, torch.optim.Adam(view.parameters()), batches)
    train(theirs, torch.optim.Adam(theirs.parameters()), batches)
    torch.testing.assert_close(vector(ours), vector(theirs))
