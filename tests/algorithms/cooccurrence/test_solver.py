"""The solver: spectrum, pairs and neighbors against independent EASE and full searches."""

import numpy as np
import pytest
import torch

from fairfold.algorithms.cooccurrence import cooccurrence, solver
from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.cooccurrence import SUM
from fairfold.algorithms.cooccurrence.scorer import (
    NEIGHBORS,
    ROWS,
    CoOccurrenceScorer,
)
from fairfold.algorithms.cooccurrence.solver import Precision, SolverSettings
from tests.support.cooccurrence import co_occurrence_federation, dataset_of, dense_matrix, pair_sums
from tests.support.federations import after_rounds, tiny_data


def test_all_of_the_spectrum_is_ease() -> None:
    """B = I − P / diag P, by numpy, on the same sum: b_j S_ij a_i is its scores, whatever the weights of items."""
    x = dense_matrix(tiny_data(4, 50, 20).train)
    gram = x.T @ x
    for beta in (0.0, 0.4):
        counts = x.sum(0).clip(1)
        scale = (counts / counts.mean()) ** -beta
        inverse = np.linalg.inv(scale[:, None] * gram * scale + 3 * np.eye(20))
        ease = -inverse / np.diag(inverse)
        np.fill_diagonal(ease, 0)
        found = Precision.of(torch.from_numpy(gram.copy()), torch.from_numpy(x.sum(0)), beta, 3.0)
        roots, scales = found.roots.clone(), found.scales
        values, vectors = solver.spectrum(found, 20)
        partial = found.correlations()
        np.testing.assert_allclose((x * (scales * roots).numpy()) @ partial.numpy() / roots.numpy(), x * scale @ ease)
        np.testing.assert_allclose((vectors * values @ vectors.T).numpy(), partial.numpy(), atol=1e-9)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_leading_eigenpairs_are_those_of_the_whole(dtype: torch.dtype, error: float) -> None:
    source = torch.Generator().manual_seed(1)
    half = torch.randn(500, 500, generator=source, dtype=torch.float64) * torch.linspace(3, 0.1, 500)
    matrix, roots = half @ half.T / 500 + torch.eye(500), torch.rand(500, generator=source, dtype=torch.float64) + 0.5
    values, vectors = solver.top_eigenpairs(matrix.to(dtype), roots, 10)  # a Krylov space
    whole = roots[:, None] * matrix * roots
    exact = torch.linalg.eigh(whole)
    torch.testing.assert_close(values.double(), exact.eigenvalues[-10:].flip(0), rtol=error, atol=0)
    left = (whole @ vectors.double() - vectors * values).norm(dim=0) / values
    assert float(left.max()) <= 2 * solver.TOLERANCE[dtype]
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(10, dtype=dtype), rtol=0, atol=100 * error)


@pytest.mark.parametrize("rank", [1, 40])
def test_a_spectrum_of_few_different_values_is_found(rank: int) -> None:
    """A Krylov space is exhausted after few products, and goes on with what chance brings."""
    source = torch.Generator().manual_seed(2)
    half = torch.randn(600, rank, generator=source)
    matrix = half @ half.T + torch.eye(600)
    values, vectors = solver.top_eigenpairs(matrix, torch.ones(600), 60)
    exact = torch.linalg.eigvalsh(matrix.double())[-60:].flip(0)
    torch.testing.assert_close(values.double(), exact, rtol=1e-3, atol=0)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(60), rtol=0, atol=1e-4)


def test_items_without_uploads_bring_no_false_eigenvalues() -> None:
    """All of theirs are 1: a space that is exhausted must not go on with rounding errors."""
    source = torch.Generator().manual_seed(3)
    half = torch.randn(100, 150, generator=source, dtype=torch.float64)
    matrix = torch.eye(2_000, dtype=torch.float64)
    matrix[:100, :100] += half @ half.T
    for dtype, error in ((torch.float32, 1e-3), (torch.float64, 1e-7)):
        values, vectors = solver.top_eigenpairs(matrix.to(dtype), torch.ones(2_000), 128)
        exact = torch.linalg.eigvalsh(matrix[:100, :100]).flip(0)
        torch.testing.assert_close(values[:100].double(), exact, rtol=error, atol=0)
        torch.testing.assert_close(values[100:], torch.ones(28, dtype=dtype), rtol=error, atol=0)
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(128, dtype=dtype), rtol=0, atol=error)


