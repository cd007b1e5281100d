"""The rows of a source on disk in columnar form, so that they can be gone over more than once in little memory."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import polars

from fairfold.data import lines, readers
from fairfold.data.layouts import empty
from fairfold.data.sources import Source

# Whole numbers, so that duplicates and overlaps can be resolved by comparing them.
SPLIT_CODES = {None: 0, "train": 0, "valid": 1, "test": 2}


@dataclass(frozen=True)
class Spool:
    """The rows of a source as Parquet parts: user, item, rating if there is one, split, in the source's order."""

    parts: tuple[Path, ...]
    rated: bool

    def scan(self) -> polars.LazyFrame:
        """All rows, lazily, with their number in ``row``."""
        return polars.scan_parquet(list(self.parts), row_index_name="row")


def spool(
    source: Source,
    folder: Path,
    *,
    repairs: Counter[str],
    block_size: int = lines.BLOCK,
    advance: lines.Advance | None = None,
) -> Spool:
    """Read a source once, block by block, into Parquet parts in a folder."""
    parts: list[tuple[Path, polars.Schema]] = []
    rated = all(file.layout.rating is not None for file in source.files)
    for file in source.files:
        rows = 0
        for frame in readers.read(file.path, file.layout, repairs=repairs, block_size=block_size, advance=advance):
            split = polars.lit(SPLIT_CODES[file.split], polars.UInt8).alias("split")
            columns = ["user", "item", "rating"] if rated else ["user", "item"]
            path = folder / f"rows-{len(parts):06d}.parquet"
            part = frame.select(*columns, split)
            part.write_parquet(path, compression="lz4", statistics=False)
            parts.append((path, part.schema))
            rows += frame.height
        if not rows:
            raise empty(file.path)
    _give_one_type(parts)
    return Spool(tuple(path for path, _ in parts), rated)


def _give_one_type(parts: list[tuple[Path, polars.Schema]]) -> None:
    """Where one block holds an id that is not a number, the ids of all blocks become text."""
    as_text = [role for role in ("user", "item") if len({schema[role] for _, schema in parts}) > 1]
    for path, schema in parts:
        change = [role for role in as_text if schema[role] != polars.String]
        if change:
            frame = polars.read_parquet(path, memory_map=False).with_columns(polars.col(change).cast(polars.String))
            frame.write_parquet(path, compression="lz4", statistics=False)
