"""Interactions in many forms (DataFrames, arrays, sparse matrices, files) as one data set."""

import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy
import polars
import torch
from torch import Tensor
from torch.utils import data as torch_data

import fairfold.data
from fairfold.data import Dataset
from fairfold.data.formats import COLUMN_NAMES, TABLE_IN_MEMORY, Options, find_columns
from fairfold.data.parsing import as_times
from fairfold.data.store import read_dataset
from fairfold.errors import InvalidData, InvalidSettings, did_you_mean

FORMS = (
    "a pandas or polars DataFrame, a scipy sparse matrix (users × items), an array of user, item and perhaps rating, "
    "a tuple of such columns, a torch Dataset of such rows, or the path of a file"
)


@dataclass(frozen=True)
class InputData:
    """A data set as the caller gave it.

    Attributes:
        data: The data set.
        integer_ids: Whether the caller's ids of users and of items are integers; else they are text.
    """

    data: Dataset
    integer_ids: tuple[bool, bool]


def read_interactions(interactions: Any, options: Mapping[str, Any], titles: Any = None, test: Any = None) -> InputData:
    """The data set of some interactions, split by ``options`` (of :func:`fairfold.data.load`) or by a ``test``."""
    parsed = parse_options(options)
    if test is not None and isinstance(interactions, Dataset | str | Path):
        given = f"test beside interactions of type {type(interactions).__name__}"
        raise InvalidData(given, "both as tables", "Give a folder with train.csv and test.csv, or two tables.")
    if test is not None and (parsed.split is not None or parsed.resplit):
        raise InvalidSettings("split or resplit beside test", "one of them", "Leave out split: test is held out.")
    if isinstance(interactions, Dataset | str | Path):
        data = interactions if isinstance(interactions, Dataset) else fairfold.data.load(interactions, **options)
        found = InputData(data, has_integer_ids(data))
    else:
        found = _prepare(to_frame(interactions, parsed), None if test is None else to_frame(test, parsed), options)
    data = found.data.with_validation()
    return replace(found, data=data if titles is None else data.with_titles(_titles(titles, data)))


def _prepare(frame: polars.DataFrame, test: polars.DataFrame | None, options: Mapping[str, Any]) -> InputData:
    """A data set of tables, written to a temporary folder and prepared like a file."""
    with tempfile.TemporaryDirectory(prefix="fairfold-") as folder:
        path = Path(folder) / "interactions"
        path.mkdir()
        if test is not None:
            frame = _common_columns(frame, test)
            _common_columns(test, frame).select(frame.columns).write_parquet(path / "test.parquet")
        frame.write_parquet(path / ("all.parquet" if test is None else "train.parquet"))
        # The columns have been found, and have their usual names now; that of the times keeps its own.
        rest = {name: value for name, value in options.items() if not name.endswith("_column")}
        rest |= {f"{name if name in COLUMN_NAMES else 'time'}_column": name for name in frame.columns}
        prepared = fairfold.data.prepare(path, cache=Path(folder) / "cache", **rest)
        data = read_dataset(prepared.folder)
    return InputData(data, (frame.schema["user"].is_integer(), frame.schema["item"].is_integer()))


def _common_columns(frame: polars.DataFrame, other: polars.DataFrame) -> polars.DataFrame:
    """The columns that two tables have in common, ids as text where either has them so."""
    shared = [name for name in frame.columns if name in other.columns]
    as_text = [name for name in shared if polars.String in (frame.schema[name], other.schema[name])]
    return frame.select(shared).with_columns(polars.col(as_text).cast(polars.String))


def parse_options(options: Mapping[str, Any], beside: Iterable[str] = ()) -> Options:
    """Options of :func:`fairfold.data.load`; another is refused with the nearest of these and of ``beside``."""
    known = [field.name for field in fields(Options)]
    for name in options:
        if name not in known:
            raise InvalidSettings(
                f"unknown option {name!r}{did_you_mean(name, [*known, *beside])}",
                f"one of {', '.join(known)}",
                "Settings are given by their keys: settings={'run.rounds': 20}.",
            )
    return Options(**options)


