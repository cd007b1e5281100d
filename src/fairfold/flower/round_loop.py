"""The loop over the rounds of a network, and the server's step in each.

It is Flower's, except that a round without any usable update does not count. It is tried again with other nodes
after a growing pause, and the log has the reason; so slow clients, or a night without any, cost time and not rounds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fairfold.errors import InvalidState
from fairfold.federation.round import (
    CULPRIT,
    Contribution,
    StepFailed,
    checked_server_update,
    step_without_culprits,
)
from fairfold.federation.updates import Aggregate, State
from fairfold.flower.nodes import Node

if TYPE_CHECKING:
    from fairfold.flower.strategy import FairStrategy

MAX_PAUSE = 60.0  # seconds before a round is tried again
log = logging.getLogger("fairfold.flower")
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def run_rounds(strategy: FairStrategy, grid: Grid, arrays: ArrayRecord, evaluate: Evaluate | None) -> Result:
    """Run all rounds; after too many failed ones in a row raise, or end with the last good model."""
    strategy.summary()
    result = Result()
    number, before = 0, strategy.progress.state.round_number
    _evaluate_on_server(result, evaluate, number, arrays)
    while before + number < strategy.last_round:
        messages = strategy.configure_train(number + 1, arrays, ConfigRecord(), grid)
        new, metrics = strategy.aggregate_train(number + 1, _exchange(strategy, messages))
        if strategy.progress.state.round_number == before + number:
            if not _may_try_again(strategy, before + number + 1):
                break
            continue
        strategy.attempt = 0
        number += 1
        if new is not None:
            result.arrays = arrays = new
        if metrics is not None:
            result.train_metrics_clientapp[number] = metrics
        messages = strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
        quality = strategy.aggregate_evaluate(number, _exchange(strategy, messages))
        if quality is not None:
            result.evaluate_metrics_clientapp[number] = quality
        _evaluate_on_server(result, evaluate, number, arrays)
    return result


def _exchange(strategy: FairStrategy, messages: Iterable[Message]) -> Iterator[Message]:
    """Send tasks, and yield the replies; in asynchronous runs those to earlier tasks as well."""
    assert strategy.streaming is not None
    opened = strategy.open_round
    if strategy.waits_for_all():
        return strategy.streaming.exchange(messages, opened.replies, strategy.round_timeout)
    seconds = strategy.settings.fleet.asynchronous.step_seconds
    is_due = partial(opened.is_step_due, float("inf") if seconds is None else time.monotonic() + seconds)
    return strategy.streaming.exchange(messages, opened.replies, strategy.round_timeout, is_due)


def _may_try_again(strategy: FairStrategy, number: int) -> bool:
    """Log why a round failed, and wait; after too many attempts raise, or end the run with the last good model."""
    strategy.attempt += 1
    reason = strategy.open_round.why_failed()
    max_attempts = strategy.settings.fleet.network.max_failed_rounds
    log.warning("round %d: no usable update (%s): it does not count, and is tried again", number, reason)
    if max_attempts is not None and strategy.attempt >= max_attempts:
        if strategy.open_round.dropped and number > 1:
            strategy.ended = f"round {number} was dropped {max_attempts} times: {reason}; the model before it is kept"
            log.warning("%s", strategy.ended)
            return False
        given = f"round {number}, tried {max_attempts} times without a usable update ({reason})"
        logs = "See run.log and the devices' own logs; then go on from the last checkpoint (resume)."
        remedy = f"{logs} fleet.network.max_failed_rounds is how often a round is tried."
        raise InvalidState(given, "devices that reply", remedy)
    time.sleep(min(2.0 ** min(strategy.attempt - 1, 10), MAX_PAUSE, strategy.round_timeout))
    return True


def _evaluate_on_server(result: Result, evaluate: Evaluate | None, number: int, arrays: ArrayRecord) -> None:
    metrics = None if evaluate is None else evaluate(number, arrays)
    if metrics is not None:
        result.evaluate_metrics_serverapp[number] = metrics


def take_step(strategy: FairStrategy, aggregate: Aggregate, kept: list[Contribution[Node]]) -> State | None:
    """Take the server's step, without clients that make it fail; None, and the state as it was, where that fails.

    ``kept``: the updates one by one, after a step has failed; their senders are left out of the rest of the run.
    """
    opened, plan, state = strategy.open_round, strategy.plan, strategy.progress.state
    culprits: list[Node] = []
    try:
        after = checked_server_update(plan, state, aggregate)
    except StepFailed as error:
        try:
            if not kept:
                raise
            after, culprits = step_without_culprits(plan, state, kept)
        except StepFailed as again:
            strategy.step_failed = True
            opened.drop(str(again))
            _leave_out(strategy, again.culprits)  # the next attempt finds others
            return None
        log.debug("without some clients: %s", error)
    opened.used = [node for node in opened.used if node not in {culprit.node_id for culprit in culprits}]
    _leave_out(strategy, culprits)
    strategy.step_failed = False
    return after


def _leave_out(strategy: FairStrategy, culprits: Iterable[Node]) -> None:
    for node in culprits:
        strategy.open_round.reject(node.node_id, CULPRIT)
        strategy.nodes.leave_out(node.node_id, CULPRIT)
