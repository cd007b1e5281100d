"""Rows that are read as they are stored, in C against the specification and dense tables."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairfold.errors import InvalidVector
from fairfold.kernels import reference
from fairfold.kernels.native import calls
from fairfold.kernels.reference import PackedRows
from fairfold.subspace.packed import QuantizedRows

pytestmark = pytest.mark.usefixtures("instructions")
generated = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@generated
@given(st.integers(1, 20), st.integers(1, 70), st.integers(1, 4), st.integers(0, 10**6))
def test_products_and_sums(bits: int, rows: int, columns: int, users: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    block, most = QuantizedRows((rows, 2 + columns), (rows, 2 + columns), bits), 2 ** (bits - 1) - 1
    whole = torch.randint(-most, most + 1, (rows, columns), generator=source)
    table = block.table(block.packed(torch.cat([torch.ones(rows, 2), whole.float()], dim=1).view(-1)))
    numbers, ids = table[torch.arange(rows)], torch.randint(0, rows, (3 * rows,), generator=source)
    assert numbers.equal(whole.float())
    vectors, factors = torch.randn(users, columns, generator=source), torch.randn(3 * rows, generator=source)
    found, wanted = calls.packed_products(table, ids, vectors), reference.packed_products(table, ids, vectors)
    assert wanted.equal(vectors @ numbers[ids].T)
    size = vectors.norm(dim=1)[:, None] * numbers[ids].norm(dim=1)
    assert bool(((found - wanted).abs() <= 1e-6 * size).all())
    added, wanted = calls.packed_sum(table, ids, factors), reference.packed_sum(table, ids, factors)
    assert bool(((added - wanted).abs() <= 1e-6 * (factors.abs() @ numbers[ids].abs())).all())
    one = calls.packed_sum(table, ids[:1], factors[:1])
    assert bool(((one - factors[0] * numbers[ids[0]]).abs() <= 1e-6 * numbers[ids[0]].abs().max()).all())


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_bits_do_not_depend_on_threads(bits: int) -> None:
    block = QuantizedRows((5000, 39), (5000, 39), bits)
    table = block.table(block.packed(block.reduce(torch.rand(5000 * 39))))
    vectors, before, found = torch.randn(2, 37), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(calls.packed_products(table, torch.arange(5000), vectors))
    finally:
        torch.set_num_threads(before)
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


def test_what_does_not_fit_is_refused() -> None:
    content, vectors = torch.zeros(2 * (2 + 3), dtype=torch.uint8), torch.ones(1, 3)
    assert calls.packed_products(PackedRows(content, 2, 3, 8), torch.tensor([1]), vectors).shape == (1, 1)
    for columns, bits, row in ((3, 8, 2), (4, 8, 0), (3, 9, 0), (3, 8, -1)):
        table = PackedRows(content, 2, columns, bits)
        with pytest.raises(InvalidVector):
            calls.packed_products(table, torch.tensor([row]), vectors)
        with pytest.raises(InvalidVector):
            calls.packed_sum(table, torch.tensor([row]), vectors[0, :1])
