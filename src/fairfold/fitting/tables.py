"""Interactions in the forms that people have them in, as a data set: one way for all, that of ``prepare``."""

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy
import polars
from torch import Tensor
from torch.utils import data as torch_data

import fairfold.data
from fairfold.data import Dataset
from fairfold.data.layouts import NAMES, TABLE, find_columns
from fairfold.data.options import Options
from fairfold.data.store import read_dataset
from fairfold.errors import InvalidData, InvalidSettings, nearest

FORMS = (
    "a pandas or polars DataFrame, a scipy sparse matrix (users × items), an array of user, item and perhaps rating, "
    "a tuple of such columns, a torch Dataset of such rows, or the path of a file"
)


@dataclass(frozen=True)
class Taken:
    """A data set, whether the caller's ids of users and of items are whole numbers, and what was repaired."""

    data: Dataset
    numbers: tuple[bool, bool]
    repairs: Mapping[str, int]


def take(interactions: Any, options: Mapping[str, Any], titles: Any = None, test: Any = None) -> Taken:
    """The data set of some interactions, split by ``options`` (of :func:`fairfold.data.load`) or by a ``test``."""
    chosen = known_options(options)
    if test is not None and isinstance(interactions, Dataset | str | Path):
        given = f"test beside interactions of type {type(interactions).__name__}"
        raise InvalidData(given, "both as tables", "Give a folder with train.csv and test.csv, or two tables.")
    if test is not None and (chosen.split is not None or chosen.resplit):
        raise InvalidSettings("split or resplit beside test", "one of them", "Leave out split: test is held out.")
    if isinstance(interactions, Dataset):
        taken = Taken(interactions, numbered_ids(interactions), {})
    elif isinstance(interactions, str | Path):
        data = fairfold.data.load(interactions, **options)
        taken = Taken(data, numbered_ids(data), {})
    else:
        frame = frame_of(interactions, chosen)
        with tempfile.TemporaryDirectory(prefix="fairfold-") as folder:
            path = Path(folder) / "interactions"
            path.mkdir()
            if test is not None:
                hidden = frame_of(test, chosen)
                frame = _alike(frame, hidden)
                _alike(hidden, frame).select(frame.columns).write_parquet(path / "test.parquet")
            frame.write_parquet(path / ("all.parquet" if test is None else "train.parquet"))
            # The columns have been found, and have their usual names now.
            rest = {name: value for name, value in options.items() if not name.endswith("_column")}
            prepared = fairfold.data.prepare(path, cache=Path(folder) / "cache", **rest)
            data = read_dataset(prepared.folder)
        whole = (frame.schema["user"].is_integer(), frame.schema["item"].is_integer())
        taken = Taken(data, whole, Counter(prepared.manifest["repairs"]))
    data = taken.data.with_validation()
    return replace(taken, data=data if titles is None else replace(data, titles=_titles(titles, data)))


def _alike(frame: polars.DataFrame, other: polars.DataFrame) -> polars.DataFrame:
    """The columns that two tables have in common, ids as text where either has them so."""
    shared = [name for name in frame.columns if name in other.columns]
    as_text = [name for name in shared if polars.String in (frame.schema[name], other.schema[name])]
    return frame.select(shared).with_columns(polars.col(as_text).cast(polars.String))


def known_options(options: Mapping[str, Any], beside: Iterable[str] = ()) -> Options:
    """The options of :func:`fairfold.data.load`; another word is refused with the one that is most like it.

    Like it may also be a word of those that are taken ``beside`` them.
    """
    known = [field.name for field in fields(Options)]
    for name in options:
        if name not in known:
            raise InvalidSettings(
                f"unknown option {name!r}{nearest(name, [*known, *beside])}",
                f"one of {', '.join(known)}",
                "Settings are given by their keys: settings={'run.rounds': 20}.",
            )
    return Options(**options)


def frame_of(interactions: Any, options: Options) -> polars.DataFrame:
    """The columns ``user``, ``item`` and perhaps ``rating`` of interactions in any form but a file."""
    if hasattr(interactions, "tocoo"):  # scipy, without importing it
        found = interactions.tocoo()
        return _filled(found.row, found.col, found.data)
    if isinstance(interactions, Tensor):
        if interactions.is_sparse:
            filled = interactions.coalesce()
            return _filled(*filled.indices().cpu().numpy(), filled.values().detach().cpu().numpy())
        interactions = interactions.detach().cpu().numpy()
    if isinstance(interactions, torch_data.TensorDataset):
        interactions = interactions.tensors
    if isinstance(interactions, numpy.ndarray):
        return _of_array(interactions, options)
    if isinstance(interactions, polars.LazyFrame):
        interactions = interactions.collect()
    if hasattr(interactions, "columns") and hasattr(interactions, "__getitem__"):  # pandas, polars and their like
        return _chosen([str(name) for name in interactions.columns], _values_of(interactions), options)
    if hasattr(interactions, "__arrow_c_stream__"):
        return frame_of(polars.DataFrame(interactions), options)
    if isinstance(interactions, tuple) and interactions and all(hasattr(part, "shape") for part in interactions):
        return _columns([_plain(part) for part in interactions])
    if isinstance(interactions, torch_data.Dataset | Iterable):
        return _of_rows(interactions, options)
    raise InvalidData(f"interactions of type {type(interactions).__name__}", FORMS, "Convert them to one of these.")


