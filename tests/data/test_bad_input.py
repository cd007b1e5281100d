"""Bad input is a clear error or a stated, counted repair: one test for every way it goes wrong."""

import contextlib
import errno
import gzip
import json
from pathlib import Path
from typing import Any

import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.checksums import with_checksum
from fairfold.data import load, prepare, readers, store, tables
from fairfold.data import parsing as json_lines
from fairfold.data.files import NOT_UTF8, PARTIAL
from fairfold.errors import CannotWrite, InvalidData
from tests.support.files import written


def repairs_of(path: Path, **options: Any) -> dict[str, int]:
    return dict(prepare(path, **options).manifest["repairs"])


GOOD = "user_id,item_id,rating\n" + "".join(f"{row % 7},{row},{row % 5 + 1}\n" for row in range(60))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("own.csv", "a,b,c\n1,2,3\n", r"no column that is known to hold the user; its columns are 'a', 'b', 'c'"),
        ("own.csv", "user_id,b,c\n1,2,3\n", "no column that is known to hold the item"),
        ("own.csv", "user_id^item_id\n1^2\n", "one field with the separator"),
        ("own.csv", "1,2,3\n1,2,3\n", "a header that names the columns"),
        ("own.csv", "ann,dune,3\nbob,emma,4\n", "--user-column 1 --item-column 2 --rating-column 3"),
        ("own.csv", "ann,dune\nbob,emma\n", "if the first line names no columns, add one"),
        ("own.json", '{"a": 1, "b": 2}\n', "no column that is known to hold the user"),
        ("own.json", '{"user_id": 1, \n', "is not JSON"),
        ("u.data", "1,2,3,4\n", "with a tab between them"),
        ("ratings.dat", "1,2,3,4\n", "with a double colon between them"),
        ("train.txt", "0,1,2\n1,2\n", "no column|names the columns"),
        ("own.parquet", "user,item\n1,2\n", "is not Parquet"),
        ("own.csv", "user_id,item_id\n1;2\n3;4\n", "cannot be used"),
        ("own.csv", "", "is empty"),
        ("ml-1m.zip", b"PK\x03\x04....", "is a zip archive"),
        ("own.csv", b"\x00\x01\x02", "is not text"),
        ("own.csv", "user_id,item_id\n", "is empty"),
        ("train.txt", "\n\n", "is empty"),
        ("own.csv", "user,item\n1,2\n".encode("utf-16"), "is UTF-16"),
        ("own.csv", gzip.compress(b"user,item\n" + bytes(range(65, 91)) * 9000, mtime=0)[:150], "truncated or damaged"),
        ("own.csv", gzip.compress(GOOD.encode(), mtime=0)[:-4], "truncated or damaged"),
    ],
)
def test_what_cannot_be_read_is_an_error(
    name: str, content: str | bytes, message: str, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(InvalidData, match=message):
        prepare(written(tmp_path / name, content))
    assert not list(cache.iterdir()) if cache.exists() else True


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="neither a file or folder nor a known data set"):
        load(tmp_path / "nothing.csv")


def test_a_folder_of_something_else_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "set" / "notes.md", "hello")
    with pytest.raises(InvalidData, match=r"holds notes\.md"):
        prepare(tmp_path / "set")


def test_train_without_test_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "set" / "train.txt", "1 2\n")
    with pytest.raises(InvalidData, match="no test file"):
        prepare(tmp_path / "set")


def test_a_named_column_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="no column 'who'; it has 'user_id', 'item_id', 'rating'"):
        prepare(written(tmp_path / "own.csv", GOOD), user_column="who")


def test_ratings_asked_of_data_without_ratings(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="a rating column"):
        prepare(written(tmp_path / "train.txt", "1 2 3\n2 3\n"), ratings=True)


@pytest.mark.parametrize(
    "options",
    [
        {"top_users": 0}, {"core": -1}, {"split": 0.0}, {"split": 1.5}, {"valid": 1.0}, {"seed": -1},
        {"scale": (5.0, 1.0)}, {"ratings": True, "min_rating": 4.0}, {"core": 1000}, {"min_rating": 99.0},
    ],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidData):
        prepare(written(tmp_path / "own.csv", GOOD), **options)


