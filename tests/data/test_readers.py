"""Every publisher's form is read into the same rows."""

import gzip
import json
from collections import Counter
from pathlib import Path

import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.data import files as lines
from fairfold.data import readers
from fairfold.data.formats import Options, detect_format
from tests.support.files import written

Rows = list[tuple[object, ...]]


def rows_of(path: Path, wanted: Options | None = None, block_size: int = 1 << 20) -> tuple[Rows, Counter[str]]:
    repairs = Counter[str]()
    frames = list(readers.read(path, detect_format(path, wanted), repairs=repairs, block_size=block_size))
    return [row for frame in frames for row in frame.rows()], +repairs


def amazon(user: str, item: str, rating: float) -> str:
    return json.dumps({"overall": rating, "reviewerID": user, "asin": item, "reviewText": 'a "b", {c}'}) + "\n"


def goodreads(user: str, item: str, rating: int) -> str:
    return json.dumps({"user_id": user, "book_id": item, "is_read": True, "rating": rating}) + "\n"


USER, OTHER, PRODUCT, BOOK = "A2VNYWOPJ13AFP", "AAP7PPBU72QFM", "B000GKXY4S", "0439893577"
FORMS: dict[str, tuple[str, Rows]] = {
    "train.txt": ("0 5 7\n3 5\n", [(0, 5), (0, 7), (3, 5)]),
    "u.data": ("196\t242\t3\t881250949\n", [(196, 242, 3.0)]),
    "ml-1m.train.rating": ("0\t32\t4\t978824330\n", [(0, 32, 4.0)]),
    "ratings.dat": ("1::1193::5::978300760\n1::661::0.5::978302109\n", [(1, 1193, 5.0), (1, 661, 0.5)]),
    "ratings.csv": ("userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n", [(1, 31, 2.5)]),
    "goodreads_interactions.csv": (
        "user_id,book_id,is_read,rating,is_reviewed\n0,948,1,5,0\n0,9,0,0,0\n",
        [(0, 948, 5.0), (0, 9, None)],
    ),
    "goodreads_interactions_dedup.json.gz": (
        goodreads("8842281e1d", "24375664", 5) + goodreads("8842281e1d", "18245960", 0),
        [("8842281e1d", 24375664, 5.0), ("8842281e1d", 18245960, None)],
    ),
    "Books_5.json.gz": (amazon(USER, BOOK, 5.0), [(USER, BOOK, 5.0)]),
    "Books_2023.jsonl.gz": (
        json.dumps({"rating": 4.0, "asin": "B1", "parent_asin": "B2", "user_id": "AX"}) + "\n",
        [("AX", "B2", 4.0)],
    ),
    "ratings_Books.csv": (f"{USER},{BOOK},5.0,1390000000\n", [(USER, BOOK, 5.0)]),
    "Magazine.csv": (f"{PRODUCT},{USER},4.0,1390000000\n", [(USER, PRODUCT, 4.0)]),
    "BX-Book-Ratings.csv": (
        '"User-ID";"ISBN";"Book-Rating"\r\n"276725";"034545104X";"0"\r\n"4377";"\\"0210000010";"8"\r\n',
        [(276725, "034545104X", None), (4377, '\\"0210000010', 8.0)],
    ),
    "own.tsv": ("user\titem\tstars\na\tx\t1.5\n", [("a", "x", 1.5)]),
    "own.csv": ('item_id,user_id,title\n1,2,"a, b\nc"\n3,4,d\n', [(2, 1), (4, 3)]),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_read(name: str, tmp_path: Path) -> None:
    text, expected = FORMS[name]
    path = written(tmp_path / name, gzip.compress(text.encode()) if name.endswith(".gz") else text)
    rows, repairs = rows_of(path)
    assert rows == expected
    assert not repairs


@pytest.mark.parametrize("name", [name for name in FORMS if not name.endswith(".gz")])
def test_gzip_of_any_text_form_is_read(name: str, tmp_path: Path) -> None:
    text, expected = FORMS[name]
    assert rows_of(written(tmp_path / f"{name}.gz", gzip.compress(text.encode())))[0] == expected


def test_parquet_with_named_columns(tmp_path: Path) -> None:
    frame = polars.DataFrame({"customer": [3, 1], "sku": ["x", "y"], "stars": [1, 5]})
    frame.write_parquet(tmp_path / "own.parquet")
    assert rows_of(tmp_path / "own.parquet", Options(user_column="customer", item_column="sku"))[0] == [
        (3, "x", 1.0),
        (1, "y", 5.0),
    ]


def test_columns_the_caller_names(tmp_path: Path) -> None:
    path = written(tmp_path / "own.csv", "who|what|how\n1|2|3\n")
    assert rows_of(path, Options(user_column="who", item_column="what", rating_column="how", separator="|"))[0] == [
        (1, 2, 3.0)
    ]


def test_byte_order_mark_and_carriage_returns(tmp_path: Path) -> None:
    assert rows_of(written(tmp_path / "own.csv", b"\xef\xbb\xbfuser,item\r\n1,2\r\n"))[0] == [(1, 2)]


def test_latin_1_of_the_publisher_is_not_a_repair(tmp_path: Path) -> None:
    text = '"User-ID";"ISBN";"Book-Rating"\n"1";"84º";"1"\n'
    assert rows_of(written(tmp_path / "BX-Book-Ratings.csv", text.encode("latin-1"))) == ([(1, "84º", 1.0)], Counter())


@pytest.mark.parametrize("text", ["007", "+7", "-0", "7.0", " 7", "", "9" * 19])
def test_only_ids_with_one_spelling_become_numbers(text: str) -> None:
    ids = polars.Series(["1", text])
    assert readers.integer_ids(ids).to_list() == ids.to_list()


def test_negative_numbers_are_numbers() -> None:
    assert readers.integer_ids(polars.Series(["-5", "0", "10"])).to_list() == [-5, 0, 10]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.lists(st.integers(0, 99999), min_size=1)), min_size=1),
    st.integers(1, 40),
)
def test_blocks_of_any_size_give_the_same_rows(users: list[tuple[int, list[int]]], size: int) -> None:
    import tempfile

    text = "".join(f"{user} {' '.join(map(str, items))}\n" for user, items in users)
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "train.txt", text)
        assert rows_of(path, block_size=size)[0] == [(user, item) for user, items in users for item in items]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 1000])
def test_no_block_is_cut_inside_quotes(size: int, tmp_path: Path) -> None:
    text = 'user,item,note\n1,2,"a\nb,""c""\n"\n3,4,d\n5,6,"e\n\n"\n'
    assert rows_of(written(tmp_path / "own.csv", text), block_size=size)[0] == [(1, 2), (3, 4), (5, 6)]


def test_progress_adds_up_to_the_size_on_disk(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gz", gzip.compress(b"1 2 3\n" * 100_000))
    seen: list[int] = []
    assert sum(len(block) for block in lines.blocks(path, size=1000, advance=seen.append)) == 600_000
    assert sum(seen) == path.stat().st_size
