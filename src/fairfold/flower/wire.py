"""What travels: orders to devices and their answers, as Flower's records. Every message is checked before it is used.

A device receives its compact vectors ψ and answers with what it *changed*, ψ′ − ψ: a change keeps its precision in
half floats, which ψ′ itself would not. Nothing that arrives is executed or unpickled, and nothing is allocated for it
but the vectors whose sizes were agreed on before.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fairfold.errors import FairfoldError, InvalidMessage
from fairfold.federation.facts import facts_of, projection_of
from fairfold.federation.projection import Hashed, Projection
from fairfold.federation.settings import Settings, read_settings
from fairfold.federation.task import Weights
from fairfold.flower.protocol import ARRAYS, FACTS, VERSION
from fairfold.runs.settings import in_full

NOT_SENT = {"data", "top_users", "world", "faults", "backend", "patience", "threshold"}
"""Settings that are the server's own business."""

LONGEST_TEXT = 1 << 16
"""Bytes of the longest text taken from a message."""

FULL, HALF = "float32", "float16"
_HEADER = re.compile(rb"\{'descr': '(<f4|<f2)', 'fortran_order': False, 'shape': \((\d{1,19}),\), \} *\n")
_CODES = {FULL: b"<f4", HALF: b"<f2"}
_HALF_EXPONENT = 15  # the largest number of a vector is brought below 2^15: at 2^16 rounding up would be infinity


@dataclass(frozen=True)
class Order:
    """What a device is asked to do.

    Attributes:
        round_number: Rounds done before this one.
        seed: Of the round's hash.
        settings: Those that decide what a device computes.
        projections: What it holds of every tensor.
        half: Whether vectors travel in half precision.
        evaluate: Whether the device is asked how well the model serves it, before it trains.
    """

    round_number: int
    seed: int
    settings: Settings
    projections: dict[str, Projection]
    half: bool = False
    evaluate: bool = False


@dataclass(frozen=True)
class Answer:
    """What a device says.

    Attributes:
        change: ψ′ − ψ of every tensor, the mean over the device's users; empty if it was only asked for its quality.
        weight: How much that counts: its number of users, or of samples.
        quality: Sum over the users evaluated, and their number.
    """

    change: Weights
    weight: float
    quality: tuple[float, int] | None = None


# -- vectors -----------------------------------------------------------------------------------------------------------


def pack(weights: Weights, half: bool) -> tuple[ArrayRecord, list[float]]:
    """Vectors as records, and by what each has to be multiplied on arrival, in the order of their names.

    A half float reaches from 6e-8 to 65504. Each vector is brought to the top of that by a power of two, which changes
    no digit, so that only numbers a billion times smaller than the largest lose more than their last digits.
    """
    arrays, scales = {}, []
    for name in sorted(weights):
        vector, scale = weights[name], 1.0
        if half:
            scale = _scale(float(vector.abs().max()) if vector.numel() else 0.0)
            vector = (vector / scale).to(torch.float16)
        arrays[name] = Array(vector.detach().contiguous().numpy())
        scales.append(scale)
    return ArrayRecord(arrays), scales


def _scale(largest: float) -> float:
    if not (0 < largest < math.inf):
        return 1.0  # zero; NaN and infinity are left for the receiver to refuse
    return 2.0 ** min(max(math.frexp(largest)[1] - _HALF_EXPONENT, -126), 127)


def unpack(record: Any, scales: Any, sizes: dict[str, int], half: bool) -> Weights:
    """Vectors from records; refused unless they are exactly those expected, and finite."""
    if not isinstance(record, ArrayRecord) or set(record) != set(sizes):
        raise _refused("other tensors than expected", f"{', '.join(sizes)}")
    if not (isinstance(scales, list) and len(scales) == len(sizes)):
        raise _refused("no scale for every tensor", f"{len(sizes)} numbers")
    found: Weights = {}
    for name, scale in zip(sorted(sizes), scales, strict=True):
        if not isinstance(scale, float) or not (0 < scale < math.inf) or (not half and scale != 1.0):
            raise _refused("a scale that is no positive number", "what the sender divided by")
        vector = _vector(record[name], sizes[name], HALF if half else FULL)
        if half:
            vector = vector.to(torch.float32).mul_(scale)
        if not bool(torch.isfinite(vector).all()):
            raise _refused("NaN or infinity", "finite numbers")
        found[name] = vector
    return found


def _vector(array: Array, size: int, dtype: str) -> torch.Tensor:
    """A vector from an ``.npy`` of exactly the expected content, without numpy's own reader.

    That one believes the header and allocates what it asks for.
    """
    if array.stype != "numpy.ndarray" or array.dtype != dtype:
        raise _refused("wrong type", f"{dtype} as numpy writes it")
    data, itemsize = array.data, numpy.dtype(dtype).itemsize
    if tuple(array.shape) != (size,) or not size * itemsize < len(data) <= size * itemsize + 4096:
        raise _refused("wrong size", f"{size} numbers")
    start = len(data) - size * itemsize
    lead = data[:start]
    header = _HEADER.fullmatch(lead[10:]) if lead[:8] == b"\x93NUMPY\x01\x00" else None
    if header is None or int.from_bytes(lead[8:10], "little") != start - 10:
        raise _refused("not an array as numpy writes it", "a vector of .npy version 1")
    if header[1] != _CODES[dtype] or int(header[2]) != size:
        raise _refused("wrong size", f"{size} numbers")
    values = numpy.frombuffer(data, dtype=numpy.dtype(_CODES[dtype].decode()), offset=start)
    return torch.from_numpy(values.copy())  # memory of its own: aligned, writable, and the message can go


