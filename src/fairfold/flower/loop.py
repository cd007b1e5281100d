"""Rounds one after another: Flower's loop, but that a round to which nobody answered does not count.

It is tried again with other nodes, after a pause that grows, and the log says why; so slow devices, or a night in which
all are away, cost time and not rounds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fairfold.errors import InvalidState

if TYPE_CHECKING:
    from fairfold.flower.strategy import FairStrategy

log = logging.getLogger("fairfold.flower")

LONGEST_PAUSE = 60.0  # seconds before a round is tried again

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def run_rounds(
    strategy: FairStrategy, grid: Grid, arrays: ArrayRecord, last_round: int, evaluate: Evaluate | None
) -> Result:
    """All rounds up to the last one; an error where too many in a row are empty, from which a run can go on."""
    strategy.summary()
    result = Result()
    _evaluated(result, evaluate, 0, arrays)
    number, before = 0, strategy.progress.state.round_number
    while before + number < last_round:
        messages = strategy.configure_train(number + 1, arrays, ConfigRecord(), grid)
        new, metrics = strategy.aggregate_train(number + 1, strategy.replies(messages))
        if strategy.progress.state.round_number == before + number:
            _try_again(strategy, before + number + 1)
            continue
        strategy.attempt, number = 0, number + 1
        if new is not None:
            result.arrays = arrays = new
        if metrics is not None:
            result.train_metrics_clientapp[number] = metrics
        messages = strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
        told = strategy.aggregate_evaluate(number, strategy.replies(messages))
        if told is not None:
            result.evaluate_metrics_clientapp[number] = told
        _evaluated(result, evaluate, number, arrays)
    return result


def _try_again(strategy: FairStrategy, number: int) -> None:
    """Say why a round was empty, and wait; or give up."""
    strategy.attempt += 1
    why, most = strategy.open_round.why_empty(), strategy.settings.fleet.network.empty_rounds
    log.warning("round %d: nobody's answer can be used (%s): it does not count, and is tried again", number, why)
    if most is not None and strategy.attempt >= most:
        raise InvalidState(
            f"round {number}, tried {most} times without an answer that could be used ({why})", "devices that answer",
            "See run.log and the devices' own logs; then go on from the last checkpoint (resume). "
            "fleet.network.empty_rounds says how often a round is tried.",
        )  # fmt: skip
    time.sleep(min(2.0 ** (strategy.attempt - 1), LONGEST_PAUSE, strategy.round_timeout))


def _evaluated(result: Result, evaluate: Evaluate | None, number: int, arrays: ArrayRecord) -> None:
    found = None if evaluate is None else evaluate(number, arrays)
    if found is not None:
        result.evaluate_metrics_serverapp[number] = found