def to_frame(interactions: Any, options: Options) -> polars.DataFrame:
    """A DataFrame of ``user``, ``item`` and perhaps ``rating`` from interactions in any form but a file."""
    if hasattr(interactions, "tocoo"):  # scipy, without importing it
        matrix = interactions.tocoo()
        return _nonzero(matrix.row, matrix.col, matrix.data)
    if isinstance(interactions, Tensor):
        if interactions.is_sparse:
            sparse = interactions.coalesce()
            return _nonzero(*sparse.indices().cpu().numpy(), sparse.values().detach().cpu().numpy())
        interactions = interactions.detach().cpu().numpy()
    if isinstance(interactions, torch_data.TensorDataset):
        interactions = interactions.tensors
    if isinstance(interactions, numpy.ndarray):
        return _from_array(interactions, options)
    if isinstance(interactions, polars.LazyFrame):
        interactions = interactions.collect()
    if hasattr(interactions, "columns") and hasattr(interactions, "__getitem__"):  # pandas, polars and their like
        named = {str(name): name for name in interactions.columns}  # pandas may name columns by numbers
        return _select(list(named), lambda name: interactions[named[name]], options)
    if hasattr(interactions, "__arrow_c_stream__"):
        return to_frame(polars.DataFrame(interactions), options)
    if isinstance(interactions, tuple) and interactions and all(hasattr(part, "shape") for part in interactions):
        return _columns([_as_array(part) for part in interactions])
    if isinstance(interactions, torch_data.Dataset | Iterable):
        return _from_rows(interactions, options)
    raise InvalidData(f"interactions of type {type(interactions).__name__}", FORMS, "Convert them to one of these.")


def _nonzero(*columns: Any) -> polars.DataFrame:
    """The entries of a sparse matrix that are not 0; a 0 may be stored in it."""
    present = columns[-1] != 0
    return _columns([column[present] for column in columns])


def _select(names: list[str], column: Any, options: Options) -> polars.DataFrame:
    """The columns that options name, or that have a known name; of times that no option asks for, only the name."""
    *places, time = find_columns(TABLE_IN_MEMORY, names, options)
    frame = _columns([_as_array(column(names[place])) for place in places if place is not None])
    if time is None:
        return frame
    name = "time" if names[time] in COLUMN_NAMES else names[time]
    if not options.by_time:
        return frame.with_columns(polars.lit(None, polars.Int64).alias(name))
    return frame.with_columns(as_times(polars.Series(name, _as_array(column(names[time])), strict=False)))


def _from_array(array: numpy.ndarray[Any, Any], options: Options) -> polars.DataFrame:
    if array.dtype.names is not None:
        return _select(list(array.dtype.names), array.__getitem__, options)
    if array.ndim != 2 or array.shape[1] not in (2, 3):
        raise InvalidData(
            f"an array of shape {list(array.shape)}",
            "a row per interaction: user, item and perhaps rating",
            "A matrix of users × items is given as scipy.sparse.csr_array(matrix).",
        )
    return _columns([array[:, place] for place in range(array.shape[1])])


def _from_rows(rows: Any, options: Options) -> polars.DataFrame:
    """A DataFrame of a torch Dataset, or of an iterable of tuples or dicts."""
    indexed = isinstance(rows, torch_data.Dataset) and hasattr(rows, "__len__")
    found = [rows[place] for place in range(len(rows))] if indexed else list(rows)
    if found and isinstance(found[0], Mapping):
        names = list(found[0])
        return _select(names, lambda name: numpy.array([_as_scalar(row[name]) for row in found]), options)
    try:
        columns = list(zip(*([_as_scalar(field) for field in row] for row in found), strict=True))
    except (TypeError, ValueError):
        columns = []
    if len(columns) not in (2, 3):
        given = f"rows such as {found[0]!r}"[:200] if found else "no interactions"
        raise InvalidData(given, "a user, an item and perhaps a rating in every row", f"Other forms: {FORMS}.")
    return _columns([numpy.array(column) for column in columns])


def _as_scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _as_array(column: Any) -> Any:
    """A column as an array, a list or a polars series, with None for missing values."""
    if isinstance(column, polars.Series):
        return column
    if isinstance(column, Tensor):
        return column.detach().cpu().numpy()
    if hasattr(column, "isna"):  # pandas has a type of its own for missing values
        values = column.to_numpy()
        missing = column.isna().to_numpy()
        if missing.any() or values.dtype.kind not in "iuf":
            return [
                None if absent else _as_scalar(value) for value, absent in zip(values.tolist(), missing, strict=True)
            ]
        return values
    return numpy.asarray(column)


