"""``FairStrategy``: the server of a real federation, on Flower's message API.

A round is that of ``simulate.loop``: reduce once a size, send, check every answer, sum per size, recover once, update.
What a network adds is here: nodes that come late, die, hang or send rubbish. Whoever cannot be used is left out by
name and reason, and the round goes on.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fairfold.errors import InvalidMessage, InvalidSettings
from fairfold.federation.aggregate import RoundTotals, ServerState, aggregate
from fairfold.federation.replies import Rejections
from fairfold.federation.sampling import Purpose, generator, sample_cohort
from fairfold.federation.send import send
from fairfold.federation.settings import Settings
from fairfold.federation.task import Weights
from fairfold.flower.exchange import StreamingGrid
from fairfold.flower.nodes import Node, Nodes
from fairfold.flower.plan import BYTES, Plan
from fairfold.flower.record import Record
from fairfold.flower.wire import Answer, Order, pack_order, unpack_answer
from fairfold.simulate.result import Quality, RoundReport
from fairfold.simulate.run import Progress

log = logging.getLogger("fairfold.flower")

DEVICES = "devices"
LARGEST_OVERHEAD = 1 << 20
"""Bytes of an answer that are not its vectors: names, figures, Flower's own records."""
"""What stands for the data in a run's settings: the server has none."""


@dataclass
class _Open:
    """A round that is under way.

    Attributes:
        orders: What the devices of each size were asked.
        seen: The vectors as these devices see them, where the rule needs them.
        waiting: Who has not answered.
        bytes_each: Of one message's tensors, by size.
    """

    orders: dict[int, Order] = field(default_factory=dict)
    seen: dict[int, Weights] = field(default_factory=dict)
    waiting: dict[int, Node] = field(default_factory=dict)
    bytes_each: dict[int, int] = field(default_factory=dict)
    answered: int = 0
    started: float = field(default_factory=time.monotonic)


