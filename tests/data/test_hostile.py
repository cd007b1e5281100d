"""Files and names that ask for trouble: each is read as what it is, or refused in words."""

import gzip
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import polars
import pytest

from fairfold.checksums import with_checksum
from fairfold.data import files as limits
from fairfold.data import load, load_images, prepare, readers
from fairfold.data import parsing as json_lines
from fairfold.data.download import _unpack
from fairfold.data.images import read_idx
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import FairfoldError, InvalidData

ROWS = [(row % 7, row) for row in range(72)]
CSV = "user_id,item_id\n" + "".join(f"{user},{item}\n" for user, item in ROWS)


def count(path: Path, **options: Any) -> int:
    return int(prepare(path, **options).manifest["source_counts"]["interactions"])


def objects(*extra: str) -> str:
    return "".join(json.dumps({"user_id": user, "item_id": item}) + "\n" for user, item in ROWS) + "".join(extra)


# -- a path is a path ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine*.parquet", "mine?.parquet", "mine[1].parquet"])
def test_a_parquet_file_is_not_taken_for_a_pattern(name: str, tmp_path: Path) -> None:
    for neighbor in ("mine1.parquet", "mine2.parquet"):
        polars.DataFrame({"user": [1, 2, 3], "item": [4, 5, 6]}).write_parquet(tmp_path / neighbor)
    with (tmp_path / name).open("wb") as file:
        polars.DataFrame({"user": ["only"], "item": ["this"]}).write_parquet(file)
    assert load(tmp_path / name).user_ids == ["only"]


@pytest.mark.parametrize("name", ["ratings[1].csv", "*.csv", "a{b}?.csv"])
def test_a_name_with_the_signs_of_patterns_is_a_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder[1]").mkdir()
    path = tmp_path / "folder[1]" / name
    path.write_text(CSV)
    data = load(path, cache=tmp_path / "cache*[2]")
    assert len(data.train) + len(data.test) == 72


