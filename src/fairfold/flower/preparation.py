"""Before the first round: which settings a network can serve, clients' statistics, and the numbering of items."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from flwr.serverapp import Grid

from fairfold.algorithms.gradient import Gradient
from fairfold.config import Settings
from fairfold.config.fleet import DifferentialPrivacy, FaultSettings, SecurePrivacy
from fairfold.errors import InvalidMessage, InvalidSettings
from fairfold.federation.algorithm import COUNTS, Centralized, NumbersItems, SparseUpdates
from fairfold.federation.architecture import ImageShape
from fairfold.federation.federation import popularity_order
from fairfold.federation.plan import Plan, privacy_notes, privacy_report
from fairfold.federation.plugin_check import check_plugins
from fairfold.federation.plugins import uses_plugins
from fairfold.federation.updates import PublicStatistics, State, Update
from fairfold.flower.grid import ask_all
from fairfold.flower.nodes import Node, Nodes
from fairfold.flower.persistence import NetworkState
from fairfold.flower.protocol import NUMBERING, STATISTICS, new_id
from fairfold.flower.secure_aggregation import secure_statistics
from fairfold.flower.wire import item_windows, pack_numbering, pack_statistics_request, unpack_statistics
from fairfold.privacy.ledger import DEFAULT_MIN_COHORT
from fairfold.typing import FLOAT_BYTES, Weights

log = logging.getLogger("fairfold.flower")

MAX_OVERHEAD = 1 << 20  # bytes of a reply that are not its tensors: names, figures, Flower's own records


def refuse_simulation_only(settings: Settings) -> None:
    """Refuse settings that only make sense where one process holds all data."""
    algorithm, fleet = settings.algorithm, settings.fleet
    uploaded = isinstance(algorithm, Gradient) and algorithm.user_vectors == "uploaded"
    exact = isinstance(settings.privacy, DifferentialPrivacy) and settings.privacy.noise == "server"
    unserved = {
        f"algorithm.kind={algorithm.kind!r} (it asks for all data in one place)": isinstance(algorithm, Centralized),
        "algorithm.user_vectors='uploaded' (a user's vectors are not sent)": uploaded,
        "fleet.replacement (a node cannot be drawn twice)": fleet.replacement,
        "privacy.noise='server' (devices add their own noise: no server sees an exact sum)": exact,
        "fleet.faults (real devices have their own)": fleet.faults != FaultSettings(),
        "fleet.latency (real devices take the time they take)": fleet.latency.median_seconds is not None,
    }
    problems = [reason for reason, given in unserved.items() if given]
    if problems:
        raise InvalidSettings("; ".join(problems), "settings a real federation can serve", "Leave these out.")


def default_privacy(settings: Settings, devices: int, *, asked: bool) -> tuple[Settings, list[str]]:
    """Choose secure aggregation where no level was ``asked`` for and there are enough devices; return notes on why."""
    chosen = settings.privacy
    if isinstance(chosen, SecurePrivacy):
        groups = settings.fleet.secure_groups
        if devices < chosen.fewest_clients(settings.fleet):
            given = f"{devices} devices with privacy.min_cohort={chosen.min_cohort}" + f" in {groups} groups" * (
                groups > 1
            )
            fewer = devices // groups
            lower = f", or take sums that hide less, to try it out: --set privacy.min_cohort={fewer}" * (fewer > 1)
            raise InvalidSettings(given, "as many at least", f"Start more devices{lower}.")
        return settings, privacy_notes(privacy_report(settings))
    if asked:
        return settings, ["Privacy: plain, as asked. The server sees the update of each device."]
    if devices < DEFAULT_MIN_COHORT:
        reason = f"{devices} devices are too few to hide any of them in a sum ({DEFAULT_MIN_COHORT} are not)"
        return settings, [f"Privacy: plain, since {reason}. The server sees the update of each device."]
    try:
        secure = settings.with_changes({"privacy.level": "secure"})
    except InvalidSettings as error:
        return settings, [f"Privacy: plain, since secure aggregation does not go with these settings: {error.given}"]
    seen = f"The server sees sums over {DEFAULT_MIN_COHORT} of them or more."
    return secure, [f"Privacy: secure, since {devices} devices take part. {seen}"]


def initial_plan(settings: Settings, num_items: int, image_shape: ImageShape | None) -> Plan:
    """Return the plan before any statistics; refuse settings that cannot be served."""
    if image_shape is None:
        if uses_plugins(settings):
            check_plugins(settings)
        if num_items < 1:
            remedy = "Give num_items=..., the number of items."
            raise InvalidSettings(f"num_items = {num_items}", "the size of the catalogue", remedy)
    return Plan.of(settings, PublicStatistics(num_items), image_shape)


def collect_statistics(
    network_state: NetworkState,
    known: Nodes,
    num_items: int,
    nodes: list[Node],
    grid: Grid,
    timeout: float,
    users_of: Callable[[Node], int],
) -> str:
    """Sum the statistics of all nodes, and number the items by them; return why that failed, or nothing."""
    log.info("asking %d nodes for statistics before the first round", len(nodes))
    settings = known.settings
    nodes, statistics = list(nodes), network_state.statistics
    # No window of items is asked for twice: two sums over nearly the same clients would reveal the difference.
    for window in item_windows(num_items)[network_state.num_windows :]:
        updates: Iterable[Update]
        if settings.privacy.uses_secure_aggregation:
            asked = num_items, window, nodes, network_state.run, timeout
            updates, reason = secure_statistics(grid, settings, *asked, users_of, known.roster)
        else:
            updates, reason = _plain_statistics(grid, settings, num_items, window, nodes, timeout, users_of), ""
        received = 0
        for update in updates:
            received += 1
            for name, part in update.sums.items():
                size = num_items if len(part) == len(window) else len(part)
                total = statistics.setdefault(name, torch.zeros(size).double())
                (total[window.start : window.stop] if size == num_items else total).add_(part)
        if not received:
            return reason or f"none of {len(nodes)} devices replied: see their own logs"
        network_state.num_windows += 1
    if settings.subspace.counts_items:
        numbers: torch.Tensor | None = popularity_order(statistics[COUNTS], settings)[1]
    else:
        plan = Plan.of(settings, PublicStatistics(num_items, statistics=statistics))
        numbers = NumbersItems.of(settings.algorithm).numbering(plan)
    if numbers is not None:
        places = network_state.item_numbers = numbers.to(torch.int64)
        network_state.numbering = new_id()
        for name, sums in statistics.items():
            if len(sums) == len(places):  # by item
                statistics[name] = torch.empty_like(sums).index_copy_(0, places, sums)
    return ""


def _plain_statistics(
    grid: Grid,
    settings: Settings,
    num_items: int,
    window: range,
    nodes: list[Node],
    timeout: float,
    users_of: Callable[[Node], int],
) -> Iterator[Update]:
    """Yield each client's statistics of a window; drop nodes with invalid ones from ``nodes``."""
    request = pack_statistics_request(settings, num_items, window)
    most = {one.node_id: users_of(one) for one in nodes}
    for node, content in ask_all(grid, list(most), STATISTICS, request, timeout):
        try:
            yield unpack_statistics(content, settings, num_items, window, most[node])
        except InvalidMessage as error:
            log.warning("node %d left out of the statistics: %s", node, error.given)
            nodes[:] = [other for other in nodes if other.node_id != node]


