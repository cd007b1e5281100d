"""What travels: orders to devices and their answers, as Flower's records. Every message is checked before it is used.

An order is what the protocol calls :class:`Sent`, with the settings that decide what a device computes, and with the
word of this device that the server holds. A device answers with its summand; where that is a whole model and vectors
travel in half precision, with its change, which keeps its digits. Before the first round devices are asked for sums,
and told the numbers that items get by them, of some items at a time.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fairfold.errors import FairfoldError
from fairfold.flower.facts import facts_in, number_in, refused, text_in, word_in
from fairfold.flower.protocol import ARRAYS, CODED, FACTS, SECURE, VERSION, WINDOW
from fairfold.flower.vectors import BYTE, DOUBLE, WHOLE, pack, unpack
from fairfold.projections import Projection, facts_of, projection_of
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.words import Answer, Sent
from fairfold.sealed import SENSELESS, table_in
from fairfold.settings import Settings, read_settings

NOT_SENT = ("data", "fleet")  # tables that are the server's own business
NOT_SENT_OF_RUN = (
    "rounds", "evaluate_every", "patience", "threshold", "backend", "device", "user_storage", "log_format",
)  # fmt: skip
MOST_ITEMS = 2**32
LONGEST_TABLE = 4_096
NO_WORD = 0  # in the place of a word's number: the server holds none of this device's


@dataclass(frozen=True)
class Order:
    """What a device is asked to do."""

    sent: Sent
    settings: Settings  # those that decide what a device computes
    items: int  # size of the catalogue
    run: int  # words of another mean nothing here
    word: int  # the number that the device's answer will have
    holds: int = NO_WORD  # the number of the word of this device that the server's sums hold
    half: bool = False  # vectors travel in half precision
    evaluate: bool = False  # the device is asked how well the model serves it, before it trains
    numbering: int = 0  # which numbering of the items this run has; 0 for the catalogue's own
    picture: tuple[int, int, int] | None = None  # height, width and classes of images, for models of those

    @property
    def half_up(self) -> bool:
        """Whether answers travel in half precision: not into sums that remember, where every digit lost would stay."""
        return self.half and self.settings.algorithm.keeps != "acknowledged"


@dataclass(frozen=True)
class Reply:
    """What a device says: its summand, and the sum of qualities over the users evaluated, with their number."""

    answer: Answer | None
    quality: tuple[float, int] | None = None


def sent_settings(settings: Settings) -> dict[str, Any]:
    """What a device has to know of the settings."""
    values = {table: of for table, of in settings.plain().items() if table not in NOT_SENT}
    values["run"] = {key: value for key, value in values["run"].items() if key not in NOT_SENT_OF_RUN}
    if settings.model.reads_images:
        values["data"] = settings.plain()["data"] | {"name": "device"}
    return values


def trains(model: str | None, settings: Settings) -> bool:
    """Whether a device that was given this model takes part in such a run; without one it trains any of fairfold's."""
    return settings.model.kind == model if model is not None else not settings.model.own


def _facts(**facts: Any) -> ConfigRecord:
    return ConfigRecord({"version": VERSION, **facts})


# -- orders ------------------------------------------------------------------------------------------------------------


def pack_order(order: Order) -> tuple[RecordDict, Order]:
    """An order as records, and the same with the vectors as the device will see them."""
    sent = order.sent
    coded = {name: held.packed(sent.vectors[name]) for name, held in sent.projections.items() if held.coded}
    plain = {name: vector for name, vector in sent.vectors.items() if name not in coded}
    arrays, scales = pack(plain, order.half)
    sizes = {name: vector.numel() for name, vector in plain.items()}
    facts = _facts(
        round=sent.round_number, size=sent.size, items=order.items, run=f"{order.run:x}", word=f"{order.word:x}",
        holds=f"{order.holds:x}", numbering=f"{order.numbering:x}", half=order.half, evaluate=order.evaluate,
        settings=json.dumps(sent_settings(order.settings)),
        projections=json.dumps({name: facts_of(held) for name, held in sent.projections.items()}),
        context=json.dumps({name: facts_of(held) for name, held in sent.context.items()}),
        beside=json.dumps({name: size for name, size in sizes.items() if name not in sent.projections}),
        scales=scales, **({} if order.picture is None else {"picture": list(order.picture)}),
    )  # fmt: skip
    if order.half:
        seen = sent.vectors | unpack(arrays, scales, sizes, half=True)
        order = replace(order, sent=replace(sent, vectors=seen))
    stored = {CODED: pack(coded, half=False)[0]} if coded else {}
    return RecordDict({ARRAYS: arrays, **stored, FACTS: facts}), order