class FairStrategy(Strategy):
    """FAIR (and FAIR-HOM, FULL-TRN, FedAvg) over a network.

    Args:
        settings: Of the run; ``capacities`` names the sizes that are served, and every device gets the largest it can
            hold. ``clients_per_round`` nodes take part in a round, or all if there are fewer.
        num_items: Size of the catalogue; items are numbered by falling popularity where that is known (``ranked``).
        folder: Where the run is written, checkpoints included; nothing is written if not given.
        resume: Go on from the newest whole checkpoint in ``folder``, where there is one.
        half: Vectors travel in half precision, both ways.
        min_nodes: Wait for so many before a round.
        patience: Seconds to wait for them; then those who are there train.
        round_timeout: Seconds devices have to answer.
        largest_weight: The most one node may count: its number of users, or of samples with ``weighting="data"``.
        evaluate: Ask devices how well the model serves their own users: before the first round and as often as
            ``evaluate_every`` says.
        watch: Told of every round as it ends.
    """

    def __init__(
        self,
        settings: Settings,
        num_items: int,
        *,
        folder: str | Path | None = None,
        resume: bool = False,
        half: bool = False,
        min_nodes: int = 1,
        patience: float = 120.0,
        round_timeout: float = 600.0,
        largest_weight: float = 1e4,
        evaluate: bool = True,
        watch: Callable[[RoundReport], None] = lambda _report: None,
    ) -> None:
        if resume and folder is None:
            raise InvalidSettings("resume without a folder", "the folder of the run", "Name it.")
        settings = settings.model_copy(update={"data": DEVICES})
        self.settings, self.plan = settings, Plan.of(settings, num_items)
        self.nodes = Nodes(self.plan)
        self.half, self.min_nodes, self.patience = half, min_nodes, patience
        self.round_timeout, self.largest_weight, self.evaluate = round_timeout, largest_weight, evaluate
        self.start_quality: Quality | None = None
        self._watch = watch
        self._record = None if folder is None else Record(Path(folder), self.plan, resume=resume)
        found = None if self._record is None else self._record.found
        if found is None:
            full, _ = self.plan.task.initial(generator(settings, Purpose.MODEL))
            found = Progress(ServerState(full), {}, [], Rejections())
        else:
            log.info("going on after round %d", found.state.round_number)
        self.progress = found
        self._open = _Open()
        self._grid: StreamingGrid | None = None
        self._last_round = settings.rounds
        self._arrays_each_round = False

    # -- a run ---------------------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds that are left.

        Args:
            grid: Flower's way to the nodes.
            initial_arrays: Full tensors to start from, in place of random ones; not with a run that is gone on with.
            num_rounds: How many; those that the settings still ask for, if not given.
            timeout: Seconds devices have to answer; that of the strategy if not given.
            train_config: Not used: what devices need comes from the settings.
            evaluate_config: Not used.
            evaluate_fn: Evaluates the full model on the server, where there is data to do so.
        """
        state = self.progress.state
        if initial_arrays and state.round_number == 0:
            self.progress.state = replace(state, full=self._given(initial_arrays))
        left = self.settings.rounds - state.round_number if num_rounds is None else num_rounds
        self._last_round = state.round_number + left
        self._arrays_each_round = evaluate_fn is not None
        largest = max(BYTES * held.size() for held in self.plan.assignments(0))
        self._grid = StreamingGrid(grid, 2 * largest + LARGEST_OVERHEAD)
        self.round_timeout = self.round_timeout if timeout is None else timeout
        with self._recording():
            result = super().start(
                cast(Grid, self._grid),
                self._full_arrays() if evaluate_fn is not None else ArrayRecord(),
                max(left, 0),
                self.round_timeout,
                train_config,
                evaluate_config,
                evaluate_fn,
            )
            if self._record is not None:
                self._record.finish(self.progress, self.nodes)
        if not left:
            result.arrays = self._full_arrays()
        return result

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        if self._record is None:
            yield
            return
        with self._record.open(self.progress):
            yield

    def _given(self, arrays: ArrayRecord) -> Weights:
        full = {name: torch.from_numpy(arrays[name].numpy().reshape(-1).copy()) for name in arrays}
        wanted = {name: vector.shape for name, vector in self.progress.state.full.items()}
        if {name: vector.shape for name, vector in full.items()} != wanted:
            sizes = ", ".join(f"{name} of {shape.numel()} numbers" for name, shape in wanted.items())
            raise InvalidSettings("initial arrays of another model", sizes, "Take them from this model, flat.")
        return full

    def _full_arrays(self) -> ArrayRecord:
        return ArrayRecord({name: Array(vector.numpy()) for name, vector in self.progress.state.full.items()})

    # -- training ------------------------------------------------------------------------------------------------------

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Ask new nodes what they can hold, draw the round's, and send each the vectors of its size."""
        number = self.progress.state.round_number
        present = self.nodes.wait(grid, self.min_nodes, self.patience)
        first = self.evaluate and self.start_quality is None and number == 0
        return self._orders(self._cohort(present, number), number, MessageType.TRAIN, evaluate=first)

    def _cohort(self, present: list[Node], number: int) -> list[Node]:
        if not present:
            return []
        wanted = min(self.settings.clients_per_round or len(present), len(present))
        drawn = sample_cohort(self.settings.model_copy(update={"clients_per_round": wanted}), len(present), number)
        return [present[place] for place in drawn.tolist()]

    def _orders(self, cohort: list[Node], number: int, kind: str, *, evaluate: bool) -> list[Message]:
        """One record a size, shared by all its messages."""
        self._open = _Open(waiting={node.node_id: node for node in cohort})
        needed = sorted({node.group for node in cohort})
        assignments = self.plan.assignments(number)
        records = {}
        reduced = send(self.progress.state.full, [assignments[group] for group in needed])
        for group, vectors in zip(needed, reduced, strict=True):
            projections = assignments[group].projections
            assert projections is not None  # only sizes that fit somebody are given to anybody
            assert vectors is not None
            order = Order(number, self.plan.seed(number), self.settings, projections, self.half, evaluate)
            records[group], seen = pack_order(order, vectors)
            self._open.orders[group] = order
            self._open.bytes_each[group] = sum(held.size for held in projections.values()) * (2 if self.half else BYTES)
            if self.settings.aggregation == "paper" and kind == MessageType.TRAIN:
                self._open.seen[group] = seen
        for node in cohort:
            node.bytes_down += self._open.bytes_each[node.group]
        return [
            Message(
                records[node.group].copy(),
                dst_node_id=node.node_id,
                message_type=kind,
                group_id=str(number + 1),
                ttl=2 * self.round_timeout + 60,  # answers that are there at the deadline are still to be fetched
            )
            for node in cohort
        ]

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every answer, sum per size, recover once, update; then write the round down."""
        state, opened = self.progress.state, self._open
        number, totals = state.round_number + 1, RoundTotals(state.full)
        cohort = list(opened.waiting.values())
        heard: list[tuple[int, tuple[float, int]]] = []
        for node, answer in self._answers(number, replies, trained=True):
            order, change = opened.orders[node.group], answer.change
            if self.settings.aggregation == "paper":
                change = {name: vector + opened.seen[node.group][name] for name, vector in change.items()}
            totals.add(order.projections, change, answer.weight)
            node.rounds += 1
            opened.answered += 1
            node.bytes_up += opened.bytes_each[node.group]
            if answer.quality is not None:
                heard.append((node.group, answer.quality))
        self.progress.state = aggregate(state, totals, self.settings)
        if heard and self.start_quality is None:
            self.start_quality = self._quality(heard)
        report = RoundReport(
            number,
            time.monotonic() - opened.started,
            opened.answered,
            sum(opened.bytes_each[node.group] for node in cohort),
            sum(opened.bytes_each[node.group] for node in cohort if node.node_id not in opened.waiting),
            None,
        )
        self.progress.history.append(report)
        left_out = len(cohort) - opened.answered
        log.info("round %d: %d answers used, %d left out, %.1f s", number, opened.answered, left_out, report.seconds)
        if self._record is not None:
            self._record.round_done(self.progress, self.nodes)
        if not self._evaluation_due():
            self._tell(report)
        metrics = {"round": number, "nodes": opened.answered, "left-out": left_out}
        wanted = self._arrays_each_round or number == self._last_round
        return self._full_arrays() if wanted else None, MetricRecord(dict(metrics))

    def _answers(self, number: int, replies: Iterable[Message], *, trained: bool) -> Iterator[tuple[Node, Answer]]:
        """The usable answers; everybody else is noted with the reason."""
        opened = self._open
        for reply in replies:
            node = opened.waiting.pop(self._sender(reply), None)
            if node is None:
                log.warning("round %d: an answer of somebody who was not asked, or had answered", number)
                continue
            if reply.has_error():
                log.warning("round %d: node %d says: %s", number, node.node_id, _plain(reply.error.reason))
                self.progress.rejections.note(number, node.node_id, "the device failed")
                continue
            try:
                answer = unpack_answer(reply.content, opened.orders[node.group], self.largest_weight, trained=trained)
            except InvalidMessage as error:
                self.progress.rejections.note(number, node.node_id, error.given)
                continue
            node.heard(answer.quality)
            yield node, answer
        for node in opened.waiting.values():
            self.progress.rejections.note(number, node.node_id, "no answer in time")

    def _sender(self, reply: Message) -> int:
        answered = reply.metadata.reply_to_message_id
        if self._grid is not None and answered in self._grid.sent_to:
            return self._grid.sent_to[answered]
        return reply.metadata.src_node_id

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _evaluation_due(self) -> bool:
        number = self.progress.state.round_number
        return self.evaluate and (number == self._last_round or number % self.settings.evaluate_every == 0)

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Where an evaluation is due: ask devices how well the model of their size serves their own users."""
        if not self._evaluation_due():
            self._open = _Open()
            return []
        number = self.progress.state.round_number - 1  # the hash the devices have just trained with
        cohort = self._cohort(self.nodes.present(grid), number)
        return self._orders(cohort, number, MessageType.EVALUATE, evaluate=True)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean over all users, and over those of each size."""
        if not self._open.orders:
            return None
        number = self.progress.state.round_number
        heard = [
            (node.group, answer.quality)
            for node, answer in self._answers(number, replies, trained=False)
            if answer.quality is not None
        ]
        quality = self._quality(heard)
        report = replace(self.progress.history[-1], quality=quality)
        self.progress.history[-1] = report
        self._tell(report)
        if quality is None:
            return None
        metrics = {self.metric: quality.server}
        for capacity, value in zip(self.plan.capacities, quality.groups, strict=True):
            if value is not None:
                metrics[f"{self.metric} {capacity}"] = value
        return MetricRecord(dict(metrics))

    @property
    def metric(self) -> str:
        """What quality is."""
        return "MSE" if self.settings.predicts_ratings else f"NDCG@{self.settings.top}"

    def _quality(self, heard: list[tuple[int, tuple[float, int]]]) -> Quality | None:
        if not heard:
            return None
        groups: list[float | None] = []
        for group in range(len(self.plan.capacities)):
            mine = [quality for where, quality in heard if where == group]
            groups.append(sum(total for total, _ in mine) / sum(users for _, users in mine) if mine else None)
        everybody = [quality for _, quality in heard]
        return Quality(sum(total for total, _ in everybody) / sum(users for _, users in everybody), tuple(groups))

    def _tell(self, report: RoundReport) -> None:
        if self._record is not None:
            self._record.note(report, self.nodes)
        self._watch(report)

    def summary(self) -> None:
        """Log what is about to run."""
        sizes = [held.size() * BYTES for held in self.plan.assignments(0)]
        served = ", ".join(
            f"{capacity}: {size} bytes" for capacity, size in zip(self.plan.capacities, sizes, strict=True)
        )
        log.info("%s, rule %s, sizes %s", self.settings.method, self.settings.aggregation, served)
        log.debug("settings %s", json.dumps(self.settings.model_dump(mode="json")))


def _plain(text: object) -> str:
    """A stranger's text as one line of bounded length, for the log."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:300])
