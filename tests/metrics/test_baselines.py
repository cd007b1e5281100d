"""Central baselines equal their formulas on dense matrices, and give known figures on real data."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.central_baselines import (
    PureSVD,
    UserNeighbors,
    rating_baseline_results,
    tried,
    tuned_ranking_baselines,
)
from fairfold.data import load
from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.partition import hold_out
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.metrics import evaluate_ranking, evaluate_ratings
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.ranking_baselines import BinaryMatrix, Popularity, Ridge
from fairfold.metrics.rating import Means

SHARED = Path(os.environ.get("FAIRFOLD_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
ORDERS = [(13, 40), (40, 13)]  # fewer users than items, fewer items than users


def random_train(users: int, items: int) -> tuple[Interactions, Tensor]:
    """Interactions, with a user and an item that have none, and the dense matrix of them."""
    dense = (torch.rand(users, items, generator=torch.Generator().manual_seed(users)) < 0.3).double()
    dense[3] = 0
    dense[:, 5] = 0
    pairs = dense.nonzero()
    return Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, items), dense


def assert_scores(scorer: Scorer, expected: Tensor) -> None:
    asked = torch.tensor([7, 0, 3])
    assert torch.allclose(scorer(asked).double(), expected[asked], atol=1e-4)


@pytest.mark.parametrize(("users", "items"), ORDERS)
def test_products_equal_dense_ones(users: int, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairfold.metrics.ranking_baselines.GRAM_BLOCK", 5)
    train, dense = random_train(users, items)
    matrix = BinaryMatrix(train)
    left, right = torch.randn(users, 4), torch.randn(items, 4)
    assert torch.allclose(matrix.times(right).double(), dense @ right.double(), atol=1e-5)
    assert torch.allclose(matrix.transposed_times(left).double(), dense.T @ left.double(), atol=1e-5)
    assert matrix.gram(of_users=True).double().equal(dense @ dense.T)
    assert matrix.gram(of_users=False).double().equal(dense.T @ dense)


@pytest.mark.parametrize(("users", "items"), ORDERS)
def test_each_recommender_equals_its_formula(users: int, items: int) -> None:
    train, dense = random_train(users, items)
    gram = dense @ dense.T
    assert_scores(Popularity(train), dense.sum(0).expand(users, -1))

    lengths = dense.norm(dim=1).clamp(min=1)
    cosine = gram / (lengths[:, None] * lengths)
    assert_scores(UserNeighbors(train), cosine.fill_diagonal_(0) ** 3 @ dense)

    ridge = gram @ torch.linalg.inv(gram + 10 * torch.eye(users, dtype=torch.float64)) @ dense
    assert_scores(Ridge(train), ridge)

    left, singular, right = torch.linalg.svd(dense, full_matrices=False)
    assert_scores(PureSVD(train, 4), left[:, :4] * singular[:4] @ right[:4])


def test_subspace_iteration_finds_what_the_exact_decomposition_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    train, _ = random_train(40, 60)
    exact = PureSVD(train, 5)(torch.arange(40))
    monkeypatch.setattr("experiments.central_baselines.EXACT_SIDE", 0)
    assert torch.allclose(PureSVD(train, 5)(torch.arange(40)), exact, atol=1e-4)


def test_sizes_that_cannot_be_served_are_refused() -> None:
    train, _ = random_train(13, 40)
    with pytest.raises(InvalidData, match="raise largest"):
        Ridge(train, largest=12)
    with pytest.raises(InvalidSettings, match="penalty"):
        Ridge(train, penalty=0)
    with pytest.raises(InvalidSettings, match="rank = 14"):
        PureSVD(train, 14)
    with pytest.raises(InvalidData, match="ratings"):
        Means(train)


def test_settings_are_chosen_on_held_out_training_data() -> None:
    """Two kinds of users with shelves of their own: with next to no penalty the ridge recalls the shelf and no more."""
    kind = torch.arange(60)[:, None] % 2 == torch.arange(80)[None] % 2
    chance = torch.rand(60, 80, generator=torch.Generator().manual_seed(0))
    pairs = (chance < torch.where(kind, 0.5, 0.05)).nonzero()
    train = Interactions.from_pairs(pairs[:, 0], pairs[:, 1], 60, 80)
    found = tried(Ridge, (1e-3, 100.0), train)
    assert list(found) == [1e-3, 100.0]
    assert found[100.0] > found[1e-3] + 0.05
    splits = []

    def seen(kept: Interactions, _value: float) -> Popularity:
        splits.append(len(kept))
        return Popularity(kept)

    same = tried(seen, (1.0, 2.0), train)
    assert same[1.0] == same[2.0]  # baselines are evaluated on the same splits and users
    assert len(splits) == 2 * 3
    assert all(length < len(train) for length in splits)


def test_where_nothing_can_be_held_out_nothing_is_tried() -> None:
    users = torch.arange(5)
    assert tried(Ridge, (1.0, 10.0), Interactions.from_pairs(users, users, 5, 5)) == {}


def test_means_and_biases() -> None:
    users, items = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 2])
    train = Interactions.from_pairs(users, items, 3, 4, torch.tensor([5.0, 3.0, 4.0, 2.0]))
    asked = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3])
    assert Means(train)(*asked).tolist() == [3.5, 3.5, 3.5]
    assert Means(train, users=True)(*asked).tolist() == [4.0, 3.0, 3.5]
    assert Means(train, items=True)(*asked).tolist() == [4.5, 3.0, 3.5]
    assert Means(train, users=True, damping=2)(*asked).tolist() == [3.75, 3.25, 3.5]


def test_biases_together_explain_an_additive_world() -> None:
    generator = torch.Generator().manual_seed(0)
    by_user, by_item = torch.randn(30, generator=generator), torch.randn(20, generator=generator)
    pairs = (torch.rand(30, 20, generator=generator) < 0.6).nonzero()
    ratings = 3 + by_user[pairs[:, 0]] + by_item[pairs[:, 1]]
    train = Interactions.from_pairs(pairs[:, 0], pairs[:, 1], 30, 20, ratings)
    assert evaluate_ratings(Means(train, users=True, items=True), train) < 1e-6
    assert evaluate_ratings(Means(train, items=True), train) > 0.1


@pytest.fixture(scope="module")
def data() -> Dataset:
    return SyntheticDataset(users=60, items=150, interactions_per_user=40, taste_strength=4.0).dataset()


@pytest.fixture(scope="module")
def rated() -> Dataset:
    """Ratings that are a user's bias plus an item's."""
    generator = torch.Generator().manual_seed(0)
    by_user, by_item = torch.randn(40, generator=generator), torch.randn(30, generator=generator)
    pairs = torch.cartesian_prod(torch.arange(40), torch.arange(30))
    ratings = 3 + by_user[pairs[:, 0]] + by_item[pairs[:, 1]]
    train, test = hold_out(Interactions.from_pairs(pairs[:, 0], pairs[:, 1], 40, 30, ratings), 0.3)
    return Dataset("additive", train, test)


def test_names_of_ranking_baselines_have_what_was_chosen(data: Dataset) -> None:
    rows = {row.name: row for row in tuned_ranking_baselines(data, k=5)}
    kinds = [name.split(" (")[0] for name in rows]
    assert [kind for kind in kinds if kind != "PureSVD-32"] == [
        "popularity", "user-kNN", "PureSVD-8", "PureSVD-16", "ridge", "EASE", "iALS"
    ]  # fmt: skip
    evaluated = evaluate_ranking(Popularity(data.train), data.train, data.test, 5)
    assert rows["popularity"].value == evaluated.ndcg
    assert rows["popularity"].by_user is not None
    assert rows["popularity"].by_user.equal(evaluated.ndcg_by_user)
    chosen = {name: row for name, row in rows.items() if row.tried}
    for name, row in chosen.items():
        assert row.format_value(max(row.tried, key=row.tried.__getitem__)).split(" ")[0] in name
    found = [name.split("(")[0].split("-")[0].strip() for name in chosen]
    assert found == ["user", "PureSVD", "ridge", "EASE", "iALS"]


def test_rows_of_ratings_need_ratings(data: Dataset, rated: Dataset) -> None:
    rows = list(rating_baseline_results(rated))
    names = [row.name.split(" (")[0] for row in rows]
    assert names == ["global mean", "user mean", "item mean", "user and item biases", "MF by SGD"]
    assert rows[0].value == evaluate_ratings(Means(rated.train), rated.test)
    with pytest.raises(InvalidData, match="without ratings"):
        next(rating_baseline_results(data))


def test_a_ridge_too_large_is_a_note_instead_of_a_row(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_train: Interactions, _penalty: float) -> None:
        raise InvalidData("too many users", "fewer", "Take fewer.")

    monkeypatch.setattr("experiments.central_baselines.Ridge", refuse)
    (row,) = [row for row in tuned_ranking_baselines(data) if row.name == "ridge"]
    assert "too many users" in str(row.value)


def test_a_validation_set_is_trained_on_in_the_end(rated: Dataset) -> None:
    kept, valid = hold_out(rated.train, 0.2)
    joined = Dataset("parts", kept, rated.test, valid).with_validation().train
    assert joined.items.equal(rated.train.items)
    assert joined.ratings is not None
    assert rated.train.ratings is not None
    assert joined.ratings.equal(rated.train.ratings)


def test_goodreads_gives_the_known_figures(tmp_path: Path) -> None:
    folder = SHARED / "goodreads-100"
    if not folder.is_dir():
        pytest.skip(f"needs goodreads-100 in {SHARED}; name its parent folder in FAIRFOLD_DATA")
    data = load(folder, cache=tmp_path)
    train, test = data.train, data.test
    assert (train.num_users, train.num_items, len(train), len(test)) == (99, 359_014, 482_745, 206_869)
    found = {}
    for scorer in (Popularity(train), UserNeighbors(train), PureSVD(train, 8), PureSVD(train), Ridge(train)):
        found[scorer.name] = evaluate_ranking(scorer, train, test).ndcg
    # How ties are broken moves popularity between 0.2757 and 0.2776.
    known = {
        "popularity": 0.2776,
        "user-kNN": 0.3966,
        "PureSVD-8": 0.3636,
        "PureSVD-16": 0.4002,
        "ridge": 0.4398,
    }
    assert found == pytest.approx(known, abs=0.002)
