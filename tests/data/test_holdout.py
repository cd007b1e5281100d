"""What is held out and what is kept are the whole, user by user."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.data.interactions import Interactions
from fairfold.data.partition import hold_out, hold_out_images
from fairfold.errors import InvalidSettings
from tests.support.pictures import pictures


@given(seed=st.integers(0, 2**32), users=st.integers(1, 8), items=st.integers(1, 30), share=st.floats(0.01, 0.99))
@settings(deadline=None, max_examples=80)
def test_every_user_is_split_by_the_share(seed: int, users: int, items: int, share: float) -> None:
    owned = torch.rand(users, items, generator=torch.Generator().manual_seed(seed)) < 0.4
    pairs = owned.nonzero()
    ratings = torch.arange(len(pairs)).float()
    whole = Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, items, ratings)
    kept, held = hold_out(whole, share, seed)
    for user in range(users):
        count = len(whole.of(user))
        assert len(held.of(user)) == min(round(count * share), max(count - 1, 0))
        both = sorted(
            zip(
                [*kept.of(user).tolist(), *held.of(user).tolist()],
                [*kept.ratings_of(user).tolist(), *held.ratings_of(user).tolist()],
                strict=True,
            )
        )
        assert both == list(zip(whole.of(user).tolist(), whole.ratings_of(user).tolist(), strict=True))
        assert kept.of(user).tolist() == sorted(kept.of(user).tolist())
    again = hold_out(whole, share, seed)
    assert again[0].items.equal(kept.items)


def test_every_interaction_has_the_same_chance() -> None:
    users = torch.arange(4000).repeat_interleave(5)
    whole = Interactions.from_pairs(users, torch.arange(5).repeat(4000), 4000, 5)
    _, held = hold_out(whole, 0.2, seed=1)
    assert torch.allclose(held.counts_by_item.double(), torch.full((5,), 800.0, dtype=torch.float64), atol=130)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_impossible_shares_are_refused(share: float) -> None:
    with pytest.raises(InvalidSettings, match="share"):
        hold_out(Interactions.from_pairs(torch.tensor([0]), torch.tensor([0]), 1, 1), share)


def test_images_held_out_take_the_place_of_the_test_set() -> None:
    whole = pictures(count=90)
    held = hold_out_images(whole, 0.25, seed=3)
    assert (len(held.train), len(held.test)) == (45, 15)
    both = torch.cat([held.train.images, held.test.images]).view(60, -1)
    assert sorted(both.tolist()) == sorted(whole.train.images.view(60, -1).tolist())
    again = hold_out_images(whole, 0.25, seed=3)
    assert again.test.images.equal(held.test.images)
    assert not hold_out_images(whole, 0.25, seed=4).test.images.equal(held.test.images)
    with pytest.raises(InvalidSettings, match="share"):
        hold_out_images(whole, 1.0)