# -- archives --------------------------------------------------------------------------------------------------------


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are suspicious as well, so that none of the tests needs a large one."""
    monkeypatch.setattr(limits, "UNSUSPICIOUS", 1000)


@pytest.mark.usefixtures("strict")
def test_gzip_that_makes_too_much_of_itself_is_refused_and_can_be_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.csv.gz"
    path.write_bytes(gzip.compress(("user,item\n" + "1,1\n" * 500_000).encode()))
    with pytest.raises(InvalidData, match=r"bytes or more of .* raise FAIRFOLD_MAX_RATIO"):
        count(path)
    monkeypatch.setenv("FAIRFOLD_MAX_RATIO", "2000")
    assert count(path) == 500_000
    monkeypatch.setenv("FAIRFOLD_MAX_TOTAL", "1000000")
    with pytest.raises(InvalidData, match="unpacks to more than 1,000,000 bytes"):
        count(path, refresh=True)


@pytest.mark.parametrize("start", [b"user,item\n", b'user,item\n1,"'])
def test_a_line_without_end_is_refused(start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(start + (b"1" * 99 + (b"\n" if start.endswith(b'"') else b"1")) * 2000)
    monkeypatch.setenv("FAIRFOLD_MAX_LINE", "20000")
    with pytest.raises(InvalidData, match="a line of more than 20,000 bytes"):
        count(path, block_size=4096)


@pytest.mark.parametrize("value", ["0", "-1", "many", "1e3", "9" * 30])
def test_limits_that_are_no_numbers(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFOLD_MAX_LINE", value)
    with pytest.raises(InvalidData, match="a whole number of at least 1"):
        limits.limit(limits.LINE)


@pytest.mark.usefixtures("strict")
def test_a_zip_that_makes_too_much_of_itself_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("set/ratings.csv", b"0" * 5_000_000)
    with pytest.raises(InvalidData, match="at most 200 bytes from one"):
        _unpack(tmp_path / "a.zip", tmp_path, ("ratings.csv",))
    assert not (tmp_path / "ratings.csv").exists() or (tmp_path / "ratings.csv").stat().st_size < 2_000_000


@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_a_damaged_zip_is_an_error(harm: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("ratings.csv", CSV)
    content = bytearray((tmp_path / "a.zip").read_bytes())
    if harm == "cut":
        content = content[:-30]
    else:
        content[60] ^= 0xFF
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(InvalidData, match="is damaged"):
        _unpack(tmp_path / "a.zip", tmp_path, ("ratings.csv",))


@pytest.mark.usefixtures("strict")
def test_an_image_file_is_read_no_further_than_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 10) + bytes(1 << 25)))
    with pytest.raises(InvalidData, match="or more; needed: 18"):
        read_idx(path)
    path.write_bytes(struct.pack(">HBB8I", 0, 8, 8, *[2**32 - 1] * 8) + bytes(100))
    with pytest.raises(InvalidData, match="has 136 bytes"):
        read_idx(path)
    path.write_bytes(struct.pack(">HBB", 0, 8, 200) + bytes(900))
    with pytest.raises(InvalidData, match="dimensions up to 8"):
        read_idx(path)


def test_images_of_the_wrong_form_are_errors(tmp_path: Path) -> None:
    def idx(name: str, kind: int, shape: tuple[int, ...], values: bytes) -> None:
        (tmp_path / name).write_bytes(struct.pack(f">HBB{len(shape)}I", 0, kind, len(shape), *shape) + values)

    for prefix in ("train", "t10k"):
        idx(f"{prefix}-images-idx3-ubyte", 8, (2, 2, 2), bytes(8))
        idx(f"{prefix}-labels-idx1-ubyte", 8, (2,), bytes([0, 1]))
    assert load_images(tmp_path, cache=tmp_path / "cache").num_classes == 2
    for name, kind, shape, values, message in (
        ("t10k-images-idx3-ubyte", 8, (8,), bytes(8), "3 dimensions"),
        ("t10k-images-idx3-ubyte", 8, (2, 1, 2), bytes(4), "images of one size"),
        ("t10k-images-idx3-ubyte", 12, (2, 2, 2), bytes(32), "images of bytes"),
        ("train-labels-idx1-ubyte", 9, (2,), b"\xff\x01", "whole numbers from 0"),
        ("train-labels-idx1-ubyte", 12, (2,), b"\x7f\xff\xff\xff\0\0\0\1", "whole numbers from 0 to 65,535"),
        ("train-labels-idx1-ubyte", 14, (2,), bytes(16), "whole numbers"),
    ):
        before = (tmp_path / name).read_bytes()
        idx(name, kind, shape, values)
        with pytest.raises(InvalidData, match=message):
            load_images(tmp_path, cache=tmp_path / "cache")
        (tmp_path / name).write_bytes(before)


# -- forms that were read as something else --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 1 << 20])
def test_lines_that_end_in_carriage_returns_alone(size: int, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(CSV.replace("\n", "\r").encode())
    data = load(path, split=1.0, block_size=size)
    assert len(data.train) == 72
    assert data.num_users == 7


@pytest.mark.parametrize(
    "values", [[{"a": 1}, {"a": 2}], [[1], [2]], [b"\xff", b"\xfe"]], ids=["struct", "list", "binary"]
)
@pytest.mark.parametrize("role", ["user", "item", "rating"])
def test_columns_of_structures_are_refused(role: str, values: list[Any], tmp_path: Path) -> None:
    columns: dict[str, Any] = {"user": [1, 2], "item": [3, 4], "rating": [5, 5]}
    polars.DataFrame(columns | {role: values}).write_parquet(tmp_path / "own.parquet")
    with pytest.raises(InvalidData, match=f"the column '{role}' of own.parquet holds"):
        prepare(tmp_path / "own.parquet")


def test_json_ids_that_are_lists_or_objects_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(objects('{"user_id": {"a": 1}, "item_id": 1}\n', '{"user_id": "[a]", "item_id": [1]}\n'))
    prepared = prepare(path)
    assert prepared.manifest["repairs"][json_lines.NOT_AN_ID] == 2
    path.write_text(objects('{"user_id": "{text", "item_id": "[1"}\n'))
    assert count(path) == 73
    path.write_text('{"user_id": {"a": 1}, "item_id": 1}\n' * 5)
    with pytest.raises(InvalidData, match="5 users or items that are lists or objects"):
        prepare(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"user_id": NaN, "item_id": 1}',
        '{"user_id": 1, "item_id": 1, "x": -Infinity}',
        '{"user_id": 1, "item_id": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"user_id": 1, "item_id": 1, "x": ' + '{"a":' * 5_000 + "1" + "}" * 5_001,
        '{"user_id": 1e999, "item_id": 1}',
        '{"user_id": 1, "item_id": 2} {"user_id": 1, "item_id": 3}',
        "[1, 2]",
    ],
)
def test_lines_that_are_nearly_json_are_left_out_and_counted(line: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(objects(line + "\n"))
    prepared = prepare(path)
    assert prepared.manifest["source_counts"]["interactions"] == 72
    assert prepared.manifest["repairs"][json_lines.NOT_JSON] == 1
    path.write_text(line + "\n" + objects())
    if "1e999" in line:  # the columns can still be read from it
        assert count(path) == 72
        return
    with pytest.raises(InvalidData, match=r"is not JSON|own\.jsonl"):
        prepare(path)


# -- names and sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["/dev/null", "x" * 5000, "y/" * 3000, "~nobody-of-this-name/x.csv", "a\0b"])
def test_sources_that_cannot_be_data(source: str) -> None:
    for read in (load, prepare, load_images):
        with pytest.raises(InvalidData) as error:
            read(source)
        assert len(str(error.value)) < 700


def test_the_longest_name_a_file_may_have(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 120 + ".csv")
    path.write_text(CSV)
    assert count(path) == 72


def test_more_users_than_any_machine_counts(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(CSV)
    assert load(path, top_users=10**20).num_users == 7
    with pytest.raises(InvalidData, match="leaves nothing"):
        load(path, core=10**20)


def test_a_separator_of_several_bytes(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(CSV.replace(",", "é"))
    assert count(path, separator="é") == 72
    for separator in ("", '"', "\n"):
        with pytest.raises(InvalidData, match="separator"):
            prepare(path, separator=separator)


@pytest.mark.parametrize(
    "sizes", [{"users": 10**14}, {"items": 10**14}, {"factors": 10**11}, {"users": 2**32 - 1}, {"factors": 2**31}]
)
def test_a_synthetic_world_that_no_machine_holds(sizes: dict[str, int]) -> None:
    with pytest.raises(FairfoldError, match=r"users|items|factors"):
        SyntheticDataset(**sizes).dataset()


def test_a_manifest_without_its_parts_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(CSV)
    folder = prepare(path).folder
    unsealed = ('{"format": 3}', '{"format": 3, "files": 3}', "[]", "[" * 100_000, "{}")
    for content in [*(text.encode() for text in unsealed), with_checksum({"format": 3, "files": 3})]:
        (folder / "manifest.json").write_bytes(content)
        with pytest.raises(InvalidData, match=r"manifest\.json: damaged"):
            load(folder)


# -- where blocks end decides nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 97, 1 << 20])
def test_short_and_long_lines_are_treated_alike_wherever_they_stand(size: int, tmp_path: Path) -> None:
    good = [f"{user},{item},3" for user, item in ROWS]
    bad = ["1,900", "1,901,3,4", "1,902,3,4,5,6"]
    for position in (0, 5, 72):
        path = tmp_path / f"own{position}.csv"
        path.write_text("\n".join(["user,item,rating", *good[:position], *bad, *good[position:]]) + "\n")
        prepared = prepare(path, block_size=size, cache=tmp_path / f"{size}")
        assert prepared.manifest["source_counts"]["interactions"] == 73  # one without a rating is an interaction
        assert prepared.manifest["repairs"][readers.MALFORMED] == 2


def test_a_stray_quote_costs_its_own_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(CSV + '1,"a"b\n1,999\n' + CSV.split("\n", 1)[1])
    prepared = prepare(path)
    assert prepared.manifest["source_counts"]["interactions"] == 72 + 1 + 72
    assert prepared.manifest["repairs"][readers.MALFORMED] == 1


def test_a_zip_whose_directory_points_before_its_start_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("ratings.csv", CSV)
    content = bytearray((tmp_path / "a.zip").read_bytes())
    del content[10:40]
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(InvalidData, match="is damaged"):
        _unpack(tmp_path / "a.zip", tmp_path, ("ratings.csv",))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_of_another_method_that_is_damaged_is_an_error(method: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as packed:
        packed.writestr("ratings.csv", CSV)
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[44:90] = bytes(46)
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(InvalidData, match="is damaged"):
        _unpack(tmp_path / "a.zip", tmp_path, ("ratings.csv",))


def test_errors_do_not_repeat_endless_names(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("a" * 30_000 + "," + "b" * 30_000 + "\n1,2\n")
    with pytest.raises(InvalidData, match="no column") as error:
        prepare(path)
    assert len(str(error.value)) < 500


def test_pixels_beyond_any_number_are_an_error(tmp_path: Path) -> None:
    for split in ("train", "test"):
        data = {"x": [[1e300] * 784], "y": [1]}
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.json").write_text(json.dumps({"users": ["u"], "user_data": {"u": data}}))
    with pytest.raises(InvalidData, match="outside 0 to 1"):
        load_images(tmp_path, cache=tmp_path / "cache")


def test_a_column_named_by_half_a_character_is_an_error(tmp_path: Path) -> None:
    """Found by case 5375 of seed 103 of tests/faults/fuzz_data.py."""
    path = tmp_path / "own.jsonl"
    path.write_text('{"user\\ud800": 1, "item": 2}\n{"user": 1, "item": 3}\n')
    with pytest.raises(InvalidData, match="not JSON"):
        prepare(path, cache=tmp_path / "cache")
