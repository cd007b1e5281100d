"""The hash: the golden vectors, and the collisions between rows that a linear family fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairfold.kernels.hashing import Layout, expand_seed, hash_blocks, mix, slots_and_signs
from fairfold.subspace import Subspace

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "slots.json").read_text())


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"n{case['full_size']}-Z{case['chunk']}-head{case['head']}")
def test_golden_vectors(case: dict[str, Any]) -> None:
    layout = Layout(
        case["full_size"], case["head"], case["tail"], case["chunk"], expand_seed(case["seed"]), case["signed"]
    )
    slots, signs = slots_and_signs(layout, torch.tensor(case["coordinates"]))
    assert slots.tolist() == case["slots"]
    assert signs.tolist() == case["signs"]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=50, unique=True), st.integers(0, 2**32 - 1))
def test_the_mixer_is_a_bijection(words: list[int], inner_key: int) -> None:
    assert len(set(mix(torch.tensor(words), inner_key).tolist())) == len(words)


def row_pair_variance(slot_of: Callable[[Tensor], Tensor], row_size: int = 32, pairs: int = 100_000) -> float:
    """Variance of how many of two rows' columns share a slot. A random hash into m slots gives row_size/m·(1 − 1/m)."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 1_000_000, (2, pairs), generator=generator)
    columns = torch.arange(row_size)
    first, second = (slot_of(side[:, None] * row_size + columns) for side in rows)
    return float((first == second).sum(1).double().var())


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_rows_collide_no_more_than_by_chance(seed: int) -> None:
    layout = Layout(32_000_000, 0, 128, 1, expand_seed(seed), True)
    variance = row_pair_variance(lambda coordinates: slots_and_signs(layout, coordinates)[0])
    assert variance == pytest.approx(0.25 * (1 - 1 / 128), abs=0.015)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_a_linear_hash_fails_the_row_pair_test(seed: int) -> None:
    """What the test above is for: (a·x + b) mod p mod m, the textbook universal family, lets whole rows collide."""
    prime = 2**31 - 1
    multiplier, shift = 1 + expand_seed(seed) % (prime - 1), expand_seed(seed + 1) % prime
    variance = row_pair_variance(lambda coordinates: (coordinates * multiplier + shift) % prime % 128)
    assert variance > 1


def test_signs_are_even_and_independent_of_the_slot() -> None:
    slots, signs = Subspace(200_000, 100, seed=9).slots(0, 200_000)
    per_slot = torch.zeros(100, dtype=torch.float64).index_add_(0, slots, signs.double())
    counts = torch.bincount(slots, minlength=100)
    assert float((per_slot / counts.sqrt()).square().mean()) == pytest.approx(1, abs=0.5)  # a fair coin: variance 1
    chi_square = ((counts - 2_000).double().square() / 2_000).sum() / 99
    assert float(chi_square) == pytest.approx(1, abs=0.5)


def test_signs_of_colliding_chunks_are_independent() -> None:
    layout = Layout(8_000_000, 0, 8_000, 8, expand_seed(4), True)
    slots, signs = slots_and_signs(layout, torch.arange(8_000_000))
    first_block = (slots < 8).view(-1, 8).all(1)
    patterns = signs.view(-1, 8)[first_block].double()
    correlation = (patterns @ patterns.T / 8).fill_diagonal_(0)
    assert len(patterns) > 500
    assert float(correlation.square().mean()) == pytest.approx(1 / 8, rel=0.1)


def test_different_seeds_are_different_hashes() -> None:
    blocks = torch.arange(100_000)
    first, second = (hash_blocks(expand_seed(seed), blocks) * 64 >> 32 for seed in (0, 1))
    assert float((first == second).double().mean()) == pytest.approx(1 / 64, abs=0.003)
    # Not a permutation of each other's coordinates either: the pairs that collide are other pairs under XOR.
    shift = int((expand_seed(0) ^ expand_seed(1)) & 0xFFFF)
    assert float((first[(blocks[:65536] ^ shift)] == second[:65536]).double().mean()) < 0.05