def test_bytes_that_are_not_utf8_are_read_as_latin_1_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", "user,item\nAna,x\nJosé,x\nZoë,y\n".encode("latin-1"))
    assert repairs_of(path)[NOT_UTF8] == 2
    assert load(path).user_ids == ["Ana", "José", "Zoë"]


def test_ratings_out_of_scale_are_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", GOOD + "1,900,7\n1,901,-1\n1,902,nan\n1,903,good\n")
    repairs = repairs_of(path, scale=(1.0, 5.0), ratings=True)
    assert repairs[readers.OUT_OF_SCALE] == 2
    assert repairs[readers.NOT_A_NUMBER] == 2
    data = load(path, scale=(1.0, 5.0), ratings=True)
    assert data.item_ids is not None
    assert not {"900", "901", "902", "903"} & set(data.item_ids)


def test_mostly_bad_ratings_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="48 of 60 rows"):
        prepare(written(tmp_path / "own.csv", GOOD), scale=(5.0, 9.0))


def test_rows_without_ids_are_left_out_and_counted(tmp_path: Path) -> None:
    assert repairs_of(written(tmp_path / "own.csv", GOOD + ",5,1\n5,,1\n"))[readers.NO_ID] == 2


def test_lines_with_too_many_fields_are_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", GOOD + "1,2,3,4,5\n")
    assert repairs_of(path)[readers.MALFORMED] == 1
    assert prepare(path).manifest["source_counts"]["interactions"] == 60


def test_lines_that_are_not_json_are_left_out_and_counted(tmp_path: Path) -> None:
    good = "".join(json.dumps({"user_id": f"u{row % 3}", "item_id": row}) + "\n" for row in range(20))
    assert repairs_of(written(tmp_path / "own.json", good + "{broken\n"))[json_lines.NOT_JSON] == 1


def test_duplicate_pairs_keep_the_last_and_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", "user,item,rating\n1,1,1\n1,2,2\n1,1,5\n")
    assert repairs_of(path, ratings=True, split=1.0)[tables.DUPLICATES] == 1
    data = load(path, ratings=True, split=1.0)
    assert data.train.ratings_of(0).tolist() == [5.0, 2.0]


def test_pairs_in_train_and_test_stay_in_train_and_are_counted(tmp_path: Path) -> None:
    written(tmp_path / "set" / "train.txt", "0 1 2 2\n1 1\n")
    written(tmp_path / "set" / "test.txt", "0 2 3 3\n1 2\n")
    repairs = repairs_of(tmp_path / "set")
    assert repairs[tables.OVERLAP] == 1
    assert repairs[tables.DUPLICATES] == 2
    data = load(tmp_path / "set")
    assert (len(data.train), len(data.test)) == (3, 2)


def test_users_with_one_interaction_are_in_train_only_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", "user,item\n1,1\n2,1\n2,2\n")
    assert repairs_of(path)[tables.SINGLE] == 1
    assert load(path).train.counts_by_user.tolist() == [1, 1]
    assert load(path).test.counts_by_user.tolist() == [0, 1]


def test_users_without_items_and_users_of_test_only_are_counted(tmp_path: Path) -> None:
    written(tmp_path / "set" / "train.txt", "0 1 2\n1\n")
    written(tmp_path / "set" / "test.txt", "0 3\n2 3\n")
    repairs = repairs_of(tmp_path / "set")
    assert repairs[readers.WITHOUT_ITEMS] == 1
    assert repairs[tables.TEST_ONLY] == 1


