"""The model that a device stores: pushed by the server at the end of a run, and used for offline recommendations.

It is one file in the format of ``fairfold export`` (docs/export.md), replaced as a whole: old and new ones are never
mixed. No torch is needed: :meth:`StoredModel.scores` is ``algorithms.cooccurrence.scorer`` in numpy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from fairfold.atomic_io import make_private_folder, remove_temporary_files, write_atomically
from fairfold.checksums import PARSE_ERRORS
from fairfold.errors import InvalidMessage, InvalidState
from fairfold.flower.protocol import ARRAYS, FACTS, FILE, MODEL, VERSION

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.serverapp import Grid

    from fairfold.flower.strategy import FairStrategy

FORMAT = "7"  # of the file: that of fairfold.runs.device_model
MODEL_FILE = "model.safetensors"
CHECKSUM_KEY = "sha256"
DTYPES = {"U8": numpy.uint8, "F32": numpy.float32, "I32": numpy.int32, "I64": numpy.int64, "F64": numpy.float64}
ROWS, PAIRS, NEIGHBORS, POPULARITY, LEADING = "rows", "pairs", "neighbors", "popularity", "leading"
LOG_STEP, LOG_ZERO, NUM_FACTORS = 16, 208, 2  # of the factors before each row (fairfold.subspace.packed)
BLOCK = 1024  # rows unpacked at a time
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
BUDGET = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", re.IGNORECASE)  # a capacity in bytes
PUSHED_AT_ONCE = 256  # nodes whose replies are waited for together

log = logging.getLogger("fairfold.flower")
Array = Any


@dataclass(frozen=True)
class StoredModel:
    """A model file's content: packed tensors, and the metadata written with them."""

    tensors: dict[str, Array]
    metadata: dict[str, Any]

    @property
    def round_number(self) -> int:
        """The round after which the model was written."""
        return int(self.metadata["round"])

    @property
    def items(self) -> int:
        """Size of the catalogue."""
        return int(self.metadata["data"]["items"])

    def recommend(self, history: list[int], top: int) -> list[tuple[int, float | None]]:
        """The best items outside a history with their scores (or None); of equal ones the more popular come first."""
        catalogue = self.tensors.get(LEADING)
        if catalogue is not None:
            rank = {int(item): place for place, item in enumerate(catalogue)}
            history = [rank[item] for item in history if item in rank]
        excluded = set(history)
        scores = self.scores(numpy.array(sorted(excluded), dtype=numpy.int64))
        has_score = numpy.isfinite(scores)
        ranked = [int(item) for item in numpy.argsort(-scores, kind="stable") if has_score[item]]
        if len(ranked) - len(excluded) < top:
            num_items = self.items if catalogue is None else len(catalogue)
            ranked += [item for item in range(num_items) if item >= len(scores) or not has_score[item]]
        best = [item for item in ranked if item not in excluded][:top]
        found = [float(scores[item]) if item < len(scores) and has_score[item] else None for item in best]
        return list(zip(best if catalogue is None else [int(catalogue[item]) for item in best], found, strict=True))

    def require_consistent(self) -> None:
        """Refuse sizes in the metadata that the tensors do not have, before memory is allocated by them."""
        held = self.metadata["projections"]
        if ROWS in held and PAIRS in held:
            (num_rows, columns), bits = held[ROWS]["kept"], held[ROWS]["bits"]
            (num_pairs, *_), items = held[PAIRS]["kept"], held[PAIRS]["items"]
            if not all(type(number) is int and number >= 0 for number in (num_rows, columns, bits, num_pairs, items)):
                raise ValueError("sizes that are no numbers")
            row_bits = 8 * (len(self.tensors[ROWS]) - NUM_FACTORS * num_rows)
            pair_bytes = 4 + min(items, 2 * num_pairs) + 3 * num_pairs if num_pairs else 0
            if row_bits < num_rows * (columns - NUM_FACTORS) * bits or len(self.tensors[PAIRS]) < pair_bytes:
                raise ValueError("tensors that are shorter than their sizes")

    @cached_property
    def _factors(self) -> Array:
        """The factors a and b of every row, [2, rows]."""
        num_rows = self.metadata["projections"][ROWS]["kept"][0]
        codes = self.tensors[ROWS][: NUM_FACTORS * num_rows].reshape(num_rows, NUM_FACTORS)
        return _decode_factors(codes.astype(numpy.float64)).T

    def _rows(self, ids: Array) -> Array:
        """Unpack the vectors w of some rows."""
        held = self.metadata["projections"][ROWS]
        (num_rows, columns), bits = held["kept"], held["bits"]
        columns -= NUM_FACTORS
        packed = self.tensors[ROWS][NUM_FACTORS * num_rows :].reshape(num_rows, -1)
        digits = numpy.unpackbits(packed[ids], axis=1, bitorder="little")[:, : columns * bits]
        numbers = (digits.reshape(len(ids), columns, bits) << numpy.arange(bits)).sum(-1)
        return numbers - float(2 ** (bits - 1) - 1)

    def scores(self, history: Array) -> Array:
        """Scores of the leading items by their ranks; minus infinity where the history gives none.

        b_j ⟨w_j, Σ a_i w_i⟩, plus what neighbors, popularity and the strongest pairs add (docs/export.md).
        """
        a, b = self._factors
        num_rows = len(a)
        known = history[history < num_rows]
        history_sum = a[known] @ self._rows(known) if len(known) else self._rows(known).sum(0)
        rarer, other, values = self._pair_corrections()
        scored, neighbor, weights = self._list(NEIGHBORS)
        reach = 1 + max([num_rows - 1, *(int(ids.max()) for ids in (rarer, other, scored, neighbor) if len(ids))])
        scores = numpy.full(reach, -numpy.inf)
        if not len(history[history < reach]):
            return scores
        for start in range(0, num_rows, BLOCK):
            ids = numpy.arange(start, min(start + BLOCK, num_rows))
            scores[ids] = (self._rows(ids) @ history_sum) * b[ids]
        has = numpy.zeros(reach)
        has[history[history < reach]] = 1
        reverse = numpy.ones(len(values))
        both = (rarer < num_rows) & (other < num_rows)
        j, i = rarer[both], other[both]
        reverse[both] = a[j] * b[i] / numpy.maximum(a[i] * b[j], 1e-30)
        added = numpy.zeros(reach)
        numpy.add.at(added, rarer, has[other] * values)
        numpy.add.at(added, other, has[rarer] * values * reverse)
        numpy.add.at(added, scored, has[neighbor] * weights)
        scores[:num_rows] += added[:num_rows]
        scores[num_rows:] = numpy.where(added[num_rows:] != 0, added[num_rows:], -numpy.inf)
        if POPULARITY in self.tensors:
            curve = _decode_factors(self.tensors[POPULARITY].astype(numpy.float64))
            scores += _interpolate(curve, reach) / (1 + has[:num_rows].sum())
        return scores

    def _list(self, name: str) -> tuple[Array, ...]:
        """Unpack a list of pairs: two items and a value each; an empty one if the model has none."""
        held = self.metadata["projections"].get(name, {"kept": [0]})
        length = held["kept"][0]
        if not length:
            return numpy.empty(0, numpy.int64), numpy.empty(0, numpy.int64), numpy.empty(0)
        content = self.tensors[name]
        unit = float(content[:4].view(numpy.float32)[0]) / 127
        are_counts = held["items"] < 2 * length
        end = 4 + (held["items"] if are_counts else 2 * length)
        if are_counts:
            first = numpy.repeat(numpy.arange(held["items"]), content[4:end])[:length]
        else:
            first = content[4:end].copy().view("<u2").astype(numpy.int64)
        second = content[end : end + 2 * length].copy().view("<u2").astype(numpy.int64)[: len(first)]
        values = content[end + 2 * length :].view(numpy.int8)[: len(first)] * unit
        is_pair = first != second
        return first[is_pair], second[is_pair], values[is_pair]

    def _pair_corrections(self) -> tuple[Array, ...]:
        """Pairs of a rarer and a more popular item, and what each adds to the product of their rows."""
        rarer, other, values = self._list(PAIRS)
        a, b = self._factors
        both = numpy.flatnonzero((rarer < len(a)) & (other < len(a)))
        for start in range(0, len(both), BLOCK):
            block = both[start : start + BLOCK]
            j, i = rarer[block], other[block]
            values[block] -= b[j] * (self._rows(j) * self._rows(i)).sum(1) * a[i]
        return rarer, other, values * float(self.metadata["settings"]["algorithm"]["pair_weight"])


