"""One subspace: reduction and recovery are what the paper's equations say."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.subspace import Subspace
from tests.support.strategies import dense, dense_from_definition, subspaces, vector


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@given(subspaces)
def test_recovery_is_multiplication_by_s(subspace: Subspace) -> None:
    matrix = dense_from_definition(subspace)
    compact = vector(subspace.size)
    assert_close(subspace.recover(compact), matrix @ compact)


@given(subspaces)
def test_recover_then_reduce_is_the_identity_on_slots_in_use(subspace: Subspace) -> None:
    compact = vector(subspace.size)
    in_use = subspace.counts() > 0
    assert_close(subspace.reduce(subspace.recover(compact)), torch.where(in_use, compact, 0))


@given(subspaces)
def test_reduce_then_recover_is_idempotent(subspace: Subspace) -> None:
    once = subspace.recover(subspace.reduce(vector(subspace.full_size)))
    assert_close(subspace.recover(subspace.reduce(once)), once)


@given(subspaces)
def test_reduction_is_the_least_squares_projection(subspace: Subspace) -> None:
    full = vector(subspace.full_size)
    solution = torch.linalg.lstsq(dense_from_definition(subspace), full[:, None], driver="gelsd").solution[:, 0]
    torch.testing.assert_close(subspace.reduce(full), solution, rtol=1e-8, atol=1e-9)


@given(subspaces)
def test_accumulate_is_the_adjoint_of_recover(subspace: Subspace) -> None:
    compact, full = vector(subspace.size, 1), vector(subspace.full_size, 2)
    assert_close(subspace.recover(compact) @ full, compact @ subspace.accumulate(full))


@given(subspaces, st.data())
def test_partial_recovery_is_a_part_of_recovery(subspace: Subspace, data: st.DataObject) -> None:
    compact = vector(subspace.size)
    start = data.draw(st.integers(0, subspace.full_size))
    stop = data.draw(st.integers(start, subspace.full_size))
    whole = subspace.recover(compact)
    assert torch.equal(subspace.recover_range(compact, start, stop), whole[start:stop])
    divisors = [size for size in range(1, subspace.full_size + 1) if subspace.full_size % size == 0]
    row_size = data.draw(st.sampled_from(divisors))
    rows = torch.tensor(
        data.draw(st.lists(st.integers(0, subspace.full_size // row_size - 1), max_size=8)), dtype=torch.long
    )
    assert torch.equal(subspace.recover_rows(compact, rows, row_size), whole.view(-1, row_size)[rows])
    gradient = vector(len(rows) * row_size, 3).view(len(rows), row_size)
    scattered = torch.zeros(subspace.full_size // row_size, row_size, dtype=torch.float64).index_add_(0, rows, gradient)
    assert_close(subspace.accumulate_rows(gradient, rows), subspace.accumulate(scattered.view(-1)))


@given(subspaces.filter(lambda subspace: subspace.orthonormal))
def test_unit_columns_are_orthonormal(subspace: Subspace) -> None:
    matrix = dense(subspace)
    in_use = (subspace.counts() > 0).double()
    assert_close(matrix.T @ matrix, torch.diag(in_use))


@given(subspaces.filter(lambda subspace: subspace.orthonormal))
def test_with_unit_columns_a_step_inside_is_the_projected_step_outside(subspace: Subspace) -> None:
    compact, gradient, step = vector(subspace.size, 1), vector(subspace.full_size, 2), 0.1
    inside = subspace.recover(compact - step * subspace.accumulate(gradient))
    outside = subspace.recover(subspace.reduce(subspace.recover(compact) - step * gradient))
    assert_close(inside, outside)


@given(subspaces)
def test_a_subspace_of_full_size_is_the_full_space(subspace: Subspace) -> None:
    whole = Subspace(subspace.full_size, subspace.full_size, subspace.seed, subspace.mapping, subspace.chunk)
    full = vector(subspace.full_size)
    assert torch.equal(whole.reduce(full), full)
    assert torch.equal(whole.recover(full), full)
    assert subspace.nests_in(whole)