def for_node(record: RecordDict, holds: int, secure: bytes | None = None) -> RecordDict:
    """The same order for one node: which of its words the server holds, and what a secure sum tells it."""
    copy = record.copy()
    own = {"holds": f"{holds:x}"} | ({} if secure is None else {SECURE: secure})
    copy[FACTS] = ConfigRecord(dict(facts_in(record)) | own)
    return copy


def unpack_order(content: RecordDict) -> Order:
    """An order and its vectors, on the device."""
    facts = facts_in(content)
    half, evaluate = facts.get("half"), facts.get("evaluate")
    if type(half) is not bool or type(evaluate) is not bool:
        raise refused("an order without its precision", "what FairStrategy sends")
    with _reading():
        settings = read_settings(_table(facts, "settings"))
        projections, context = _projections(facts, "projections"), _projections(facts, "context")
        beside = _table(facts, "beside")
        if not all(type(length) is int and 0 <= length <= MOST_ITEMS for length in beside.values()):
            raise ValueError("lengths that are none")
        sizes = {name: held.size for name, held in projections.items() if not held.coded} | beside
        coded = {name: held for name, held in projections.items() if held.coded}
    number, size = number_in(facts, "round", 2**31), number_in(facts, "size", 2**16)
    vectors = unpack(content.get(ARRAYS), facts.get("scales"), sizes, half)
    lengths = {name: held.bytes for name, held in coded.items()}
    if coded:
        stored = unpack(content.get(CODED), [1.0] * len(coded), lengths, half=False, dtype=BYTE)
        vectors |= {name: held.unpacked(stored[name]) for name, held in coded.items()}
    sent = Sent(number, size, projections, {name: vectors[name] for name in (*projections, *beside)}, context)
    return Order(
        sent, settings, number_in(facts, "items", MOST_ITEMS), word_in(facts, "run"), word_in(facts, "word"),
        word_in(facts, "holds"), half, evaluate, word_in(facts, "numbering"), _picture(facts),
    )  # fmt: skip


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Whatever cannot be read is refused with words."""
    try:
        yield
    except (FairfoldError, *SENSELESS) as error:
        raise refused(f"an order that cannot be read ({str(error)[:200]})", "what FairStrategy sends") from None


def _table(facts: ConfigRecord, key: str) -> dict[str, Any]:
    found = table_in(text_in(facts, key))
    if len(found) > LONGEST_TABLE:
        raise ValueError(f"a table of {len(found)} rows")
    return found


def _projections(facts: ConfigRecord, key: str) -> dict[str, Projection]:
    return {name: projection_of(of) for name, of in _table(facts, key).items()}


def _picture(facts: ConfigRecord) -> tuple[int, int, int] | None:
    found = facts.get("picture")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 3 or not all(type(n) is int and 0 < n < 2**16 for n in found):
        raise refused("a picture that is none", "height, width and classes")
    height, width, classes = found
    return int(height), int(width), int(classes)


# -- answers -----------------------------------------------------------------------------------------------------------


def pack_reply(order: Order, reply: Reply, *, values: bool = False) -> RecordDict:
    """What a device says, as records; ``values``: its answer is a weighted model."""
    sums = {} if reply.answer is None else reply.answer.sums
    weight = 0.0 if reply.answer is None else reply.answer.weight
    if values and order.half_up:  # a change keeps its digits in half floats, which the model itself would not
        sums = {name: total - order.sent.vectors[name] * weight for name, total in sums.items()}
    arrays, scales = pack(sums, order.half_up)
    facts = _facts(run=f"{order.run:x}", word=f"{order.word:x}", weight=float(weight), scales=scales)
    if reply.quality is not None:
        facts["quality"], facts["evaluated"] = float(reply.quality[0]), int(reply.quality[1])
    return RecordDict({ARRAYS: arrays, FACTS: facts})


def unpack_reply(
    content: RecordDict, order: Order, sizes: dict[str, int], largest_weight: float, *, values: bool = False
) -> Reply:
    """What a device says, on the server: refused unless it is said to this very order, and of the agreed sizes.

    There are none if only the quality was asked for. Whether the numbers can be used is the algorithm's to say.
    """
    facts = facts_in(content)
    if set(content) != {ARRAYS, FACTS}:
        raise refused("other records than expected", f"{ARRAYS} and {FACTS}")
    if word_in(facts, "run") != order.run or word_in(facts, "word") != order.word:
        raise refused("an answer to another round", f"round {order.sent.round_number + 1}")
    quality = _quality(facts, order.settings)
    if not sizes:
        return Reply(None, quality)
    weight = _weight(facts, largest_weight)
    listed = order.settings.algorithm.listed
    sums = unpack(content[ARRAYS], facts.get("scales"), sizes, order.half_up, sparse=listed)
    if values and order.half_up:
        sums = {name: total.add_(order.sent.vectors[name], alpha=weight) for name, total in sums.items()}
    return Reply(Answer({name: sums[name] for name in sizes}, weight), quality)


def _weight(facts: ConfigRecord, most: float) -> float:
    weight = facts.get("weight")
    if not isinstance(weight, float) or not 0 < weight <= most:
        raise refused("a weight out of range", f"above 0 and at most {most:g}")
    return weight


def _quality(facts: ConfigRecord, settings: Settings) -> tuple[float, int] | None:
    total, users = facts.get("quality"), facts.get("evaluated")
    if total is None and users is None:
        return None
    if not isinstance(total, float) or type(users) is not int or not 0 < users < 2**31:
        raise refused("a quality that is no number", "a sum and a count of users")
    most = math.inf if settings.smaller_is_better else float(users) * (1 + 1e-9)  # an NDCG is at most 1
    if not (0 <= total <= most and math.isfinite(total)):
        raise refused("a quality out of range", "at most 1 per user")
    return total, users


# -- the sums before the first round, and the numbers that items get by them -------------------------------------------


def windows(items: int) -> list[range]:
    """The catalogue in parts."""
    return [range(start, min(start + WINDOW, items)) for start in range(0, items, WINDOW)]


def ask(settings: Settings, items: int, window: range) -> RecordDict:
    """What asks a device for its part of the sums, of some items."""
    sent = json.dumps(sent_settings(settings))
    return RecordDict({FACTS: _facts(settings=sent, items=items, start=window.start, stop=window.stop)})


def asked_in(content: RecordDict) -> tuple[Settings, int, range]:
    """The same, on the device."""
    facts = facts_in(content)
    with _reading():
        settings = read_settings(_table(facts, "settings"))
    return settings, *_window(facts)


def _window(facts: ConfigRecord) -> tuple[int, range]:
    """The size of the catalogue, and the items in question."""
    items = number_in(facts, "items", MOST_ITEMS, 1)
    start = number_in(facts, "start", items - 1)
    return items, range(start, number_in(facts, "stop", min(items, start + WINDOW), start + 1))


def pack_survey(answer: Answer) -> RecordDict:
    """A device's part."""
    return RecordDict({ARRAYS: pack(answer.sums, half=False)[0], FACTS: _facts(weight=float(answer.weight))})


