"""Messages of final models: the server sends every node that of its size, and a node stores it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fairfold.checksums import PARSE_ERRORS
from fairfold.device import stored_model
from fairfold.errors import InvalidMessage
from fairfold.flower.protocol import ARRAYS, FACTS, FILE, MODEL, VERSION

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.serverapp import Grid

    from fairfold.flower.roster import Roster
    from fairfold.flower.strategy import FairStrategy

PUSHED_AT_ONCE = 256  # nodes whose replies are waited for together

log = logging.getLogger("fairfold.flower")


def model_message(content: bytes, roster: Roster | None = None) -> RecordDict:
    """The message that sends a device the content of its model file, signed where there is a roster with a signer."""
    import numpy
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    file = Array(numpy.frombuffer(content, numpy.uint8))
    facts = ConfigRecord({"version": VERSION})
    if roster is not None:
        number = time.time_ns() // 1_000_000
        facts.update({"number": f"{number:x}", "signature": roster.sign_model(number, content)})
    return RecordDict({ARRAYS: ArrayRecord({FILE: file}), FACTS: facts})


def store_model(folder: Path, content: RecordDict, capacity: str, signer: str = "") -> RecordDict:
    """Store the model of a message in place of the last one, if it is whole and within the device's capacity."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    facts, arrays = content.get(FACTS), content.get(ARRAYS)
    if not isinstance(facts, ConfigRecord) or facts.get("version") != VERSION or not isinstance(arrays, ArrayRecord):
        raise InvalidMessage("another version of the protocol", f"version {VERSION}", "Update both sides.")
    try:
        data = arrays[FILE].data
        file = data[10 + int.from_bytes(data[8:10], "little") :]
        stored_model.store_model(folder, file, capacity, dict(facts), signer)
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
        tensors, metadata = device_file_contents(reduced, plan.settings, state, facts, measured)
        content = checked_tensor_bytes(tensors, metadata | {"run": f"{strategy.network_state.run:x}"})
        record = model_message(content, strategy.nodes.roster)
        for start in range(0, len(nodes), PUSHED_AT_ONCE):
            block = nodes[start : start + PUSHED_AT_ONCE]
            done += [node for node, _ in ask_all(grid, block, MODEL, record, strategy.round_timeout)]
    log.info("%d of %d nodes store the model of round %d", len(done), num_asked, state.round_number)
    strategy.nodes.note({"event": PUSHED, "round": state.round_number, "asked": num_asked, "nodes": done})