def test_truncated_parquet(tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    polars.DataFrame({"user": range(1000), "item": range(1000)}).write_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidData, match=r"is not Parquet|truncated"):
        prepare(path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("when", ["rows", "train", "manifest"])
def test_a_full_disk_is_an_error_and_leaves_nothing(
    number: int, when: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both forms in which it shows: the engine's own exception, and the system's.
    if when == "manifest":

        def full(*_: object) -> None:
            raise OSError(number, "No space left on device")

        monkeypatch.setattr("fairfold.data.files.os.fsync", full)
    else:
        real = polars.DataFrame.write_parquet

        def write(frame: polars.DataFrame, path: Path, **options: object) -> None:
            if Path(path).name.startswith(when):
                raise polars.exceptions.ComputeError(f"No space left on device (os error {number})")
            real(frame, path, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(polars.DataFrame, "write_parquet", write)
    with pytest.raises(InvalidData, match="is full"):
        prepare(written(tmp_path / "own.csv", GOOD))
    assert not list(cache.iterdir())


def test_another_error_of_the_system_is_passed_on(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("fairfold.data.files.os.fsync", broken)
    with pytest.raises((OSError, CannotWrite), match="Input/output"):
        prepare(written(tmp_path / "own.csv", GOOD))
    assert not list(cache.iterdir())


def test_a_cache_of_another_version_is_prepared_again_and_said_so(tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", GOOD)
    first = prepare(path)
    manifest = first.folder / store.MANIFEST
    content = json.loads(manifest.read_text())
    del content["checksum"]
    manifest.write_bytes(with_checksum(content | {"format": 99, "fairfold": "9.9"}))
    with pytest.raises(InvalidData, match=r"prepared by fairfold 9\.9 in format 99"):
        load(first.folder)
    again = prepare(path)
    assert "prepared by fairfold 9.9" in again.note
    assert again.manifest["counts"] == first.manifest["counts"]
    assert prepare(path).note == "was in the cache already"


def test_a_cache_with_another_bit_is_prepared_again_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "own.csv", GOOD)
    right, folder = load(path), prepare(path).folder
    part = next(folder.glob("train-*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(InvalidData, match=r"train-00000.parquet has another checksum.*--refresh"):
        load(folder)
    found = load(path)
    assert "it is prepared again" in caplog.text
    assert found.train.items.tolist() == right.train.items.tolist()
    assert load(folder).train.items.tolist() == right.train.items.tolist()


@pytest.mark.parametrize("harm", ["cut", "remove", "garble"])
def test_a_damaged_cache_is_prepared_again(harm: str, tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", GOOD)
    folder = prepare(path).folder
    part = next(folder.glob("train-*"))
    if harm == "cut":
        part.write_bytes(part.read_bytes()[:-1])
    elif harm == "remove":
        part.unlink()
    else:
        (folder / store.MANIFEST).write_text("{")
    assert prepare(path).note.startswith("prepared again")
    assert len(load(path).train) + len(load(path).test) == 60
    assert not list(folder.parent.glob(f".*{PARTIAL}"))


def test_a_changed_source_is_prepared_again(tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", GOOD)
    prepare(path)
    path.touch()
    assert prepare(path).note == "was in the cache already"  # another time, the same content
    written(path, GOOD + "1,900,5\n")
    assert prepare(path).note == "prepared again: the source has changed"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    written(tmp_path / "file", "")
    with pytest.raises(InvalidData, match="cannot create or write"):
        prepare(written(tmp_path / "own.csv", GOOD), cache=tmp_path / "file" / "cache")


def test_a_prepared_folder_takes_no_options(tmp_path: Path) -> None:
    folder = prepare(written(tmp_path / "own.csv", GOOD)).folder
    assert len(load(folder).train)
    with pytest.raises(InvalidData, match="is prepared already"):
        load(folder, top_users=3)


PIECES = st.sampled_from(
    [
        *(b"user,item,rating\n", b"user_id\titem_id\n", b"1,2,3\n", b"1\t2\t3\t4\n", b"1::2::3::4\n", b"0 1 2\n"),
        *(b'{"user_id": 1, "item_id": [2]}\n', b'{"user_id": null, "item_id": 2}\n', b"{", b"\n", b"\r\n", b"\xff"),
        *(b"\xc3\xa9,1\n", b"nan,inf,nan\n", b"9" * 30, b",,\n", b"-0,+1,1e400\n", b"\x1f\x8b", b'"a;b', b'"'),
        b"A2VNYWOPJ13AFP,0439893577,5.0,1390000000\n",
    ]
)
NAMES = ["own.csv", "u.data", "ratings.dat", "train.txt", "own.json", "own.parquet", "BX-Book-Ratings.csv"]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(NAMES), content=st.one_of(st.lists(PIECES, max_size=8).map(b"".join), st.binary(max_size=40))
)
def test_any_bytes_are_data_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    with contextlib.suppress(InvalidData):
        assert len(load(written(folder / name, content), cache=folder / "cache").train) >= 1
