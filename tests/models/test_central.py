"""Central training takes the steps it says it takes, learns what can be learnt, and says when it cannot."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import logsigmoid

from fairfold.data.holdout import hold_out
from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.negatives import NegativeSampler
from fairfold.data.synthetic import SyntheticWorld
from fairfold.errors import InvalidData, InvalidSettings, InvalidVector
from fairfold.metrics import evaluate_ranking, evaluate_ratings
from fairfold.metrics.references import Means
from fairfold.models import MF, NeuMF, NeuMFMLP, scorer
from fairfold.models.central import (
    CentralSettings,
    EpochReport,
    choose_epochs,
    train_ranking,
    train_ratings,
)
from fairfold.models.tasks import RankingTask, RatingTask, predictor, with_validation

WORLD = SyntheticWorld(users=60, items=150, interactions_per_user=40, taste_strength=4.0)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return WORLD.dataset()


@pytest.fixture(scope="module")
def rated() -> Dataset:
    """Ratings that are a user's bias plus an item's."""
    generator = torch.Generator().manual_seed(0)
    by_user, by_item = torch.randn(40, generator=generator), torch.randn(30, generator=generator)
    pairs = torch.cartesian_prod(torch.arange(40), torch.arange(30))
    ratings = 3 + by_user[pairs[:, 0]] + by_item[pairs[:, 1]]
    train, test = hold_out(Interactions.from_pairs(pairs[:, 0], pairs[:, 1], 40, 30, ratings), 0.3)
    return Dataset("additive", train, test)


def test_an_epoch_of_one_batch_is_one_step_of_adam_on_the_formula(data: Dataset) -> None:
    torch.manual_seed(0)
    model, slow = NeuMF(60, 150), NeuMF(60, 150)
    slow.load_state_dict(model.state_dict())
    settings = CentralSettings(epochs=1, batch_size=10**6, negatives=3, regulariser=0.1, seed=4)
    report = next(train_ranking(model, data.train, settings))

    optimiser = torch.optim.Adam(slow.parameters(), lr=settings.learning_rate)
    users, items = data.train.users, data.train.items
    negatives = NegativeSampler(data.train, 3, seed=4).epoch(1)
    rank = torch.stack([logsigmoid(slow(users, items) - slow(users, negatives[:, n])) for n in range(3)])
    norms = [table(users) for table in (slow.user_product, slow.user_network)]
    norms += [table(items) for table in (slow.item_product, slow.item_network)]
    norms += [table(negatives) for table in (slow.item_product, slow.item_network)]
    loss = -rank.mean() + 0.1 * 0.5 * sum(vectors.square().sum() for vectors in norms) / len(users)
    loss.backward()
    optimiser.step()

    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for (name, fast), expected in zip(model.named_parameters(), slow.parameters(), strict=True):
        # Adam's first step is ± the learning rate, so where a gradient is 0 up to rounding its sign is noise:
        # always for the output's bias, which cancels in positive - negative, and for a stray element elsewhere.
        if name != "output.bias":
            assert torch.isclose(fast, expected, atol=1e-5).double().mean() > 0.999, name


def test_ranking_models_learn_the_planted_tastes(data: Dataset) -> None:
    popular = evaluate_ranking(lambda users: WORLD.log_popularity.expand(len(users), -1), data.train, data.test)
    torch.manual_seed(0)
    model = MF(60, 150)
    settings = CentralSettings(epochs=15, batch_size=64, learning_rate=5e-3, regulariser=0.05)
    losses = [report.loss for report in train_ranking(model, data.train, settings)]
    assert losses[-1] < 0.8 * losses[0]
    assert evaluate_ranking(scorer(model), data.train, data.test).ndcg > popular.ndcg + 0.05


def test_the_same_seed_trains_the_same_model(data: Dataset) -> None:
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        models.append(MF(60, 150))
        list(train_ranking(models[-1], data.train, CentralSettings(epochs=2, batch_size=100, seed=seed)))
    assert models[0].item.weight.equal(models[1].item.weight)
    assert not models[0].item.weight.equal(models[2].item.weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_training_on_the_gpu_gives_what_the_cpu_gives(data: Dataset) -> None:
    figures = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = NeuMF(60, 150).to(device)
        list(train_ranking(model, data.train, CentralSettings(epochs=3, batch_size=100)))
        figures.append(evaluate_ranking(scorer(model), data.train, data.test).ndcg)
    assert figures[1] == pytest.approx(figures[0], abs=0.02)


def test_every_sample_is_counted_once_an_epoch(data: Dataset) -> None:
    steps: list[int] = []
    reports = list(train_ranking(MF(60, 150), data.train, CentralSettings(epochs=2, batch_size=1000), steps.append))
    assert [report.epoch for report in reports] == [1, 2]
    assert sum(steps) == 2 * len(data.train)


def test_rating_models_learn_biases(rated: Dataset) -> None:
    torch.manual_seed(0)
    assert rated.train.ratings is not None
    model = NeuMFMLP(40, 30, factors=8, start=float(rated.train.ratings.mean()))
    list(train_ratings(model, rated.train, CentralSettings(epochs=40, batch_size=32, learning_rate=5e-3)))
    found = evaluate_ratings(predictor(model), rated.test).mse
    assert found < 0.3 * evaluate_ratings(Means(rated.train), rated.test).mse


def reports(epochs: int) -> Iterator[EpochReport]:
    return (EpochReport(epoch, 0.0, 0.0) for epoch in range(1, epochs + 1))


def test_epochs_are_chosen_by_the_best_value_within_patience() -> None:
    values = iter([0.1, 0.3, 0.2, 0.25, 0.1, 0.9])
    choice = choose_epochs(reports(6), lambda: next(values), patience=3)
    assert (choice.epochs, choice.value, choice.tried) == (2, 0.3, 5)
    rising = iter([1.0, 2.0, 3.0])
    assert choose_epochs(reports(3), lambda: next(rising), patience=1).epochs == 3
    with pytest.raises(InvalidSettings, match="patience"):
        choose_epochs(reports(1), lambda: 0.0, patience=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"negatives": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"regulariser": -1.0},
        {"weight_decay": float("inf")},
        {"seed": -1},
    ],
)
def test_settings_that_cannot_be_served_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(wrong))):
        CentralSettings(**wrong)  # type: ignore[arg-type]


def test_data_that_cannot_be_trained_on_is_refused(data: Dataset) -> None:
    nothing = torch.tensor([]).long()
    with pytest.raises(InvalidData, match="ratings"):
        train_ratings(NeuMFMLP(60, 150), data.train, CentralSettings())
    with pytest.raises(InvalidData, match="empty"):
        next(train_ranking(MF(2, 3), Interactions.from_pairs(nothing, nothing, 2, 3), CentralSettings()))
    with pytest.raises(InvalidData, match="without ratings"):
        RatingTask(data)
    with pytest.raises(InvalidVector, match="learning rate"):
        list(train_ranking(MF(60, 150), data.train, CentralSettings(learning_rate=1e30)))


def test_tasks_give_rows_for_models_and_references(data: Dataset, rated: Dataset) -> None:
    ranking = RankingTask(data, k=5)
    rows = {reference.name: reference for reference in ranking.references()}
    kinds = [name.split(" (")[0] for name in rows]
    assert [kind for kind in kinds if kind != "PureSVD-32"] == [
        "popularity", "user-kNN", "PureSVD-8", "PureSVD-16", "ridge"
    ]  # fmt: skip
    of_all = [*(reference.row for reference in rows.values()), ranking.test_row(MF(60, 150))]
    assert all(len(row) == len(ranking.metrics) for row in of_all)
    chosen = {name: reference.tried for name, reference in rows.items() if reference.tried}
    for name, tried in chosen.items():
        best = max(tried, key=tried.__getitem__)
        assert f"{best:g}" in name
    assert [name.split("(")[0].split("-")[0].strip() for name in chosen] == ["user", "PureSVD", "ridge"]
    rating = RatingTask(rated)
    assert [reference.name for reference in rating.references()] == [
        "global mean",
        "user mean",
        "item mean",
        "user and item biases",
    ]
    model = NeuMFMLP(40, 30)
    assert rating.value(model, rated.train, rated.test) == -rating.test_row(model)[0]


def test_a_ridge_too_large_is_a_note_instead_of_a_row(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_train: Interactions, _penalty: float) -> None:
        raise InvalidData("too many users", "fewer", "Take fewer.")

    monkeypatch.setattr("fairfold.models.tasks.Ridge", refuse)
    *_, last = RankingTask(data).references()
    assert last.name == "ridge"
    assert "too many users" in last.row


def test_a_validation_set_is_trained_on_in_the_end(rated: Dataset) -> None:
    kept, valid = hold_out(rated.train, 0.2)
    joined = with_validation(Dataset("parts", kept, rated.test, valid))
    assert joined.items.equal(rated.train.items)
    assert joined.ratings is not None
    assert rated.train.ratings is not None
    assert joined.ratings.equal(rated.train.ratings)
