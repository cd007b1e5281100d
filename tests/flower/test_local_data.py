"""A device's own file: CSV or SQLite, one person's or a family's, items by number or by name."""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from fairfold.data.formats import detect_format
from fairfold.data.readers import read
from fairfold.errors import InvalidData
from fairfold.flower.local_data import LocalData, LocalFile


def table(data: LocalData) -> dict[str, list[int]]:
    return {name: data.train.of(user).tolist() for name, user in zip(data.names, data.users, strict=True)}


def write_database(path: Path, rows: list[tuple[str, int, float]]) -> None:
    with closing(sqlite3.connect(path)) as base, base:
        base.execute('CREATE TABLE "my ratings" (who TEXT, what INTEGER, stars REAL)')
        base.executemany('INSERT INTO "my ratings" VALUES (?, ?, ?)', rows)


def test_csv_of_one_person(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("item\n3\n1\n3\n")
    assert table(LocalFile(tmp_path / "mine.csv").load(5)) == {"": [1, 3]}


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_of_several(separator: str, tmp_path: Path) -> None:
    lines = ["user,item,rating", "bob,4,5", "anna,0,2", "bob,2,1"]
    (tmp_path / "ours.csv").write_text("\n".join(lines).replace(",", separator))
    data = LocalFile(tmp_path / "ours.csv").load(5, ratings=True)
    assert table(data) == {"anna": [0], "bob": [2, 4]}
    assert data.train.ratings_of(1).tolist() == [1.0, 5.0]


def test_sqlite_is_opened_for_reading_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.db"
    write_database(path, [("anna", 2, 4.5), ("anna", 0, 1.0)])
    before = path.read_bytes()
    data = LocalFile(path, user="who", item="what", rating="stars").load(3, ratings=True)
    assert table(data) == {"anna": [0, 2]}
    assert data.train.ratings_of(0).tolist() == [1.0, 4.5]
    assert path.read_bytes() == before


def test_items_by_name(tmp_path: Path) -> None:
    (tmp_path / "catalogue.txt").write_text("Dune\nEmma\nUlysses\n")
    (tmp_path / "mine.csv").write_text("item\nUlysses\nDune\n")
    assert table(LocalFile(tmp_path / "mine.csv", catalogue=tmp_path / "catalogue.txt").load(3)) == {"": [0, 2]}
    (tmp_path / "mine.csv").write_text("item\nUlysses\nOthello\n")
    with pytest.raises(InvalidData, match="Othello"):
        LocalFile(tmp_path / "mine.csv", catalogue=tmp_path / "catalogue.txt").load(3)


def test_what_is_held_back_is_never_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("user,item\n" + "\n".join(f"{user},{item}" for user in "ab" for item in range(60)))
    first = LocalFile(path, holdout=0.3).load(100)
    assert first.test is not None
    assert 15 < len(first.test) < 60
    path.write_text(path.read_text() + "\na,77\n")  # one more: what was held back before still is
    second = LocalFile(path, holdout=0.3).load(100)
    assert second.test is not None
    for user in (0, 1):
        held = set(first.test.of(user).tolist())
        assert held.isdisjoint(first.train.of(user).tolist())
        assert held <= set(second.test.of(user).tolist())
        assert held.isdisjoint(second.train.of(user).tolist())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("item\n", "no interactions"), ("thing\n1\n", "columns thing"), ("item\n9\n", "not in the catalogue"),
        ("item\n-1\n", "not in the catalogue"), ("user,item\na,\n", "without an item"), ("", "which is empty"),
        ("item\n" + "9" * 400 + "\n", "not in the catalogue"), ("user,item,rating\na,1,good\n", "rating 'good'"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_with_what_is_wrong(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(InvalidData, match=complaint):
        LocalFile(tmp_path / "mine.csv").load(5, ratings="rating" in text)


def test_a_missing_file_and_a_missing_table(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="No such file"):
        LocalFile(tmp_path / "none.csv").load(5)
    write_database(tmp_path / "mine.db", [("anna", 1, 1.0)])
    with pytest.raises(InvalidData, match="my ratings"):
        LocalFile(tmp_path / "mine.db", table="other").load(5)


@pytest.mark.parametrize("space", [" ", "\u00a0", "\u3000"])
def test_ids_are_the_same_for_a_device_and_for_a_run_of_the_whole_file(space: str, tmp_path: Path) -> None:
    """``a`` and ``a `` were two items for `train`, and one for a node."""
    path, catalogue = tmp_path / "rows.csv", tmp_path / "catalogue"
    rows = [("u", "a"), ("u ", "b"), ("v", f"a{space}"), (f"{space}v", f"{space}c")]
    path.write_text("user,item\n" + "".join(f"{user},{item}\n" for user, item in rows))
    catalogue.write_text("a\nb\nc\n")
    assert LocalFile(path, catalogue=catalogue).histories(3) == {"u": {0: None, 1: None}, "v": {0: None, 2: None}}
    frames = read(path, detect_format(path), repairs=Counter())
    assert {tuple(row) for frame in frames for row in frame.select("user", "item").rows()} == {
        ("u", "a"), ("u", "b"), ("v", "a"), ("v", "c")
    }  # fmt: skip
