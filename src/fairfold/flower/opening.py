"""Before the first round: what a network can serve, the survey of the devices, and the numbers that items get by it."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fairfold.errors import InvalidMessage, InvalidSettings
from fairfold.flower.books import Books
from fairfold.flower.exchange import ask_all
from fairfold.flower.nodes import Node
from fairfold.flower.protocol import NUMBERING, SURVEY, new_word
from fairfold.flower.secure_round import survey as secure_survey
from fairfold.flower.wire import ask, tell, unpack_survey, windows
from fairfold.privacy.ledger import USUAL_COHORT
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.dry_run import try_out
from fairfold.protocol.noising import privacy_facts, privacy_words
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Answer, Public, State
from fairfold.settings import Settings
from fairfold.settings.parts import FaultSettings
from fairfold.settings.privacy import PrivatePrivacy, SecurePrivacy
from fairfold.simulate.numbering import order_by
from fairfold.values import BYTES, Weights

log = logging.getLogger("fairfold.flower")

LARGEST_OVERHEAD = 1 << 20  # bytes of an answer that are not its vectors: names, figures, Flower's own records

Picture = tuple[int, int, int]  # height, width and number of classes of images


def refuse_unserved(settings: Settings) -> None:
    """Refuse settings that only make sense where one process holds everybody's data."""
    algorithm, fleet = settings.algorithm, settings.fleet
    uploaded = getattr(algorithm, "user_vectors", "private") == "uploaded"
    exact = isinstance(settings.privacy, PrivatePrivacy) and settings.privacy.noise == "server"
    unserved = {
        f"algorithm.kind={algorithm.kind!r} (it asks for all data in one place)": algorithm.pooled,
        "algorithm.user_vectors='uploaded' (a user's vectors are not sent)": uploaded,
        "fleet.replacement (a node cannot be drawn twice)": fleet.replacement,
        "privacy.noise='server' (devices add their own noise: no server sees an exact sum)": exact,
        "fleet.faults (real devices have their own)": fleet.faults != FaultSettings(),
        "fleet.clock (real devices take the time they take)": fleet.clock.seconds is not None,
    }
    problems = [words for words, given in unserved.items() if given]
    if problems:
        raise InvalidSettings("; ".join(problems), "settings a real federation can serve", "Leave these out.")


def with_privacy(settings: Settings, devices: int, *, asked: bool) -> tuple[Settings, list[str]]:
    """Secure sums where nothing else was asked for and there are devices enough; and what was chosen, and why."""
    chosen = settings.privacy
    if not asked and not isinstance(chosen, SecurePrivacy):
        if devices < USUAL_COHORT:
            why = f"{devices} devices are too few to hide any of them in a sum ({USUAL_COHORT} are not)"
            return settings, [f"Privacy: plain, since {why}. The server sees what each device answers."]
        try:
            settings = settings.with_changes({"privacy.level": "secure"})
        except InvalidSettings as error:
            return settings, [f"Privacy: plain, since secure sums do not go with these settings: {error.given}"]
        why = f"since {devices} devices take part"
        return settings, [f"Privacy: secure, {why}. The server sees sums over {USUAL_COHORT} of them or more."]
    if not isinstance(chosen, SecurePrivacy):
        return settings, ["Privacy: plain, as asked. The server sees what each device answers."]
    if devices < chosen.smallest_cohort:
        given = f"{devices} devices with privacy.smallest_cohort={chosen.smallest_cohort}"
        raise InvalidSettings(given, "as many at least", "Start more devices, or lower the minimum.")
    return settings, privacy_words(privacy_facts(settings))


def first_plan(settings: Settings, num_items: int, picture: Picture | None) -> Plan:
    """A plan before anybody was asked anything: refuses what cannot be served."""
    if picture is None:
        try_out(settings)
        if num_items < 1:
            raise InvalidSettings(
                f"num_items = {num_items}", "the size of the catalogue", "Give num_items=..., the number of items."
            )
    return Plan.of(settings, Public(num_items), picture)


