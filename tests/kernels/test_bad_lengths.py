"""Short, narrow and mistyped tensors never let C read beyond them: it refuses what the specification refuses."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fairfold.errors import FairfoldError, InvalidVector
from fairfold.kernels import reference
from fairfold.kernels.native import calls, loader
from fairfold.kernels.reference import PackedRows

ROWS, COLUMNS = 7, 5
TABLE = PackedRows(torch.arange(ROWS * (2 + COLUMNS), dtype=torch.uint8), ROWS, COLUMNS, 8)
DTYPES = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float64, torch.float16]
Operation = Callable[..., Tensor]
OPERATIONS: dict[Operation, Operation] = {
    calls.pair_sums: reference.pair_sums,
    calls.packed_products: reference.packed_products,
    calls.packed_sum: reference.packed_sum,
}


def good(operation: Operation) -> list[Any]:
    ids = torch.tensor([1, 4, 6])
    if operation is calls.pair_sums:
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
