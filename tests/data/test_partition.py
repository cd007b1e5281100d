"""Clients: every row belongs to exactly one, and a million of them cost what the data costs."""

import tracemalloc

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.data.interactions import Interactions
from fairfold.data.partition import Partition, by_label, by_user, by_writer
from fairfold.errors import InvalidData


def is_partition(clients: Partition, rows: int) -> bool:
    held = torch.cat([clients.of(client) for client in range(len(clients))])
    return torch.equal(held.sort().values, torch.arange(rows))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1), st.integers(1, 12), st.floats(0.01, 100), st.integers(0, 5))
def test_every_row_belongs_to_one_client(labels: list[int], clients: int, concentration: float, seed: int) -> None:
    split = by_label(torch.tensor(labels), clients, concentration, seed)
    assert len(split) == clients
    assert is_partition(split, len(labels))
    again = by_label(torch.tensor(labels), clients, concentration, seed)
    assert split.rows is not None
    assert again.rows is not None
    assert torch.equal(split.rows, again.rows)


def labels_a_client(concentration: float) -> float:
    labels = torch.arange(10_000) % 10
    split = by_label(labels, 100, concentration, seed=3).without_empty()
    return float(numpy.mean([len(set(labels[split.of(client)].tolist())) for client in range(len(split))]))


def test_concentration_decides_how_mixed_the_labels_are() -> None:
    assert labels_a_client(0.01) < 2.5
    assert labels_a_client(100.0) > 9.9


def test_shares_follow_the_dirichlet_distribution() -> None:
    # Variance of a share of a symmetric Dirichlet distribution: (1/k)(1 - 1/k) / (k·a + 1).
    size, concentration = 20, 0.5
    counts = torch.cat([by_label(torch.zeros(2000).long(), size, concentration, seed).counts for seed in range(200)])
    expected = (1 / size) * (1 - 1 / size) / (size * concentration + 1)
    assert float((counts / 2000).var()) == pytest.approx(expected, rel=0.1)


def test_one_client_a_user() -> None:
    pairs = torch.tensor([[0, 1], [0, 2], [2, 0]])
    interactions = Interactions.from_pairs(pairs[:, 0], pairs[:, 1], 3, 3)
    clients = by_user(interactions)
    assert clients.counts.tolist() == [2, 0, 1]
    assert interactions.items[clients.of(0)].tolist() == [1, 2]
    assert len(clients.without_empty()) == 2
    assert clients.without_empty().of(1).tolist() == [2]


def test_one_client_a_writer() -> None:
    clients = by_writer(torch.tensor([1, 0, 1, 3]))
    assert [clients.of(client).tolist() for client in range(4)] == [[1], [0, 2], [], [3]]


@pytest.mark.parametrize(("clients", "concentration"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_what_makes_no_division(clients: int, concentration: float) -> None:
    with pytest.raises(InvalidData):
        by_label(torch.zeros(3).long(), clients, concentration)


def test_writers_below_0() -> None:
    with pytest.raises(InvalidData, match="-7"):
        by_writer(torch.tensor([0, -7]))


def test_a_million_clients_cost_what_the_data_costs() -> None:
    labels = torch.arange(2_000_000) % 10
    tracemalloc.start()
    clients = by_label(labels, 1_000_000, 0.5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(clients) == 1_000_000
    assert clients.rows is not None
    stored = (
        clients.offsets.element_size() * clients.offsets.numel() + clients.rows.element_size() * clients.rows.numel()
    )
    assert stored == 8 * (1_000_001 + 2_000_000)
    assert peak < 150e6  # a handful of numbers a row, no object a client
