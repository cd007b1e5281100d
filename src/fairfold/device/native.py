"""The C library of devices through ctypes: a client's samples, local training and scores (``native/device``)."""

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fairfold.device as package
from fairfold.device.facts import MAX_ITEMS
from fairfold.device.layout import LONG, layout_of
from fairfold.errors import InvalidMessage

NAME, ABI = "fairfold_device.so", 2
MAX_DRAWN = 1 << 32  # items of the samples of a round
LOSSES = {"bpr": 0, "softmax": 2}  # as fairfold.h has them
OPTIMIZERS = {"sgd": 0, "adagrad": 1, "adam": 2}


class _Layout(Structure):
    _fields_ = [
        ("full_size", c_int64), ("head", c_int64), ("tail", c_int64), ("chunk", c_int64), ("key", c_uint64),
        ("is_signed", c_int64),
    ]  # fmt: skip


class _Tensor(Structure):
    _fields_ = [("layout", _Layout), ("values", c_void_p)]


class _Form(Structure):
    _fields_ = [
        ("product", c_int64), ("user", c_int64), ("item", c_int64), ("layers", c_int64), ("units", POINTER(c_int64)),
        ("output", c_int64), ("loss", c_int64), ("regularizer", c_double), ("optimizer", c_int64), ("rate", c_double),
    ]  # fmt: skip


class _Model(Structure):
    _fields_ = [
        ("form", _Form), ("tables", _Tensor * 2), ("dense", POINTER(_Tensor)), ("dense_count", c_int64),
        ("user", c_void_p * 2),
    ]  # fmt: skip


class _Samples(Structure):
    _fields_ = [
        ("items", c_void_p), ("count", c_int64), ("width", c_int64), ("targets", c_void_p), ("ends", c_void_p),
        ("steps", c_int64),
    ]  # fmt: skip


@cache
def library() -> Any:
    """The library, or None where it was not built or is of another time."""
    # An editable install keeps what was compiled apart from the sources; the package's path has both folders.
    found = [path for folder in package.__path__ if (path := Path(folder) / NAME).is_file()]
    return load_library(found[0]) if found else None


def load_library(path: Path) -> Any:
    """Load the library of a file; None if it is of another time."""
    try:
        loaded = ctypes.CDLL(str(path))
        if loaded.fairfold_device_abi() != ABI:
            return None
    except (OSError, AttributeError):
        return None
    model, samples = POINTER(_Model), POINTER(_Samples)
    signatures: dict[str, list[Any]] = {
        "sample": [c_void_p, c_int64, c_int64, c_int64, c_int64, c_int, c_uint64, c_void_p],
        "train_bytes": [model, c_int64, c_int64],
        "train": [model, samples, c_void_p, c_int64],
        "add": [c_void_p, c_void_p, c_void_p, c_double, c_int64],
        "scores_bytes": [model],
        "scores": [model, c_int64, c_int64, c_void_p, c_void_p, c_int64],
    }
    for name, arguments in signatures.items():
        function = getattr(loaded, f"fairfold_device_{name}")
        function.argtypes, function.restype = arguments, c_int64 if name.endswith("_bytes") else c_int
    return loaded


@dataclass(frozen=True)
class NetworkForm:
    """A model by its tensors' names: how scores are computed, and how it is trained."""

    product: int
    width: int  # of user and item in the network, 0 without one
    layers: tuple[int, ...]
    output: bool
    tables: tuple[str, ...]
    users: tuple[str, ...]
    dense: tuple[str, ...]
    loss: str
    l2: float
    optimizer: str
    rate: float


