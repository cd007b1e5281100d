"""Large catalogues: inverses around every item against the exact one, and sums that are held sparse."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence import cooccurrence, local_inverse, low_rank, solver
from fairfold.algorithms.cooccurrence.local_inverse import LocalPrecision, SparseGram, SparseRows
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


def local_inverse_of(packed: Tensor, counts: Tensor, related: int, ridge: float = 2.0) -> LocalPrecision:
    gram = SparseGram.of(packed.to_sparse().coalesce(), len(counts), torch.float64)
    neighborhoods = gram.neighborhoods(gram.most_related(related))
    return LocalPrecision.of(neighborhoods, solver.item_scales(counts, 0.15), ridge)


def exact_inverse(packed: Tensor, counts: Tensor) -> Any:
    scales = solver.item_scales(counts, 0.15).numpy()
    full = cooccurrence.unpack_triangle(packed).numpy()
    return np.linalg.inv(scales[:, None] * full * scales + 2 * np.eye(len(full)))


def test_with_all_items_related_it_is_the_exact_inverse() -> None:
    packed, counts = gram_of()
    packed += 0.01  # everything occurs with everything
    inverse = exact_inverse(packed, counts)
    found = local_inverse_of(packed, counts, ITEMS - 1)
    np.testing.assert_allclose(found.roots.square().numpy(), np.diag(inverse), rtol=1e-9)
    rarer, other, values = found.pairs
    assert len(values) == ITEMS * (ITEMS - 1) // 2
    wanted = -inverse / np.sqrt(np.outer(np.diag(inverse), np.diag(inverse)))
    np.testing.assert_allclose(values.numpy(), wanted[rarer, other], atol=1e-9)
    assert bool((rarer > other).all())


def test_more_related_items_come_closer() -> None:
    packed, counts = gram_of()
    inverse = exact_inverse(packed, counts)
    wanted = -inverse / np.sqrt(np.outer(np.diag(inverse), np.diag(inverse))) * (1 - np.eye(ITEMS))
    errors = []
    for related in (3, 12, 30):
        table = local_inverse_of(packed, counts, related).correlations @ torch.eye(ITEMS, dtype=torch.float64)
        errors.append(float(np.linalg.norm(table.numpy() - wanted)))
    assert errors[0] > 1.2 * errors[1] > 1.4 * errors[2]


def test_an_item_is_regressed_on_its_related_ones() -> None:
    """Against NumPy, item by item: the inverse of the block of the item and what it is related to."""
    packed, counts = gram_of(12)
    full, scales = cooccurrence.unpack_triangle(packed), solver.item_scales(counts, 0.15)
    matrix = (scales[:, None] * full * scales).numpy() + 2 * np.eye(ITEMS)
    diagonal = full.diagonal() + local_inverse.SHRINKAGE * full.diagonal().mean()
    related = (full / (diagonal[:, None] * diagonal).sqrt()).fill_diagonal_(0)
    found = local_inverse_of(packed, counts, 5)
    regressed = dict[tuple[int, int], list[float]]()
    for item in range(ITEMS):
        near = related[item].argsort(descending=True, stable=True)[:5].tolist()
        members = [one for one in near if related[item, one] > 0] + [item]
        column = np.linalg.inv(matrix[np.ix_(members, members)])[:, -1]
        assert float(found.roots[item] ** 2) == pytest.approx(column[-1])
        for one, value in zip(members[:-1], column, strict=False):
            pair = (max(one, item), min(one, item))
            regressed.setdefault(pair, []).append(-value / float(found.roots[one] * found.roots[item]))
    rarer, other, values = found.pairs
    assert list(zip(rarer.tolist(), other.tolist(), strict=True)) == sorted(regressed)
    for pair, value in zip(sorted(regressed), values.tolist(), strict=True):
        assert value == pytest.approx(np.mean(regressed[pair]))


def test_a_sum_that_is_not_positive_definite_gives_a_model() -> None:
    """Devices may send anything: an item whose block is not definite stands alone."""
    packed, counts = gram_of()
    source = torch.Generator().manual_seed(1)
    packed += 5 * torch.randn(len(packed), generator=source, dtype=torch.float64)
    assert float(torch.linalg.eigvalsh(cooccurrence.unpack_triangle(packed)).min()) < -5
    found = local_inverse_of(packed, counts, 20)
    assert bool((found.roots > 0).all())
    assert bool(torch.isfinite(found.roots).all())
    assert bool(torch.isfinite(found.pairs[2]).all())


def test_the_matrix_of_some_pairs_is_symmetric() -> None:
    pairs = (torch.tensor([3, 4, 4]), torch.tensor([1, 0, 3]), torch.tensor([0.5, -1.0, 2.0]))
    table = SparseRows.of_pairs(pairs, 5) @ torch.eye(5)
    wanted = torch.zeros(5, 5)
    wanted[pairs[:2]] = pairs[2]
    assert torch.equal(table, wanted + wanted.T)


def test_blocks_fit_in_memory() -> None:
    for items in (2, 100, 40_000, 1_000_000, 2**24 - 1):
        related = local_inverse.num_related(items)
        assert 1 <= related < items
        assert items * (related + 1) ** 2 <= max(local_inverse.BLOCK_NUMBERS, 4 * items)


def test_sparse_products_and_neighbors_are_those_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_inverse, "COLUMNS_AT_ONCE", 3)
    packed, counts = gram_of(12)
    for items in (ITEMS, 7):  # the leading items of the same sum
        full = cooccurrence.unpack_triangle(packed[: cooccurrence.triangle_size(items)])
        gram = SparseGram.of(packed.to_sparse().coalesce(), items, torch.float64)
        table = torch.randn(items, 8, dtype=torch.float64)
        torch.testing.assert_close(gram @ table, full @ table)
        found = solver.neighbor_list(*gram.most_similar(counts[:items], 5))
        blocks = gram.neighborhoods(gram.most_related(5))
        for members, block in zip(blocks.members, blocks.blocks, strict=True):
            assert torch.equal(block, full[members][:, members])
        torch.testing.assert_close(found[:, 2], solver.nearest_neighbors(full, counts[:items], 5)[:, 2])


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All triangles are too long to be held."""
    for module in (updates, cooccurrence):
        monkeypatch.setattr(module, "MAX_DENSE", 0)


