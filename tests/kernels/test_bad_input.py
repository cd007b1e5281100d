"""Bad rows and shapes are refused before anything is read or written; odd but valid ones are served."""

import pytest
import torch

from fairfold.errors import InvalidRow, InvalidVector
from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout, expand_seed
from fairfold.kernels.native import loader

LAYOUT = Layout(100 * 8 + 3, 16, 64, 8, expand_seed(4), True)  # three coordinates past the last whole row


@pytest.fixture(params=["native", "reference"], autouse=True)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(loader, "_load", lambda: (None, "switched off for this test"))
    elif loader.library() is None:
        pytest.skip(loader.status().reason)
    return str(request.param)


LONGS, WORDS = torch.int64, torch.int32


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(bad, LONGS) for bad in (-1, 100, 2**40, -(2**63), 2**63 - 1)]
    + [(bad, WORDS) for bad in (-1, 100, -(2**31), 2**31 - 1)],
)
@pytest.mark.parametrize("at", [0, 7, -1])
def test_rows_the_table_does_not_have(bad: int, dtype: torch.dtype, at: int) -> None:
    rows = torch.arange(50, dtype=dtype)
    rows[at] = bad
    compact, values = torch.randn(LAYOUT.size), torch.randn(50, 8)
    before = compact.clone()
    for call in (
        lambda: ops.recover_rows(LAYOUT, compact, rows, 8),
        lambda: ops.accumulate_rows(LAYOUT, values, rows, compact),
        lambda: ops.touched_rows(LAYOUT, values, rows),
        lambda: ops.sgd_rows(LAYOUT, compact, values, rows, 0.1),
    ):
        with pytest.raises(InvalidRow, match=str(bad)):
            call()
    assert torch.equal(compact, before)
    assert issubclass(InvalidRow, IndexError), "as torch's own embedding raises"


def test_vectors_of_the_wrong_size(body: str) -> None:
    if body == "reference":
        pytest.skip("torch itself refuses, with errors of its own")
    rows, short = torch.tensor([1]), torch.randn(LAYOUT.size - 1)
    with pytest.raises(InvalidVector):
        ops.recover_rows(LAYOUT, short, rows, 8)
    with pytest.raises(InvalidVector):
        ops.accumulate_rows(LAYOUT, torch.randn(1, 8), rows, short)
    with pytest.raises(InvalidVector):
        ops.accumulate_rows(LAYOUT, torch.randn(3, 8), rows, torch.zeros(LAYOUT.size))
    with pytest.raises(InvalidVector):
        ops.touched_rows(LAYOUT, torch.randn(3, 8), rows)
    with pytest.raises(InvalidVector):
        ops.recover_range(LAYOUT, torch.randn(LAYOUT.size), LAYOUT.full_size - 1, torch.empty(2))


def test_positions_out_of_bounds(body: str) -> None:
    signs = torch.ones(1, 1, dtype=torch.int8)
    for position in (-1, 4) if body == "native" else (4,):
        with pytest.raises((InvalidVector, IndexError)):
            ops.recover_positions(torch.zeros(4), torch.tensor([[position]], dtype=torch.int32), signs)


def test_nothing_to_do() -> None:
    none, values = torch.empty(0, dtype=torch.int64), torch.empty(0, 8)
    compact = torch.randn(LAYOUT.size)
    before = compact.clone()
    assert ops.recover_rows(LAYOUT, compact, none, 8).shape == (0, 8)
    ops.accumulate_rows(LAYOUT, values, none, compact)
    ops.sgd_rows(LAYOUT, compact, values, none, 0.1)
    slots, sums = ops.touched_rows(LAYOUT, values, none)
    assert slots.shape == sums.shape == (0,)
    ops.recover_range(LAYOUT, compact, 5, torch.empty(0))
    ops.accumulate_range(LAYOUT, torch.empty(0), 5, compact)
    ops.count_range(LAYOUT, 5, 5, torch.zeros(LAYOUT.size, dtype=torch.int32))
    assert torch.equal(compact, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_to_the_specification(dtype: torch.dtype) -> None:
    compact = torch.randn(LAYOUT.size).to(dtype)
    rows = ops.recover_rows(LAYOUT, compact, torch.tensor([1, 2]), 8)
    assert rows.dtype is dtype
    assert torch.equal(rows.float(), ops.recover_rows(LAYOUT, compact.float(), torch.tensor([1, 2]), 8))


def test_targets_with_gaps_are_written_in_place() -> None:
    compact = torch.randn(LAYOUT.size)
    wide = torch.zeros(40, 2)
    ops.recover_range(LAYOUT, compact, 3, wide[:, 1])
    expected = torch.empty(40)
    ops.recover_range(LAYOUT, compact, 3, expected)
    assert torch.equal(wide[:, 1], expected)
    assert not wide[:, 0].any()
    sums = torch.zeros(LAYOUT.size, 2)
    ops.accumulate_rows(LAYOUT, torch.ones(2, 8), torch.tensor([1, 2]), sums[:, 1])
    assert sums[:, 1].abs().sum() > 0
    assert not sums[:, 0].any()
