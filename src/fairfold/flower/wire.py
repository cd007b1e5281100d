"""Messages between server and clients as Flower's records. Every message is checked before it is used.

A task goes with the settings that decide what a client computes, and with the id of the client's update that the server
has acknowledged; the reply is an additive update. In half precision a whole model travels as its change, which keeps
its digits. Statistics and numbers of items, before the first round, are for a window of items at a time.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fairfold.checksums import PARSE_ERRORS
from fairfold.config import Settings, read_settings
from fairfold.device.facts import MAX_ITEMS, id_in, invalid_message, number_in, table_in, window_in
from fairfold.errors import FairfoldError, InvalidMessage
from fairfold.federation.aggregation import CombinesRobustly
from fairfold.federation.algorithm import RemembersUpdates, SparseUpdates
from fairfold.federation.architecture import Architecture, ImageShape
from fairfold.federation.bounds import checked_statistics, max_evaluated
from fairfold.federation.training import LocalSgd, RankingSgd
from fairfold.federation.updates import ClientTask, Update
from fairfold.flower.messages import facts_in, make_facts, with_facts
from fairfold.flower.protocol import ARRAYS, CODED, FACTS, SECURE, WINDOW
from fairfold.flower.vectors import FLOAT64, INT64, UINT8, pack, unpack
from fairfold.subspace.projection import Projection, describe_projection, make_projection

SERVER_TABLES = ("data", "fleet")  # settings that are not sent to clients
SERVER_RUN_KEYS = (
    "rounds", "evaluate_every", "patience", "threshold", "backend", "device", "user_storage", "table_storage",
    "log_format",
)  # fmt: skip
# A task is refused beyond so many numbers per user, numbers in layers, and samples (with negatives) per user and round.
MAX_USER_NUMBERS, MAX_DENSE_NUMBERS, MAX_SAMPLES = 1 << 16, 1 << 24, 1 << 24
REQUEST_IDS = ("run", "update_id", "acknowledged_id", "numbering")
NO_UPDATE = 0  # the id of no update: the server has acknowledged none of this client's


@dataclass(frozen=True)
class TaskRequest:
    """A task for a client, as the server sends it."""

    task: ClientTask
    settings: Settings  # those that decide what a client computes
    num_items: int
    run: int  # id of the run
    update_id: int  # the id that the client's update will have
    acknowledged_id: int = NO_UPDATE  # the id of this client's update that the server's sums contain
    half: bool = False  # vectors travel in half precision
    evaluate: bool = False  # the client evaluates the model on its users before it trains
    numbering: int = 0  # id of the numbering of the items; 0 for the catalogue's own
    image_shape: ImageShape | None = None  # of image models

    @property
    def half_updates(self) -> bool:
        """Whether updates travel in half precision: not where the server's sums remember them, with rounding errors."""
        return self.half and not isinstance(self.settings.algorithm, RemembersUpdates)


@dataclass(frozen=True)
class Reply:
    """A client's reply: its additive update, and the sum of a metric over its users with their number."""

    update: Update | None
    quality: tuple[float, int] | None = None


def client_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that a client needs."""
    values = {table: of for table, of in settings.plain().items() if table not in SERVER_TABLES}
    if settings.fleet.secure_groups > 1 and CombinesRobustly.of(settings.algorithm).robust_rule is not None:
        # How the server combines the sums of groups is no matter of a client's, which knows of no groups
        values["algorithm"] = values["algorithm"] | {"aggregation": "delta"}
        values["algorithm"].pop("byzantine_share", None)
    values["run"] = {key: value for key, value in values["run"].items() if key not in SERVER_RUN_KEYS}
    if settings.model.reads_images:
        values["data"] = settings.plain()["data"] | {"name": "device"}
    return values


def can_train(model: str | None, settings: Settings) -> bool:
    """Return whether a client with this model can take part; without one it trains any of fairfold's."""
    return settings.model.kind == model if model is not None else not settings.model.is_custom


# -- tasks -------------------------------------------------------------------------------------------------------------


