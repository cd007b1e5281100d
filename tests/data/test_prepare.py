"""From rows to a data set: the choice of users, ids, splits, order of items, and the way back."""

import hashlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.data import Dataset, load, prepare
from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData

PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=120)


def csv_of(path: Path, pairs: list[tuple[Any, ...]]) -> Path:
    header = ["user", "item", "rating"][: len(pairs[0])]
    path.write_text("\n".join([",".join(header), *(",".join(map(str, row)) for row in pairs)]) + "\n")
    return path


def pairs_of(data: Dataset, *splits: Interactions | None) -> set[tuple[str, str]]:
    """Pairs of original ids: the way back."""
    assert data.user_ids is not None
    assert data.item_ids is not None
    return {
        (data.user_ids[user], data.item_ids[item])
        for split in splits
        if split is not None
        for user, item in zip(split.users.tolist(), split.items.tolist(), strict=True)
    }


@settings(max_examples=12, deadline=None)
@given(pairs=PAIRS, top=st.integers(1, 6))
def test_the_heaviest_users_are_those_with_most_distinct_items(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]], top: int
) -> None:
    folder = tmp_path_factory.mktemp("top")
    data = load(csv_of(folder / "own.csv", pairs), cache=folder, top_users=top)
    items = defaultdict(set)
    for user, item in pairs:
        items[user].add(item)
    expected = sorted(sorted(items, key=lambda user: (-len(items[user]), user))[:top])
    assert data.user_ids == [str(user) for user in expected]
    assert pairs_of(data, data.train, data.test) == {
        (str(user), str(item)) for user in expected for item in items[user]
    }


@settings(max_examples=12, deadline=None)
@given(pairs=PAIRS, split=st.floats(0.1, 1.0), valid=st.sampled_from([0.0, 0.3]))
def test_a_split_loses_nothing_and_has_the_share_asked_for(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]], split: float, valid: float
) -> None:
    folder = tmp_path_factory.mktemp("split")
    data = load(csv_of(folder / "own.csv", pairs), cache=folder, split=split, valid=valid)
    parts = [data.train, data.test, *([data.valid] if data.valid is not None else [])]
    assert sum(len(part) for part in parts) == len(set(pairs))
    assert pairs_of(data, *parts) == {(str(user), str(item)) for user, item in pairs}
    in_all = sum((part.counts_by_user for part in parts), torch.zeros(data.num_users, dtype=torch.int64))
    wanted = torch.clamp((in_all.double() * split + 0.5).floor(), min=1)
    assert torch.equal(in_all - data.test.counts_by_user, wanted.long())
    assert int(data.train.counts_by_user.min()) >= 1


@settings(max_examples=8, deadline=None)
@given(pairs=PAIRS)
def test_items_are_in_order_of_train_popularity_ties_by_id(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("items")
    data = load(csv_of(folder / "own.csv", pairs), cache=folder)
    assert data.item_ids is not None
    keys = [(-count, int(name)) for count, name in zip(data.train.counts_by_item.tolist(), data.item_ids, strict=True)]
    assert keys == sorted(keys)


@settings(max_examples=8, deadline=None)
@given(pairs=PAIRS, core=st.integers(2, 4))
def test_every_user_and_item_of_a_core_has_its_number(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]], core: int
) -> None:
    folder = tmp_path_factory.mktemp("core")
    left = set(pairs)
    while True:
        users, items = Counter(user for user, _ in left), Counter(item for _, item in left)
        kept = {(user, item) for user, item in left if users[user] >= core and items[item] >= core}
        if kept == left:
            break
        left = kept
    path = csv_of(folder / "own.csv", pairs)
    if not left:
        with pytest.raises(InvalidData, match="leaves nothing"):
            load(path, cache=folder, core=core)
        return
    data = load(path, cache=folder, core=core)
    assert pairs_of(data, data.train, data.test) == {(str(user), str(item)) for user, item in left}
    assert data.num_users == len({user for user, _ in left})


def test_ids_that_are_not_numbers_keep_the_order_of_the_source(tmp_path: Path) -> None:
    data = load(csv_of(tmp_path / "own.csv", [("z", "q"), ("a", "p"), ("z", "p"), ("a", "q")]), split=1.0)
    assert data.user_ids == ["z", "a"]
    assert data.item_ids == ["q", "p"]


def test_one_id_that_is_no_number_makes_all_of_them_text(tmp_path: Path) -> None:
    rows = [(user, item) for user in range(30) for item in range(20)]
    path = csv_of(tmp_path / "own.csv", [*rows, ("x", "007")])
    prepared = prepare(path, block_size=200)
    data = load(prepared.folder)
    assert pairs_of(data, data.train, data.test) == {(str(user), str(item)) for user, item in [*rows, ("x", "007")]}


@pytest.mark.parametrize("block_size", [1, 64, 1 << 20])
def test_the_size_of_blocks_changes_nothing(block_size: int, tmp_path: Path) -> None:
    path = csv_of(tmp_path / "own.csv", [(row % 7, row * row % 31, row % 5 + 1) for row in range(200)])
    data = load(prepare(path, block_size=block_size, cache=tmp_path / str(block_size), ratings=True).folder)
    again = load(path, ratings=True)
    assert torch.equal(data.train.items, again.train.items)
    assert data.item_ids == again.item_ids


