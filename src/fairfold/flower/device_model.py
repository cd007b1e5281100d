"""Messages of final models: the server sends every node that of its size, and a node stores it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairfold.checksums import PARSE_ERRORS
from fairfold.device import stored_model
from fairfold.device.encoding import signed_rows
from fairfold.errors import InvalidMessage
from fairfold.flower.protocol import ARRAYS, FACTS, FILE, MODEL, ROWS, VERSION

if TYPE_CHECKING:
    from flwr.app import Context, RecordDict
    from flwr.serverapp import Grid

    from fairfold.federation.plan import Plan
    from fairfold.federation.updates import State
    from fairfold.flower.client import ClientRuntime
    from fairfold.flower.roster import Roster
    from fairfold.flower.strategy import FairStrategy
    from fairfold.subspace.projection import Projection

ROW_BYTES_AT_ONCE = 1 << 20  # of the rows that pass by a device after its model
PUSHED_AT_ONCE = 256  # nodes whose replies are waited for together

log = logging.getLogger("fairfold.flower")


def model_message(content: bytes, roster: Roster | None = None) -> RecordDict:
    """The message that sends a device the content of its model file, signed where there is a roster with a signer."""
    return _signed_message(content, content, roster)


def rows_message(model: bytes, first: int, rows: bytes, roster: Roster | None = None) -> RecordDict:
    """The message of a block of rows that pass by a device with this model file, from item ``first`` on."""
    return _signed_message(rows, signed_rows(model, first, rows), roster, first=first)


def _signed_message(content: bytes, signed: bytes, roster: Roster | None, **facts: int) -> RecordDict:
    import numpy
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    file = Array(numpy.frombuffer(content, numpy.uint8))
    record = ConfigRecord({"version": VERSION, **facts})
    if roster is not None:
        number = time.time_ns() // 1_000_000
        record.update({"number": f"{number:x}", "signature": roster.sign_model(number, signed)})
    return RecordDict({ARRAYS: ArrayRecord({FILE: file}), FACTS: record})


def store_model(folder: Path, content: RecordDict, capacity: str, signer: str = "") -> RecordDict:
    """Store the model of a message in place of the last one, if it is whole and within the device's capacity."""
    return _stored(content, lambda file, facts: stored_model.store_model(folder, file, capacity, facts, signer))


def keep_sums(runtime: ClientRuntime, content: RecordDict, context: Context) -> RecordDict:
    """Add the rows of a message to the sums of a device's histories."""
    from fairfold.device import encoding
    from fairfold.flower.client_tasks import load_interactions

    def histories(num_items: int) -> dict[str, list[int]]:
        data = load_interactions(runtime, context, num_items, ratings=False)
        parts = [data.train] if data.test is None else [data.train, data.test]
        names = zip(data.names, data.users, strict=True)
        return {name: [item for part in parts for item in part.of(user).tolist()] for name, user in names}

    folder, signer = runtime.folder(context), str(context.node_config.get("signer", ""))
    return _stored(content, lambda rows, facts: encoding.keep_sums(folder, rows, facts, histories, signer))


def _stored(content: RecordDict, store: Callable[[bytes, dict[str, Any]], None]) -> RecordDict:
    """Store the bytes of a message; the reply says that they are."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    facts, arrays = content.get(FACTS), content.get(ARRAYS)
    if not isinstance(facts, ConfigRecord) or facts.get("version") != VERSION or not isinstance(arrays, ArrayRecord):
        raise InvalidMessage("another version of the protocol", f"version {VERSION}", "Update both sides.")
    try:
        data = arrays[FILE].data
        store(data[10 + int.from_bytes(data[8:10], "little") :], dict(facts))
    except InvalidMessage:
        raise
    except PARSE_ERRORS as error:
        raise InvalidMessage(f"a damaged model ({error})", "a whole one", "The server sends it again.") from None
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
        tensors, metadata = device_file_contents(reduced, plan.resolved_settings, state, facts, measured)
        content = checked_tensor_bytes(tensors, metadata | {"run": f"{strategy.network_state.run:x}"})
        record = model_message(content, strategy.nodes.roster)
        passing = list(_row_blocks(plan, state, reduced.projections))
        for start in range(0, len(nodes), PUSHED_AT_ONCE):
            block = nodes[start : start + PUSHED_AT_ONCE]
            block = [node for node, _ in ask_all(grid, block, MODEL, record, strategy.round_timeout)]
            done += block
            for first, rows in passing:
                rows_record = rows_message(content, first, rows, strategy.nodes.roster)
                block = [node for node, _ in ask_all(grid, block, ROWS, rows_record, strategy.round_timeout)]
    log.info("%d of %d nodes store the model of round %d", len(done), num_asked, state.round_number)
    strategy.nodes.note({"event": PUSHED, "round": state.round_number, "asked": num_asked, "nodes": done})


def _row_blocks(plan: Plan, state: State, held: Mapping[str, Projection]) -> Iterator[tuple[int, bytes]]:
    """Blocks of the rows that pass by devices with such a model, each as a device packs rows of its own."""
    from dataclasses import replace

    from fairfold.federation.plan import StreamsRows
    from fairfold.subspace.packed import QuantizedRows

    algorithm = StreamsRows.of(plan.algorithm)
    for name, part in algorithm.stream_packing(held).items():
        assert isinstance(part, QuantizedRows)
        rows = algorithm.encoding_rows(plan, state.full, held)[name].view(part.kept)
        step = max(1, ROW_BYTES_AT_ONCE // part.kept[1])
        for first in range(0, len(rows), step):
            block = rows[first : first + step]
            yield first, bytes(replace(part, kept=(len(block), part.kept[1])).packed(block).numpy())