def pack_request(request: TaskRequest) -> tuple[RecordDict, TaskRequest]:
    """Pack a request into records; return them with the request as the client will see it after rounding."""
    task = request.task
    packing = _packed_projections({**task.context, **task.projections})
    coded = {name: projection.packed(task.vectors[name]) for name, projection in packing.items()}
    plain = {name: vector for name, vector in task.vectors.items() if name not in coded}
    sizes = {name: vector.numel() for name, vector in plain.items()}
    arrays, scales = pack(plain, request.half)
    ids = {key: f"{getattr(request, key):x}" for key in REQUEST_IDS}
    tables = {
        "settings": client_settings(request.settings),
        "projections": {name: describe_projection(one) for name, one in task.projections.items()},
        "context": {name: describe_projection(one) for name, one in task.context.items()},
        "unprojected": {name: size for name, size in sizes.items() if name not in task.projections},
    }
    texts = {key: json.dumps(table) for key, table in tables.items()}
    facts = make_facts(round=task.round_number, size=task.size, items=request.num_items, scales=scales, **ids, **texts)
    facts.update(half=request.half, evaluate=request.evaluate)
    if request.image_shape is not None:
        facts["image_shape"] = list(request.image_shape)
    records = RecordDict({ARRAYS: arrays, FACTS: facts})
    if coded:
        records[CODED] = pack(coded, half=False)[0]
    if request.half:
        request = replace(request, task=replace(task, vectors=task.vectors | unpack(arrays, scales, sizes, half=True)))
    return records, request


def for_node(record: RecordDict, acknowledged_id: int, secure: bytes | None = None) -> RecordDict:
    """Return a request for one node: with its acknowledged update, and its message of secure aggregation."""
    facts = {} if secure is None else {SECURE: secure}
    return with_facts(record, acknowledged_id=f"{acknowledged_id:x}", **facts)


def unpack_request(content: RecordDict) -> TaskRequest:
    """Unpack and check a request, on the client."""
    facts = facts_in(content)
    half, evaluate = facts.get("half"), facts.get("evaluate")
    if type(half) is not bool or type(evaluate) is not bool:
        raise invalid_message("a task without its precision", "what FairStrategy sends")
    with _refuse_unreadable():
        settings = read_settings(table_in(facts, "settings"))
        projections, context = _read_projections(facts, "projections"), _read_projections(facts, "context")
        unprojected = table_in(facts, "unprojected")
        if not all(type(length) is int and 0 <= length <= MAX_ITEMS for length in unprojected.values()):
            raise ValueError("invalid lengths")
        coded = _packed_projections({**context, **projections})
        sizes = {name: one.size for name, one in projections.items() if name not in coded} | unprojected
    vectors = unpack(content.get(ARRAYS), facts.get("scales"), sizes, half)
    if coded:
        lengths = {name: one.bytes for name, one in coded.items()}
        stored = unpack(content.get(CODED), [1.0] * len(coded), lengths, half=False, dtype=UINT8)
        vectors |= {name: one.unpacked(stored[name]) for name, one in coded.items()}
    number, size = number_in(facts, "round", 2**31), number_in(facts, "size", 2**16)
    num_items = number_in(facts, "items", MAX_ITEMS)
    ordered = {name: vectors[name] for name in (*projections, *unprojected, *(coded.keys() - projections.keys()))}
    task = ClientTask(number, size, projections, ordered, context)
    ids = {key: id_in(facts, key) for key in REQUEST_IDS}
    return TaskRequest(
        task, settings, num_items, half=half, evaluate=evaluate, image_shape=_read_image_shape(facts), **ids
    )


def _packed_projections(projections: Mapping[str, Projection]) -> dict[str, Projection]:
    return {name: one for name, one in projections.items() if one.is_packed}


@contextlib.contextmanager
def _refuse_unreadable() -> Iterator[None]:
    """Turn every parsing error into an :class:`InvalidMessage`."""
    try:
        yield
    except (FairfoldError, *PARSE_ERRORS) as error:
        raise invalid_message(f"a task that cannot be read ({str(error)[:200]})", "what FairStrategy sends") from None


def _read_projections(facts: ConfigRecord, key: str) -> dict[str, Projection]:
    return {name: make_projection(of) for name, of in table_in(facts, key).items()}


