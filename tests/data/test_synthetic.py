"""The synthetic world is reproducible, split, popular first, and has a known best answer."""

import pytest
import torch

from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidSettings
from fairfold.metrics.ranking import evaluate_ranking


def test_every_user_has_its_share_and_no_item_twice() -> None:
    world = SyntheticDataset(users=30, items=400, interactions_per_user=50)
    data = world.dataset()
    assert data.train.counts_by_user.tolist() == [35] * 30
    assert data.test.counts_by_user.tolist() == [15] * 30
    for user in range(30):
        both = torch.cat([data.train.of(user), data.test.of(user)])
        assert len(set(both.tolist())) == 50
        assert data.train.of(user).equal(data.train.of(user).sort().values)


def test_the_same_seed_gives_the_same_world_whatever_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SyntheticDataset(users=20, items=300, seed=5).dataset()
    monkeypatch.setattr("fairfold.data.synthetic.BLOCK_ELEMENTS", 700)
    blocks = SyntheticDataset(users=20, items=300, seed=5).dataset()
    other = SyntheticDataset(users=20, items=300, seed=6).dataset()
    assert whole.train.items.equal(blocks.train.items)
    assert whole.test.items.equal(blocks.test.items)
    assert not whole.train.items.equal(other.train.items)


def test_popularity_falls_with_the_item_number() -> None:
    counts = SyntheticDataset(users=400, items=1000, taste_strength=1.0).dataset().train.counts_by_item.double()
    tenths = counts.view(10, 100).sum(1)
    assert (tenths[:-1] > tenths[1:]).sum() >= 8
    assert tenths[0] > 3 * tenths[-1]


def test_one_draw_follows_the_softmax_of_the_scores() -> None:
    world = SyntheticDataset(
        users=40_000, items=5, interactions_per_user=2, taste_strength=0.0, popularity_exponent=1.0
    )
    drawn = world.dataset()
    counts = (drawn.train.counts_by_item + drawn.test.counts_by_item).double() / 40_000
    chance = world.log_popularity.double().softmax(0)
    others = chance / (1 - chance)
    expected = chance + chance * (others.sum() - others)  # first, or second after another
    assert torch.allclose(counts, expected, atol=0.01)


def test_the_planted_scores_beat_popularity() -> None:
    world = SyntheticDataset(users=100, items=1000)
    data = world.dataset()
    best = evaluate_ranking(world.best_scores, data.train, data.test)
    popular = evaluate_ranking(lambda users: world.log_popularity.expand(len(users), -1), data.train, data.test)
    assert best.ndcg > popular.ndcg + 0.1
    noisy = evaluate_ranking(lambda users: world.best_scores(users) + torch.randn(1000), data.train, data.test)
    assert best.ndcg > noisy.ndcg


@pytest.mark.parametrize(
    "wrong",
    [
        {"users": 0},
        {"items": 0},
        {"factors": 0},
        {"interactions_per_user": 1},
        {"interactions_per_user": 2000},
        {"taste_strength": float("nan")},
        {"popularity_exponent": -1.0},
        {"seed": -1},
    ],
)
def test_impossible_worlds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(wrong))):
        SyntheticDataset(**wrong)  # type: ignore[arg-type]