def _decode_factors(codes: Array) -> Array:
    """Factors from their logarithms, a byte each."""
    return numpy.where(codes > 0, numpy.exp((codes - LOG_ZERO) / LOG_STEP), 0.0)


def _interpolate(curve: Array, num_items: int) -> Array:
    """The popularity of items from the curve at the items 0, 1, 3, 7 and so on."""
    logs = numpy.log(numpy.maximum(curve, 1e-30))
    return numpy.exp(numpy.interp(numpy.log2(numpy.arange(num_items) + 1.0), numpy.arange(len(logs)), logs))


def read_model(folder: Path) -> StoredModel:
    """Read the model that a device stores; refused where there is none, or its checksum is wrong."""
    path = folder / MODEL_FILE
    remedy = "The server sends it again when it trains next, or: fairfold server train --resume."
    if not path.is_file():
        given = f"{folder}, which holds no {MODEL_FILE}"
        raise InvalidState(given, "the folder of a device that was sent a model", "Train first. " + remedy)
    try:
        return parse_model(path.read_bytes())
    except OSError as error:
        raise InvalidState(f"{path}: {error.strerror}", "a file that can be read", "Check its permissions.") from None
    except PARSE_ERRORS as error:
        raise InvalidState(f"{path}: damaged ({error})", "the model that this device was sent", remedy) from None


