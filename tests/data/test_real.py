"""The real data sets have the counts their index states."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fairfold.data import load, load_images, prepare
from fairfold.data.partition import by_writer

COUNTS = {
    "goodreads-100": {
        "users": 99, "items": 359_014, "items_in_train": 281_241, "train": 482_745, "test": 206_869,
    },
    "goodreads-interactions-200k": {"users": 438, "items": 99_301, "interactions": 200_000, "rated": 97_037},
    # The file has 340,556 strings, of which three are others with a space around them.
    "book-crossing": {"users": 105_283, "items": 340_553, "interactions": 1_149_780, "rated": 433_671},
    "ml-100k": {"users": 943, "items": 1_682, "interactions": 100_000},
    "ml-1m": {"users": 6_040, "items": 3_706, "train": 994_169, "test": 6_040},
    "gowalla": {"users": 29_858, "items": 40_981, "train": 719_081, "valid": 91_047, "test": 217_242},
    "mnist": {"train": 60_000, "test": 10_000},
    "qmnist-writers": {"train_writers": 539, "test_writers": 297},
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts_equal_those_of_the_index(name: str, real_data: Callable[[str], Path]) -> None:
    manifest = prepare(real_data(name)).manifest
    found = manifest.get("source_counts", {}) | manifest["counts"]
    assert {count: found[count] for count in COUNTS[name]} == COUNTS[name]
    assert set(manifest["repairs"]) <= {"users with one interaction, in train only"}


@pytest.mark.parametrize("name", ["goodreads-100", "goodreads-interactions-200k", "book-crossing", "ml-1m", "gowalla"])
def test_the_hundred_heaviest_users(name: str, real_data: Callable[[str], Path]) -> None:
    prepared = prepare(real_data(name), top_users=100)
    source, counts = prepared.manifest["source_counts"], prepared.manifest["counts"]
    assert counts["users"] == min(100, source["users"])
    for count, value in COUNTS[name].items():
        assert source.get(count, value) == value
    assert {"train", "test"} <= set(source) if "train" in COUNTS[name] else "train" not in source
    data = load(prepared.folder)
    assert data.user_ids == sorted(data.user_ids or [], key=int)
    assert (data.train.counts_by_item.diff() <= 0).all()


def test_goodreads_ratings_of_the_heaviest_users(real_data: Callable[[str], Path]) -> None:
    data = load(real_data("goodreads-interactions-200k"), top_users=100, ratings=True)
    assert data.num_users == 100
    assert data.train.ratings is not None
    assert (float(data.train.ratings.min()), float(data.train.ratings.max())) == (1.0, 5.0)


def test_movielens_has_titles_and_can_be_split_anew(real_data: Callable[[str], Path]) -> None:
    titles = load(real_data("ml-100k")).titles
    assert titles is not None
    assert "Star Wars (1977)" in titles[:5]
    data = load(real_data("ml-1m"), resplit=True, split=0.7)
    assert len(data.train) + len(data.test) == 1_000_209
    assert len(data.train) == pytest.approx(0.7 * 1_000_209, rel=1e-3)


def test_mnist_by_writer(real_data: Callable[[str], Path]) -> None:
    data = load_images(real_data("qmnist-writers"), images=str(real_data("mnist")))
    assert data.train.writers is not None
    assert len(by_writer(data.train.writers).without_empty()) == 539
    assert data.train.images.shape == (60_000, 28, 28)
    assert data.train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