def _read_image_shape(facts: ConfigRecord) -> ImageShape | None:
    shape = facts.get("image_shape")
    if shape is None:
        return None
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(n) is int and 0 < n < 2**16 for n in shape):
        raise invalid_message("an invalid shape of images", "height, width and classes")
    return cast(ImageShape, tuple(shape))


def refuse_large_round(request: TaskRequest, num_samples: int) -> None:
    """Refuse a task whose round of one user would need more memory than any honest one."""
    algorithm: object = request.settings.algorithm
    negatives = algorithm.num_negatives if isinstance(algorithm, RankingSgd) else 0
    draws = num_samples * algorithm.local_epochs * (1 + negatives) if isinstance(algorithm, LocalSgd) else 0
    if draws > MAX_SAMPLES:
        raise InvalidMessage(f"a round of {draws} draws for one user", f"at most {MAX_SAMPLES}", "Ask for less.")


def refuse_large_model(architecture: Architecture) -> None:
    """Refuse a model whose users' vectors and layers, which are used whole, are too large."""
    user_numbers = sum(architecture.user_vectors.values())
    dense_numbers = sum(math.prod(shape) for shape in architecture.dense.values())
    if user_numbers > MAX_USER_NUMBERS or dense_numbers > MAX_DENSE_NUMBERS:
        given = f"a model with {user_numbers} numbers a user and {dense_numbers} in its layers"
        raise InvalidMessage(given, f"at most {MAX_USER_NUMBERS} and {MAX_DENSE_NUMBERS}", "Use a smaller one.")


# -- replies -----------------------------------------------------------------------------------------------------------


def pack_reply(request: TaskRequest, reply: Reply, *, sends_weights: bool = False) -> RecordDict:
    """Pack a client's reply into records; ``sends_weights``: its update is a weighted model, not a change."""
    sums, weight = ({}, 0.0) if reply.update is None else (reply.update.sums, reply.update.weight)
    if sends_weights and request.half_updates:  # a change keeps its digits in half precision
        sums = {name: total - request.task.vectors[name] * weight for name, total in sums.items()}
    arrays, scales = pack(sums, request.half_updates)
    facts = make_facts(run=f"{request.run:x}", update_id=f"{request.update_id:x}", weight=float(weight), scales=scales)
    if reply.quality is not None:
        facts["quality"], facts["evaluated"] = float(reply.quality[0]), int(reply.quality[1])
    return RecordDict({ARRAYS: arrays, FACTS: facts})


def unpack_reply(
    content: RecordDict,
    request: TaskRequest,
    sizes: dict[str, int],
    max_weight: float,
    max_users: int = 2**31 - 1,
    *,
    sends_weights: bool = False,
) -> Reply:
    """Unpack a reply on the server (without ``sizes`` its quality alone); refuse other requests' and other sizes."""
    facts = facts_in(content)
    if set(content) != {ARRAYS, FACTS}:
        raise invalid_message("other records than expected", f"{ARRAYS} and {FACTS}")
    if id_in(facts, "run") != request.run or id_in(facts, "update_id") != request.update_id:
        raise invalid_message("a reply to another round", f"round {request.task.round_number + 1}")
    quality = _read_quality(facts, request, max_users)
    if not sizes:
        return Reply(None, quality)
    weight = _read_weight(facts, max_weight)
    sparse = SparseUpdates.of(request.settings.algorithm).sparse_sums
    sums = unpack(content[ARRAYS], facts.get("scales"), sizes, request.half_updates, sparse=sparse)
    if sends_weights and request.half_updates:
        sums = {name: total.add_(request.task.vectors[name], alpha=weight) for name, total in sums.items()}
    return Reply(Update({name: sums[name] for name in sizes}, weight), quality)


def _read_weight(facts: ConfigRecord, most: float) -> float:
    weight = facts.get("weight")
    if not isinstance(weight, float) or not 0 < weight <= most:
        raise invalid_message("a weight out of range", f"above 0 and at most {most:g}")
    return weight


