"""``FairStrategy``: the server of a real federation, on Flower's message API.

A round is that of :mod:`fairfold.federation.round`; nodes that come late, die, hang or send invalid messages are left
out of it, with the reason. Which update of which client the sums contain is stored in the same checkpoint as the sums
(:mod:`.persistence`), and every task names it. So sums that remember updates are exact under lost, late, refused and
repeated replies, and under a server that resumes from an older checkpoint.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fairfold.config import Settings
from fairfold.errors import InvalidSettings
from fairfold.federation.aggregation import make_aggregate
from fairfold.federation.algorithm import RemembersUpdates
from fairfold.federation.architecture import ImageShape
from fairfold.federation.evaluation import Quality
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Contribution
from fairfold.federation.scheduling import count_staleness
from fairfold.federation.simulation import Progress
from fairfold.federation.updates import PublicStatistics, State
from fairfold.flower import preparation
from fairfold.flower.device_model import push_models
from fairfold.flower.grid import StreamingGrid
from fairfold.flower.nodes import Node, Nodes
from fairfold.flower.persistence import NetworkState, RunRecorder
from fairfold.flower.protocol import new_id
from fairfold.flower.roster import Roster
from fairfold.flower.round_loop import run_rounds, take_step
from fairfold.flower.rounds import NO_STATISTICS, OpenRound, PendingTask, tasks_for, usable_replies
from fairfold.flower.wire import NO_UPDATE, TaskRequest, for_node, pack_request
from fairfold.runs.loaded import with_device_data
from fairfold.typing import Weights

log = logging.getLogger("fairfold.flower")


class FairStrategy(Strategy):
    """Any algorithm and any method over a network.

    Args:
        settings: Settings of the run, by default those of the default recipe. Every client gets the largest size of
            ``fleet.capacities`` that it can hold; ``fleet.clients_per_round`` nodes, or all, take part in a round.
        num_items: Size of the catalogue; items are numbered by falling popularity where that is known (``ranked``).
        folder: Where the run is written, checkpoints included; nothing is written if not given.
        resume: Go on from the newest complete checkpoint in ``folder``, where there is one.
        half: Vectors travel in half precision, both ways.
        min_nodes: Wait for this many nodes before a round. Like the next two, by default that of ``fleet.network``.
        wait_timeout: Seconds to wait for them; then those who are there train.
        round_timeout: Seconds for a client's reply.
        max_users: The most users of one node, where no ``roster`` says it. They weigh 1 each, or with "data" at most as
            much as a user with every item of the catalogue; a node that weighs more is left out.
        roster: The devices that have enrolled, with the users that each may act for.
        evaluate: Clients evaluate the model on their own users, first before any round (``run.evaluate_every``).
        image_shape: Height, width and number of classes, where clients have images.
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
        wait_timeout: float | None = None,
        round_timeout: float | None = None,
        max_users: int = 10_000,
        roster: Roster | None = None,
        evaluate: bool = True,
        image_shape: ImageShape | None = None,
    ) -> None:
        if resume and folder is None:
            raise InvalidSettings("resume without a folder", "the folder of the run", "Give folder=...")
        self.settings = with_device_data(Settings() if settings is None else settings, num_items)
        preparation.refuse_simulation_only(self.settings)
        self.num_items, self.image_shape, self.metric = num_items, image_shape, self.settings.metric
        self.half, self.max_users = half, max_users
        self.evaluate = evaluate and self.settings.privacy.reports_quality
        network = self.settings.fleet.network
        self.min_nodes = network.min_nodes if min_nodes is None else min_nodes
        self.wait_timeout = network.wait_timeout if wait_timeout is None else wait_timeout
        self.round_timeout = network.round_timeout if round_timeout is None else round_timeout
        self.plan = preparation.initial_plan(self.settings, num_items, image_shape)
        self._recorder = RunRecorder(folder, self.plan, resume=resume, image_shape=image_shape)
        restored = self._recorder.restored
        self.progress = restored or Progress(State({}), {}, [], Rejections())
        self.network_state = NetworkState(None if restored is None else restored.state)
        secret = self.network_state.secret
        note, groups = self._recorder.record_event, self.network_state.groups
        self.nodes = Nodes(self.settings, note=note, roster=roster, secret=secret, groups=groups)
        if isinstance(self.settings.algorithm, RemembersUpdates):
            self.nodes.acknowledged_sizes = self.network_state.sizes
        if restored is not None:
            log.info("going on after round %d", restored.state.round_number)
            self.nodes.restore(self._recorder.known_events)
        if restored is not None or not self.settings.algorithm.statistics(self.settings):
            self._set_plan()
        self.open_round = OpenRound()
        self._training_round = OpenRound()  # the last one of training: in asynchronous runs some tasks are in flight
        self.streaming: StreamingGrid | None = None
        self.numbered_nodes: set[int] = set()  # nodes that have received the numbers of their items
        self.start_quality: Quality | None = None
        self.attempt = 0  # failed attempts at the open round
        self.step_failed = False  # then the updates of the next attempt are kept one by one, where they are seen
        self.ended = ""  # why the run ended before its last round
        self._initial_tensors: Weights | None = None
        self.last_round = self.settings.run.rounds
        self._arrays_each_round = False

    def _set_plan(self) -> None:
        """Make the plan and the model, once the statistics are known."""
        public = PublicStatistics(self.num_items, statistics=self.network_state.statistics)
        self.plan = Plan.of(self.settings, public, self.image_shape)
        self.nodes.set_plan(self.plan)
        if not self.progress.state.full:
            self.progress.state = self.network_state.save_in(self.plan.initial(self._recorder.storage)[0])
        self._recorder.set_plan(self.plan, self.progress)

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
        """Run the rounds that are left, or ``num_rounds``, with ``timeout`` seconds for a client's reply.

        A run that is not resumed starts from ``initial_arrays``, full tensors, if given. ``evaluate_fn`` evaluates the
        full model on the server. The configs are not used: what clients need comes from the settings.
        """
        number = self.progress.state.round_number
        if initial_arrays and number == 0:
            arrays = initial_arrays.items()
            self._initial_tensors = {name: torch.from_numpy(array.numpy().reshape(-1).copy()) for name, array in arrays}
        if self.nodes.plan is not None:
            self._use_initial_tensors()
        rounds = self.settings.run.rounds
        left = rounds - number if num_rounds is None else num_rounds
        self.last_round = number + left
        self._arrays_each_round = evaluate_fn is not None
        self.streaming = StreamingGrid(grid, preparation.max_update_bytes(self.plan))
        streaming = cast(Grid, self.streaming)
        self.round_timeout = self.round_timeout if timeout is None else timeout
        with self._recorder.open(self.progress):
            first = self._full_arrays() if self._arrays_each_round else ArrayRecord()
            result = run_rounds(self, streaming, first, evaluate_fn)
            if self.nodes.plan is not None:
                self._recorder.finish(self.progress, self.nodes, self.ended, self.start_quality)
            if self.settings.fleet.network.push_model and 0 < rounds <= self.progress.state.round_number:
                push_models(self, streaming)
        if not left or self.ended:
            result.arrays = self._full_arrays()
        return result

    def _use_initial_tensors(self) -> None:
        """Start from the tensors that were given, if any, in place of random ones."""
        if self._initial_tensors is not None:
            self.progress.state = preparation.with_initial_tensors(self.progress.state, self._initial_tensors)
            self._initial_tensors = None

    def _full_arrays(self) -> ArrayRecord:
        return ArrayRecord({name: Array(vector.numpy()) for name, vector in self.progress.state.full.items()})

    def summary(self) -> None:
        sizes = zip(self.plan.capacities, self.plan.assignments(0), strict=True)
        served = ", ".join(f"{capacity}: {held.bytes()} bytes" for capacity, held in sizes)
        log.info("%s, %s, sizes %s", self.settings.subspace.method, self.plan.algorithm.kind, served)
        log.debug("settings %s", json.dumps(self.settings.plain()))

    def users_of(self, node: Node) -> int:
        """The most users that a node may act for."""
        return node.max_users or self.max_users

    def waits_for_all(self) -> bool:
        """Return whether the replies to all tasks are awaited: in synchronous runs, and at the end."""
        return self.settings.fleet.asynchronous.is_synchronous or self.progress.state.round_number == self.last_round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Collect statistics if needed, draw a cohort, and return a task for each of its nodes."""
        number = self.progress.state.round_number
        busy, replies = self._training_round.pending, self._training_round.replies
        opened = self.open_round = OpenRound(number + 1, self.progress.rejections, busy, replies)
        if self.nodes.plan is None and not self._prepare(grid):
            return []
        draw = partial(self.nodes.sample, grid, number, self.attempt, busy)
        cohort = self.nodes.wait(draw, 0 if busy else self.min_nodes, self.wait_timeout)
        self.nodes.merge_small_sizes(cohort)  # where a run is resumed
        evaluate = self.evaluate and self.start_quality is None and number == 0
        cohort = opened.with_updatable_size(cohort, self.nodes)
        return self._tasks(cohort, number, MessageType.TRAIN, grid, evaluate=evaluate)

    def _prepare(self, grid: Grid) -> bool:
        """Collect statistics from all connected nodes, and make the plan; return whether that succeeded."""
        present = self.nodes.wait(lambda: self.nodes.connected(grid), self.min_nodes, self.wait_timeout)
        if not present:
            return False
        failure = preparation.collect_statistics(
            self.network_state, self.nodes, self.num_items, present, grid, self.round_timeout, self.users_of
        )
        if failure:
            self.open_round.statistics_error = failure
            self.open_round.left_out |= {node.node_id: NO_STATISTICS for node in present}
            return False
        self._set_plan()
        self._use_initial_tensors()
        self.nodes.merge_small_sizes([node for node in present if node.node_id in self.nodes.usable])
        return True

    def _tasks(self, cohort: list[Node], number: int, kind: str, grid: Grid, *, evaluate: bool) -> list[Message]:
        """Return the messages to a cohort: one record per size, shared but for what is each client's own."""
        opened, timeout = self.open_round, self.round_timeout
        preparation.send_numbering(self.network_state, cohort, self.numbered_nodes, grid, self.settings, timeout)
        cohort = opened.with_numbers(cohort, self.numbered_nodes)
        opened.end_phase("nodes")
        shared: dict[str, Any] = {
            "run": self.network_state.run, "update_id": new_id(), "half": self.half, "evaluate": evaluate,
            "numbering": self.network_state.numbering, "image_shape": self.image_shape,
        }  # fmt: skip
        records = {}
        for key, task in tasks_for(self.plan, cohort, replace(self.progress.state, round_number=number)):
            records[key], opened.requests[key] = pack_request(
                TaskRequest(task, self.plan.resolved_settings, self.num_items, **shared)
            )
        deadline = time.monotonic() + timeout
        for node in cohort:
            opened.pending[node.node_id] = PendingTask(node, opened.requests[self._request_key(node)], deadline)
        secure = opened.start_secure(self.plan, kind, grid, self.network_state.run, timeout, self.nodes.roster)
        messages = []
        for node in [node for node in cohort if node.node_id in opened.pending]:
            key = self._request_key(node)
            opened.bytes_down[node.node_id] = opened.requests[key].task.bytes_down // (2 if self.half else 1)
            acknowledged_id = self.network_state.acknowledged.get(node.client_id, NO_UPDATE)
            content = for_node(records[key], acknowledged_id, secure.get(node.node_id))
            ttl = 2 * timeout + 60  # replies that are there at the deadline are still to be fetched
            messages.append(Message(content, node.node_id, kind, ttl=ttl, group_id=str(number + 1)))
        opened.end_phase("tasks")
        return messages

    def _request_key(self, node: Node) -> int:
        return node.node_id if self.plan.method.per_client else node.size

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate every update, aggregate per size, take the server's step; then record the round."""
        opened, network_state = self.open_round, self.network_state
        asynchronous = self.settings.fleet.asynchronous
        aggregate = make_aggregate(self.settings, bounded=True)
        if self.nodes.plan is None:  # no node has come yet, or the statistics are lost: there is no model
            self._recorder.record_round(opened)
            return None, None
        kept: list[Contribution[Node]] = []  # after a failed step, to find out whose update it was
        accepted: list[tuple[Node, TaskRequest]] = []
        for node, request, reply in usable_replies(self, replies, trained=True):
            assert reply.update is not None  # checked by usable_replies
            one = Contribution(node, request.task, reply.update, self.users_of(node))
            kept += [one] * self.step_failed
            aggregate.add(one.task, one.update, alone=self.plan.method.per_client, users=one.users)
            accepted.append((node, request))
            opened.used.append(node.node_id)
            opened.add_quality(node, reply.quality)
        opened.expire(everybody=asynchronous.is_synchronous)
        self._training_round = opened
        if opened.staleness:
            staleness = count_staleness(network_state.staleness, opened.staleness.values(), asynchronous)
            network_state.staleness = staleness
        for task, update, users in opened.unmasked_updates(self.plan, self.users_of):
            aggregate.add(task, update, users=users)
        survivors = () if opened.secure is None else opened.secure.survivors
        accepted += [(node, opened.requests[self._request_key(node)]) for node in survivors]
        state = take_step(self, aggregate, kept) if opened.used else None
        if state is None:  # no usable update, a lost secure aggregate, or no model follows: it does not count
            self._recorder.record_round(opened)
            return None, None
        for node, request in accepted:
            if node.node_id in opened.used:
                self._acknowledge(node, request)
        self.progress.state = network_state.save_in(state)
        self.start_quality = self.start_quality or opened.quality(len(self.plan.capacities))
        opened.end_phase("step")
        self.progress.history.append(report := opened.report())
        used, left_out = len(opened.used), len(opened.left_out)
        log.info("round %d: %d updates used, %d left out, %.1f s", opened.number, used, left_out, report.seconds)
        self._recorder.save_round(self.progress, opened, report, evaluated=self._evaluation_due())
        arrays = self._full_arrays() if self._arrays_each_round or opened.number == self.last_round else None
        return arrays, MetricRecord({"round": opened.number, "nodes": used, "left-out": left_out})

    def _acknowledge(self, node: Node, request: TaskRequest) -> None:
        """Remember that the sums contain a node's update."""
        self.network_state.acknowledged[node.client_id] = request.update_id
        self.network_state.sizes[node.client_id] = request.task.size
        if held := self.open_round.contributions.get(node.node_id):
            self.network_state.contributions[self.nodes.identity(node)] = held
        node.rounds += 1

    def _evaluation_due(self) -> bool:
        number = self.progress.state.round_number
        return self.evaluate and (number == self.last_round or number % self.settings.run.evaluate_every == 0)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Where an evaluation is due, ask a cohort to evaluate the model of their size on their own users."""
        number = self.progress.state.round_number
        self.open_round = OpenRound(number, self.progress.rejections)
        if self.nodes.plan is None or not self._evaluation_due():
            return []
        busy = () if self.waits_for_all() else self._training_round.pending
        cohort = self.nodes.sample(grid, number - 1, busy=busy)
        # With the hash that the clients have just trained with.
        return self._tasks(cohort, number - 1, MessageType.EVALUATE, grid, evaluate=True)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the mean quality over all users, and over those of each size."""
        opened = self.open_round
        if not opened.requests:
            return None
        for node, _, reply in usable_replies(self, replies, trained=False):
            opened.add_quality(node, reply.quality)
        if self.waits_for_all():
            opened.expire(everybody=True)
        opened.unmask_qualities(self.plan, self.users_of)
        quality = opened.quality(len(self.plan.capacities))
        report = self.progress.history[-1] = replace(self.progress.history[-1], quality=quality)
        self._recorder.record_quality(opened.number, opened, report)
        if quality is None:
            return None
        by_size = zip(self.plan.capacities, quality.groups, strict=True)
        sizes = {f"{self.metric} {capacity}": value for capacity, value in by_size if value is not None}
        return MetricRecord({self.metric: quality.server, **sizes})