# -- orders ------------------------------------------------------------------------------------------------------------


def pack_order(order: Order, received: Weights) -> tuple[RecordDict, Weights]:
    """An order as records, and the vectors as the device will see them."""
    arrays, scales = pack(received, order.half)
    facts: dict[str, Any] = {
        "version": VERSION,
        "round": order.round_number,
        "seed": f"{order.seed:016x}",
        "settings": json.dumps(order.settings.model_dump(mode="json", exclude=NOT_SENT)),
        "projections": json.dumps({name: facts_of(held) for name, held in order.projections.items()}),
        "half": order.half,
        "scales": scales,
        "evaluate": order.evaluate,
    }
    seen = received
    if order.half:
        seen = unpack(arrays, scales, {name: vector.numel() for name, vector in received.items()}, half=True)
    return RecordDict({ARRAYS: arrays, FACTS: ConfigRecord(facts)}), seen


def unpack_order(content: RecordDict) -> tuple[Order, Weights]:
    """An order and its vectors, on the device."""
    facts = facts_in(content)
    number, half, evaluate = facts.get("round"), facts.get("half"), facts.get("evaluate")
    if type(number) is not int or number < 0 or type(half) is not bool or type(evaluate) is not bool:
        raise _refused("an order without round or precision", "what FairStrategy sends")
    try:
        settings = read_settings(in_full(json.loads(_text(facts, "settings"))))
        described = json.loads(_text(facts, "projections"))
        projections = {str(name): projection_of(values) for name, values in described.items()}
        seed = int(_text(facts, "seed"), 16)
    except (FairfoldError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _refused(f"an order that cannot be read ({error})", "what FairStrategy sends") from None
    if not all(isinstance(held, Hashed) and held.subspace.full_size == math.prod(held.shape)
               for held in projections.values()):  # fmt: skip
        raise _refused("projections that are not subspaces of their tensors", "FAIR's subspaces")
    order = Order(number, seed, settings, projections, half, evaluate)
    sizes = {name: held.size for name, held in projections.items()}
    return order, unpack(content.get(ARRAYS), facts.get("scales"), sizes, half)


# -- answers -----------------------------------------------------------------------------------------------------------


def pack_answer(order: Order, answer: Answer) -> RecordDict:
    """An answer as records."""
    arrays, scales = pack(answer.change, order.half)
    facts: dict[str, Any] = {
        "version": VERSION,
        "round": order.round_number,
        "seed": f"{order.seed:016x}",
        "weight": float(answer.weight),
        "scales": scales,
    }
    if answer.quality is not None:
        facts |= {"quality": float(answer.quality[0]), "evaluated": int(answer.quality[1])}
    return RecordDict({ARRAYS: arrays, FACTS: ConfigRecord(facts)})


def unpack_answer(content: RecordDict, order: Order, largest_weight: float, *, trained: bool = True) -> Answer:
    """An answer, on the server: refused unless it is one to this very order, in range and of the agreed sizes.

    Args:
        content: What arrived.
        order: What was asked.
        largest_weight: The most a device may count.
        trained: Whether a change is expected, or the quality alone.
    """
    facts = facts_in(content)
    if set(content) != {ARRAYS, FACTS}:
        raise _refused("other records than expected", f"{ARRAYS} and {FACTS}")
    if type(facts.get("round")) is not int or facts["round"] != order.round_number:
        raise _refused("an answer to another round", f"round {order.round_number + 1}")
    if facts.get("seed") != f"{order.seed:016x}":
        raise _refused("an answer to another hash", "the seed that was sent")
    quality = _quality(facts, order.settings)
    if not trained:
        return Answer({}, 0.0, quality)
    weight = facts.get("weight")
    if not isinstance(weight, float) or not 0 < weight <= largest_weight:
        raise _refused("a weight out of range", f"above 0 and at most {largest_weight:g}")
    sizes = {name: held.size for name, held in order.projections.items()}
    change = unpack(content[ARRAYS], facts.get("scales"), sizes, order.half)
    for vector in change.values():
        if float(vector.abs().max()) > order.settings.largest_change:
            raise _refused("values out of range", f"changes of at most {order.settings.largest_change:g}")
    return Answer(change, weight, quality)


def _quality(facts: ConfigRecord, settings: Settings) -> tuple[float, int] | None:
    total, users = facts.get("quality"), facts.get("evaluated")
    if total is None and users is None:
        return None
    if not isinstance(total, float) or type(users) is not int or not 0 < users < 2**31:
        raise _refused("a quality that is no number", "a sum and a count of users")
    most = math.inf if settings.predicts_ratings else float(users) * (1 + 1e-9)  # an NDCG is at most 1
    if not (0 <= total <= most and math.isfinite(total)):
        raise _refused("a quality out of range", "at most 1 a user")
    return total, users


def facts_in(content: RecordDict) -> ConfigRecord:
    """The facts of a message, of this version of the protocol."""
    facts = content.get(FACTS)
    if not isinstance(facts, ConfigRecord):
        raise _refused("a message without facts", f"a record {FACTS!r}")
    version = facts.get("version")
    if type(version) is not int or version != VERSION:
        raise _refused("another version of the protocol", f"version {VERSION}")
    return facts


def _text(facts: ConfigRecord, key: str) -> str:
    text = facts.get(key)
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise _refused(f"no readable {key}", f"a text of at most {LONGEST_TEXT} characters")
    return text


def _refused(given: str, needed: str) -> InvalidMessage:
    return InvalidMessage(given, needed, "Both sides must run the same fairfold.")
