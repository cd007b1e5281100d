"""EASE, iALS and item-kNN equal what plain numpy finds in other ways, and stand beside rankings as they were chosen."""

import subprocess
import sys

import numpy
import pytest
import torch

from experiments.central_baselines import strong_ranking_baselines
from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.synthetic import SyntheticDataset
from fairfold.metrics import evaluate_ranking
from fairfold.metrics.ranking import is_cut
from fairfold.metrics.ranking_baselines import (
    BinaryMatrix,
    Ease,
    ImplicitALS,
    ItemNeighbors,
    Popularity,
    invert,
    largest_side,
)
from fairfold.metrics.tuned_baselines import STRONG_BASELINES, tuned_strong_baselines

SHAPES = [(13, 40), (40, 13)]  # EASE is solved from the users' side, from the items' side


def random_train(users: int, items: int, share: float = 0.3) -> tuple[Interactions, numpy.ndarray]:
    """Interactions, with a user and an item that have none, and the dense matrix of them."""
    dense = numpy.random.default_rng(users).random((users, items)) < share
    dense[3], dense[:, 5] = False, False
    pairs = torch.from_numpy(numpy.argwhere(dense))
    return Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, items), dense.astype(float)


@pytest.mark.parametrize(("users", "items"), SHAPES)
def test_ease_is_its_closed_form(users: int, items: int) -> None:
    train, dense = random_train(users, items)
    inverse = numpy.linalg.inv(dense.T @ dense + 7 * numpy.eye(items))
    weights = -inverse / numpy.diag(inverse)
    numpy.fill_diagonal(weights, 0)
    numpy.testing.assert_allclose(Ease(train, 7.0)(torch.arange(users)).numpy(), dense @ weights, atol=1e-4)


@pytest.mark.parametrize(("users", "items"), SHAPES)
def test_ease_is_a_ridge_regression_of_every_item_on_all_others(users: int, items: int) -> None:
    """The optimum under a zero diagonal, found without its formula."""
    train, dense = random_train(users, items)
    expected = numpy.empty_like(dense)
    for item in range(items):
        others = numpy.delete(dense, item, axis=1)
        # Least squares with λ as further rows: |√λ w|².
        system = numpy.vstack([others, numpy.sqrt(7.0) * numpy.eye(items - 1)])
        wanted = numpy.concatenate([dense[:, item], numpy.zeros(items - 1)])
        expected[:, item] = others @ numpy.linalg.lstsq(system, wanted, rcond=None)[0]
    asked = torch.tensor([7, 0, 3, 12])
    numpy.testing.assert_allclose(Ease(train, 7.0)(asked).numpy(), expected[asked], atol=1e-4)


