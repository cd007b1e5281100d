"""A round of a network: the state of the open one, and the filter of usable replies."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fairfold.errors import InvalidMessage
from fairfold.federation.aggregation import fixed_point_encoding, from_weighted_change
from fairfold.federation.algorithm import WeighsUsers
from fairfold.federation.bounds import BoundsContributions, max_evaluated, sum_problem
from fairfold.federation.evaluation import Quality, RoundReport
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import STEP_FAILED
from fairfold.federation.updates import ClientTask, State, Update
from fairfold.flower.grid import PendingReplies, one_line
from fairfold.flower.nodes import Node, Nodes
from fairfold.flower.roster import Roster
from fairfold.flower.secure_aggregation import SecureRounds, quality_encoding
from fairfold.flower.vectors import tensor_bytes
from fairfold.flower.wire import Reply, TaskRequest, unpack_reply
from fairfold.privacy.fixed_point import Encoding, MeasuredUpdate
from fairfold.runs.events import ROUND, Event
from fairfold.typing import Weights

if TYPE_CHECKING:
    from fairfold.flower.strategy import FairStrategy

OTHER_SIZE = "its capacity is smaller than at its last update, which stays until the next run"
NO_NUMBERING = "it did not receive the numbers of its items, or could not read its own"
NO_STATISTICS = "the statistics before the first round are lost"
GROUP_REFUSED = "the sum of its group, which its users cannot have"
UNKNOWN_NODE = -1
log = logging.getLogger("fairfold.flower")
QualitySum = tuple[float, int]  # sum of a metric over some users, and their number


@dataclass(frozen=True)
class PendingTask:
    """A task in flight: its node, the request, and the time (monotonic) until which its reply is awaited."""

    node: Node
    request: TaskRequest
    deadline: float


@dataclass
class OpenRound:
    """A round that is under way."""

    number: int = 0  # from 1
    rejections: Rejections = field(default_factory=Rejections)
    # Tasks in flight by node, in asynchronous runs of earlier rounds as well, and the replies to them.
    pending: dict[int, PendingTask] = field(default_factory=dict)
    replies: PendingReplies = field(default_factory=PendingReplies)
    # What the clients of each size received; by node where every client has a hash of its own.
    requests: dict[int, TaskRequest] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)  # nodes whose updates are aggregated
    left_out: dict[int, str] = field(default_factory=dict)  # nodes whose updates are not, and why
    staleness: dict[int, int] = field(default_factory=dict)  # steps since an update's task was sent; asynchronous runs
    bytes_down: dict[int, int] = field(default_factory=dict)  # of tensors, by node
    bytes_up: dict[int, int] = field(default_factory=dict)  # usable or not
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    started: float = field(default_factory=time.monotonic)
    qualities: list[tuple[int, QualitySum]] = field(default_factory=list)  # by size; -1 under secure aggregation
    node_qualities: dict[int, QualitySum] = field(default_factory=dict)
    secure: SecureRounds | None = None  # where updates are masked
    statistics_error: str = ""  # why there are no statistics before the first round
    contributions: dict[int, Weights] = field(default_factory=dict)  # by node, what to remember if its update is used
    dropped: str = ""  # why no model follows from the updates

    def reject(self, node: int, reason: str) -> None:
        """Leave a node out of the round, and count the reason."""
        self.rejections.note(self.number, node, reason)
        self.left_out[node] = reason

    def drop(self, reason: str) -> None:
        """Use none of the updates, since no model follows from their sums; under masks nobody can be named."""
        unnamed = ", and under masks nobody can be named" if self.secure is not None else ""
        self.dropped = f"no model follows from the sums ({reason}){unnamed}"
        self.left_out |= dict.fromkeys(self.used, STEP_FAILED)
        self.rejections.counts[STEP_FAILED] += 1
        self.used.clear()

    def with_updatable_size(self, cohort: list[Node], nodes: Nodes) -> list[Node]:
        """Return the nodes of a cohort that can change their acknowledged update; leave the others out."""
        self.left_out |= {node.node_id: OTHER_SIZE for node in cohort if not nodes.can_update(node)}
        return [node for node in cohort if nodes.can_update(node)]

    def with_numbers(self, cohort: list[Node], numbered: set[int]) -> list[Node]:
        """Return the nodes of a cohort that know the numbers of their items; leave the others out."""
        for node in [node.node_id for node in cohort if node.node_id not in numbered]:
            self.left_out[node] = NO_NUMBERING
            log.warning("round %d: client %d left out: %s", self.number, node, NO_NUMBERING)
        return [node for node in cohort if node.node_id in numbered]

    def expire(self, *, everybody: bool) -> None:
        """Stop waiting for tasks whose deadline has passed, or for all."""
        now = time.monotonic()
        for node in [node for node, task in self.pending.items() if everybody or task.deadline <= now]:
            del self.pending[node]
            self.reject(node, "no update in time")
            self.replies.forget(node)
        self.end_phase("updates")

    def is_step_due(self, step_at: float) -> bool:
        """Return whether an asynchronous step is due: all deadlines have passed, or ``step_at`` with an update."""
        now = time.monotonic()
        has_updates = bool(self.used or self.node_qualities)
        return (has_updates and now >= step_at) or all(task.deadline <= now for task in self.pending.values())

    def end_phase(self, name: str) -> None:
        """Count the time since the last phase ended as that of a phase."""
        since = self.started + sum(self.phases.values())
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - since

    def add_quality(self, node: Node, quality: QualitySum | None) -> None:
        """Add the quality that a node measured."""
        if quality is not None:
            self.qualities.append((node.size, quality))
            self.node_qualities[node.node_id] = quality

    def _add_aggregate_quality(self, aggregate: MeasuredUpdate, plan: Plan, users: int) -> None:
        """Add a quality under masks, unless so many users cannot have it."""
        counted, settings = round(aggregate.num_validated), plan.settings
        possible = settings.smaller_is_better or aggregate.quality <= counted + 1
        if possible and 0 < counted <= max_evaluated(settings, plan.public.num_items, users):
            self.qualities.append((-1, (aggregate.quality, counted)))

    def quality(self, sizes: int) -> Quality | None:
        """Return the mean quality over all users, and over those of each size; None where there is none."""
        overall = _mean_quality(quality for _, quality in self.qualities)
        by_size = (
            _mean_quality(quality for other, quality in self.qualities if other == size) for size in range(sizes)
        )
        return None if overall is None else Quality(overall, tuple(by_size))

    def why_failed(self) -> str:
        """Return why the round has no usable update."""
        if self.statistics_error:
            return f"the statistics before it are lost: {self.statistics_error}"
        if self.dropped:
            return self.dropped
        if not self.bytes_down and not self.left_out:
            return "no node is there that takes part"
        reasons = Counter(self.left_out.values()).most_common()
        return f"{len(self.bytes_down)} were asked: " + ", ".join(f"{count} × {reason}" for reason, count in reasons)

    def report(self) -> RoundReport:
        """Return the round as the history of a run has it."""
        seconds, down = time.monotonic() - self.started, sum(self.bytes_down.values())
        return RoundReport(self.number, seconds, len(self.used), down, sum(self.bytes_up.values()), None)

    def event(self, held: dict[str, int]) -> Event:
        """Return the round as an event of ``nodes.jsonl``; ``held``: bytes that a client of each size holds."""
        phases = {name: round(seconds, 4) for name, seconds in self.phases.items()}
        event = {
            "event": ROUND, "round": self.number, "counted": bool(self.used), "asked": len(self.bytes_down),
            "used": self.used, "left_out": self.left_out, "down": self.bytes_down, "up": self.bytes_up,
            "held": held, "at": round(time.time(), 3), "phases": phases,
        }  # fmt: skip
        event |= {"dropped": self.dropped} if self.dropped else {}
        return event | ({"staleness": self.staleness} if self.staleness else {})

    # -- secure aggregation --------------------------------------------------------------------------------------------

    def start_secure(
        self, plan: Plan, kind: str, grid: Grid, run: int, timeout: float, roster: Roster | None
    ) -> dict[int, bytes]:
        """Start secure aggregation, if any, among the pending nodes; return the message for each that remains."""
        if not plan.settings.privacy.uses_secure_aggregation or not self.pending:
            return {}
        trains = kind == MessageType.TRAIN
        encoding: Callable[[int], Encoding] = quality_encoding
        if trains:
            tasks = {size: request.task for size, request in self.requests.items()}
            encoding = partial(fixed_point_encoding, plan, tasks)
        nodes = [task.node for task in self.pending.values()]
        sizes = {node.client_id: node.size if trains else 0 for node in nodes}
        of_all = grid, timeout, plan.settings, encoding, sizes, nodes, roster
        self.secure = SecureRounds.of(*of_all, together=not trains)
        messages = self.secure.begin(run, self.number - 1, "train" if trains else "evaluate")
        for node in [node for node in self.pending if node not in messages]:
            del self.pending[node]
            self.reject(node, "no keys or shares")
        self.end_phase("masks")
        return messages

    def unmasked_updates(self, plan: Plan, users_of: Callable[[Node], int]) -> list[tuple[ClientTask, Update, int]]:
        """Unmask the aggregates of every group and size for nodes in ``used``, each with the most users that it is of.

        Those that their users cannot have are left out.
        """
        if self.secure is None:
            return []
        found, refused = list[tuple[ClientTask, Update, int]](), dict[int, str]()
        for group, aggregates in self.secure.finish():
            group.require_budget_unspent(f"round {self.number}")
            survivors, problem = group.survivors, ""
            sums = list[tuple[ClientTask, Update, int]]()
            for size, aggregate in aggregates.items():
                owners = survivors if len(aggregates) == 1 else [node for node in survivors if node.size == size]
                users, task = sum(map(users_of, owners)), replace(self.requests[size].task, group=group.group)
                problem = problem or sum_problem(plan, aggregate.update, users, len(owners)) or ""
                self._add_aggregate_quality(aggregate, plan, users)
                sums.append((task, from_weighted_change(plan, task, aggregate.update), users))
            refused |= dict.fromkeys([node.node_id for node in survivors if problem], problem)
            self.used += [node.node_id for node in survivors if not problem]
            found += [] if problem else sums
        for node in self.bytes_up.keys() - {node.node_id for node in self.secure.survivors}:
            self.reject(node, "a secure sum that is lost")
        if refused and not self.used:
            self.used += refused
            self.drop(next(iter(refused.values())))
        for node in refused.keys() - self.left_out.keys():
            self.reject(node, GROUP_REFUSED)
        return found

    def unmask_qualities(self, plan: Plan, users_of: Callable[[Node], int]) -> None:
        """Unmask the aggregate of an evaluation."""
        if self.secure is None:
            return
        for group, aggregates in self.secure.finish():
            for aggregate in aggregates.values():
                self._add_aggregate_quality(aggregate, plan, sum(map(users_of, group.survivors)))


def _mean_quality(qualities: Iterable[QualitySum]) -> float | None:
    sums = list(qualities)
    return sum(total for total, _ in sums) / sum(users for _, users in sums) if sums else None


def tasks_for(plan: Plan, cohort: list[Node], state: State) -> Iterator[tuple[int, ClientTask]]:
    """Yield the task of each size, or of each node where every client has a hash of its own."""
    if plan.method.per_client:
        tasks = [(node.node_id, plan.client_task(state, node.size, node.hash_id)) for node in cohort]
    else:
        sizes = sorted({node.size for node in cohort})
        tasks = list(zip(sizes, plan.algorithm.tasks(plan, state, sizes), strict=True))
    for key, task in tasks:
        if plan.settings.fleet.asynchronous.is_synchronous:
            yield key, task
        else:  # copies, since vectors may be the server's own, which the next step changes
            yield key, replace(task, vectors={name: vector.clone() for name, vector in task.vectors.items()})


def usable_replies(
    strategy: FairStrategy, replies: Iterable[Message], *, trained: bool
) -> Iterator[tuple[Node, TaskRequest, Reply]]:
    """Yield the valid replies; reject the others, with the reason."""
    opened = strategy.open_round
    for message in replies:
        sender = message.metadata.src_node_id
        if strategy.streaming is not None:  # by the message that is answered: a late reply is not one to a new task
            sender = opened.replies.sent_to.pop(message.metadata.reply_to_message_id, UNKNOWN_NODE)
        pending = opened.pending.pop(sender, None)
        if pending is None:
            log.warning("round %d: a reply of a node that has no task, or has replied", opened.number)
            continue
        node = pending.node.node_id
        if message.has_error():
            log.warning("round %d: node %d failed: %s", opened.number, node, one_line(message.error.reason))
            opened.reject(node, "the device failed")
            strategy.numbered_nodes.discard(node)  # it may have lost the numbers of its items
            strategy.nodes.mark_failed(node)
            continue
        try:
            reply = _read_reply(strategy, message, pending, trained=trained)
        except InvalidMessage as error:
            opened.reject(node, error.given)
            continue
        if reply is not None:
            yield pending.node, pending.request, reply
            if _has_enough(strategy):
                return


def _read_reply(strategy: FairStrategy, message: Message, pending: PendingTask, *, trained: bool) -> Reply | None:
    """Read a reply; None where its update is masked. Raises :class:`InvalidMessage` where it cannot be used."""
    opened, plan = strategy.open_round, strategy.plan
    node, request = pending.node, pending.request
    asynchronous = strategy.settings.fleet.asynchronous
    if opened.secure is None:
        opened.bytes_up[node.node_id] = tensor_bytes(message.content)
    if trained and not asynchronous.is_synchronous:
        staleness = strategy.progress.state.round_number - request.task.round_number
        opened.staleness[node.node_id] = staleness
        # The sums keep the client's acknowledged update, which its next task names.
        _refuse_if(asynchronous.staleness_problem(staleness, depends_on_model=plan.algorithm.depends_on_model))
    if opened.secure is not None:
        opened.bytes_up[node.node_id] = opened.secure.receive(node, message.content)
        return None
    sizes = plan.algorithm.update_shapes(plan, request.task) if trained else {}
    sends_weights = plan.algorithm.sends_weights
    users, of_user = strategy.users_of(node), WeighsUsers.of(plan.algorithm).max_user_weight(plan)
    reply = unpack_reply(message.content, request, sizes, users * of_user, users, sends_weights=sends_weights)
    if trained:
        update = reply.update
        _refuse_if("no update" if update is None else plan.algorithm.validate_update(plan, request.task, update))
        assert update is not None
        bounds, state = BoundsContributions.of(plan.algorithm), strategy.network_state
        held = state.contributions.get(strategy.nodes.identity(node), {})
        found = bounds.check_contribution(plan, request.task, update, held, users, state.secret)
        _refuse_if(found[0])
        opened.contributions[node.node_id] = found[1]
    return reply


def _refuse_if(problem: str | None) -> None:
    if problem is not None:
        raise InvalidMessage(problem, "a usable update", "The client is left out of the round.")


def _has_enough(strategy: FairStrategy) -> bool:
    """Whether an asynchronous step has as many updates as ``buffer_size``."""
    buffer_size = strategy.settings.fleet.asynchronous.buffer_size
    received = max(len(strategy.open_round.used), len(strategy.open_round.node_qualities))
    return buffer_size is not None and received >= buffer_size and not strategy.waits_for_all()
