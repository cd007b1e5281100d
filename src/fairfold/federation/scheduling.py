"""Scheduling: which clients take part in a round, with which task, and which updates arrive before the server's step.

Updates add up, so an asynchronous round need not wait for all: tasks stay in flight from round to round, and an update
counts in the round in which it arrives, unless it is too stale. In a simulation arrivals follow a latency model; clock
and tasks in flight are tensors of the algorithm state, so that a resumed run finds them in its checkpoint.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairfold.config.fleet import AsynchronousSettings, SecurePrivacy
from fairfold.errors import InvalidSettings
from fairfold.federation.aggregation import ONE, Ranks, merge_small_groups
from fairfold.federation.algorithm import Centralized, Tunable
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Purpose, draw_fault, generator, panel, sample_cohort, secure_groups
from fairfold.federation.updates import ClientTask, ScheduledTask, State
from fairfold.subspace.projection import describe_projection, make_projection
from fairfold.typing import Weights

if TYPE_CHECKING:
    from fairfold.config import Settings

CLOCK = "clock"  # group of the algorithm state: simulated time, tasks in flight, figures of the last round
TASK_PREFIX = "task "  # prefix of the groups that hold tasks in flight; a number follows

VECTOR, DESCRIPTION = "vector/", "description"
TASK_PROJECTIONS = ("projections", "context")

_doubles, _integers = (partial(torch.tensor, dtype=dtype) for dtype in (torch.float64, torch.int64))


@dataclass(frozen=True)
class ClientSampler:
    """Samples the clients of a simulated federation: their sizes, and the ``participants`` that the method serves."""

    plan: Plan
    size: Tensor
    participants: Tensor
    ranks: Ranks = ONE

    @classmethod
    def of(cls, plan: Plan, num_clients: int) -> "ClientSampler":
        """Split clients by the capacity scheme; refuse settings that cannot work."""
        fleet = plan.settings.fleet
        if not fleet.asynchronous.is_synchronous and fleet.latency.median_seconds is None:
            given = "fleet.asynchronous in a simulation, in which devices take no time"
            remedy = "Set fleet.latency.median_seconds, or leave fleet.asynchronous out."
            raise InvalidSettings(given, "how long they take", remedy)
        if isinstance(plan.algorithm, Centralized):
            return cls(plan, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        size = _sizes_hidden_in_sums(plan, fleet.groups(num_clients))
        serves = torch.tensor([held.projections is not None for held in plan.assignments(0)])
        return cls(plan, size, serves[size].nonzero().flatten())

    def cohort(self, round_number: int, busy: Sequence[int] = ()) -> Tensor:
        """Sample C: K participants, or all if fewer; ``busy`` ones, with an earlier task, count but are not drawn."""
        settings = self.plan.settings
        count = len(self.participants)
        per_round = settings.fleet.clients_per_round or count
        if busy:
            free = self.participants[~torch.isin(self.participants, torch.tensor(busy))]
            wanted = min(per_round - len(busy), len(free))
            return free[sample_cohort(settings, len(free), round_number, wanted)] if wanted > 0 else free[:0]
        everybody = per_round > count and not settings.fleet.replacement
        if everybody or isinstance(self.plan.algorithm, Centralized):
            return self.participants
        share = Tunable.of(self.plan.algorithm).participating_share(self.plan, round_number)
        if share < 1:
            return self.participants[panel(self.participants, share)]
        return self.participants[sample_cohort(settings, count, round_number)]

    @cached_property
    def group(self) -> Tensor:
        """The group of each client, whose updates are summed together under masks."""
        return secure_groups(self.plan.settings, len(self.size))

    @cached_property
    def seconds(self) -> Tensor:
        """Simulated seconds that every client takes for a task."""
        latency = self.plan.settings.fleet.latency
        assert latency.median_seconds is not None
        source = generator(self.plan.settings, Purpose.SPEED)
        slow = torch.rand(len(self.size), generator=source, dtype=torch.float64) < latency.slow_share
        spread = torch.randn(len(self.size), generator=source, dtype=torch.float64)
        return latency.median_seconds * torch.where(slow, latency.slow_factor, 1.0) * (latency.log_std * spread).exp()

    def schedule(self, state: State, cohort: list[int]) -> Iterator[ScheduledTask]:
        """The clients of a cohort with their tasks, reduced once per size, or per client where hashes differ."""
        sizes = self.size[cohort].tolist()
        if self.plan.method.per_client:
            for client, size in zip(cohort, sizes, strict=True):
                yield ScheduledTask(client, self.plan.client_task(state, size, client))
            return
        distinct = list(dict.fromkeys(sizes))
        tasks = dict(zip(distinct, self.plan.algorithm.tasks(self.plan, state, distinct), strict=True))
        groups = dict[tuple[int, int], ClientTask]()
        for client, size, group in zip(cohort, sizes, self.group[cohort].tolist(), strict=True):
            task = tasks[size]
            yield ScheduledTask(client, groups.setdefault((size, group), replace(task, group=group) if group else task))

    def faults(self, round_number: int, cohort: list[int]) -> dict[int, str]:
        """Draw the clients that fail in a round, each with its fault."""
        settings = self.plan.settings
        faults = settings.fleet.faults
        if not any(share for _, share in faults):
            return {}
        drawn = {c: draw_fault(faults, generator(settings, Purpose.FAULTS, round_number, c)) for c in cohort}
        return {client: kind for client, kind in drawn.items() if kind is not None}


def _sizes_hidden_in_sums(plan: Plan, size: Tensor) -> Tensor:
    """Sizes after groups that are too small, by their expected number in a cohort, joined the next smaller size."""
    privacy = plan.settings.privacy
    if not isinstance(privacy, SecurePrivacy):
        return size
    cohort = min(plan.settings.fleet.clients_per_round or len(size), len(size))
    fewest = privacy.fewest_clients(plan.settings.fleet)
    if cohort < fewest:
        groups = f" in {plan.settings.fleet.secure_groups} groups" * (fewest > privacy.min_cohort)
        given = f"{cohort} of {len(size)} devices per round with privacy.min_cohort={privacy.min_cohort}{groups}"
        all_of_them = "Ask all of them (fleet.clients_per_round='none'), lower the minimum, which hides less"
        remedy = f"{all_of_them}, or take privacy.level='plain', which hides nothing."
        raise InvalidSettings(given, "as many at least, so that a sum hides each of them", remedy)
    held = [one.bytes() for one in plan.assignments(0)]
    largest_first = sorted(range(len(held)), key=lambda one: -held[one])
    return merge_small_groups(size, largest_first, fewest / (cohort / len(size)))


@dataclass(frozen=True)
class InFlightTask:
    """A task that a simulated client works on, and the time at which its update arrives."""

    client: int
    task: ClientTask
    due: float


@dataclass(frozen=True)
class RoundSchedule:
    """The tasks whose updates arrive in a round, reasons of those too stale, and groups of the state to carry on."""

    scheduled: Iterable[ScheduledTask]
    cohort: list[int]
    stale: dict[int, str] = field(default_factory=dict)
    carried: dict[str, Weights] = field(default_factory=dict)

    def into(self, state: State) -> State:
        """The state after the round, with clock and tasks in flight."""
        if not self.carried:
            return state
        others = {name: group for name, group in state.algorithm_state.items() if not name.startswith(TASK_PREFIX)}
        return replace(state, algorithm_state=others | self.carried)


def schedule_round(sampler: ClientSampler, state: State) -> RoundSchedule:
    """Sample a cohort, give it tasks, and select the tasks whose updates arrive before the server's step."""
    number, fleet = state.round_number, sampler.plan.settings.fleet
    if fleet.latency.median_seconds is None:
        cohort = sampler.cohort(number).tolist()
        return RoundSchedule(sampler.schedule(state, cohort), cohort)
    depends_on_model = sampler.plan.algorithm.depends_on_model
    now, waiting = in_flight_tasks(state.algorithm_state)
    asked = sampler.cohort(number, [one.client for one in waiting]).tolist()
    for new in sampler.schedule(state, asked):
        waiting.append(InFlightTask(new.client, new.task, now + float(sampler.seconds[new.client])))
    if fleet.asynchronous.is_synchronous:
        done = waiting
        then = max((one.due for one in waiting), default=now)
    else:
        done, then = completed_before_step(waiting, fleet.asynchronous, number, now, depends_on_model=depends_on_model)
    client_ids = [one.client for one in done]  # with repetitions, if sampled with replacement
    staleness = [number - one.task.round_number for one in done]
    problems = {
        client: fleet.asynchronous.staleness_problem(steps, depends_on_model=depends_on_model)
        for client, steps in zip(client_ids, staleness, strict=True)
    }
    left = [one for one in waiting if one.client not in problems]
    clock = _round_figures(state.algorithm_state.get(CLOCK, {}), sampler, asked, client_ids, staleness)
    positions, stored = _stored_tasks(left, number)
    clock |= positions | {"now": _doubles([then]), "seconds": _doubles([then - now])}
    scheduled = [ScheduledTask(one.client, one.task) for one in done]
    stale = {client: reason for client, reason in problems.items() if reason is not None}
    return RoundSchedule(scheduled, client_ids, stale, {CLOCK: clock} | stored)


