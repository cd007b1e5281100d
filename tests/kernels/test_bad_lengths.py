"""Short, narrow and mistyped tensors never let C read beyond them: it refuses what the specification refuses."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fairfold.errors import FairfoldError, InvalidVector
from fairfold.kernels import reference, sparse_pairs
from fairfold.kernels.native import calls, loader
from fairfold.kernels.native import sparse_pairs as sparse_calls
from fairfold.kernels.reference import PackedRows
from fairfold.subspace import Subspace

ROWS, COLUMNS = 7, 5
TABLE = PackedRows(torch.arange(ROWS * (2 + COLUMNS), dtype=torch.uint8), ROWS, COLUMNS, 8)
DTYPES = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float64, torch.float16]
Operation = Callable[..., Any]
OPERATIONS: dict[Operation, Operation] = {
    calls.pair_sums: reference.pair_sums,
    sparse_calls.listed_pair_sums: sparse_pairs.listed_pair_sums,
    sparse_calls.symmetric_rows: sparse_pairs.symmetric_rows,
    sparse_calls.member_blocks: sparse_pairs.member_blocks,
    sparse_calls.strongest: sparse_pairs.strongest,
    calls.packed_products: reference.packed_products,
    calls.packed_sum: reference.packed_sum,
}
LAYOUT = Subspace(ROWS * COLUMNS, 12, seed=3).layout
# Those of a subspace and its slots: some change their last tensors in place
OF_SLOTS: dict[Operation, Operation] = {
    native: getattr(reference, native.__name__)
    for native in (
        calls.reduce, calls.recover_range, calls.accumulate_range, calls.count_range, calls.recover_rows,
        calls.accumulate_rows, calls.touched_rows, calls.factorize, calls.recover_positions, calls.accumulate_positions,
        calls.fold_groups, calls.unfold_groups,
    )
}  # fmt: skip


def good_slots(operation: Operation) -> list[Any]:
    """Arguments of an operation on slots."""
    rows, compact, full = torch.tensor([1, 4, 6]), torch.randn(LAYOUT.size), torch.randn(LAYOUT.full_size)
    counts = torch.zeros(LAYOUT.size, dtype=torch.int32)
    places, signs = torch.tensor([3, 0, 7], dtype=torch.int32), torch.tensor([1, -1, 1], dtype=torch.int8)
    given: dict[Operation, list[Any]] = {
        calls.reduce: [LAYOUT, full],
        calls.recover_range: [LAYOUT, compact, 3, torch.zeros(9)],
        calls.accumulate_range: [LAYOUT, full[:9].clone(), 3, compact, counts],
        calls.count_range: [LAYOUT, 3, 12, counts],
        calls.recover_rows: [LAYOUT, compact, rows, COLUMNS],
        calls.accumulate_rows: [LAYOUT, torch.randn(3, COLUMNS), rows, compact],
        calls.touched_rows: [LAYOUT, torch.randn(3, COLUMNS), rows],
        calls.factorize: [torch.tensor([5, 2, 5, 9])],
        calls.recover_positions: [compact, places, signs],
        calls.accumulate_positions: [torch.randn(3), places, signs, compact],
        calls.fold_groups: [compact, 2, 3],
        calls.unfold_groups: [compact, 2, 3, torch.zeros(2 * LAYOUT.size)],
    }
    return given[operation]


def good(operation: Operation) -> list[Any]:
    ids = torch.tensor([1, 4, 6])
    if operation is sparse_calls.symmetric_rows:
        return [torch.tensor([0, 1, 2, 4]), torch.ones(4), 4, torch.int64, torch.float32]
    if operation is sparse_calls.member_blocks:
        return [
            torch.tensor([0, 2, 3]),
            torch.tensor([0, 2, 1, 0, 2]),
            torch.ones(5),
            torch.tensor([[0, 1], [2, 1], [0, 2]]),
        ]
    if operation is sparse_calls.strongest:
        return [*good(sparse_calls.member_blocks)[:3], torch.ones(3), None, 2]
    if operation in (calls.pair_sums, sparse_calls.listed_pair_sums):
        return [torch.tensor([0, 2, 1, 3, 4]), torch.tensor([0, 2]), torch.tensor([2, 5]), torch.ones(2), 4]
    return [TABLE, ids, torch.ones(3, COLUMNS) if operation is calls.packed_products else torch.ones(3)]


def test_the_reproductions_of_reads_beyond_the_end() -> None:
    """Each of these read the heap beyond a tensor."""
    if loader.library() is None:
        pytest.skip(loader.status().reason)
    items, begins, ends, weights, most = good(calls.pair_sums)
    for short in ([items, begins[:1], ends, weights, most], [items, begins, ends[:1], weights, most]):
        with pytest.raises(InvalidVector, match="lists of one length"):
            calls.pair_sums(*short)
    ids = torch.tensor([1, 4, 6])
    with pytest.raises(InvalidVector, match="5 columns"):
        calls.packed_products(TABLE, ids, torch.ones(3, 1))
    with pytest.raises(InvalidVector, match="lists of one length"):
        calls.packed_sum(TABLE, ids, torch.ones(1))
    for operation in (calls.packed_products, calls.packed_sum):
        _, _, operand = good(operation)
        with pytest.raises(loader.NotSupported):
            operation(TABLE, ids.float(), operand)
        expected = OPERATIONS[operation](TABLE, ids, operand)
        torch.testing.assert_close(operation(TABLE, ids.int(), operand), expected)


def spoiled(tensor: Tensor, chance: random.Random) -> Tensor:
    """A tensor of another length, dtype, rank or stride, or with other numbers."""
    kind = chance.randrange(7)
    if kind == 0:
        return tensor[
            : chance.randrange(len(tensor) + 1)
        ].clone()  # of its own memory: nothing good lies beyond its end
    if kind == 1:
        return tensor.to(chance.choice(DTYPES))
    if kind == 2:
        return tensor[None] if chance.random() < 0.5 else tensor.reshape(-1)[:1].reshape(())
    if kind == 3:
        return torch.cat([tensor, tensor])[:: chance.choice([1, 2, 3])]
    if kind == 4:
        return tensor[..., : chance.randrange(tensor.shape[-1] + 1)].clone()
    if kind == 5:
        return torch.empty_like(tensor, device="meta")
    return tensor + chance.choice([-(10**6), -1, 1, 3, 10**6])


def test_ten_thousand_bad_calls_are_refused_or_give_what_the_specification_gives() -> None:
    if loader.library() is None:
        pytest.skip(loader.status().reason)
    chance, refused, served = random.Random(38), 0, 0
    for _ in range(10_000):
        operation = chance.choice(list(OPERATIONS))
        given = good(operation)
        for place in [at for at, one in enumerate(given) if isinstance(one, Tensor)]:
            if chance.random() < 0.5:
                given[place] = spoiled(given[place], chance)
        try:
            found = operation(*given)
        except (FairfoldError, loader.NotSupported):
            refused += 1
            continue
        served += 1
        torch.testing.assert_close(found, OPERATIONS[operation](*given))
    assert refused > 4000
    assert served > 1000


def tensors_of(*values: Any) -> list[Tensor]:
    """The tensors among values and in their tuples, of a device that has memory."""
    flat = [one for value in values for one in (value if type(value) is tuple else [value])]
    return [one for one in flat if isinstance(one, Tensor) and not one.is_meta]


@pytest.mark.parametrize("calls_made", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_bad_calls_on_slots_are_refused_or_stay_inside(calls_made: int) -> None:
    """What is served is what the specification gives, where that serves it."""
    if loader.library() is None:
        pytest.skip(loader.status().reason)
    chance, refused, compared = random.Random(39), 0, 0
    for number in range(calls_made):
        torch.manual_seed(number)
        operation = chance.choice(list(OF_SLOTS))
        given = good_slots(operation)
        for place in [at for at, one in enumerate(given) if isinstance(one, Tensor)]:
            if chance.random() < 0.4:
                given[place] = spoiled(given[place], chance)
        if chance.random() < 0.2:
            for place in [at for at, one in enumerate(given) if isinstance(one, int)]:
                given[place] = chance.choice([-(2**16), -1, 0, 1, 2, 5, 2**16])
        same = [one.clone() if isinstance(one, Tensor) else one for one in given]
        try:
            found = operation(*given)
        except (FairfoldError, loader.NotSupported, RuntimeError, ZeroDivisionError):  # or torch refuses it
            refused += 1
            continue
        try:
            expected = OF_SLOTS[operation](*same)
        except (FairfoldError, RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError):
            continue
        compared += 1
        if operation is not calls.touched_rows:  # whose slots have an order of their own
            for mine, theirs in zip(tensors_of(found, *given), tensors_of(expected, *same), strict=True):
                torch.testing.assert_close(mine, theirs, equal_nan=True, check_stride=False)
    assert refused > 0.3 * calls_made
    assert compared > 0.1 * calls_made
