"""The compiled body against the specification, on generated layouts, for every instruction set."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairfold.kernels import hashing, ops, reference
from fairfold.kernels.hashing import Layout, expand_seed
from fairfold.kernels.native import calls
from tests.kernels.harness import Table, assert_sums_close, gapped, layouts, ranges, tables

pytestmark = pytest.mark.usefixtures("instructions")
GOLDEN = Path(__file__).parents[1] / "golden" / "slots.json"

# The fixture only selects machine code: examples need not start it afresh.
generated = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_golden_slots_and_signs() -> None:
    for case in json.loads(GOLDEN.read_text()):
        layout = Layout(
            case["full_size"], case["head"], case["tail"], case["chunk"], expand_seed(case["seed"]), case["signed"]
        )
        found = calls.slots_and_signs(layout, torch.tensor(case["coordinates"]))
        assert found[0].tolist() == case["slots"]
        assert found[1].tolist() == case["signs"]


@pytest.mark.parametrize("chunk", [1, 8, 48])
def test_rows_beyond_32_bits_match_golden_rule(chunk: int) -> None:
    """Tables of more than 2**32 pieces take another path: their rows must be those of the specification."""
    layout = Layout(2**40, 4096, 4800, chunk, expand_seed(5), True)
    compact = torch.randn(layout.size)
    rows = torch.tensor([0, 1, 511, 512, 2**32 // 8, 2**37 // 8 - 1, 2**40 // 8 - 1, 2**39 // 8, 5])
    found = calls.recover_rows(layout, compact, rows, 8)
    assert torch.equal(found, reference.recover_rows(layout, compact, rows, 8))


@pytest.mark.parametrize("head", [0, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row_size", [8, 12, 64])
def test_single_values_of_a_vector_beyond_the_second_cache(head: int, dtype: torch.dtype, row_size: int) -> None:
    """They are hashed in small groups, some way ahead of where they are read."""
    layout = Layout(960_000, head, 200_003, 1, expand_seed(7), True)
    compact = torch.randn(layout.size, dtype=dtype)
    for count in (0, 1, 3, 500):
        rows = torch.randint(0, 960_000 // row_size, (count,))
        found = calls.recover_rows(layout, compact, rows, row_size)
        assert torch.equal(found, reference.recover_rows(layout, compact, rows, row_size))
    for start, stop in ((0, 960_000), (0, 5), (998, 1013), (5000, 5000 + row_size), (77, 50_001)):
        out, expected = torch.full((stop - start,), 7.0, dtype=dtype), torch.empty(stop - start, dtype=dtype)
        calls.recover_range(layout, compact, start, out)
        reference.recover_range(layout, compact, start, expected)
        assert torch.equal(out, expected)


@generated
@given(table=tables())
def test_recover_rows(table: Table) -> None:
    compact = table.compact()
    found = calls.recover_rows(table.layout, compact, table.rows, table.row_size)
    assert torch.equal(found, reference.recover_rows(table.layout, compact, table.rows, table.row_size))
    again = calls.recover_rows(table.layout, gapped(compact), table.rows, table.row_size)
    assert torch.equal(again, found)


@generated
@given(table=tables())
def test_accumulate_rows_and_touched_rows(table: Table) -> None:
    layout, values = table.layout, table.values()
    expected = torch.zeros(layout.size, dtype=table.dtype)
    reference.accumulate_rows(layout, values, table.rows, expected)
    sums = torch.zeros(layout.size, dtype=table.dtype)
    calls.accumulate_rows(layout, gapped(values), table.rows, sums)
    assert_sums_close(sums, expected, values.numel(), float(values.abs().max()) if values.numel() else 0)

    touched = calls.touched_rows(layout, values, table.rows)
    slots, summed = touched
    assert torch.equal(slots, reference.touched_rows(layout, values, table.rows)[0])
    dense = torch.zeros(layout.size, dtype=table.dtype)
    dense[slots] = summed
    assert torch.equal(dense, sums), "touched slots must carry the bits of the dense gradient"


@generated
@given(data=st.data(), layout=layouts())
def test_ranges(data: st.DataObject, layout: Layout) -> None:
    start, stop = data.draw(ranges(layout))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    compact, values = torch.randn(layout.size, dtype=dtype), torch.randn(stop - start, dtype=dtype)
    out, expected = torch.full((stop - start,), 7.0, dtype=dtype), torch.empty(stop - start, dtype=dtype)
    calls.recover_range(layout, compact, start, out)
    reference.recover_range(layout, compact, start, expected)
    assert torch.equal(out, expected)

    sums, counts = torch.ones(layout.size, dtype=dtype), torch.ones(layout.size, dtype=torch.int32)
    expected_sums, expected_counts = sums.clone(), counts.clone()
    only_counts = counts.clone()
    calls.accumulate_range(layout, values, start, sums, counts)
    calls.count_range(layout, start, stop, only_counts)
    reference.accumulate_range(layout, values, start, expected_sums, expected_counts)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(only_counts, expected_counts)
    assert_sums_close(sums, expected_sums, stop - start, 5.0)


@generated
@given(layout=layouts(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_reduce(layout: Layout, dtype: torch.dtype) -> None:
    full = torch.randn(layout.full_size, dtype=dtype)
    found = calls.reduce(layout, gapped(full))
    assert_sums_close(found, reference.reduce(layout, full), layout.full_size, 5.0)


@generated
@given(table=tables())
def test_active_slots_and_positions(table: Table) -> None:
    layout, rows = table.layout, table.rows
    slots, signs = calls.slots_and_signs(layout, reference.row_coordinates(rows, table.row_size))
    numbers, active = calls.factorize(slots)
    for mine, expected in zip((numbers, active), reference.factorize(slots), strict=True):
        assert torch.equal(mine, expected)
    found = numbers, signs

    compact, values = table.compact(), table.values()
    gathered = calls.recover_positions(compact[active], *found)
    assert torch.equal(gathered, reference.recover_rows(layout, compact, rows, table.row_size))
    sums, dense = torch.zeros(len(active), dtype=table.dtype), torch.zeros(layout.size, dtype=table.dtype)
    calls.accumulate_positions(values, *found, sums)
    calls.accumulate_rows(layout, values, rows, dense)
    assert torch.equal(sums, dense[active])


@generated
@given(layout=layouts(), seed=st.integers(0, 2**31))
def test_slots_and_signs(layout: Layout, seed: int) -> None:
    coordinates = torch.randint(0, layout.full_size, (50,), generator=torch.Generator().manual_seed(seed))
    found = calls.slots_and_signs(layout, coordinates)
    expected = hashing.slots_and_signs(layout, coordinates)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("few", [False, True])
def test_bits_do_not_depend_on_the_number_of_threads(chunk: int, few: bool) -> None:
    """Also where all rows are one, so that most threads find nothing of theirs for long."""
    before = torch.get_num_threads()
    layout = Layout(400_000 * 16, 30_016, 60_000, chunk, expand_seed(1), True)
    rows, values = torch.randint(0, 1 if few else 400_000, (20_000,)), torch.randn(20_000, 16)
    compact, full = torch.randn(layout.size), torch.randn(layout.full_size)
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            sums, rowsums = torch.zeros(layout.size), torch.zeros(layout.size)
            counts = torch.zeros(layout.size, dtype=torch.int32)
            recovered = torch.empty(layout.full_size)
            ops.accumulate_range(layout, full, 0, sums, counts)
            ops.accumulate_rows(layout, values, rows, rowsums)
            ops.recover_range(layout, compact, 0, recovered)
            looked_up = ops.recover_rows(layout, compact, rows, 16)
            reduced = ops.reduce(layout, full)
            assert torch.equal(reduced, sums / counts.clamp(min=1))
            results.append((sums, counts, rowsums, recovered, looked_up, reduced))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, results[0], strict=True))


@generated
@given(st.lists(st.one_of(st.integers(0, 12), st.integers(-(2**63), 2**63 - 1)), max_size=80), st.booleans())
def test_factorize(keys: list[int], flat: bool) -> None:
    given_keys = torch.tensor(keys, dtype=torch.int64)
    if not flat:
        given_keys = torch.stack([given_keys, given_keys.flip(0)], 1)
    found, expected = calls.factorize(given_keys), reference.factorize(given_keys)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[1][found[0].long()], given_keys)