@pytest.mark.parametrize("factors", [2, 6, 30])  # most histories longer, some of each, most shorter
def test_ials_is_a_loop_of_normal_equations(factors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairfold.metrics.ranking_baselines.AT_ONCE", 50)  # several groups
    train, dense = random_train(25, 18)
    unobserved, penalty = 0.2, 0.05
    start = ImplicitALS(train, factors, unobserved, penalty, sweeps=0).users.double().numpy()

    def solved(rows: numpy.ndarray, others: numpy.ndarray) -> numpy.ndarray:
        found = []
        for row in rows:
            pull = penalty * (row.sum() + unobserved * len(others))
            normal = others.T @ numpy.diag(row + unobserved) @ others + pull * numpy.eye(factors)
            found.append(numpy.linalg.solve(normal, others.T @ row))
        return numpy.array(found)

    users = start
    for _ in range(3):
        items = solved(dense.T, users)
        users = solved(dense, items)
    scores = ImplicitALS(train, factors, unobserved, penalty, sweeps=3)(torch.arange(25))
    numpy.testing.assert_allclose(scores.numpy(), users @ items.T, atol=2e-4)
    assert float(scores.abs().max()) > 0.1


@pytest.mark.parametrize(("neighbors", "shrinkage"), [(4, 2.0), (50, 0.0)])
def test_item_neighbours_are_those_of_a_plain_loop(neighbors: int, shrinkage: float) -> None:
    train, dense = random_train(40, 13)
    counts, expected = dense.sum(0), numpy.zeros_like(dense)
    for item in range(13):
        alike = []
        for other in range(13):
            both = (dense[:, item] * dense[:, other]).sum()
            length = max(counts[item], 1) ** 0.5 * max(counts[other], 1) ** 0.5
            alike.append(0.0 if other == item else float(both / (length + shrinkage)))
        nearest = sorted(range(13), key=lambda other: (-round(alike[other], 6), other))[:neighbors]
        for other in nearest:
            expected[:, item] += alike[other] * dense[:, other]
    found = ItemNeighbors(train, neighbors, shrinkage, block=5)(torch.arange(40))
    numpy.testing.assert_allclose(found.numpy(), expected, atol=1e-4)


def test_items_in_common_are_counted_alike_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    train, dense = random_train(60, 40)
    asked = torch.tensor([0, 7, 5, 39])
    expected = torch.from_numpy(dense.T @ dense).float()[asked]
    assert BinaryMatrix(train).in_common(asked).equal(expected)  # sums of dense rows: there are few, and long ones
    kept = BinaryMatrix(train)
    kept.gram(of_users=False).fill_(-1)  # a copy, to be overwritten
    assert kept.in_common(asked).equal(expected)
    sparse, few = random_train(90, 500, 0.01)
    monkeypatch.setattr("fairfold.metrics.ranking_baselines._row_sums", None)  # not asked for where lists are short
    assert BinaryMatrix(sparse).in_common(asked).equal(torch.from_numpy(few.T @ few).float()[asked])


def test_neighbours_are_added_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    train, _ = random_train(40, 13)
    found = ItemNeighbors(train, 4, 2.0)
    whole = found(torch.arange(40))
    monkeypatch.setattr("fairfold.metrics.ranking_baselines.EXPANDED", 7)
    torch.testing.assert_close(found(torch.arange(40)), whole)
    assert not found(torch.tensor([3])).any()  # the user without items


@pytest.mark.parametrize("side", [1, 5, 300])
def test_a_matrix_is_inverted_in_its_own_memory(side: int) -> None:
    rows = torch.randn(side, side, generator=torch.Generator().manual_seed(side))
    given = rows @ rows.T + torch.eye(side)
    expected = torch.linalg.inv(given.double())
    inverse = invert(given, torch.device("cpu"))
    assert inverse.data_ptr() == given.data_ptr()
    torch.testing.assert_close(inverse.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ease_takes_the_memory_of_one_matrix() -> None:
    """Of a large catalogue: neither a copy of its sum, nor of the factor, nor of the inverse beside it."""
    code = """
import torch
from fairfold.data.interactions import Interactions
from fairfold.metrics import ranking_baselines
from fairfold.metrics.ranking_baselines import Ease
def built(items):
    users = torch.arange(items + 100).repeat_interleave(2)
    which = torch.arange(len(users)) * 7919 % items
    Ease(Interactions.from_pairs(users, which, items + 100, items), 10.0, device=torch.device("cpu"))
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
ranking_baselines.KEPT_SIDE = 100
before = built(500)
print((built(5000) - before) / (4 * 5000**2))
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert 0.9 < float(shown) < 1.6


@pytest.fixture(scope="module")
def data() -> Dataset:
    return SyntheticDataset(users=150, items=120, interactions_per_user=40, taste_strength=4.0).dataset()


def test_rows_are_of_all_items_that_anybody_has(data: Dataset) -> None:
    counts = data.train.counts_by_item
    seen = int((counts > 0).sum())
    rows = dict(tuned_strong_baselines(data, 10))
    assert [name.split(" (")[0] for name in rows] == [
        f"{kind} of {seen} items" for kind in ("EASE", "iALS", "item-kNN")
    ]
    floor = evaluate_ranking(Popularity(data.train), data.train, data.test, 10)
    for name, row in rows.items():
        assert row.users.equal(floor.users)
        assert row.ndcg > floor.ndcg
        assert not is_cut(name)
    assert len({len(kind.values) for kind in STRONG_BASELINES}) == 1  # as many tries for each


def test_the_largest_matrix_follows_from_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8 * 10_000**2 // 4096 + 1}.__getitem__)
    assert largest_side() == 10_000
    monkeypatch.delattr("os.sysconf")
    assert largest_side() == 16_384


@pytest.fixture
def scored(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What references say of the first users in the end, one after the other."""
    seen = []

    def watched(score, train, test, k, **users):  # type: ignore[no-untyped-def]
        if train is data.train:
            seen.append(score(torch.arange(5)))
        return evaluate_ranking(score, train, test, k, **users)

    monkeypatch.setattr("fairfold.metrics.tuned_baselines.evaluate_ranking", watched)
    return seen


def test_items_that_a_reference_does_not_know_come_behind(data: Dataset, scored: list[torch.Tensor]) -> None:
    list(tuned_strong_baselines(data, 10, largest=50))
    ease, known = scored[0], scored[0][0] > -1e20
    assert 0 < int(known.sum()) < 120
    assert float(ease[:, ~known].max()) < float(ease[:, known].min())


def test_what_is_too_large_takes_the_most_popular_items(data: Dataset, scored: list[torch.Tensor]) -> None:
    rows = [name.split(" (")[0] for name, _ in tuned_strong_baselines(data, 10, largest=50)]
    assert rows == ["EASE cut to 50 of 120 items", "iALS of 120 items", "item-kNN of 120 items"]
    assert [is_cut(name) for name in rows] == [True, False, False]
    counts = data.train.counts_by_item
    known = scored[0][0] > -1e20
    assert int(known.sum()) == 50
    assert int(counts[known].min()) >= int(counts[~known].max())


def test_a_row_says_that_its_settings_were_chosen_on_fewer_items(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairfold.metrics.tuned_baselines.TUNED_SIDE", 100)
    monkeypatch.setattr("fairfold.metrics.tuned_baselines.TUNED_ITEMS", 60)
    monkeypatch.setattr("fairfold.metrics.tuned_baselines.NEIGHBOURED", 90)
    ease, ials, nearest = (name for name, _ in tuned_strong_baselines(data, 10))
    assert ease.endswith(", chosen on 60 items)")
    assert "chosen" not in ials
    assert nearest.startswith("item-kNN cut to 90 of 120 items (")
    assert "chosen" not in nearest  # on all that it has


def test_with_few_users_ease_serves_any_catalogue() -> None:
    few = SyntheticDataset(users=30, items=120, interactions_per_user=40, taste_strength=4.0).dataset()
    rows = [name.split(" (")[0] for name, _ in tuned_strong_baselines(few, 10, largest=50)]
    assert rows == ["EASE of 120 items", "iALS of 120 items", "item-kNN of 120 items"]


def test_rows_of_an_experiment_are_of_all_items_or_say_that_they_were_cut(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(strong_ranking_baselines(data, 10))
    assert [row.name.split(" (")[0] for row in rows] == ["popularity", "ridge", "EASE", "iALS", "item-kNN"]
    (ease,) = (found for _, found in tuned_strong_baselines(data, 10, kinds=STRONG_BASELINES[:1]))
    assert rows[2].value == pytest.approx(ease.ndcg, abs=1e-6)
    assert all(row.by_user is not None for row in rows)
    monkeypatch.setattr("fairfold.metrics.tuned_baselines.largest_side", lambda: 50)
    cut = [row.name.split(" (")[0] for row in strong_ranking_baselines(data, 10) if is_cut(row.name)]
    assert cut == ["ridge cut to 50 of 120 items", "EASE cut to 50 of 120 items"]
