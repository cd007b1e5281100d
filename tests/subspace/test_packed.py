"""Quantized rows and pairs: what is stored is what is held."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.algorithms.cooccurrence.scorer import (
    CoOccurrenceScorer,
)
from fairfold.device import model as device_model
from fairfold.errors import InvalidMessage
from fairfold.subspace.packed import (
    LEVELS,
    QuantizedPairs,
    QuantizedRows,
    best_levels,
    nearest_levels,
    pair_bytes,
    pairs_within,
)
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


@st.composite
def pair_lists(draw: st.DrawFn) -> tuple[QuantizedPairs, torch.Tensor]:
    """A projection, and a list that it is of: of one item, of all pairs, with an item's pairs with itself."""
    items = draw(st.sampled_from([1, 2, 3, 9, 60, 8_000, (1 << 16) + 1, 1 << 24]))
    directed, number = draw(st.booleans()), st.integers(0, items - 1)
    listed = draw(st.lists(st.tuples(number, number), unique=True, max_size=90))
    ids = listed if directed else sorted({(max(pair), min(pair)) for pair in listed}, key=listed.__contains__)
    values = torch.randn(len(ids), generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) ** 3
    rows = torch.cat([torch.tensor(ids).view(-1, 2), values[:, None]], dim=1)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))
    return QuantizedPairs((len(rows), 3), (draw(st.integers(0, len(ids))), 3), items, directed), rows


@given(pair_lists())
def test_a_list_of_pairs_is_stored_as_it_is_held(given: tuple[QuantizedPairs, torch.Tensor]) -> None:
    held, rows = given
    (many, _), items, directed = held.kept, held.items, held.directed
    compact = held.reduce(rows.view(-1))
    stored = held.packed(compact)
    assert len(stored) == held.bytes == device_model.packed_bytes(describe_projection(held))
    assert held.unpacked(stored).equal(compact)
    assert make_projection(describe_projection(held)) == held
    assert pairs_within(held.bytes + 1, items, directed) >= many
    wanted = {(j, i): value for j, i, value in rows[:many].tolist()}
    found = {(j, i): value for j, i, value in compact.view(-1, 3).tolist()}
    assert list(found) == sorted(wanted)
    if len(wanted) <= LEVELS:  # as many levels as values
        assert found == wanted
    rounding = 1e-5 * sum(map(abs, wanted.values()))
    assert sum(found.values()) == pytest.approx(sum(wanted.values()), abs=rounding)  # levels are means
    triples = [(j, i, value) for (j, i), value in found.items() if i != j]
    on_device = device_model.parse_pairs(stored.numpy().tobytes(), describe_projection(held))
    assert list(zip(*on_device, strict=True)) == triples


@given(st.integers(0, 10**7), st.sampled_from([1, 2, 60, 3_706, 40_981, 1 << 24]), st.booleans())
def test_as_many_pairs_fit_a_budget_as_its_bytes_say(budget: int, items: int, directed: bool) -> None:
    most = pairs_within(budget, items, directed)
    assert (
        pair_bytes(most, items, directed) <= budget < min(pair_bytes(most + more, items, directed) for more in (2, 3))
    )


def test_levels_are_better_than_steps_and_than_the_average() -> None:
    values = torch.rand(5_000, generator=torch.Generator().manual_seed(1)) ** 4
    levels = best_levels(values)
    off = (levels[nearest_levels(values, levels)] - values).square().mean()
    steps = ((values * 15).round() / 15 - values).square().mean()
    assert float(off) < 0.75 * float(steps)
    assert float(off) < 0.01 * float(values.var())


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("many", [1, 7, 40])
def test_damaged_lists_are_refused_or_are_of_known_items(many: int, directed: bool) -> None:
    """The same ones by the worker and by the small device."""
    draw, items, refused = random.Random(many), 60, 0
    held = QuantizedPairs((many, 3), (many, 3), items, directed)
    rows = torch.tensor([[j, draw.randrange(j), draw.random()] for j in draw.sample(range(1, items), many)])
    right = held.packed(held.reduce(rows.view(-1)))
    for _ in range(300):
        wrong, outcomes = right.clone(), list[Any]()
        for _ in range(draw.choice([1, 2, 9])):
            wrong[draw.choice([draw.randrange(len(wrong)), draw.randrange(len(wrong) - 4, len(wrong))])] = (
                draw.randrange(256)
            )
        try:
            listed = held.unpacked(wrong).view(-1, 3)
            known = bool((listed[:, :2] < items).all())
            outcomes.append([tuple(row) for row in listed.tolist() if row[0] != row[1]] if known else None)
        except InvalidMessage:
            outcomes.append(None)
        try:
            pairs = device_model.parse_pairs(wrong.numpy().tobytes(), describe_projection(held))
            outcomes.append(list(zip(*pairs, strict=True)))
        except InvalidMessage:
            outcomes.append(None)
        assert outcomes[0] == outcomes[1]
        refused += outcomes[0] is None
    assert 20 <= refused <= 280


@pytest.mark.parametrize(
    "facts", [{"kept": [2, 3], "bits": 9}, {"kept": [2, 3], "bits": True}, {"kept": [9, 3]}, {"kept": [2, 1]}]
)
def test_facts_of_no_block_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        make_projection({"kind": "quantized rows", "shape": [4, 4], "bits": 8} | facts)
    with pytest.raises((ValueError, KeyError)):
        make_projection({"kind": "quantized pairs", "shape": [4, 4], "items": 4, "directed": False} | facts)
