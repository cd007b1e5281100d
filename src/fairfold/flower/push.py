"""The last word of a run: every device is given the final model of its size, as the file that it keeps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flwr.serverapp import Grid

from fairfold.flower.exchange import ask_all
from fairfold.flower.offline import given_model
from fairfold.flower.protocol import MODEL
from fairfold.runs.device import contents, reduced_to, said_quality
from fairfold.runs.nodes import PUSHED
from fairfold.runs.tensors import sealed_bytes

if TYPE_CHECKING:
    from fairfold.flower.strategy import FairStrategy

log = logging.getLogger("fairfold.flower")

GIVEN_AT_ONCE = 256
"""Nodes whose answers are waited for together."""


def push_models(strategy: FairStrategy, grid: Grid) -> None:
    """Give all that are connected the model; who is not there now gets it after the next training."""
    state = strategy.progress.state
    plan = strategy.plan.algorithm.settled(strategy.plan, state)
    facts = {"name": "devices", "items": strategy.num_items}
    asked, done = 0, list[int]()
    by_size = dict[int, list[int]]()
    for node in strategy.nodes.everybody(grid):
        by_size.setdefault(node.group, []).append(node.node_id)
    for size, nodes in sorted(by_size.items()):
        capacity = plan.capacities[size]
        measured = said_quality(plan, strategy.progress.history, capacity)
        tensors, told = contents(reduced_to(capacity, plan, state), plan.settings, state, facts, measured)
        record = given_model(sealed_bytes(tensors, told | {"run": f"{strategy.books.run:x}"}))
        for start in range(0, len(nodes), GIVEN_AT_ONCE):
            some = nodes[start : start + GIVEN_AT_ONCE]
            asked += len(some)
            done += [node for node, _ in ask_all(grid, some, MODEL, record, strategy.round_timeout)]
    log.info("%d of %d nodes keep the model of round %d", len(done), asked, state.round_number)
    strategy.nodes.note({"event": PUSHED, "round": state.round_number, "asked": asked, "nodes": done})
