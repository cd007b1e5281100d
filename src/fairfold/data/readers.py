"""From any known file of interactions to blocks of rows: user, item and, where there is one, rating."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars

from fairfold.data import json_lines, lines, parquet
from fairfold.data.files import Advance
from fairfold.data.json_lines import NOT_AN_ID, NOT_JSON
from fairfold.data.layouts import SEPARATORS, Layout
from fairfold.errors import InvalidData

MALFORMED = "lines with a wrong number of fields, left out"
NO_ID = "rows without a user or an item, left out"
NOT_A_NUMBER = "ratings that are not numbers, rows left out"
OUT_OF_SCALE = "ratings out of scale, rows left out"
WITHOUT_ITEMS = "lines with a user and no items"

MORE = "more"  # the column of what a line should not hold

# Above this share of left-out rows the file was not what it was taken for, and an error helps more than a repair.
TOLERATED = 0.1


def read(
    path: Path,
    layout: Layout,
    *,
    repairs: Counter[str],
    block_size: int = lines.BLOCK,
    advance: Advance = lambda _done: None,
) -> Iterator[polars.DataFrame]:
    """Yield the rows of a file in blocks of so many bytes, in the order of the file; repairs are counted.

    Frames have the columns ``user`` and ``item`` (Int64 where every id of the block is a plain whole number, else
    String) and, where the layout has one, ``rating`` (Float32, null for "not rated").
    """
    own = Counter[str]()
    rows = 0
    for frame in _frames(path, layout, own, block_size, advance):
        clean = _clean(frame, layout, own)
        rows += clean.height
        if clean.height:
            yield clean
    left_out = sum(own[reason] for reason in (MALFORMED, NOT_JSON, NOT_AN_ID, NO_ID, NOT_A_NUMBER, OUT_OF_SCALE))
    if left_out > TOLERATED * (rows + left_out):
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in own.items() if count)
        raise InvalidData(
            f"{left_out:,} of {rows + left_out:,} rows of {path.name} cannot be used ({reasons})",
            _description(layout),
            "Check the columns, the separator (--separator) and the scale of the ratings (--scale).",
        )
    repairs.update(own)


def _description(layout: Layout) -> str:
    if layout.kind != "delimited":
        return "rows with a user and an item"
    scale = "" if layout.scale is None else f", ratings from {layout.scale[0]:g} to {layout.scale[1]:g}"
    return (
        f"{layout.width} fields a line with a {SEPARATORS.get(layout.separator, layout.separator)} between them{scale}"
    )


def _frames(
    path: Path, layout: Layout, repairs: Counter[str], size: int, advance: Advance
) -> Iterator[polars.DataFrame]:
    if layout.kind == "parquet":
        columns = {role: str(name) for role, name in _roles(layout).items()}
        for frame, share in parquet.blocks(path, columns, max(1, size // parquet.BYTES_A_ROW)):
            advance(int(path.stat().st_size * share))
            yield frame
        return
    quoted = layout.kind == "delimited" and layout.quote == '"'
    parse = {"lines": _user_lines, "delimited": _delimited, "json": _json}[layout.kind]
    first = True
    for block in lines.blocks(
        path, size=size, quoted=quoted, encoding=layout.encoding, repairs=repairs, advance=advance
    ):
        body = block[block.find(b"\n") + 1 :] if first and layout.header else block
        first = False
        if body.strip():
            yield parse(path, body, layout, repairs)


def _user_lines(path: Path, block: bytes, _layout: Layout, repairs: Counter[str]) -> polars.DataFrame:
    for separator in (b",", b"\t", b";"):
        if separator in block:
            raise InvalidData(
                f"a {SEPARATORS[separator.decode()]} in {path.name}",
                "lines of the form `user item item …` with blanks between them",
                "Name the columns (--user-column, --item-column) if this is a table with one interaction per line.",
            )
    fields = polars.Series("line", block.decode().split("\n"), dtype=polars.String).str.strip_chars()
    fields = fields.filter(fields != "").str.split(" ")
    frame = fields.to_frame().select(
        polars.col("line").list.first().alias("user"), polars.col("line").list.slice(1).alias("item")
    )
    repairs[WITHOUT_ITEMS] += int((frame["item"].list.len() == 0).sum())
    frame = frame.filter(polars.col("item").list.len() > 0).explode("item")
    return frame.filter(polars.col("item") != "")  # two blanks in a row make an empty field


def _delimited(_path: Path, block: bytes, layout: Layout, repairs: Counter[str]) -> polars.DataFrame:
    separator = layout.separator
    if len(separator.encode()) > 1:  # the engine separates by one byte; a tab does not occur in these files
        block, separator = block.replace(separator.encode(), b"\t"), "\t"
    try:
        frame = _parse(block, layout, separator)
    except polars.exceptions.PolarsError:  # quotes that follow no rule: then every line stands for itself
        given = [line for line in block.split(b"\n") if line.strip()]
        frames, _ = json_lines.salvage(given, lambda some: _parse(b"\n".join(some), layout, separator))
        nothing = polars.DataFrame(schema=dict.fromkeys([*_roles(layout), MORE], polars.String))
        frame = polars.concat([nothing, *frames])
        repairs[MALFORMED] += len(given) - frame.height
    too_many = frame[MORE].is_not_null()
    repairs[MALFORMED] += int(too_many.sum())
    frame = frame.filter(~too_many).drop(MORE)
    if layout.quote == "strip":
        frame = frame.with_columns(polars.all().str.strip_prefix('"').str.strip_suffix('"'))
    return frame


def _roles(layout: Layout) -> dict[str, str | int]:
    roles: dict[str, str | int] = {"user": layout.user, "item": layout.item}
    return roles if layout.rating is None else {**roles, "rating": layout.rating}


def _name(position: int) -> str:
    return f"column_{position + 1}"  # what the engine calls the columns of a file without a header


def _parse(block: bytes, layout: Layout, separator: str) -> polars.DataFrame:
    """The columns wanted, and in ``MORE`` what stands in a line after all it should hold.

    The engine takes the number of columns from the first line, which may be the one that is wrong, and so is given a
    line of its own. Fields that are missing at the end of a line are null.
    """
    first = separator.join("x" * (layout.width + 1)).encode() + b"\n"
    roles = {**_roles(layout), MORE: layout.width}
    frame = polars.read_csv(
        first + block,
        has_header=False,
        separator=separator,
        quote_char='"' if layout.quote == '"' else None,
        schema={_name(position): polars.String for position in range(layout.width + 1)},
        columns=[_name(position) for position in sorted({int(position) for position in roles.values()})],
        truncate_ragged_lines=True,
    )
    return frame.select(polars.col(_name(int(position))).alias(role) for role, position in roles.items()).slice(1)


def _json(_path: Path, block: bytes, layout: Layout, repairs: Counter[str]) -> polars.DataFrame:
    return json_lines.parse(block, {role: str(name) for role, name in _roles(layout).items()}, repairs)


def _clean(frame: polars.DataFrame, layout: Layout, repairs: Counter[str]) -> polars.DataFrame:
    """Leave out, and count, the rows that say nothing; give ids and ratings their types."""
    for role in ("user", "item"):
        missing = frame[role].is_null()
        if frame.schema[role] == polars.String:
            missing |= frame[role] == ""
        if missing.any():
            repairs[NO_ID] += int(missing.sum())
            frame = frame.filter(~missing.fill_null(True))
    if "rating" in frame.columns:
        given = frame["rating"]
        rating = given.cast(polars.Float32, strict=False)
        # An empty field is an interaction without a rating; a word is a mistake.
        blank = given.is_null() | (given == "") if given.dtype == polars.String else given.is_null()
        wrong = (rating.is_null() & ~blank.fill_null(True)) | ~rating.is_finite().fill_null(True)
        outside = ~rating.is_between(*layout.scale).fill_null(True) & ~wrong if layout.scale else wrong & False
        if layout.unrated is not None:
            outside &= (rating != layout.unrated).fill_null(True)
            rating = rating.replace(layout.unrated, None)
        frame = frame.with_columns(rating.alias("rating"))
        for reason, rows in ((NOT_A_NUMBER, wrong), (OUT_OF_SCALE, outside)):
            repairs[reason] += int(rows.sum())
        if wrong.any() or outside.any():
            frame = frame.filter(~(wrong | outside))
    return frame.with_columns(whole_numbers(frame["user"]), whole_numbers(frame["item"]))


def whole_numbers(ids: polars.Series) -> polars.Series:
    """Int64 where every id is a whole number in its only spelling, so that the way back to the text is exact."""
    if ids.dtype != polars.String:
        return ids.cast(polars.Int64)
    for sample in (ids.head(100), ids):
        numbers = sample.cast(polars.Int64, strict=False)
        if numbers.null_count():
            return ids
        if (sample.str.starts_with("0") & (sample.str.len_bytes() > 1)).any():  # 007 is not 7, nor is an ISBN
            return ids
        if (sample.str.starts_with("+") | sample.str.starts_with("-0")).any():
            return ids
    return numbers