def test_single_precision_gives_the_correlations_of_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the sum is so large against the ridge that items which are always together could not be notes apart."""
    train = tiny_data(4, 400, 60).train
    counts = train.counts_by_item
    packed = pair_sums([train.of(user) for user in range(400)], cooccurrence.history_weights(train.counts_by_user), 60)
    whole = Precision.of(cooccurrence.unpack_triangle(packed), counts, 0.15, 4.0)
    monkeypatch.setattr(solver, "SMALL_MATRIX", 0)
    single = Precision.of(cooccurrence.unpack_triangle(packed), counts, 0.15, 4.0)
    assert whole.matrix.dtype == torch.float64
    assert single.matrix.dtype == torch.float32
    torch.testing.assert_close(single.roots, whole.roots, rtol=1e-5, atol=0)
    torch.testing.assert_close(single.correlations().double(), whole.correlations(), rtol=0, atol=1e-5)
    assert Precision.of(cooccurrence.unpack_triangle(packed * 1e6), counts, 0.15, 4.0).matrix.dtype == torch.float64
    together = torch.full((400, 400), 2_000.0)  # all items always: the worst sum that single precision is trusted with
    found = Precision.of(together, torch.ones(400), 0.0, 1.0)
    assert found.matrix.dtype == torch.float32
    exact = torch.full((400, 400), 2_000.0, dtype=torch.float64) + torch.eye(400, dtype=torch.float64)
    torch.testing.assert_close(found.roots, torch.linalg.inv(exact).diagonal().sqrt(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("many", [1, 7, 100, 10_000])
def test_the_strongest_pairs_are_those_of_a_full_search(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(solver, "ROWS_AT_ONCE", 8)
    source = torch.Generator().manual_seed(3)
    matrix = torch.randn(30, 30, generator=source, dtype=torch.float64)
    matrix = (matrix + matrix.T).fill_diagonal_(0)
    counts = torch.arange(60, 30, -1)
    left = matrix.abs() * (counts[:, None] * counts) ** solver.POPULAR_PAIRS
    ranked = sorted(((float(left[i, j]), i, j) for i in range(30) for j in range(i)), reverse=True)[:many]
    found = solver.strongest_pairs(matrix, counts, many)
    assert found.shape == (many, 3)
    wanted = torch.tensor([[i, j, matrix[i, j]] for _, i, j in ranked])
    torch.testing.assert_close(found[: len(ranked)], wanted.double(), rtol=0, atol=1e-6)
    assert not bool(found[len(ranked) :].any())


def test_one_ridge_for_histories_of_any_length() -> None:
    """In the model that is chosen, as well; pairs that weigh less have a smaller one."""
    histories = [[user % 8 + place for place in range(4)] for user in range(16)]
    for exponent, wanted in ((0.5, 4.0 * 75**0.5), (1.0, 4.0)):
        for mine in (histories, [items + [item + 11 for item in items] for items in histories]):
            federation = co_occurrence_federation(dataset_of(mine, 22), history_exponent=exponent)
            state = after_rounds(federation, federation.initial(), 1)
            assert float(state.algorithm_state["solver"]["solver"][0]) == pytest.approx(wanted)


def test_few_users_have_no_more_items_than_a_multiple_of_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two items with as many users none is kept without the other."""
    histories = [list(range(user, user + 12)) for user in range(8)]  # 8 users; counts rise to 8 and fall again
    data = dataset_of(histories, 19)
    for most, support in ((9, 3), (1.5, 5), (1, 7), (0.7, 8)):
        monkeypatch.setattr(cooccurrence, "ITEMS_PER_USER", most)
        federation = co_occurrence_federation(data, support=3)
        model = cooccurrence.model_of(federation.plan)
        counts = data.train.counts_by_item
        assert model.min_support == support
        assert model.head == int((counts >= support).sum())
        assert model.head <= 8 * most or support == 3
        assert most == 9 or int((counts >= support - 1).sum()) > 8 * most


def test_more_support_is_the_leading_block_of_the_same_sum() -> None:
    federation = co_occurrence_federation(tiny_data(2, 30, 25))
    plan, state = federation.plan, after_rounds(federation, federation.initial(), 1)
    algorithm, sums = plan.algorithm, state.algorithm_state[SUM][SUM]
    assert isinstance(algorithm, CoOccurrence)
    part = algorithm.solve(plan, sums, SolverSettings(4.0, 4, 0.15, 0.05, 10))
    small = co_occurrence_federation(tiny_data(2, 30, 25), max_items=10)
    after = after_rounds(small, small.initial(), 1)
    few = CoOccurrence.solve(
        small.plan.algorithm,  # type: ignore[arg-type]
        small.plan,
        sums[: cooccurrence.triangle_size(10)],
        SolverSettings(4.0, 4, 0.15, 0.05, 10),
    )
    assert len(after.algorithm_state[SUM][SUM]) == cooccurrence.triangle_size(10)
    torch.testing.assert_close(part[ROWS][:10, :6], few[ROWS])
    assert not bool(part[ROWS][10:].any())
    near = part[NEIGHBORS].view(5, -1, 3)
    assert bool((near[:, :10, :2] < 10).all())
    assert bool((near[:, 10:, 0] == near[:, 10:, 1]).all())


def test_neighbors_are_the_most_similar_and_count_in_one_direction() -> None:
    """By counts of pairs, where histories are of one length: Jaccard; and a score is the rows', and their sum."""
    histories = [sorted({(user * 7 + step * step) % 23 for step in range(30)})[:6] for user in range(50)]
    x = dense_matrix(dataset_of(histories, 23).train)
    both, counts = x.T @ x, x.sum(0)
    alike = both / np.maximum(counts[:, None] + counts - both, 1)
    np.fill_diagonal(alike, 0)
    found = solver.nearest_neighbors(torch.from_numpy(both / 6), torch.from_numpy(counts), 3).numpy().reshape(3, 23, 3)
    for item in range(23):
        best = np.sort(alike[item])[::-1][:3]
        np.testing.assert_allclose(found[:, item, 2], best, atol=1e-12)
        real = best > 0
        np.testing.assert_allclose(alike[item, found[real, item, 1].astype(int)], best[real])
        assert (found[~real, item, 1] == item).all()
    rows, listed = torch.rand(23, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(0, 3)
    near = torch.from_numpy(found.reshape(-1, 3)).float()
    alone, with_near = CoOccurrenceScorer(rows, listed, 1.0), CoOccurrenceScorer(rows, listed, 1.0, near)
    mine, everything = [torch.tensor([1, 4, 9])], torch.arange(23)
    added = with_near.scores(with_near.histories(mine), everything) - alone.scores(alone.histories(mine), everything)
    wanted = torch.zeros(23)
    for item, other, value in near.tolist():
        wanted[int(item)] += value * (item != other and int(other) in (1, 4, 9))
    torch.testing.assert_close(added[0], wanted, rtol=1e-4, atol=1e-5)
    assert float(added.abs().max()) > 0.05
