"""Large catalogues of few users: the low rank plus diagonal against the exact inverse."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence import cooccurrence, low_rank, solver
from fairfold.algorithms.cooccurrence.local_inverse import SparseGram
from fairfold.algorithms.cooccurrence.low_rank import LowRankPrecision
from tests.algorithms.cooccurrence.test_local_inverse import ITEMS, USERS, gram_of


def low_rank_of(packed: Tensor, counts: Tensor, columns: int, ridge: float = 2.0) -> LowRankPrecision:
    gram = SparseGram.of(packed.to_sparse().coalesce(), len(counts), torch.float64)
    scales = solver.item_scales(counts, 0.15)
    return LowRankPrecision.of(gram, scales, low_rank.factorize(gram, scales, columns), ridge)


def all_pairs(items: int) -> Tensor:
    return torch.arange(items).repeat(items, 1)


@pytest.mark.parametrize("users", [USERS, 20])
def test_with_all_columns_it_is_the_exact_inverse(users: int) -> None:
    """As many columns as items, or as users, above whose number no sum has a rank."""
    packed, counts = gram_of(users)
    full = cooccurrence.unpack_triangle(packed).numpy()
    scales = solver.item_scales(counts, 0.15).numpy()
    inverse = np.linalg.inv(scales[:, None] * full * scales + 2 * np.eye(ITEMS))
    found = low_rank_of(packed, counts, min(users, ITEMS))
    np.testing.assert_allclose(found.roots.square().numpy(), np.diag(inverse), rtol=1e-5)
    rarer, other, values = found.correlations(all_pairs(ITEMS))
    assert len(values) == ITEMS * (ITEMS - 1) // 2
    wanted = -inverse / np.sqrt(np.outer(np.diag(inverse), np.diag(inverse)))
    np.testing.assert_allclose(values.numpy(), wanted[rarer, other], atol=1e-5)
    assert bool((rarer > other).all())


def test_the_diagonal_is_what_the_sum_says() -> None:
    """Whatever the number of columns: P⁻¹ has the diagonal of D G D + λ."""
    packed, counts = gram_of()
    for columns in (1, 5, ITEMS):
        found = low_rank_of(packed, counts, columns)
        dense = found.matrix @ torch.eye(ITEMS, dtype=torch.float64)
        own = cooccurrence.unpack_triangle(packed).diagonal() * solver.item_scales(counts, 0.15).square()
        torch.testing.assert_close(dense.diagonal(), own + 2.0)
        inverse = torch.linalg.inv(dense)
        torch.testing.assert_close(found.roots.square(), inverse.diagonal())


def test_a_sum_that_is_not_positive_definite_gives_a_model() -> None:
    """Devices may send anything: what is below 0 is left out of B, and R is λ at least."""
    packed, counts = gram_of()
    source = torch.Generator().manual_seed(1)
    packed += 5 * torch.randn(len(packed), generator=source, dtype=torch.float64)
    assert float(torch.linalg.eigvalsh(cooccurrence.unpack_triangle(packed)).min()) < -5
    found = low_rank_of(packed, counts, 20)
    assert bool(torch.isfinite(found.factors).all())
    assert bool((found.matrix.diagonal >= 2).all())
    assert bool((found.roots > 0).all())


def test_it_is_taken_where_it_is_exact() -> None:
    assert low_rank.is_exact(20_000, 2_048)
    assert not low_rank.is_exact(20_000, 2_049)
    assert not low_rank.is_exact(1_000_000, 300)  # a table of so many columns has no room


PEAK = """
import resource
import torch
from fairfold.algorithms.cooccurrence.low_rank import DiagonalAndFactors, LowRankPrecision

items = 4_000
factors = torch.randn(items, 1_024)
ones = torch.ones(items, dtype=torch.float64)
precision = LowRankPrecision(ones, DiagonalAndFactors(ones, factors), factors, ones)
near = torch.randint(0, items, (items, 64))
torch.ones(31 << 18)  # 31 MiB: memory of this size is not returned from now on, as after a search for similar items
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
precision.correlations(near)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3)
"""


def test_correlations_of_many_pairs_take_the_memory_of_their_list() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 150  # megabytes; kept pieces between temporaries took more than 900