def send_numbering(
    network_state: NetworkState, cohort: list[Node], numbered: set[int], grid: Grid, settings: Settings, timeout: float
) -> None:
    """Send the items' numbers to nodes of a cohort that lack them; add those that replied to ``numbered``."""
    lacking = [node.node_id for node in cohort if node.node_id not in numbered]
    numbers = network_state.item_numbers
    for window in () if numbers is None else item_windows(len(numbers)):
        assert numbers is not None
        record = pack_numbering(network_state.numbering, numbers, window, ratings=settings.predicts_ratings)
        lacking = [node for node, _ in ask_all(grid, lacking, NUMBERING, record, timeout)]
    numbered.update(lacking)


def with_initial_tensors(state: State, full: Weights) -> State:
    """Return a state with given tensors in place of its own; refuse other names or sizes."""
    shapes = {name: vector.shape for name, vector in state.full.items()}
    if {name: vector.shape for name, vector in full.items()} != shapes:
        sizes = ", ".join(f"{name} of {shape.numel()} numbers" for name, shape in shapes.items())
        raise InvalidSettings("initial arrays of another model", sizes, "Take them from this model, flat.")
    return replace(state, full=full)


def max_update_bytes(plan: Plan) -> int:
    """Return the bytes beyond which a reply is not even fetched: twice the largest update, and overhead."""
    sizes = [FLOAT_BYTES * held.size() for held in plan.assignments(0)]
    sizes += [SparseUpdates.of(plan.algorithm).max_update_bytes(plan, size) for size in range(len(sizes))]
    return 2 * max(*sizes, 8 * 3 * min(plan.public.num_items, 1 << 20)) + MAX_OVERHEAD