class LocalNetwork:
    """One user's model on a device: compact vectors (arrays of floats, trained in place), and the user's own."""

    def __init__(
        self,
        form: NetworkForm,
        projections: Mapping[str, Mapping[str, Any]],
        values: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> None:
        self._library = library()
        self._alive: list[Any] = [dict(values), dict(own)]
        units = (c_int64 * max(1, len(form.layers)))(*form.layers)
        dense = (_Tensor * max(1, len(form.dense)))()
        for place, name in enumerate(form.dense):
            dense[place] = self._tensor(projections[name], values[name])
        tables = (_Tensor * 2)()
        users = (c_void_p * 2)()
        branches = [side for side, has in enumerate((form.product, form.width)) if has]
        for side, table, user in zip(branches, form.tables, form.users, strict=True):
            tables[side] = self._tensor(projections[table], values[table])
            users[side] = _address_of(own[user], "f", form.width if side else form.product)
        steps = LOSSES[form.loss], form.l2, OPTIMIZERS[form.optimizer], form.rate
        described = _Form(form.product, form.width, form.width, len(form.layers), units, form.output, *steps)
        self._alive += [units, dense]
        self._model = _Model(described, tables, dense, len(form.dense), users)

    def _tensor(self, held: Mapping[str, Any], values: Any) -> _Tensor:
        layout = _Layout(*layout_of(held))
        return _Tensor(layout, _address_of(values, "f", layout.head + layout.tail))

    def train(self, items: Any, width: int, ends: Sequence[int]) -> None:
        """Take all steps of a round on samples of ``width`` items, the user's first; ``ends``: of each step."""
        if width < 1:
            raise _invalid("samples of no items")
        stops = array("q", ends)
        taken = _address_of(items, "q", len(items) // width * width)
        samples = _Samples(taken, len(items) // width, width, None, _address(stops), len(stops))
        memory, size = _aligned(self._library.fairfold_device_train_bytes(self._model, samples.count, width))
        _check(self._library.fairfold_device_train(self._model, samples, memory, size))

    def scores(self, first: int, count: int) -> Any:
        """The scores of ``count`` items from ``first`` on."""
        if not 0 <= count <= MAX_ITEMS:
            raise _invalid("scores of no number of items")
        found = array("f", bytes(4 * count))
        memory, size = _aligned(self._library.fairfold_device_scores_bytes(self._model))
        _check(self._library.fairfold_device_scores(self._model, first, count, _address(found), memory, size))
        return found


def draw_samples(
    history: Sequence[int], catalogue: int, epochs: int, negatives: int, *, shuffle: bool, seed: int
) -> Any:
    """The samples of a round, epoch after epoch: each item of an ascending history with others."""
    own = array("q", history)
    if min(epochs, negatives) < 0 or epochs * len(own) * (1 + negatives) > MAX_DRAWN:
        raise _invalid(f"a round of {epochs} epochs with {negatives} negatives")
    items = array("q", bytes(8 * epochs * len(own) * (1 + negatives)))
    drawn = library().fairfold_device_sample(
        _address(own), len(own), catalogue, epochs, negatives, shuffle, seed & LONG, _address(items)
    )
    _check(drawn)
    return items


def add_weighted(total: Any, values: Any, before: Any | None, weight: float) -> None:
    """Add a weighted vector, or its change, to a sum in place."""
    size = len(total)
    earlier = None if before is None else _address_of(before, "f", size)
    given = _address_of(total, "f", size), _address_of(values, "f", size)
    _check(library().fairfold_device_add(*given, earlier, weight, size))


def _address_of(numbers: Any, typecode: str, length: int) -> int:
    """The address of so many numbers of a type, which are checked here: C cannot see where an array ends."""
    if not isinstance(numbers, array) or numbers.typecode != typecode or len(numbers) != length:
        raise _invalid(f"no array of {length} numbers of type {typecode!r}")
    return _address(numbers)


def _address(numbers: Any) -> int:
    return int(numbers.buffer_info()[0])


_memory: list[Any] = []  # reused: a device trains one user after another


def _aligned(size: int) -> tuple[int, int]:
    """Address and size of enough memory, aligned to 64 bytes."""
    if size < 0:
        raise _invalid("a model that cannot be")
    if not _memory or ctypes.sizeof(_memory[0]) < size + 64:
        _memory[:] = [ctypes.create_string_buffer(size + 64)]
    start = ctypes.addressof(_memory[0])
    return (start + 63) // 64 * 64, size


def _check(status: int) -> None:
    if status:
        raise _invalid(f"a task that the library refuses (status {status})")


def _invalid(given: str) -> InvalidMessage:
    return InvalidMessage(given, "what FairStrategy sends", "Both sides must run the same fairfold.")