def test_ratings_stay_with_their_pairs(tmp_path: Path) -> None:
    rows = [(user, item, (user * 7 + item) % 5 + 1) for user in range(9) for item in range(user, 20)]
    data = load(csv_of(tmp_path / "own.csv", rows), ratings=True)
    assert data.user_ids is not None
    assert data.item_ids is not None
    for split in (data.train, data.test):
        assert split.ratings is not None
        for user, item, rating in zip(split.users, split.items, split.ratings, strict=True):
            assert rating == (int(data.user_ids[user]) * 7 + int(data.item_ids[item])) % 5 + 1


def test_unrated_interactions_count_as_implicit_and_are_left_out_of_ratings(tmp_path: Path) -> None:
    path = tmp_path / "goodreads_interactions.csv"
    path.write_text("user_id,book_id,is_read,rating,is_reviewed\n0,1,1,5,0\n0,2,0,0,0\n0,3,1,3,0\n")
    assert len(load(path, split=1.0).train) == 3
    assert load(path, split=1.0, ratings=True).train.ratings_of(0).tolist() == [5.0, 3.0]
    liked = load(path, split=1.0, min_rating=4)
    assert liked.item_ids == ["1"]
    assert liked.train.ratings is None


def test_a_split_of_the_publisher_is_kept_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("0 0 1 2 3 4 5 6\n1 0 1 2\n")
    (tmp_path / "test.txt").write_text("0 7\n1 3\n")
    data = load(tmp_path)
    assert prepare(tmp_path).manifest["split"] == "the publisher's"
    assert pairs_of(data, data.test) == {("0", "7"), ("1", "3")}
    with pytest.raises(InvalidData, match="a split of its own"):
        load(tmp_path, split=0.5)
    again = load(tmp_path, split=0.5, resplit=True)
    assert again.train.counts_by_user.tolist() == [4, 2]
    assert pairs_of(again, again.train, again.test) == pairs_of(data, data.train, data.test)


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_a_folder_of_tables_may_be_split_too(ending: str, tmp_path: Path) -> None:
    for split, rows in (("train", [(0, 1), (0, 2), (1, 1)]), ("valid", [(1, 2)]), ("test", [(0, 3), (1, 3)])):
        frame = polars.DataFrame(rows, schema=["user", "item"], orient="row")
        path = tmp_path / f"{split}.{ending}"
        if ending == "parquet":
            frame.write_parquet(path)
        else:
            frame.write_csv(path, separator="," if ending == "csv" else "\t")
    data = load(tmp_path)
    assert data.valid is not None
    assert [len(split) for split in (data.train, data.valid, data.test)] == [3, 1, 2]


def test_a_folder_with_one_text_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "test.txt").write_text("7 1 2 3 4 5 6 7 8 9 10\n")
    data = load(tmp_path / "own", cache=tmp_path / "cache")
    assert (len(data.train), len(data.test)) == (7, 3)


def test_seeds_decide_the_split(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "own.csv", [(0, item) for item in range(100)])
    pairs = [
        frozenset(pairs_of(data, data.test)) for data in (load(path), load(path, seed=1), load(path, cache=tmp_path))
    ]
    assert pairs[0] == pairs[2] != pairs[1]


def test_items_nobody_touched_belong_to_a_published_numbering(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("0 0 1 5\n1 0 2\n")
    (tmp_path / "test.txt").write_text("0 2\n1 1\n")
    assert load(tmp_path).num_items == 6  # 3 and 4 exist in the publisher's numbering
    assert load(tmp_path, top_users=1).num_items == 4
    (tmp_path / "test.txt").write_text("0 2\n1 1000000\n")
    assert load(tmp_path).num_items == 5  # these ids are no dense numbering


def test_titles_come_along(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::10::5::1\n2::10::4::1\n1::20::3::1\n2::30::3::1\n")
    (tmp_path / "movies.dat").write_bytes('10::Amélie (2001)::Comedy\n20::Up: a, "b" (2009)::X\n'.encode("latin-1"))
    data = load(tmp_path, split=1.0)
    assert data.item_ids == ["10", "20", "30"]
    assert data.titles == ["Amélie (2001)", 'Up: a, "b" (2009)', ""]
    (tmp_path / "movies.dat").write_text("10::Another title::Comedy\n")
    assert load(tmp_path, split=1.0).titles == ["Another title", "", ""]
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,10,5,1\n")
    (tmp_path / "csv" / "movies.csv").write_text('movieId,title,genres\n10,"American President, The (1995)",Comedy\n')
    assert load(tmp_path / "csv").titles == ["American President, The (1995)"]


def test_the_manifest_says_what_was_done(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "own.csv", [(row % 7, row) for row in range(70)])
    manifest = prepare(path, top_users=3, seed=5).manifest
    assert manifest["options"] == {"top_users": 3, "seed": 5}
    assert manifest["split"] == "0.7 of every user's interactions to train on, at random with seed 5"
    assert manifest["source_counts"] == {"users": 7, "items": 70, "interactions": 70}
    assert manifest["counts"] == {"users": 3, "items": 30, "train": 21, "valid": 0, "test": 9, "items_in_train": 21}
    assert manifest["source"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_prepared_files_are_plain_parquet(tmp_path: Path) -> None:
    folder = prepare(csv_of(tmp_path / "own.csv", [(row % 7, row) for row in range(70)])).folder
    assert polars.read_parquet(folder / "train-00000.parquet").columns == ["user", "item"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "items.parquet", "manifest.json", "test-00000.parquet", "train-00000.parquet", "users.parquet",
    ]  # fmt: skip