def unpack_survey(content: RecordDict, settings: Settings, window: range) -> Answer:
    """The same, on the server: refused unless every sum is there, of the right length."""
    weight = _weight(facts_in(content), 2**31)
    wanted = {
        name: len(window) if per_item else 3
        for name, per_item in settings.algorithm.surveys(settings).items()
        if per_item or window.start == 0
    }
    sums = unpack(content.get(ARRAYS), [1.0] * len(wanted), wanted, half=False, dtype=DOUBLE)
    counts = sums.get(COUNTS)
    if counts is not None and not bool(((counts >= 0) & (counts <= weight)).all()):
        raise refused("counts out of range", "at most one per user")
    return Answer(sums, weight)


@dataclass(frozen=True)
class Told:
    """The numbers that some items have in a run."""

    numbering: int
    items: int
    window: range
    places: Tensor
    ratings: bool


def tell(numbering: int, place: Tensor, window: range, *, ratings: bool) -> RecordDict:
    """What tells a device the numbers of some items."""
    start, stop = window.start, window.stop
    facts = _facts(numbering=f"{numbering:x}", items=len(place), start=start, stop=stop, ratings=ratings)
    part = place[start:stop].to(torch.int64).contiguous()
    return RecordDict({ARRAYS: ArrayRecord({"places": Array(part.numpy())}), FACTS: facts})


def told_in(content: RecordDict) -> Told:
    """The same, on the device."""
    facts = facts_in(content)
    items, window = _window(facts)
    places = unpack(content.get(ARRAYS), [1.0], {"places": len(window)}, half=False, dtype=WHOLE)["places"]
    if int(places.min()) < 0 or int(places.max()) >= items:
        raise refused("numbers beyond the catalogue", f"numbers from 0 to {items - 1}")
    return Told(word_in(facts, "numbering"), items, window, places, facts.get("ratings") is True)
