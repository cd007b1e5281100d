"""Folding, unfolding and sums over a nested chain, both bodies."""

import pytest
import torch
from torch import Tensor

from fairfold.kernels import reference
from fairfold.kernels.hashing import Layout, expand_seed
from fairfold.subspace import nesting

FULL = 9_000


pytestmark = pytest.mark.usefixtures("body")


def chain(chunk: int, ranked: bool) -> list[Layout]:
    """Sizes that nest, small to large, the full space last."""
    hashed = [
        Layout(FULL, 24 * factor if ranked else 0, 48 * factor, chunk, expand_seed(2), True) for factor in (1, 3, 6, 24)
    ]
    return [*hashed, Layout(FULL, FULL, 0, chunk, expand_seed(2), True)]


def recovered(layout: Layout, compact: Tensor) -> Tensor:
    out = torch.empty(layout.full_size, dtype=compact.dtype)
    reference.recover_range(layout, compact, 0, out)
    return out


CHAINS = [(1, False), (1, True), (8, False), (24, True), (48, False)]


@pytest.mark.parametrize(("chunk", "ranked"), CHAINS)
def test_unfolded_vectors_stand_for_the_same_full_vector(chunk: int, ranked: bool) -> None:
    layouts = chain(chunk, ranked)
    for small in layouts:
        compact = torch.randn(small.size)
        for big in layouts[layouts.index(small) :]:
            assert torch.equal(recovered(big, nesting.unfolded(small, big, compact)), recovered(small, compact))


@pytest.mark.parametrize(("chunk", "ranked"), CHAINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_folded_sums_are_those_of_the_smaller_size(chunk: int, ranked: bool, dtype: torch.dtype) -> None:
    layouts, full = chain(chunk, ranked), torch.randn(FULL, dtype=dtype)
    sums = {}
    for layout in layouts:
        total, counts = torch.zeros(layout.size, dtype=dtype), torch.zeros(layout.size, dtype=torch.int32)
        reference.accumulate_range(layout, full, 0, total, counts)
        sums[layout] = total, counts
    for big in layouts:
        for small in layouts[: layouts.index(big)]:
            assert torch.allclose(nesting.folded(big, small, sums[big][0]), sums[small][0], atol=1e-4)
            assert torch.equal(nesting.folded(big, small, sums[big][1]), sums[small][1])


def test_half_precision_is_served() -> None:
    small, big = chain(8, False)[:2]
    vector = torch.randn(small.size, dtype=torch.bfloat16)
    unfolded = nesting.unfolded(small, big, vector)
    assert unfolded.dtype is torch.bfloat16
    assert torch.equal(recovered(big, unfolded), recovered(small, vector))
