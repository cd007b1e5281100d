"""The page that reads like the paper's Algorithms 1 (server) and 2 (client): the oracle for everything faster."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fairfold.federation.aggregate import RoundTotals, ServerState, aggregate
from fairfold.federation.least_squares import SizeTotals, least_squares
from fairfold.federation.projection import Assignment, Projection
from fairfold.federation.rating_squares import RatingTotals, passing_rows, rating_squares
from fairfold.federation.replies import Rejections, change_of, fault_of, problem_with, spoil
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.send import send
from fairfold.federation.settings import Settings
from fairfold.federation.task import Task, Weights
from fairfold.federation.train import SOLVERS, Device, LocalSolver, Trained
from fairfold.simulate.federation import Federation


def solver_of(settings: Settings) -> LocalSolver:
    """What a device computes, by the settings."""
    if settings.solver == "least_squares":
        return rating_squares if settings.predicts_ratings else least_squares
    return SOLVERS[settings.solver]


def totals_of(assignments: list[Assignment], state: ServerState, task: Task) -> RoundTotals | SizeTotals | RatingTotals:
    """What adds up a round, by the settings."""
    if task.settings.solver != "least_squares":
        return RoundTotals(state.full)
    return RatingTotals(assignments, task) if task.ratings else SizeTotals(assignments, task)


def largest_of(assignments: list[Assignment]) -> dict[str, Projection] | None:
    """What the largest devices hold."""
    held = [assignment for assignment in assignments if assignment.projections is not None]
    return max(held, key=Assignment.size).projections if held else None


@dataclass(frozen=True)
class Visit:
    """A device that takes part in a round, and what it receives."""

    device: Device
    received: Weights


Train = Callable[[Iterable[Visit]], Iterable[tuple[Visit, Trained]]]


def in_turn(solver: LocalSolver, settings: Settings) -> Train:
    """Devices train one after the other, each when it is asked for."""
    return lambda visits: ((visit, solver(visit.received, visit.device, settings)) for visit in visits)


def run_round(
    state: ServerState,
    private: Weights,
    federation: Federation,
    rejections: Rejections,
    train: Train | None = None,
) -> ServerState:
    """One round: sample, reduce once a size, send, train, check, sum per size, recover once, update.

    Args:
        state: The server's, with θ.
        private: Every user's own vectors, a row each; row i stands for what device i keeps on its own disk. Written to.
        federation: What does not change over the run.
        rejections: Counts the replies that were left out.
        train: What the devices compute, if not as the settings say: a faster way to the same numbers.
    """
    settings, task, number = federation.settings, federation.task, state.round_number
    remembered = settings.solver == "least_squares"
    totals = totals_of(federation.assignments(number), state, task)
    train = train or in_turn(solver_of(settings), settings)
    for visit, trained in train(visits(state, private, federation)):  # Optimise Fᵢ(Sᵢψᵢ)
        client, projections, received = visit.device.client, visit.device.projections, visit.received
        if not remembered:
            _keep(trained.own, private, client, task)
        reply = spoil(trained.compacts, fault_of(settings, generator(settings, Purpose.FAULTS, number, client)))
        problem = problem_with(reply, received, projections, settings)
        if problem is not None or reply is None:
            rejections.note(number + 1, client, problem or "no answer")
            continue
        if remembered:  # what a device last said is what the server took: a refused reply was never said
            _keep(trained.own, private, client, task)
        weight = settings.weight(task.samples(client))  # pᵢ
        if settings.aggregation == "delta":
            reply = {name: change_of(vector, received[name], settings) for name, vector in reply.items()}
        totals.add(projections, reply, weight)
    if not isinstance(totals, RoundTotals):
        return totals.applied(state, settings)
    return aggregate(state, totals, settings)  # θ ← Σ pᵢ Sᵢψᵢ′


def visits(state: ServerState, private: Weights, federation: Federation) -> Iterator[Visit]:
    """The devices of a round in their order: sample, reduce once a size, send."""
    settings, task, number = federation.settings, federation.task, state.round_number
    cohort = federation.cohort(number)  # C ← a random set of clients
    assignments = federation.assignments(number)  # S of every capacity, of this round's hash
    sent = send(state.full, assignments)  # ψ ← projection(S, θ), once a size
    largest = largest_of(assignments)
    for client in cohort.tolist():
        group = int(federation.group[client])
        projections, received = assignments[group].projections, sent[group]
        assert projections is not None  # the cohort has none that the method leaves out
        assert received is not None
        if settings.method == "inconsistent":
            projections = federation.assignments(number, client)[group].projections
            received = {name: held.reduce(state.full[name]) for name, held in (projections or {}).items()}
            assert projections is not None
        own = {name: rows[task.rows_of(name, client)] for name, rows in private.items()}
        source = generator(settings, Purpose.TRAINING, number, client)
        passing = passing_rows(state.full, projections, number, task)
        yield Visit(Device(client, task, projections, own, source, number, largest, passing), received)


def _keep(own: Weights, private: Weights, client: int, task: Task) -> None:
    for name, vector in own.items():
        private[name][task.rows_of(name, client)] = vector