def _filled(*columns: Any) -> polars.DataFrame:
    """The places of a sparse matrix that are not 0; a 0 may be stored in it."""
    kept = columns[-1] != 0
    return _columns([column[kept] for column in columns])


def _values_of(frame: Any) -> Any:
    named = {str(name): name for name in frame.columns}  # pandas may name columns by numbers
    return lambda name: frame[named[name]]


def _chosen(names: list[str], column: Any, options: Options) -> polars.DataFrame:
    """The columns that are wanted, or that have a known name."""
    user, item, rating = find_columns(TABLE, names, options)
    return _columns([_plain(column(names[place])) for place in (user, item, rating) if place is not None])


def _of_array(array: numpy.ndarray[Any, Any], options: Options) -> polars.DataFrame:
    if array.dtype.names is not None:
        return _chosen(list(array.dtype.names), array.__getitem__, options)
    if array.ndim != 2 or array.shape[1] not in (2, 3):
        raise InvalidData(
            f"an array of shape {list(array.shape)}",
            "a row per interaction: user, item and perhaps rating",
            "A matrix of users × items is given as scipy.sparse.csr_array(matrix).",
        )
    return _columns([array[:, place] for place in range(array.shape[1])])


def _of_rows(rows: Any, options: Options) -> polars.DataFrame:
    """Of a torch Dataset, or of anything that gives one interaction after another: tuples, or dicts with names."""
    one_by_one = isinstance(rows, torch_data.Dataset) and hasattr(rows, "__len__")
    found = [rows[place] for place in range(len(rows))] if one_by_one else list(rows)
    if found and isinstance(found[0], Mapping):
        names = list(found[0])
        return _chosen(names, lambda name: numpy.array([_number(row[name]) for row in found]), options)
    try:
        columns = list(zip(*([_number(field) for field in row] for row in found), strict=True))
    except (TypeError, ValueError):
        columns = []
    if len(columns) not in (2, 3):
        given = f"rows such as {found[0]!r}"[:200] if found else "no interactions"
        raise InvalidData(given, "a user, an item and perhaps a rating in every row", f"Other forms: {FORMS}.")
    return _columns([numpy.array(column) for column in columns])


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _plain(column: Any) -> Any:
    """A column as an array or a polars series; what is missing is None."""
    if isinstance(column, polars.Series):
        return column
    if isinstance(column, Tensor):
        return column.detach().cpu().numpy()
    if hasattr(column, "isna"):  # pandas: a type of its own for what is missing
        values = column.to_numpy()
        missing = column.isna().to_numpy()
        if missing.any() or values.dtype.kind not in "iuf":
            return [None if gone else _number(value) for value, gone in zip(values.tolist(), missing, strict=True)]
        return values
    return numpy.asarray(column)


def _columns(given: list[Any]) -> polars.DataFrame:
    """Users, items and perhaps ratings under their usual names; ids that are whole numbers as such, others as text."""
    if len(given) not in (2, 3):
        raise InvalidData(f"{len(given)} columns", "users, items and perhaps ratings", f"Give {FORMS}.")
    series = [_series(name, values) for name, values in zip(NAMES, given, strict=False)]
    lengths = [len(column) for column in series]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise InvalidData(f"columns of lengths {lengths}", "one length, of at least 1", "Give one row per interaction.")
    return polars.DataFrame(series)


def _series(name: str, values: Any) -> polars.Series:
    if isinstance(values, list):
        plain = {type(value) for value in values if value is not None}
        values = values if len(plain) <= 1 else [None if value is None else str(value) for value in values]
    found = polars.Series(name, values, strict=False)
    if name == "rating":
        return found.cast(polars.Float64, strict=False)
    if found.dtype.is_float():  # as numbers become where some are missing, or stand beside ratings in one array
        whole = found.fill_nan(None).cast(polars.Int64, strict=False)
        if (whole.cast(found.dtype) == found.fill_nan(None)).all():
            return whole
    return found.cast(polars.Int64) if found.dtype.is_integer() else found.cast(polars.String)


def numbered_ids(data: Dataset) -> tuple[bool, bool]:
    """Whether the ids of users and of items, which a data set holds as text, are all whole numbers."""
    users, items = (all(map(_is_whole, ids or ())) for ids in (data.user_ids, data.item_ids))
    return users, items


def _is_whole(word: str) -> bool:
    """Whether a text is a whole number in its only spelling: 007 is not 7."""
    return word.removeprefix("-").isdecimal() and str(int(word)) == word


def _titles(titles: Any, data: Dataset) -> list[str]:
    """The title of every item, in the order of the data set; empty where there is none."""
    pairs = titles.items() if hasattr(titles, "items") else titles
    named = {str(item): str(title) for item, title in pairs}
    ids = data.item_ids or [str(item) for item in range(data.num_items)]
    return [named.get(item, "") for item in ids]
