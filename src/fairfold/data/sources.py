"""What a folder or file holds: which files, which split each belongs to, and where the titles are."""

import csv
from dataclasses import dataclass
from pathlib import Path

import polars

from fairfold.data import lines
from fairfold.data.layouts import Layout, detect
from fairfold.data.options import Options
from fairfold.errors import InvalidData

SPLITS = ("train", "valid", "test")

# Folders are recognised by these names, the first that is there; each may also be gzip.
SINGLE_FILES = (
    "u.data",
    "ratings.dat",
    "ratings.csv",
    "BX-Book-Ratings.csv",
    "goodreads_interactions.csv",
    "goodreads_interactions.json",
    "goodreads_interactions_dedup.json",
)
TABLE_ENDINGS = (
    ".csv",
    ".tsv",
    ".parquet",
    ".pq",
    ".json",
    ".jsonl",
    ".inter",
    ".csv.gz",
    ".tsv.gz",
    ".json.gz",
    ".jsonl.gz",
)


@dataclass(frozen=True)
class SourceFile:
    """One file of interactions; ``split`` is None where the publisher gives no split."""

    path: Path
    layout: Layout
    split: str | None = None


@dataclass(frozen=True)
class Source:
    """The files of one data set."""

    name: str
    files: tuple[SourceFile, ...]
    titles: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """All files that are read."""
        return [*(file.path for file in self.files), *([] if self.titles is None else [self.titles])]

    @property
    def published_split(self) -> bool:
        """Whether the publisher says what is train and what is test."""
        return self.files[0].split is not None


def find_source(path: Path, wanted: Options | None = None) -> Source:
    """Tell what a folder in its publisher's form, or one file, holds."""
    if not path.exists():
        raise lines.no_such_file(path)
    if path.is_file():
        chosen: list[tuple[str | None, Path]] = [(None, path)]
        folder, name = path.parent, path.name.split(".")[0]
        if name in ("ratings", "u", "train"):  # say little by themselves; the folder says more
            name = folder.name
    elif not path.is_dir():
        raise InvalidData(
            f"{path} is neither a file nor a folder", "a file or folder of interactions", "Copy the data into a file."
        )
    else:
        folder, name = path, path.resolve().name
        chosen = _files_of(path)
    files = tuple(SourceFile(file, detect(file, wanted), split) for split, file in chosen)
    titles, _ = _TITLES.get(files[0].path.name.removesuffix(".gz"), ("", ""))
    if files[0].path.suffix == ".inter":  # RecBole's
        titles = files[0].path.name.removesuffix(".inter").removesuffix(f".{files[0].split}") + ".item"
    return Source(name, files, folder / titles if titles and (folder / titles).is_file() else None)


def _files_of(folder: Path) -> list[tuple[str | None, Path]]:
    for pattern in ("{}.txt", "*.{}.rating", "*.{}.inter", "{}.csv", "{}.tsv", "{}.parquet"):
        found = {split: _one(folder, pattern.format(split)) for split in SPLITS}
        if (train := found["train"]) is not None:
            if found["test"] is None:
                raise InvalidData(
                    f"{folder} has {train.name} and no test file",
                    "both, or one file without a split",
                    f"Give the file itself ({train}) to have it split, or add the test file.",
                )
            return [(split, file) for split, file in found.items() if file is not None]
    for name in SINGLE_FILES:
        if (file := _one(folder, name)) is not None:
            return [(None, file)]
    tables = [path for path in sorted(folder.iterdir()) if path.name.lower().endswith(TABLE_ENDINGS)]
    if len(tables) == 1:
        return [(None, tables[0])]
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
    raise InvalidData(
        f"{folder} holds {names}",
        "one of the forms in docs/data.md, or a single CSV, TSV, JSON lines or Parquet file",
        "Name the file with the interactions.",
    )


def _one(folder: Path, pattern: str) -> Path | None:
    for ending in ("", ".gz"):
        if found := sorted(folder.glob(pattern + ending)):
            return found[0]
    return None


# Files of titles and their separators, by what they stand beside. Id and title come first in all of them; those that
# end in .csv have a header.
_TITLES = {
    "u.data": ("u.item", "|"),
    "ratings.dat": ("movies.dat", "::"),
    "ratings.csv": ("movies.csv", ","),
    "BX-Book-Ratings.csv": ("BX-Books.csv", ";"),
}


def read_titles(path: Path) -> polars.DataFrame:
    """Ids and titles, as text, of the items a publisher names; lines that cannot be read have no title."""
    # Read as UTF-8, and as Latin-1 where it is not: movies.dat comes in both.
    text = (line.rstrip("\r") for block in lines.blocks(path) for line in block.decode().split("\n"))
    separator = dict(_TITLES.values()).get(path.name)
    if path.suffix == ".csv" or separator is None:
        next(text, None)
    separator = separator or "\t"  # RecBole's
    fields = (_fields(line, separator) for line in text)
    pairs = [(found[0], found[1]) for found in fields if len(found) >= 2]
    frame = polars.DataFrame(pairs, schema={"id": polars.String, "title": polars.String}, orient="row")
    return frame.unique("id", keep="first", maintain_order=True)


def _fields(line: str, separator: str) -> list[str]:
    if separator == ",":
        try:
            return next(csv.reader([line]), [])
        except csv.Error:  # a field that is too long to be a title
            return []
    return [field.strip('"') for field in line.split(separator)]