def _read_quality(facts: ConfigRecord, request: TaskRequest, max_users: int) -> tuple[float, int] | None:
    settings, (total, users) = request.settings, (facts.get("quality"), facts.get("evaluated"))
    if total is None and users is None:
        return None
    if not isinstance(total, float) or type(users) is not int or not 0 < users < 2**31:
        raise invalid_message("a quality that is no number", "a sum and a count of users")
    most_counted = max_evaluated(settings, request.num_items, max_users)
    if users > most_counted:
        raise invalid_message("a quality of more users than the device has", f"{most_counted} at most")
    most = math.inf if settings.smaller_is_better else float(users) * (1 + 1e-9)  # an NDCG is at most 1
    if not (0 <= total <= most and math.isfinite(total)):
        raise invalid_message("a quality out of range", "at most 1 per user")
    return total, users


# -- statistics before the first round, and the numbering of items by them ---------------------------------------------


def item_windows(num_items: int) -> list[range]:
    """Split the catalogue into windows of at most ``WINDOW`` items."""
    return [range(start, min(start + WINDOW, num_items)) for start in range(0, num_items, WINDOW)]


def pack_statistics_request(settings: Settings, num_items: int, window: range) -> RecordDict:
    """Pack a request for a client's statistics of some items."""
    table = json.dumps(client_settings(settings))
    return RecordDict({FACTS: make_facts(settings=table, items=num_items, start=window.start, stop=window.stop)})


def unpack_statistics_request(content: RecordDict) -> tuple[Settings, int, range]:
    """Unpack a request for statistics on the client: settings, number of items, window of items."""
    facts = facts_in(content)
    with _refuse_unreadable():
        settings = read_settings(table_in(facts, "settings"))
    return settings, *window_in(facts)


def statistics_lengths(settings: Settings, window: range) -> dict[str, int]:
    """Return the lengths of the sums in a client's statistics of a window; those of no item come with the first."""
    statistics = settings.algorithm.statistics(settings).items()
    return {name: len(window) if one.per_item else 3 for name, one in statistics if one.per_item or window.start == 0}


def pack_statistics(statistics: Update) -> RecordDict:
    """Pack a client's statistics into records."""
    facts = make_facts(weight=float(statistics.weight))
    return RecordDict({ARRAYS: pack(statistics.sums, half=False)[0], FACTS: facts})


def unpack_statistics(
    content: RecordDict, settings: Settings, num_items: int, window: range, max_users: float
) -> Update:
    """Unpack a client's statistics on the server; refuse missing sums, other lengths and impossible numbers."""
    weight = _read_weight(facts_in(content), max_users)
    lengths = statistics_lengths(settings, window)
    sums = unpack(content.get(ARRAYS), [1.0] * len(lengths), lengths, half=False, dtype=FLOAT64)
    return checked_statistics(settings, Update(sums, weight), num_items)


@dataclass(frozen=True)
class Numbering:
    """The numbers that the items of a window have in a run."""

    numbering: int  # its id
    num_items: int
    window: range
    numbers: Tensor
    ratings: bool


def pack_numbering(numbering: int, numbers: Tensor, window: range, *, ratings: bool) -> RecordDict:
    """Pack the numbers of a window of items into records."""
    start, stop = window.start, window.stop
    facts = make_facts(numbering=f"{numbering:x}", items=len(numbers), start=start, stop=stop, ratings=ratings)
    part = numbers[start:stop].to(torch.int64).contiguous()
    return RecordDict({ARRAYS: ArrayRecord({"numbers": Array(part.numpy())}), FACTS: facts})


def unpack_numbering(content: RecordDict) -> Numbering:
    """Unpack and check the numbers of a window of items, on the client."""
    facts = facts_in(content)
    num_items, window = window_in(facts)
    numbers = unpack(content.get(ARRAYS), [1.0], {"numbers": len(window)}, half=False, dtype=INT64)["numbers"]
    if int(numbers.min()) < 0 or int(numbers.max()) >= num_items:
        raise invalid_message("numbers beyond the catalogue", f"numbers from 0 to {num_items - 1}")
    return Numbering(id_in(facts, "numbering"), num_items, window, numbers, facts.get("ratings") is True)
