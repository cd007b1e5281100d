"""Negatives are never positives, are uniform, and are the same for the same seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.data.interactions import Interactions
from fairfold.data.sampling import NegativeSampler, generator
from fairfold.errors import InvalidData, InvalidSettings


def random_train(seed: int, users: int, items: int, density: float) -> Interactions:
    chance = torch.rand(users, items, generator=torch.Generator().manual_seed(seed))
    owned = chance < density
    owned[torch.arange(users), chance.argmax(1)] = False  # one item is left to draw
    pairs = owned.nonzero()
    return Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, items)


@given(
    seed=st.integers(0, 2**32),
    users=st.integers(1, 10),
    items=st.integers(1, 30),
    density=st.floats(0, 1),
    each=st.integers(1, 4),
)
@settings(deadline=None, max_examples=100)
def test_never_a_positive(seed: int, users: int, items: int, density: float, each: int) -> None:
    train = random_train(seed, users, items, density)
    sampler = NegativeSampler(train)
    negatives = sampler.draw(train.users[:, None].expand(-1, each), generator(seed, 0))
    assert negatives.shape == (len(train), each)
    for user, drawn in zip(train.users.tolist(), negatives.tolist(), strict=True):
        allowed = set(range(items)) - set(train.of(user).tolist())
        assert set(drawn) <= allowed
    everyone = sampler.draw(torch.arange(users), generator(seed))
    for user, item in enumerate(everyone.tolist()):
        assert item in set(range(items)) - set(train.of(user).tolist())


@pytest.mark.parametrize("owned", [[], [0, 1, 2], [17, 18, 19], [0, 3, 4, 9, 19], list(range(18))])
def test_every_other_item_has_the_same_chance(owned: list[int]) -> None:
    items, draws = 20, 20_000
    # A second user on either side, so that a slip into a neighbour's items would show.
    users = torch.tensor([0] * 3 + [1] * len(owned) + [2] * 3)
    train = Interactions.from_pairs(users, torch.tensor([5, 6, 7, *owned, 0, 1, 19]), 3, items)
    drawn = NegativeSampler(train).draw(torch.ones(draws, dtype=torch.int64), generator(3))
    counts = torch.bincount(drawn, minlength=items).double()
    others = torch.tensor([item for item in range(items) if item not in owned])
    expected = draws / len(others)
    chi_square = float(((counts[others] - expected) ** 2 / expected).sum())
    degrees = len(others) - 1
    assert int(counts.sum()) == int(counts[others].sum()) == draws
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 10


def test_words_of_a_seed_are_mixed() -> None:
    train = random_train(1, 8, 200, 0.3)

    def drawn(*words: int) -> list[int]:
        return NegativeSampler(train).draw(train.users, generator(*words)).tolist()

    assert drawn(7, 3) == drawn(7, 3)
    assert drawn(7, 3) != drawn(7, 4)
    assert drawn(0, 1) != drawn(1, 0)
    with pytest.raises(InvalidSettings, match="seed"):
        generator(-1, 0)


def test_a_user_with_everything_is_refused() -> None:
    train = Interactions.from_pairs(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2, 2)
    with pytest.raises(InvalidData, match="user 1"):
        NegativeSampler(train)


@given(st.integers(0, 2**16), st.integers(1, 6), st.integers(2, 40), st.floats(0, 0.9))
def test_one_user_alone_draws_the_same(seed: int, users: int, items: int, density: float) -> None:
    sampler = NegativeSampler(random_train(seed, users, items, density))
    for user in range(users):
        chance = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        alone = sampler.of_user(user, chance)
        together = sampler.draw(torch.full((50,), user), torch.Generator().manual_seed(seed))
        assert torch.equal(alone, together)