def completed_before_step(
    waiting: list[InFlightTask], settings: AsynchronousSettings, number: int, now: float, *, depends_on_model: bool
) -> tuple[list[InFlightTask], float]:
    """Tasks completed before the server's next step, and its time: not before one update that counts has arrived."""
    done, counting = list[InFlightTask](), 0
    for one in sorted(waiting, key=lambda task: task.due):
        if counting and settings.step_seconds is not None and one.due > now + settings.step_seconds:
            return done, max(now + settings.step_seconds, done[-1].due)
        done.append(one)
        staleness = number - one.task.round_number
        counting += settings.staleness_problem(staleness, depends_on_model=depends_on_model) is None
        if counting == settings.buffer_size:
            break
    return done, max(done[-1].due, now) if done else now


def staleness_notes(algorithm_state: Mapping[str, Weights], settings: "Settings") -> list[str]:
    """A sentence on how stale the updates of an asynchronous run were."""
    counts = algorithm_state.get(CLOCK, {}).get("staleness")
    if settings.fleet.asynchronous.is_synchronous or counts is None or not int(counts.sum()):
        return []
    depends_on_model = settings.algorithm.depends_on_model
    return [staleness_sentence(counts.tolist(), settings.fleet.asynchronous, depends_on_model=depends_on_model)]