def _columns(given: list[Any]) -> polars.DataFrame:
    """A DataFrame of users, items and perhaps ratings; integer ids as such, others as text."""
    if len(given) not in (2, 3):
        raise InvalidData(f"{len(given)} columns", "users, items and perhaps ratings", f"Give {FORMS}.")
    series = [_series(name, values) for name, values in zip(COLUMN_NAMES, given, strict=False)]
    lengths = [len(column) for column in series]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise InvalidData(f"columns of lengths {lengths}", "one length, of at least 1", "Give one row per interaction.")
    return polars.DataFrame(series)


def _series(name: str, values: Any) -> polars.Series:
    if isinstance(values, list):
        types = {type(value) for value in values if value is not None}
        values = values if len(types) <= 1 else [None if value is None else str(value) for value in values]
    found = polars.Series(name, values, strict=False)
    if name == "rating":
        return found.cast(polars.Float64, strict=False)
    if found.dtype.is_float():  # as numbers become where some are missing, or stand beside ratings in one array
        whole = found.fill_nan(None).cast(polars.Int64, strict=False)
        if (whole.cast(found.dtype) == found.fill_nan(None)).all():
            return whole
    return found.cast(polars.Int64) if found.dtype.is_integer() else found.cast(polars.String)


def has_integer_ids(data: Dataset) -> tuple[bool, bool]:
    """Whether the ids of users and of items, which a data set holds as text, are all integers."""
    users, items = (all(map(_is_integer, ids or ())) for ids in (data.user_ids, data.item_ids))
    return users, items


def _is_integer(text: str) -> bool:
    """Whether a text is an integer in its only spelling: 007 is not 7."""
    return text.removeprefix("-").isdecimal() and str(int(text)) == text


def _titles(titles: Any, data: Dataset) -> list[str]:
    """The title of every item in the order of the data set; empty where there is none."""
    pairs = titles.items() if hasattr(titles, "items") else titles
    named = {str(item): str(title) for item, title in pairs}
    ids = data.item_ids or [str(item) for item in range(data.num_items)]
    return [named.get(item, "") for item in ids]


class IdIndex:
    """Finds the number of a user or an item by the caller's id."""

    def __init__(self, role: str, ids: Iterable[str], remedy: str) -> None:
        self._role = role
        self._remedy = remedy
        self.numbers = {text: number for number, text in enumerate(ids)}

    def __contains__(self, given: Any) -> bool:
        return str(_as_scalar(given)) in self.numbers

    def __getitem__(self, given: Any) -> int:
        text = str(_as_scalar(given))
        if text not in self.numbers:
            some = ", ".join(list(self.numbers)[:3])
            hint = did_you_mean(text, self.numbers)
            raise InvalidData(f"{self._role} {given!r}{hint}", f"one of the data (such as {some})", self._remedy)
        return self.numbers[text]


def history_items(
    given: Any, items: IdIndex, users: IdIndex, *, rated: bool, unknown: str
) -> tuple[Tensor, Tensor | None]:
    """The numbers of a history's items, and their ratings; unknown items are skipped with a warning, or refused."""
    if rated and not hasattr(given, "items"):
        raise InvalidData("a history without ratings", "a dict of items and ratings", "Give {item: rating, ...}.")
    if unknown not in ("skip", "error"):
        raise InvalidSettings(f"unknown = {unknown!r}", "'skip' or 'error'", "Skipped items are warned of.")
    ids = list(given)
    missing = [item for item in ids if item not in items] if unknown == "skip" else []
    if missing:
        hint = " (the id of a user; ask for several by users=[...])" if missing[0] in users else ""
        left = f"{len(missing):,} of {len(ids):,} items are not of the data and are skipped"
        warnings.warn(f"{left}: {missing[0]!r}{hint}", stacklevel=4)
    known = [item for item in ids if item not in missing] if missing else ids
    numbers = torch.tensor([items[item] for item in known], dtype=torch.int64)
    return numbers, torch.tensor([float(given[item]) for item in known]) if rated else None