def parse_model(content: bytes) -> StoredModel:
    """Parse a model file; raises one of ``PARSE_ERRORS`` where it is damaged."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    checksum = metadata.pop(CHECKSUM_KEY)
    tensors = dict[str, Array]()
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = numpy.frombuffer(content[start:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    shapes = {name: [entry["dtype"], entry["shape"]] for name, entry in header.items()}
    digest = hashlib.sha256(json.dumps([metadata, shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].tobytes())
    if digest.hexdigest() != checksum:
        raise ValueError("a wrong checksum")
    if metadata["format"] != FORMAT:
        raise ValueError(f"of format {metadata['format']}, and not {FORMAT}")
    parsed = {key: json.loads(metadata[key]) for key in ("projections", "settings", "data")}
    model = StoredModel(tensors, metadata | parsed)
    model.require_consistent()
    return model


def model_message(content: bytes) -> RecordDict:
    """The message that sends a device the content of its model file."""
    from flwr.app import Array as FlowerArray
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    file = FlowerArray(numpy.frombuffer(content, numpy.uint8))
    return RecordDict({ARRAYS: ArrayRecord({FILE: file}), FACTS: ConfigRecord({"version": VERSION})})


def store_model(folder: Path, content: RecordDict, capacity: str) -> RecordDict:
    """Store the model of a message in place of the last one, if it is whole and within the device's capacity."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    facts, arrays = content.get(FACTS), content.get(ARRAYS)
    if not isinstance(facts, ConfigRecord) or facts.get("version") != VERSION or not isinstance(arrays, ArrayRecord):
        raise InvalidMessage("another version of the protocol", f"version {VERSION}", "Update both sides.")
    try:
        data = arrays[FILE].data
        file = data[10 + int.from_bytes(data[8:10], "little") :]
        model = parse_model(file)
    except PARSE_ERRORS as error:
        raise InvalidMessage(f"a damaged model ({error})", "a whole one", "The server sends it again.") from None
    size = sum(tensor.nbytes for name, tensor in model.tensors.items() if name != LEADING)
    budget = BUDGET.fullmatch(capacity.strip())
    if budget is not None and size > float(budget[1]) * UNITS[budget[2].lower()]:
        raise InvalidMessage(f"a model of {size} bytes", f"at most {capacity}", "Request its capacity first.")
    make_private_folder(folder)
    remove_temporary_files(folder)
    write_atomically(folder / MODEL_FILE, file, private=True)
    return RecordDict({FACTS: ConfigRecord({"version": VERSION})})


def push_models(strategy: FairStrategy, grid: Grid) -> None:
    """Send every connected node the final model of its size; the others get theirs after the next training."""
    from fairfold.federation.algorithm import Tunable
    from fairfold.flower.grid import ask_all
    from fairfold.runs.device_model import device_file_contents, reduce_model, reported_quality
    from fairfold.runs.events import PUSHED
    from fairfold.runs.tensors import checked_tensor_bytes

    state = strategy.progress.state
    plan = Tunable.of(strategy.plan.algorithm).resolve(strategy.plan, state)
    facts = {"name": "devices", "items": strategy.num_items}
    done, by_size = list[int](), dict[int, list[int]]()
    for node in strategy.nodes.connected(grid):
        by_size.setdefault(node.size, []).append(node.node_id)
    num_asked = sum(map(len, by_size.values()))
    for size, nodes in sorted(by_size.items()):
        capacity = plan.capacities[size]
        measured = reported_quality(plan, strategy.progress.history, capacity)
        reduced = reduce_model(capacity, plan, state)
        tensors, metadata = device_file_contents(reduced, plan.settings, state, facts, measured)
        record = model_message(checked_tensor_bytes(tensors, metadata | {"run": f"{strategy.network_state.run:x}"}))
        for start in range(0, len(nodes), PUSHED_AT_ONCE):
            block = nodes[start : start + PUSHED_AT_ONCE]
            done += [node for node, _ in ask_all(grid, block, MODEL, record, strategy.round_timeout)]
    log.info("%d of %d nodes store the model of round %d", len(done), num_asked, state.round_number)
    strategy.nodes.note({"event": PUSHED, "round": state.round_number, "asked": num_asked, "nodes": done})
