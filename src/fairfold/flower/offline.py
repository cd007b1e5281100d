"""A device recommends on its own: by the newest model of its size that it was given, and the history it has.

The model is one file, of the format of ``fairfold export`` (docs/export.md), with a checksum of all of it inside. It is
replaced whole or not at all, and nothing else is read beside the history, so an old and a new model are never mixed.
Neither keeping nor using it needs torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from fairfold.errors import InvalidMessage, InvalidState
from fairfold.files import make_private, remove_leftovers, write_atomically
from fairfold.flower.protocol import ARRAYS, FACTS, FILE, VERSION
from fairfold.sealed import SENSELESS

if TYPE_CHECKING:
    from flwr.app import RecordDict

FORMAT = "6"  # of the file: that of fairfold.runs.device
MODEL_FILE = "model.safetensors"
SEAL = "sha256"
TYPES = {"U8": numpy.uint8, "F32": numpy.float32, "I32": numpy.int32, "I64": numpy.int64, "F64": numpy.float64}
ROWS, LISTED, NEAR, POPULAR, LEADING = "rows", "pairs", "near", "popular", "leading"
STEP, ZERO, FACTORS = 16, 208, 2
BLOCK = 1024  # rows whose numbers are made of bits at a time
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
BUDGET = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", re.IGNORECASE)  # a capacity in bytes, not in shares

Array = Any


@dataclass(frozen=True)
class StoredModel:
    """A model as it lies in its file: tensors as they are stored, and what was written with them."""

    tensors: dict[str, Array]
    told: dict[str, Any]

    @property
    def round_number(self) -> int:
        """After which it was made."""
        return int(self.told["round"])

    @property
    def items(self) -> int:
        """Size of the catalogue."""
        return int(self.told["data"]["items"])

    def recommend(self, history: list[int], top: int) -> list[tuple[int, float | None]]:
        """The best items of the catalogue that are not in a history; None in the place of a score where none is.

        Of equal scores, and of items without one, the more popular come first.
        """
        names = self.tensors.get(LEADING)
        number = {int(name): place for place, name in enumerate(names)} if names is not None else None
        mine = history if number is None else [number[item] for item in history if item in number]
        scores = self.scores(numpy.unique(numpy.asarray(mine, dtype=numpy.int64)))
        scored, worn = numpy.isfinite(scores), set(mine)
        best = [int(item) for item in numpy.argsort(-scores, kind="stable") if scored[item]]
        rest = (item for item in range(self.items if names is None else len(names)))
        rest = (item for item in rest if item >= len(scores) or not scored[item])
        found = list[tuple[int, float | None]]()
        for item in (*best, *rest) if len(best) - len(worn) < top else best:
            if len(found) == top:
                break
            if item not in worn:
                score = float(scores[item]) if item < len(scores) and scored[item] else None
                found.append((item if names is None else int(names[item]), score))
        return found

    def require_agreeing(self) -> None:
        """Refuse facts that the tensors do not bear out, before anybody asks for memory by them."""
        held = self.told["projections"]
        if ROWS in held and LISTED in held:
            (known, columns), bits = held[ROWS]["kept"], held[ROWS]["bits"]
            (many, *_), items = held[LISTED]["kept"], held[LISTED]["items"]
            if not all(type(number) is int and number >= 0 for number in (known, columns, bits, many, items)):
                raise ValueError("sizes that are none")
            held_bits = 8 * (len(self.tensors[ROWS]) - FACTORS * known)
            listed = 4 + min(items, 2 * many) + 3 * many if many else 0
            if held_bits < known * (columns - FACTORS) * bits or len(self.tensors[LISTED]) < listed:
                raise ValueError("tensors that are shorter than it says")

    def scores(self, history: Array) -> Array:
        """Of the leading items, those that a history tells nothing of at minus infinity; numbers as the model has them.

        b_j ⟨w_j, Σ a_i w_i⟩, what neighbours and popularity add, what pairs say beyond the rows; see docs/export.md.
        """
        held = self.told["projections"]
        (known, columns), bits = held[ROWS]["kept"], held[ROWS]["bits"]
        content, columns = self.tensors[ROWS], columns - FACTORS
        codes = content[: FACTORS * known].reshape(known, FACTORS).astype(numpy.float64)
        into, out = _factors(codes).T
        packed, most = content[FACTORS * known :].reshape(known, -1), 2 ** (bits - 1) - 1

        def rows(ids: Array) -> Array:
            digits = numpy.unpackbits(packed[ids], axis=1, bitorder="little")[:, : columns * bits]
            return (digits.reshape(len(ids), columns, bits) << numpy.arange(bits)).sum(-1) - float(most)

        mine = history[history < known]
        taste = into[mine] @ rows(mine) if len(mine) else numpy.zeros(columns)
        rarer, other, values = self._pairs(held[LISTED], known, into, out, rows)
        scored, near, alike = self._listed(NEAR, held[NEAR]) if NEAR in held else (rarer[:0], other[:0], values[:0])
        reach = 1 + max([known - 1, *(int(of.max()) for of in (rarer, other, scored, near) if len(of))])
        found, added = numpy.full(reach, -numpy.inf), numpy.zeros(reach)
        for start in range(0, known, BLOCK):
            ids = numpy.arange(start, min(start + BLOCK, known))
            found[ids] = (rows(ids) @ taste) * out[ids]
        worn = numpy.zeros(reach)
        worn[history[history < reach]] = 1
        back = numpy.ones(len(values))
        both = (rarer < known) & (other < known)
        j, i = rarer[both], other[both]
        back[both] = into[j] * out[i] / numpy.maximum(into[i] * out[j], 1e-30)
        numpy.add.at(added, rarer, worn[other] * values)
        numpy.add.at(added, other, worn[rarer] * values * back)
        numpy.add.at(added, scored, worn[near] * alike)
        found[:known] += added[:known]
        found[known:] = numpy.where(added[known:] != 0, added[known:], -numpy.inf)
        if POPULAR in self.tensors:
            found += _between(_factors(self.tensors[POPULAR].astype(numpy.float64)), reach) / (1 + worn[:known].sum())
        return found if len(history[history < reach]) else numpy.full(reach, -numpy.inf)

    def _listed(self, name: str, held: dict[str, Any]) -> tuple[Array, ...]:
        """The rows of a list: two items, and a value."""
        many, items, content = held["kept"][0], held["items"], self.tensors[name]
        if not many:
            return numpy.empty(0, numpy.int64), numpy.empty(0, numpy.int64), numpy.empty(0)
        unit, counted = float(content[:4].view(numpy.float32)[0]) / 127, items < 2 * many
        end = 4 + (items if counted else 2 * many)
        if counted:
            rarer = numpy.repeat(numpy.arange(items), content[4:end])[:many]
        else:
            rarer = content[4:end].copy().view("<u2").astype(numpy.int64)
        other = content[end : end + 2 * many].copy().view("<u2").astype(numpy.int64)[: len(rarer)]
        values = content[end + 2 * many :].view(numpy.int8)[: len(rarer)] * unit
        real = rarer != other
        return rarer[real], other[real], values[real]

    def _pairs(self, held: dict[str, Any], known: int, into: Array, out: Array, rows: Any) -> tuple[Array, ...]:
        """Pairs of a rarer and a more popular item, and what each says beyond the rows."""
        rarer, other, values = self._listed(LISTED, held)
        both = numpy.flatnonzero((rarer < known) & (other < known))
        for start in range(0, len(both), BLOCK):
            some = both[start : start + BLOCK]
            j, i = rarer[some], other[some]
            values[some] -= out[j] * (rows(j) * rows(i)).sum(1) * into[i]
        return rarer, other, values * float(self.told["settings"]["algorithm"]["pair_weight"])


def _factors(codes: Array) -> Array:
    """Logarithms in a byte each."""
    return numpy.where(codes > 0, numpy.exp((codes - ZERO) / STEP), 0.0)


def _between(popular: Array, items: int) -> Array:
    """What popularity adds to so many items, from the curve that is held."""
    logs = numpy.log(numpy.maximum(popular, 1e-30))
    return numpy.exp(numpy.interp(numpy.log2(numpy.arange(items) + 1.0), numpy.arange(len(logs)), logs))


def read_model(folder: Path) -> StoredModel:
    """The model that a device keeps; refused where there is none, or one bit of it is another."""
    path = folder / MODEL_FILE
    remedy = "The server gives it again when it trains next, or: fairfold server train --resume."
    if not path.is_file():
        given = f"{folder}, which holds no {MODEL_FILE}"
        raise InvalidState(given, "the folder of a device that was given a model", "Train first. " + remedy)
    try:
        return parsed(path.read_bytes())
    except OSError as error:
        raise InvalidState(f"{path}: {error.strerror}", "a file that can be read", "Check its permissions.") from None
    except SENSELESS as error:
        raise InvalidState(f"{path}: damaged ({error})", "the model that this device was given", remedy) from None


def parsed(content: bytes) -> StoredModel:
    """A model from the content of a file; ValueError and the like where that is not what was written."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    told = header.pop("__metadata__")
    seal = told.pop(SEAL)
    tensors, shapes = dict[str, Array](), dict[str, list[Any]]()
    for name, of in header.items():
        start, end = (8 + length + offset for offset in of["data_offsets"])
        tensors[name] = numpy.frombuffer(content[start:end], TYPES[of["dtype"]]).reshape(of["shape"])
        shapes[name] = [of["dtype"], of["shape"]]
    digest = hashlib.sha256(json.dumps([told, shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].tobytes())
    if digest.hexdigest() != seal:
        raise ValueError("another checksum than it says")
    if told["format"] != FORMAT:
        raise ValueError(f"of format {told['format']}, and not {FORMAT}")
    plain = {key: json.loads(told[key]) for key in ("projections", "settings", "data")}
    found = StoredModel(tensors, told | plain)
    found.require_agreeing()
    return found


def given_model(content: bytes) -> RecordDict:
    """What gives a device a model."""
    from flwr.app import Array as Numbers
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    file = Numbers(numpy.frombuffer(content, numpy.uint8))
    return RecordDict({ARRAYS: ArrayRecord({FILE: file}), FACTS: ConfigRecord({"version": VERSION})})


def keep_model(folder: Path, content: RecordDict, capacity: str) -> RecordDict:
    """Keep a model that was given in the place of the one before, if it is whole and fits into this device."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    facts, arrays = content.get(FACTS), content.get(ARRAYS)
    if not isinstance(facts, ConfigRecord) or facts.get("version") != VERSION or not isinstance(arrays, ArrayRecord):
        raise InvalidMessage("another version of the protocol", f"version {VERSION}", "Update both sides.")
    try:
        data = arrays[FILE].data
        file = data[10 + int.from_bytes(data[8:10], "little") :]
        found = parsed(file)
    except SENSELESS as error:
        raise InvalidMessage(f"a damaged model ({error})", "a whole one", "The server gives it again.") from None
    size = sum(tensor.nbytes for name, tensor in found.tensors.items() if name != LEADING)
    budget = BUDGET.fullmatch(capacity.strip())
    if budget is not None and size > float(budget[1]) * UNITS[budget[2].lower()]:
        raise InvalidMessage(f"a model of {size} bytes", f"at most {capacity}", "Ask this device first.")
    make_private(folder)
    remove_leftovers(folder)
    write_atomically(folder / MODEL_FILE, file, private=True)
    return RecordDict({FACTS: ConfigRecord({"version": VERSION})})


def recommend(folder: Path, history: list[int], top: int = 10) -> tuple[StoredModel, list[tuple[int, float | None]]]:
    """What the model in a device's folder suggests for a history, and the model; no network, no torch."""
    model = read_model(folder)
    kind = model.told["settings"]["algorithm"]["kind"]
    if kind != "correlations":
        raise InvalidState(
            f"a model of algorithm.kind={kind!r}", "'correlations', whose scores follow from a history alone",
            "fairfold.runs.device.read_device_model reads it.",
        )  # fmt: skip
    return model, model.recommend(history, top)