def open_books(books: Books, settings: Settings, num_items: int, nodes: list[Node], grid: Grid, timeout: float) -> str:
    """Ask everybody who is there for the sums before the first round, and number the items by them.

    Returns why there are no such sums yet, or nothing. Items that were asked for are not asked for again: two sums of
    nearly the same devices would tell the difference.
    """
    log.info("asking %d nodes for the sums before the first round", len(nodes))
    nodes = list(nodes)
    for window in windows(num_items)[books.windows :]:
        answers: Iterable[Answer]
        if settings.privacy.sums_alone:
            answers, lost = secure_survey(grid, settings, num_items, window, nodes, books.run, timeout)
        else:
            answers, lost = _plain_survey(grid, settings, num_items, window, nodes, timeout), ""
        heard = 0
        for answer in answers:
            heard += 1
            for name, part in answer.sums.items():
                size = num_items if len(part) == len(window) else len(part)
                whole = books.survey.setdefault(name, torch.zeros(size).double())
                (whole[window.start : window.stop] if size == num_items else whole).add_(part)
        if not heard:
            return lost or f"none of {len(nodes)} devices answered: see their own logs"
        books.windows += 1
    survey = books.survey
    if settings.subspace.counted:
        place: torch.Tensor | None = order_by(survey[COUNTS], settings)[1]
    else:
        place = settings.algorithm.numbering(Plan.of(settings, Public(num_items, survey=survey)))
    if place is not None:
        books.numbering, books.place = new_word(), place.to(torch.int64)
        books.survey = {name: _moved(of, place) for name, of in survey.items()}
    return ""


def _plain_survey(
    grid: Grid, settings: Settings, num_items: int, window: range, nodes: list[Node], timeout: float
) -> Iterator[Answer]:
    """What each device says of some items; who cannot be understood is not asked of the next ones."""
    asked = [node.node_id for node in nodes]
    for node, content in ask_all(grid, asked, SURVEY, ask(settings, num_items, window), timeout):
        try:
            yield unpack_survey(content, settings, window)
        except InvalidMessage as error:
            log.warning("node %d left out of the survey: %s", node, error.given)
            nodes[:] = [other for other in nodes if other.node_id != node]


def _moved(sums: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Sums by item in the order of other numbers."""
    if len(sums) != len(place):
        return sums
    found = torch.empty_like(sums)
    found[place] = sums
    return found


def tell_numbers(
    books: Books, nodes: list[Node], told: set[int], grid: Grid, settings: Settings, timeout: float
) -> list[Node]:
    """Those of some nodes who know the numbers of their items in this run, after being told."""
    if books.place is None:
        return nodes
    lacking = [node.node_id for node in nodes if node.node_id not in told]
    for window in windows(len(books.place)):
        record = tell(books.numbering, books.place, window, ratings=settings.predicts_ratings)
        lacking = [node for node, _ in ask_all(grid, lacking, NUMBERING, record, timeout)]
    told.update(lacking)
    return [node for node in nodes if node.node_id in told]


def log_plan(plan: Plan) -> None:
    """Log what is about to run."""
    sizes = zip(plan.capacities, plan.assignments(0), strict=True)
    served = ", ".join(f"{capacity}: {held.bytes()} bytes" for capacity, held in sizes)
    log.info("%s, %s, sizes %s", plan.settings.subspace.method, plan.algorithm.kind, served)
    log.debug("settings %s", json.dumps(plan.settings.plain()))


def flat(arrays: ArrayRecord) -> Weights:
    """Full tensors that were given, one vector each."""
    return {name: torch.from_numpy(of.numpy().reshape(-1).copy()) for name, of in arrays.items()}


def started_from(state: State, full: Weights) -> State:
    """A state with tensors that were given, in the place of its own."""
    wanted = {name: vector.shape for name, vector in state.full.items()}
    if {name: vector.shape for name, vector in full.items()} != wanted:
        sizes = ", ".join(f"{name} of {shape.numel()} numbers" for name, shape in wanted.items())
        raise InvalidSettings("initial arrays of another model", sizes, "Take them from this model, flat.")
    return replace(state, full=full)


def largest_answer(plan: Plan) -> int:
    """Bytes beyond which an answer is not even fetched: twice the largest that any device has to send."""
    sizes = [BYTES * held.size() for held in plan.assignments(0)]
    sizes += [plan.algorithm.largest_answer(plan, size) for size in range(len(sizes))]
    return 2 * max(*sizes, 8 * 3 * min(plan.public.items, 1 << 20)) + LARGEST_OVERHEAD