@pytest.mark.parametrize("few", [True, False])
def test_a_large_catalogue_has_the_model_of_a_small_one(
    everything_is_large: None, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rounds by a sparse sum and inverses around every item, and by a dense one; also once it is retracted."""
    monkeypatch.setattr(low_rank, "MAX_COLUMNS", 60 if few else 0)
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


def test_a_long_history_is_capped_and_that_is_noted(everything_is_large: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
from fairfold.algorithms.cooccurrence import cooccurrence, local_inverse, solver
source = torch.Generator().manual_seed(0)
lengths = torch.full((2_000,), 20)
items = torch.randint(1, 5_000, (2_000, 20), generator=source).cumsum(1).flatten() - 1
packed = cooccurrence.CoOccurrenceUpload.of(items, lengths, 2_048).shortest(100_000, torch.float32)
gram = local_inverse.SparseGram.of(packed, 100_000)
near = gram.neighborhoods(gram.most_related(20))
found = local_inverse.LocalPrecision.of(near, torch.ones(100_000, dtype=torch.float64), 4.0)
print(bool((found.roots > 0).all()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    good, peak = done.stdout.split()
    assert good == "True"
    assert float(peak) < 1_000


def test_a_list_of_pairs_takes_little_more_than_itself() -> None:
    """In a process of its own: no copies, sorted or merged, stand beside it; nor while it is added up."""
    code = """
import resource, torch
from fairfold.algorithms.cooccurrence import cooccurrence
from fairfold.federation.updates import add_vectors
from fairfold.kernels import native
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
lengths = torch.full((30_000,), 25)
items = torch.randint(1, 8_000, (30_000, 25), generator=torch.Generator().manual_seed(0)).cumsum(1).flatten() - 1
def summed(users):
    mine = cooccurrence.CoOccurrenceUpload.of(items[: 25 * users], lengths[:users], 2_048)
    return add_vectors(None, [mine.shortest(200_000, torch.float32)], cooccurrence.triangle_size(200_000))
summed(100)
before, total = peak(), summed(30_000)
print(native.status().available, (peak() - before) / len(total.values()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    compiled, each = done.stdout.split()
    assert compiled == "False" or float(each) < 30  # bytes: 8, 4 and 8 for the sum, and histories turned round


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
    alone = updates.SparseSum(50)
    for part in (parts[0], wanted.to_sparse().coalesce(), parts[0]):
        alone.add(part)
    assert torch.equal(alone.total().to_dense(), wanted)
