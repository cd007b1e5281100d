"""Sources of interactions: the files of a folder, the split of each, and the file of titles."""

import csv
from dataclasses import dataclass
from pathlib import Path

import polars

from fairfold.data.formats import FileFormat, Options, detect_format
from fairfold.data.text import blocks, no_such_file
from fairfold.errors import InvalidData

SPLITS = ("train", "valid", "test")
# Folders are recognised by these names, the first that is there; each may also be gzip.
SINGLE_FILES: tuple[str, ...] = ("u.data", "ratings.dat", "ratings.csv", "BX-Book-Ratings.csv")
SINGLE_FILES += ("goodreads_interactions.csv", "goodreads_interactions.json", "goodreads_interactions_dedup.json")
TABLE_ENDINGS: tuple[str, ...] = (".parquet", ".pq", ".inter")
TABLE_ENDINGS += (".csv", ".tsv", ".json", ".jsonl", ".csv.gz", ".tsv.gz", ".json.gz", ".jsonl.gz")

# Files of titles and their separators, by the file of interactions. Id and title come first; CSV files have a header.
_TITLES = {
    "u.data": ("u.item", "|"),
    "ratings.dat": ("movies.dat", "::"),
    "ratings.csv": ("movies.csv", ","),
    "BX-Book-Ratings.csv": ("BX-Books.csv", ";"),
}


@dataclass(frozen=True)
class SourceFile:
    """One file of interactions; ``split`` is None where the publisher gives no split."""

    path: Path
    file_format: FileFormat
    split: str | None = None


@dataclass(frozen=True)
class Source:
    """The files of one data set."""

    name: str
    files: tuple[SourceFile, ...]
    titles: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """Paths of all files that are read."""
        return [*(file.path for file in self.files), *([] if self.titles is None else [self.titles])]

    @property
    def published_split(self) -> bool:
        """True if the publisher gives a split."""
        return self.files[0].split is not None


def find_source(path: Path, options: Options | None = None) -> Source:
    """Find the files of a data set: one file, or a folder in its publisher's form."""
    if not path.exists():
        raise no_such_file(path)
    if path.is_dir():
        folder, name, found = path, path.resolve().name, _files_of(path)
    elif path.is_file():
        folder, name, found = path.parent, path.name.split(".")[0], [(None, path)]
        if name in ("ratings", "u", "train"):  # the folder's name is more telling
            name = folder.name
    else:
        given = f"{path} is neither a file nor a folder"
        raise InvalidData(given, "a file or folder of interactions", "Copy the data into a file.")
    files = tuple(SourceFile(file, detect_format(file, options), split) for split, file in found)
    titles, _ = _TITLES.get(files[0].path.name.removesuffix(".gz"), ("", ""))
    if files[0].path.suffix == ".inter":  # RecBole's
        titles = files[0].path.name.removesuffix(".inter").removesuffix(f".{files[0].split}") + ".item"
    return Source(name, files, folder / titles if titles and (folder / titles).is_file() else None)


def _files_of(folder: Path) -> list[tuple[str | None, Path]]:
    for pattern in ("{}.txt", "*.{}.rating", "*.{}.inter", "{}.csv", "{}.tsv", "{}.parquet"):
        found = {split: _one(folder, pattern.format(split)) for split in SPLITS}
        if (train := found["train"]) is not None:
            if found["test"] is None:
                given = f"{folder} has {train.name} and no test file"
                remedy = f"Give the file itself ({train}) to have it split, or add the test file."
                raise InvalidData(given, "both, or one file without a split", remedy)
            return [(split, file) for split, file in found.items() if file is not None]
    for name in SINGLE_FILES:
        if (file := _one(folder, name)) is not None:
            return [(None, file)]
    entries = sorted(folder.iterdir())
    tables = [path for path in entries if path.name.lower().endswith(TABLE_ENDINGS)]
    if len(tables) == 1:
        return [(None, tables[0])]
    names = ", ".join(path.name for path in entries[:12]) or "nothing"
    needed = "one of the forms in docs/data.md, or a single CSV, TSV, JSON lines or Parquet file"
    raise InvalidData(f"{folder} holds {names}", needed, "Name the file with the interactions.")


def _one(folder: Path, pattern: str) -> Path | None:
    return next((path for ending in ("", ".gz") for path in sorted(folder.glob(pattern + ending))), None)


def read_titles(path: Path) -> polars.DataFrame:
    """Read ids and titles of items, as text; lines that cannot be read are left out."""
    # Read as UTF-8, and as Latin-1 where it is not: movies.dat comes in both.
    text = (line.rstrip("\r") for block in blocks(path) for line in block.decode().split("\n"))
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
        except csv.Error:  # a field that is too long
            return []
    return [field.strip('"') for field in line.split(separator)]
