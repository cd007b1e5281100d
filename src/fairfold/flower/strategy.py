"""``FairStrategy``: the server of a real federation, on Flower's message API.

A round is that of ``protocol.round``: reduce once per size, send, check every answer, sum per size, apply. What a
network adds is here: nodes that come late, die, hang or send rubbish. Whoever cannot be used is left out by name and
reason, and the round goes on. Which word of which device the sums hold stands in the same checkpoint as the sums
(:mod:`.books`), and every order says it: so words are exact under lost, late, refused and repeated answers, and under
a server that goes on from an older checkpoint.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fairfold.errors import InvalidSettings
from fairfold.flower import opening
from fairfold.flower.books import Books
from fairfold.flower.exchange import StreamingGrid
from fairfold.flower.loop import run_rounds
from fairfold.flower.nodes import Node, Nodes
from fairfold.flower.protocol import new_word
from fairfold.flower.push import push_models
from fairfold.flower.record import Record
from fairfold.flower.replies import enough, give_up, step_due, usable_answers
from fairfold.flower.rounds import Asked, OpenRound, metrics_of, sent_to
from fairfold.flower.wire import NO_WORD, Order, for_node, pack_order
from fairfold.protocol.faults import Rejections
from fairfold.protocol.plan import Plan
from fairfold.protocol.turns import counted_behind
from fairfold.protocol.words import Public, State, Totals
from fairfold.runs.federated import on_devices
from fairfold.settings import Settings
from fairfold.simulate.result import Quality
from fairfold.simulate.run import Progress
from fairfold.values import Weights

log = logging.getLogger("fairfold.flower")


class FairStrategy(Strategy):
    """Any algorithm and any method over a network.

    Args:
        settings: Settings of the run; those of the best recipe if not given. ``fleet.capacities`` names the sizes that
            are served, and every device gets the largest it can hold. ``fleet.clients_per_round`` nodes take part in a
            round, or all if there are fewer.
        num_items: Size of the catalogue; items are numbered by falling popularity where that is known (``ranked``).
        folder: Where the run is written, checkpoints included; nothing is written if not given.
        resume: Go on from the newest whole checkpoint in ``folder``, where there is one.
        half: Vectors travel in half precision, both ways.
        min_nodes: Wait for this many nodes before a round. Like the next two, by default that of ``fleet.network``.
        patience: Seconds to wait for them; then those who are there train.
        round_timeout: Seconds devices have to answer.
        largest_weight: The most one node may count: its number of users, or of samples with ``weighting="data"``.
        evaluate: Ask devices how well the model serves their own users: before the first round and as often as
            ``run.evaluate_every`` says.
        picture: Height, width and number of classes, where devices have images.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        num_items: int = 0,
        *,
        folder: str | Path | None = None,
        resume: bool = False,
        half: bool = False,
        min_nodes: int | None = None,
        patience: float | None = None,
        round_timeout: float | None = None,
        largest_weight: float = 1e4,
        evaluate: bool = True,
        picture: tuple[int, int, int] | None = None,
    ) -> None:
        if resume and folder is None:
            raise InvalidSettings("resume without a folder", "the folder of the run", "Give folder=...")
        self.settings = on_devices(Settings() if settings is None else settings, num_items)
        opening.refuse_unserved(self.settings)
        self.num_items, self.picture = num_items, picture
        self.plan = opening.first_plan(self.settings, num_items, picture)
        self.nodes = Nodes(self.settings)
        network, self.half, self.largest_weight = self.settings.fleet.network, half, largest_weight
        self.evaluate = evaluate and self.settings.privacy.tells_quality
        self.min_nodes = network.min_nodes if min_nodes is None else min_nodes
        self.patience = network.patience if patience is None else patience
        self.round_timeout = network.round_timeout if round_timeout is None else round_timeout
        self.metric = self.settings.metric
        self.start_quality: Quality | None = None
        self._record = None if folder is None else Record(Path(folder), self.plan, resume=resume, picture=picture)
        found = None if self._record is None else self._record.found
        self.books = Books(None if found is None else found.state)
        self.nodes.spoken = self.books.sizes if self.settings.algorithm.keeps == "acknowledged" else {}
        self.progress = found or Progress(State({}), {}, [], Rejections())
        if self._record is not None:
            self.nodes.note = self._record.note_event
        if self._record is not None and found is not None:
            log.info("going on after round %d", found.state.round_number)
            self.nodes.known(self._record.known)
        if found is not None or not self.settings.algorithm.surveys(self.settings):
            self._settle()
        self.open_round = OpenRound()
        self._at_work = OpenRound()  # the last round of training: where rounds do not wait, some are still at work
        self.streaming: StreamingGrid | None = None
        self.numbered: set[int] = set()
        self._given_arrays: Weights | None = None
        self._last_round = self.settings.run.rounds
        self._arrays_each_round = False
        self.attempt = 0  # how often the open round was tried in vain

    def _settle(self) -> None:
        """Devices have said what a plan needs: sizes are known, and there is a model."""
        self.plan = Plan.of(self.settings, Public(self.num_items, survey=self.books.survey), self.picture)
        self.nodes.settle(self.plan)
        if not self.progress.state.full:
            self.progress.state = self.books.into(self.plan.initial()[0])
        if self._record is not None:
            self._record.settle(self.plan, self.progress)

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
            num_rounds: How many rounds; those that the settings still ask for, if not given.
            timeout: Seconds devices have to answer; that of the strategy if not given.
            train_config: Not used: what devices need comes from the settings.
            evaluate_config: Not used.
            evaluate_fn: Evaluates the full model on the server, where there is data to do so.
        """
        number = self.progress.state.round_number
        if initial_arrays and number == 0:
            self._given_arrays = opening.flat(initial_arrays)
        if self.nodes.plan is not None:
            self._start_from_given()
        left = self.settings.run.rounds - number if num_rounds is None else num_rounds
        self._last_round = number + left
        self._arrays_each_round = evaluate_fn is not None
        self.streaming = StreamingGrid(grid, opening.largest_answer(self.plan))
        self.round_timeout = self.round_timeout if timeout is None else timeout
        with contextlib.nullcontext() if self._record is None else self._record.open(self.progress):
            first = self._full_arrays() if self._arrays_each_round else ArrayRecord()
            result = run_rounds(self, cast(Grid, self.streaming), first, self._last_round, evaluate_fn)
            if self._record is not None and self.nodes.plan is not None:
                self._record.finish(self.progress, self.nodes)
            if self.settings.fleet.network.push and 0 < self.settings.run.rounds <= self.progress.state.round_number:
                push_models(self, cast(Grid, self.streaming))
        if not left:
            result.arrays = self._full_arrays()
        return result

    def _start_from_given(self) -> None:
        """Take the tensors that were given in the place of random ones."""
        full, self._given_arrays = self._given_arrays, None
        if full is not None:
            self.progress.state = opening.started_from(self.progress.state, full)

    def _full_arrays(self) -> ArrayRecord:
        return ArrayRecord({name: Array(vector.numpy()) for name, vector in self.progress.state.full.items()})

    def summary(self) -> None:
        """Log what is about to run."""
        opening.log_plan(self.plan)

    # -- training ------------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask new nodes what they can hold, draw the round's, and send each the vectors of its size."""
        number, wanted = self.progress.state.round_number, (self.min_nodes, self.patience)
        self.open_round = OpenRound(waiting=self._at_work.waiting, line=self._at_work.line)
        if self.nodes.plan is None:
            present = self.nodes.wait(lambda: self.nodes.everybody(grid), *wanted)
            if not present:
                return []
            asked = self.books, self.settings, self.num_items, present
            self.open_round.lack_survey(present, opening.open_books(*asked, grid, self.round_timeout))
            if self.open_round.unsurveyed:
                return []
            self._settle()
            self._start_from_given()
            self.nodes.hide([node for node in present if node.node_id in self.nodes.usable])
        busy = self.open_round.waiting
        wanted = (0, 0.0) if busy else wanted
        cohort = self.nodes.wait(lambda: self.nodes.drawn(grid, number, self.attempt, busy), *wanted)
        self.nodes.hide(cohort)  # where a run is gone on with
        first = self.evaluate and self.start_quality is None and number == 0
        return self._orders(cohort, number, MessageType.TRAIN, grid, evaluate=first)

    def _orders(self, cohort: list[Node], number: int, kind: str, grid: Grid, *, evaluate: bool) -> list[Message]:
        """One record per size, shared by all its messages but for the word of each device that the server holds."""
        opened, until = self.open_round, time.monotonic() + self.round_timeout
        cohort = opened.who_speaks(cohort, self.nodes) if kind == MessageType.TRAIN else cohort
        known = opening.tell_numbers(self.books, cohort, self.numbered, grid, self.settings, self.round_timeout)
        cohort = opened.who_knows(known, cohort, number + 1)
        opened.phase("nodes")
        state = replace(self.progress.state, round_number=number)
        records, word = {}, new_word()
        for key, sent in sent_to(self.plan, cohort, state):
            order = Order(
                sent, self.settings, self.num_items, self.books.run, word, NO_WORD, self.half, evaluate,
                self.books.numbering, self.picture,
            )  # fmt: skip
            records[key], opened.orders[key] = pack_order(order)
        for node in cohort:
            opened.waiting[node.node_id] = Asked(node, opened.orders[self._key(node)], until)
        told = opened.hide(self.plan, kind, grid, self.books.run, self.progress, self.round_timeout)
        messages = []
        for node in [node for node in cohort if node.node_id in opened.waiting]:
            key = self._key(node)
            opened.send(node, opened.orders[key].sent.bytes_down // (2 if self.half else 1))
            content = for_node(records[key], self.books.held.get(node.name, NO_WORD), told.get(node.node_id))
            ttl = 2 * self.round_timeout + 60  # answers that are there at the deadline are still to be fetched
            messages.append(Message(content, node.node_id, kind, ttl=ttl, group_id=str(number + 1)))
        opened.phase("orders")
        return messages

    def _key(self, node: Node) -> int:
        return node.node_id if self.plan.method.per_client else node.group

    def replies(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Send orders, and hear what comes, of those before as well where rounds do not wait."""
        assert self.streaming is not None
        due = step_due(self, wait=self._waits())
        return self.streaming.order(messages, self.open_round.line, self.round_timeout, due)

    def _waits(self) -> bool:
        """Whether all who are asked are waited for: where rounds wait, and at the very end."""
        over = self.progress.state.round_number == self._last_round
        return over or self.settings.fleet.pace.waits

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every answer, sum per size, apply; then write the round down."""
        opened, algorithm = self.open_round, self.plan.algorithm
        number, totals = self.progress.state.round_number + 1, Totals()
        if self.nodes.plan is None:  # nobody has come yet, or a survey is lost: there is no model to speak of
            if self._record is not None:
                self._record.note_round(number, opened)
            return None, None
        for node, order, reply in usable_answers(self, number, replies, trained=True):
            assert reply.answer is not None  # of such no word is handed on
            totals.add(order.sent, reply.answer, alone=self.plan.method.per_client)
            self._used(node, order)
            opened.hear(node, reply.quality)
            if enough(self, wait=self._waits()):
                break
        give_up(self, number, everybody=self.settings.fleet.pace.waits)
        self._at_work = opened
        if opened.behind:
            self.books.behind = counted_behind(self.books.behind, opened.behind.values(), self.settings.fleet.pace)
        for sent, answer in opened.unmasked(self.plan, number, self.progress.rejections):
            totals.add(sent, answer)
        for node in opened.survived():
            self._used(node, opened.orders[self._key(node)])
        if not opened.used:  # nobody answered, or a secure sum is lost: it does not count
            if self._record is not None:
                self._record.note_round(number, opened)
            return None, None
        self.progress.state = self.books.into(algorithm.apply(self.plan, self.progress.state, totals))
        self.start_quality = self.start_quality or opened.quality(len(self.plan.capacities))
        opened.phase("step")
        report = opened.report(number)
        self.progress.history.append(report)
        left_out = len(opened.left_out)
        log.info("round %d: %d answers used, %d left out, %.1f s", number, len(opened.used), left_out, report.seconds)
        if self._record is not None:
            self._record.round_over(self.progress, opened, number, report, evaluated=self._evaluation_due())
        wanted = self._arrays_each_round or number == self._last_round
        metrics = MetricRecord({"round": number, "nodes": len(opened.used), "left-out": left_out})
        return self._full_arrays() if wanted else None, metrics

    def _used(self, node: Node, order: Order) -> None:
        """Note that the sums hold a word of a node."""
        self.books.held[node.name], self.books.sizes[node.name] = order.word, order.sent.size
        node.rounds += 1
        self.open_round.used.append(node.node_id)

    # -- how well the model serves the users of devices, as these say themselves ---------------------------------------

    def _evaluation_due(self) -> bool:
        number = self.progress.state.round_number
        return self.evaluate and (number == self._last_round or number % self.settings.run.evaluate_every == 0)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Where an evaluation is due: ask devices how well the model of their size serves their own users."""
        self.open_round = OpenRound()
        if self.nodes.plan is None or not self._evaluation_due():
            return []
        number = self.progress.state.round_number - 1  # the hash the devices have just trained with
        busy = () if self._waits() else self._at_work.waiting
        cohort = self.nodes.drawn(grid, number, busy=busy)
        return self._orders(cohort, number, MessageType.EVALUATE, grid, evaluate=True)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean over all users, and over those of each size."""
        if not self.open_round.orders:
            return None
        number = self.progress.state.round_number
        for node, _, reply in usable_answers(self, number, replies, trained=False):
            self.open_round.hear(node, reply.quality)
            if enough(self, wait=self._waits()):
                break
        if self._waits():
            give_up(self, number, everybody=True)
        self.open_round.unmasked_qualities()
        quality = self.open_round.quality(len(self.plan.capacities))
        self.progress.history[-1] = replace(self.progress.history[-1], quality=quality)
        if self._record is not None:
            self._record.note(self.progress.history[-1])
            self._record.note_quality(self.progress.state.round_number, self.open_round)
        if quality is None:
            return None
        return metrics_of(self.metric, self.plan, quality)
