"""Large catalogues: the low rank plus diagonal against the exact inverse, and sums that are held sparse."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence import cooccurrence, low_rank, solver
from fairfold.algorithms.cooccurrence.low_rank import LowRankPrecision, SparseGram
from fairfold.algorithms.cooccurrence.scorer import NEIGHBORS, PAIRS, POPULARITY, ROWS
from fairfold.federation import updates
from tests.support.cooccurrence import co_occurrence_federation, pair_sums
from tests.support.federations import after_rounds, tiny_data

USERS, ITEMS = 80, 40


def gram_of(users: int = USERS, items: int = ITEMS) -> tuple[Tensor, Tensor]:
    """A packed sum, and how many users have each item."""
    train = tiny_data(4, users, items).train
    weights = cooccurrence.history_weights(train.counts_by_user)
    return pair_sums([train.of(user) for user in range(users)], weights, items).double(), train.counts_by_item


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
    found = low_rank_of(packed, counts, low_rank.num_columns(ITEMS, users, draft=False))
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


def test_more_columns_come_closer() -> None:
    packed, counts = gram_of()
    exact = low_rank_of(packed, counts, ITEMS).correlations(all_pairs(ITEMS))[2]
    errors = [
        float((low_rank_of(packed, counts, d).correlations(all_pairs(ITEMS))[2] - exact).norm()) for d in (2, 10, 30)
    ]
    assert errors[0] > 1.2 * errors[1] > 1.4 * errors[2]


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


def test_sparse_products_and_neighbors_are_those_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "PADDED_AT_ONCE", 100)
    monkeypatch.setattr(low_rank, "COLUMNS_AT_ONCE", 3)
    monkeypatch.setattr(low_rank, "LISTED_AT_ONCE", 50)
    packed, counts = gram_of(12)
    for items in (ITEMS, 7):  # the leading items of the same sum
        full = cooccurrence.unpack_triangle(packed[: cooccurrence.triangle_size(items)])
        gram = SparseGram.of(packed.to_sparse().coalesce(), items, torch.float64)
        table = torch.randn(items, 8, dtype=torch.float64)
        torch.testing.assert_close(gram @ table, full @ table)
        found = solver.neighbor_list(*gram.most_similar(counts[:items], 5))
        torch.testing.assert_close(found[:, 2], solver.nearest_neighbors(full, counts[:items], 5)[:, 2])


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All triangles are too long to be held."""
    for module in (updates, cooccurrence):
        monkeypatch.setattr(module, "MAX_DENSE", 0)


def test_a_large_catalogue_has_the_model_of_a_small_one(
    everything_is_large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rounds by sparse sums and low rank, and by a dense one and its inverse; also once it is retracted."""
    data = tiny_data(2, 60, 25)
    large = co_occurrence_federation(data)
    sparse = after_rounds(large, large.initial(), 2)
    monkeypatch.undo()
    small = co_occurrence_federation(data)
    dense = after_rounds(small, small.initial(), 2)
    head = large.plan.architecture.tables[ROWS][0]
    kept = updates.vector_in(sparse.algorithm_state["sum"], "sum", cooccurrence.triangle_size(head))
    assert kept is not None
    assert kept.is_sparse
    assert torch.equal(kept.to_dense(), dense.algorithm_state["sum"]["sum"])
    for name in (ROWS, NEIGHBORS, POPULARITY):
        a, b = sparse.full[name].view(head, -1) if name == ROWS else sparse.full[name], dense.full[name]
        if name == ROWS:  # up to the sign of a column
            b = b.view(head, -1)
            torch.testing.assert_close(a[:, 2:] @ a[:, 2:].T, b[:, 2:] @ b[:, 2:].T, rtol=0, atol=1e-4)
            a, b = a[:, :2], b[:, :2]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    one, other = (torch.sort(state.full[PAIRS].view(-1, 3)[:, 2]).values for state in (sparse, dense))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_long_history_is_capped_and_that_is_told(everything_is_large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One user with 50,000 items must not list a billion pairs."""
    monkeypatch.setattr(cooccurrence, "LONGEST_UPLOAD", 6)
    federation = co_occurrence_federation(tiny_data(2, 60, 25))
    state = after_rounds(federation, federation.initial(), 1)
    kept = state.algorithm_state["sum"]
    assert max(federation.clients.train.counts_by_user) > 6
    pairs = [min(6, int(length)) * (min(6, int(length)) + 1) // 2 for length in federation.clients.train.counts_by_user]
    assert len(kept["sum"]) <= sum(pairs)
    notes = federation.plan.algorithm.notes(federation.plan, state)  # type: ignore[attr-defined]
    assert any("over 6 items" in note for note in notes)


@pytest.mark.slow
def test_a_large_catalogue_takes_the_memory_of_its_pairs() -> None:
    """In a process of its own: all numbers of 100,000 items would take 40 GB."""
    code = """
import resource, torch
from fairfold.algorithms.cooccurrence import cooccurrence, low_rank, solver
source = torch.Generator().manual_seed(0)
lengths = torch.full((2_000,), 20)
items = torch.randint(1, 5_000, (2_000, 20), generator=source).cumsum(1).flatten() - 1
packed = cooccurrence.CoOccurrenceUpload.of(items, lengths, 2_048).shortest(100_000, torch.float32)
gram = low_rank.SparseGram.of(packed, 100_000)
scales = torch.ones(100_000, dtype=torch.float64)
found = low_rank.LowRankPrecision.of(gram, scales, low_rank.factorize(gram, scales, 64), 4.0)
print(bool((found.roots > 0).all()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    good, peak = done.stdout.split()
    assert good == "True"
    assert float(peak) < 1_000


@pytest.mark.parametrize("merged", [3, 1 << 22])
def test_sparse_sums_add_up_in_any_order(monkeypatch: pytest.MonkeyPatch, merged: int) -> None:
    monkeypatch.setattr(updates, "MERGED_AT_ONCE", merged)
    source = np.random.default_rng(1)
    parts: list[Any] = [torch.zeros(50).to_sparse()]
    for _ in range(20):
        vector = np.zeros(50, dtype=np.float32)
        vector[source.integers(0, 50, 9)] = source.integers(-99, 99, 9) / 65_536
        parts.append(torch.from_numpy(vector).to_sparse())
    wanted = sum(part.to_dense().double() for part in parts)
    for order in (parts, parts[::-1]):
        total = updates.SparseSum(50)
        for number, part in enumerate(order):
            total.add(part)
            if number == 7:
                assert total.total().is_coalesced()
        found = total.total()
        assert torch.equal(found.to_dense(), wanted)
        assert bool((found.indices()[0].diff() > 0).all())


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