def staleness_sentence(counts: list[int], settings: AsynchronousSettings, *, depends_on_model: bool) -> str:
    """A sentence on counts of updates by staleness, of which the last are beyond the limit."""
    *within, beyond = counts
    if not depends_on_model:
        return (
            f"Rounds did not wait: {sum(counts):,} updates counted, {beyond:,} of them more than "
            f"{settings.max_staleness} steps stale: updates do not depend here on the model that was sent."
        )
    total = sum(within)
    mean = sum(steps * count for steps, count in enumerate(within)) / max(total, 1)
    most = max((steps for steps, count in enumerate(within) if count), default=0)
    return (
        f"Rounds did not wait: {total:,} updates counted, {mean:.1f} steps stale on average and {most} at most; "
        f"{beyond:,} were refused, being more than {settings.max_staleness} steps stale."
    )


def count_staleness(before: list[int] | None, staleness: Iterable[int], settings: AsynchronousSettings) -> list[int]:
    """Add updates to counts by staleness, of which the last are beyond the limit."""
    counts = list(before) if before is not None else [0] * (settings.max_staleness + 2)
    for steps in staleness:
        counts[min(steps, settings.max_staleness + 1)] += 1
    return counts


def in_flight_tasks(algorithm_state: Mapping[str, Weights]) -> tuple[float, list[InFlightTask]]:
    """The simulated time, and the tasks in flight, from the algorithm state."""
    clock = algorithm_state.get(CLOCK)
    if clock is None:
        return 0.0, []
    count = sum(name.startswith(TASK_PREFIX) for name in algorithm_state)
    tasks = [_loaded_task(algorithm_state[f"{TASK_PREFIX}{place}"]) for place in range(count)]
    rows = zip(clock["clients"].tolist(), clock["tasks"].tolist(), clock["due"].tolist(), strict=True)
    return float(clock["now"]), [InFlightTask(client, tasks[place], due) for client, place, due in rows]


def _round_figures(
    before: Mapping[str, Tensor], sampler: ClientSampler, asked: list[int], completed: list[int], staleness: list[int]
) -> dict[str, Tensor]:
    """Clients of the last round, and counts over all rounds."""
    settings = sampler.plan.settings.fleet.asynchronous
    drawn = before["drawn"].clone() if "drawn" in before else torch.zeros(len(sampler.size), dtype=torch.bool)
    drawn[asked] = True
    figures = {"asked": _integers(asked), "completed": _integers(completed), "drawn": drawn}
    if not settings.is_synchronous:
        counts = before["staleness"].tolist() if "staleness" in before else None
        figures["staleness"] = _integers(count_staleness(counts, staleness, settings))
    return figures


def _stored_tasks(waiting: list[InFlightTask], number: int) -> tuple[dict[str, Tensor], dict[str, Weights]]:
    """Tasks in flight as tensors: clients and times for the clock, and a group for every distinct task."""
    tasks = {id(one.task): one.task for one in waiting}
    place = {key: index for index, key in enumerate(tasks)}
    positions = {
        "clients": _integers([one.client for one in waiting]),
        "tasks": _integers([place[id(one.task)] for one in waiting]),
        "due": _doubles([one.due for one in waiting]),
    }
    stored: dict[str, Weights] = {}
    for key, task in tasks.items():
        description: dict[str, Any] = {"round": task.round_number, "size": task.size}
        for kind, projections in zip(TASK_PROJECTIONS, (task.projections, task.context), strict=True):
            description[kind] = {name: describe_projection(held) for name, held in projections.items()}
        copy = task.round_number == number
        vectors = {VECTOR + name: vector.clone() if copy else vector for name, vector in task.vectors.items()}
        text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
        stored[f"{TASK_PREFIX}{place[key]}"] = vectors | {DESCRIPTION: text}
    return positions, stored


def _loaded_task(stored: Weights) -> ClientTask:
    found = json.loads(bytes(stored[DESCRIPTION].tolist()))
    held, context = ({name: make_projection(one) for name, one in found[key].items()} for key in TASK_PROJECTIONS)
    vectors = {name.removeprefix(VECTOR): vector for name, vector in stored.items() if name != DESCRIPTION}
    return ClientTask(found["round"], found["size"], held, vectors, context)
