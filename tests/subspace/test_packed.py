"""Quantized rows and pairs: what is stored is what is held."""

from typing import Any

import numpy as np
import pytest
import torch

from fairfold.algorithms.cooccurrence.scorer import (
    CoOccurrenceScorer,
)
from fairfold.device import model as device_model
from fairfold.subspace.packed import QuantizedPairs, QuantizedRows, pair_bytes, pairs_within
from fairfold.subspace.projection import describe_projection, make_projection


def test_rows_without_columns_are_their_factors() -> None:
    table = torch.rand(20, 12, generator=torch.Generator().manual_seed(0)) + 0.1
    held = QuantizedRows((20, 12), (9, 2), 8)
    compact = held.reduce(table.view(-1))
    stored = held.packed(compact)
    assert len(stored) == held.bytes == 18
    assert held.unpacked(stored).equal(compact)
    torch.testing.assert_close(compact.view(9, 2), table[:9, :2], rtol=np.exp(1 / 32) - 1, atol=0)
    assert make_projection(describe_projection(held)) == held
    given, hidden = [torch.tensor([1, 4])], torch.arange(9)
    listed = torch.tensor([[5, 1, 0.5], [7, 4, 0.25], [8, 5, 0.1]])
    scores = []
    for rows in (compact.view(9, 2), held.table(stored)):
        model = CoOccurrenceScorer(rows, listed, 1.0)
        scores.append(model.scores(model.histories(given), hidden)[0])
    assert scores[0].equal(scores[1])
    assert scores[0].argsort(descending=True, stable=True)[:3].tolist() == [5, 7, 0]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_what_is_stored_is_what_is_held(bits: int) -> None:
    table = torch.randn(20, 12, generator=torch.Generator().manual_seed(0))
    table[:, :2] = table[:, :2].abs() + 0.1
    table[3, 2:] = 0
    held = QuantizedRows((20, 12), (9, 7), bits)
    compact = held.reduce(table.view(-1))
    stored = held.packed(compact)
    assert stored.dtype == torch.uint8
    assert len(stored) == held.bytes
    assert held.unpacked(stored).equal(compact)
    assert make_projection(describe_projection(held)) == held
    # Every product b_j ⟨w_j, w_i⟩ a_i is what the table's is, to what its bits and its factors' bytes allow.
    rows, wanted = compact.view(9, 7).double(), table[:9, :7].double()
    found, exact = ((of[:, 1:2] * of[:, 2:]) @ (of[:, :1] * of[:, 2:]).T for of in (rows, wanted))
    step = wanted[:, 2:].abs().amax(1) / (2 ** (bits - 1) - 1) / 2
    size = wanted[:, 2:].abs().sum(1)
    off = step[:, None] * size + step * size[:, None] + 5 * step[:, None] * step
    allowed = wanted[:, 1:2] * wanted[:, :1].T * off + (np.exp(1 / 16) - 1) * exact.abs() * 1.1
    assert bool(((found - exact).abs() <= allowed + 1e-3 * off).all())


def test_a_list_of_pairs_is_stored_as_it_is_held() -> None:
    rows = torch.tensor([[5, 3, 0.5], [4, 1, -0.25], [5, 0, 0.1], [2, 1, 0.2], [900_999, 4000, 0.3]])
    for items in (2, 8_000, 1 << 16, 1 << 24):  # counted, or listed; in two bytes, or in three
        for many in (0, 2, 3, 5):
            mine = rows.clone()
            mine[:, :2] %= items
            held = QuantizedPairs((5, 3), (many, 3), items)
            compact = held.reduce(mine.view(-1))
            assert len(held.packed(compact)) == held.bytes
            torch.testing.assert_close(held.unpacked(held.packed(compact)), compact)
            most = pairs_within(held.bytes, items)
            assert most >= many
            assert pair_bytes(most, items) <= held.bytes < pair_bytes(most + 1, items)
            triples = [triple for triple in compact.view(-1, 3).tolist() if triple[0] != triple[1]]
            on_device = device_model.parse_pairs(held.packed(compact).numpy().tobytes(), describe_projection(held))
            torch.testing.assert_close(torch.tensor(on_device).view(-1, 3), torch.tensor(triples).view(-1, 3))
            wanted = sorted(mine[:many].tolist(), key=lambda row: row[:2])
            torch.testing.assert_close(compact.view(-1, 3)[:, :2], torch.tensor(wanted).view(-1, 3)[:, :2])
            torch.testing.assert_close(compact.view(-1, 3)[:, 2].sum(), mine[:many, 2].sum(), rtol=0, atol=0.01)
            assert make_projection(describe_projection(held)) == held


@pytest.mark.parametrize(
    "facts", [{"kept": [2, 3], "bits": 9}, {"kept": [2, 3], "bits": True}, {"kept": [9, 3]}, {"kept": [2, 1]}]
)
def test_facts_of_no_block_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        make_projection({"kind": "quantized rows", "shape": [4, 4], "bits": 8} | facts)
    with pytest.raises((ValueError, KeyError)):
        make_projection({"kind": "quantized pairs", "shape": [4, 4], "items": 4} | facts)
