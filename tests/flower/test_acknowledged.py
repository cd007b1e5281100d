"""Sums that remember updates are exact: they contain each client's last one, whatever happens on the way.

Every run here is one of faults at random moments. At its end the server's running sums are worked out anew, from the
histories and from the word that each device and the server agree on.
"""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fairfold.algorithms.incremental import chain_of, rows_of
from fairfold.algorithms.ratings import LAST_UPDATE, BayesianRatings
from fairfold.errors import InvalidState
from fairfold.federation.updates import State
from fairfold.flower.client_store import FILE
from fairfold.flower.persistence import RunRecorder
from fairfold.flower.rounds import OTHER_SIZE
from fairfold.flower.strategy import FairStrategy
from fairfold.runs.events import ROUND, read_events
from tests.support.federations import tiny_data
from tests.support.nodes import Nodes, assert_same, cooccurrence_sums, in_process
from tests.support.settings import make_settings

USERS, ITEMS, ROUNDS = 6, 48, 8
KINDS: dict[str, dict[str, Any]] = {
    "ratings": {"algorithm": "ratings", "group_similar": True, "reference_factors": 4},
    "ratings by counts": {"algorithm": "ratings", "popularity": "counts", "reference_factors": 4},
    "ratings streamed": {"algorithm": "ratings", "streamed": True},
}


def federation(kind: str, devices: Path, seed: int, nodes: int = USERS, **options: Any) -> Nodes:
    keys = KINDS[kind] | {
        "rounds": ROUNDS,
        "clients_per_round": None,
        "capacities": "1x-4x",
        "factors": 4,
        "seed": seed,
    }
    data = tiny_data(seed, USERS, ITEMS, KINDS[kind]["algorithm"] == "ratings")
    return in_process(data, make_settings(**keys), nodes, devices, evaluate=False, **options)


def recomputed(nodes: Nodes) -> dict[str, dict[str, torch.Tensor]]:
    """The sums that follow from every client's last update, in double precision, by the algorithm's equations."""
    plan, world = nodes.strategy.plan, nodes.world
    (name,), (own,), d = plan.architecture.tables, plan.architecture.user_vectors, plan.settings.model.factors
    chain, algorithm = chain_of(plan, 0), plan.algorithm
    assert isinstance(algorithm, BayesianRatings)
    users, upload_space = USERS // len(nodes.grid.contexts), algorithm.update_space(chain[-1])
    rows = torch.zeros(upload_space.size // d, d).double()
    algorithm_state = torch.zeros(plan.architecture.user_vectors[own]).double()
    for number in range(len(nodes.grid.contexts)):
        local_state = nodes.kept(number).acknowledged.local_state
        for place, user in enumerate(range(number * users, (number + 1) * users)):
            if not local_state or not bool((local_state[own][place] != 0).any()):
                continue
            items = world.clients.train.of(user)
            start = sum(len(world.clients.train.of(other)) for other in range(number * users, user))
            last = local_state[LAST_UPDATE][start : start + len(items)].double()
            rows.index_add_(0, rows_of(upload_space, items, d), last)
            algorithm_state += local_state[own][place].double()
    return {"sums": {name: rows.view(-1), own: algorithm_state}}


def assert_exact(nodes: Nodes, state: State | None = None) -> None:
    """The server's sums contain every client's last update."""
    state = nodes.strategy.progress.state if state is None else state
    for moment, expected in recomputed(nodes).items():
        found = state.algorithm_state.get(moment, {})
        for key, of in expected.items():
            mine = found.get(key, torch.zeros_like(of))
            assert_same({key: mine.double()}, {key: of}, ROUNDING)


ROUNDING = 3e-6
"""Of the largest number: changes are float32, and were larger before users' vectors settled."""

FAULTS = ("drop", "late", "again", "nan", "infinite", "wrong_size", "out_of_range", None, None)


@pytest.mark.parametrize("nodes", [USERS, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_lost_late_refused_and_repeated_replies(kind: str, nodes: int, tmp_path: Path) -> None:
    """Seeded by the kind: in eight rounds each node fails in about six."""
    chance = random.Random(f"{kind} {nodes}")
    plan: list[tuple[int, str | None]] = []

    def fault(_round: int, node: int) -> str | None:
        plan.append((node, chance.choice(FAULTS)))  # anew where an empty round is tried again
        return plan[-1][1]

    found = federation(kind, tmp_path, 3, nodes, fault=fault)
    found.run()
    counts = found.strategy.progress.rejections.counts
    bad = Counter(fault for _, fault in plan if fault not in (None, "again"))
    assert counts["no update in time"] == bad["drop"] + bad["late"]
    assert counts["NaN or infinity"] == bad["nan"] + bad["infinite"]
    assert (counts["wrong size"], counts["values out of range"]) == (bad["wrong_size"], bad["out_of_range"])
    assert_exact(found)
    held = found.strategy.network_state.acknowledged
    assert len(held) == len({node for node, fault in plan if fault in (None, "again")})


MOMENTS = [4, pytest.param(20, marks=pytest.mark.slow)]


class Killed(BaseException):
    """A process ends here."""


class Mortal:
    """An app whose device, or whose server, is killed at the message that is named."""

    def __init__(self, app: ClientApp) -> None:
        self.app, self.trained, self.device_dies, self.server_dies = app, 0, -1, -1

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self.app(message, context)  # the device has saved what it would remember of this
        if message.metadata.message_type != "train":
            return reply
        self.trained += 1
        if self.trained == self.server_dies:
            raise Killed
        if self.trained == self.device_dies:
            raise RuntimeError("killed")
        return reply


def mortal(kind: str, devices: Path, seed: int, **options: Any) -> tuple[Nodes, Mortal]:
    made: list[Mortal] = []

    def wrapped(app: ClientApp) -> ClientApp:
        made.append(Mortal(app))
        return made[0]  # type: ignore[return-value]

    return federation(kind, devices, seed, app=wrapped, **options), made[0]


@pytest.mark.parametrize("algorithm_state", MOMENTS)
@pytest.mark.parametrize("kind", ["ratings", "ratings by counts"])
def test_a_node_killed_after_saving_and_before_its_update_is_acknowledged(
    kind: str, algorithm_state: int, tmp_path: Path
) -> None:
    """At moments drawn by chance."""
    for moment in random.Random(kind).sample(range(1, USERS * 4), algorithm_state):
        folder = tmp_path / str(moment)
        nodes, app = mortal(kind, folder, moment)
        app.device_dies = moment
        nodes.run(num_rounds=5)
        assert nodes.strategy.progress.rejections.counts == {"the device failed": 1}
        assert_exact(nodes)
        shutil.rmtree(folder)


@pytest.mark.parametrize("algorithm_state", MOMENTS)
@pytest.mark.parametrize("kind", ["ratings", "ratings by counts"])
def test_a_server_killed_before_its_checkpoint_goes_on(kind: str, algorithm_state: int, tmp_path: Path) -> None:
    """Within a round, or when all updates are aggregated and the checkpoint is not yet written."""
    drawn = random.Random(kind).sample(range(1, USERS * 4 + 1), algorithm_state - 2)
    for moment in [*drawn, USERS * 4 + 1, USERS * 4 + 3]:
        folder = tmp_path / str(moment)
        nodes, app = mortal(kind, folder / "devices", moment, folder=folder / "run")
        if moment > USERS * 4:  # after round 1 to 4
            rounds = moment - USERS * 4
            _dies_before_saving(nodes.strategy, rounds)
        else:
            app.server_dies = moment
            rounds = (moment - 1) // USERS + 1
        with pytest.raises(Killed):
            nodes.run()
        again = FairStrategy(nodes.strategy.settings, ITEMS, folder=folder / "run", resume=True,
                             round_timeout=0.0, evaluate=False)  # fmt: skip
        assert again.progress.state.round_number == rounds - 1
        nodes.strategy = again
        nodes.run(num_rounds=3)
        assert nodes.strategy.progress.state.round_number == rounds + 2
        assert not again.progress.rejections.counts
        assert_exact(nodes)
        shutil.rmtree(folder)


def _dies_before_saving(strategy: FairStrategy, rounds: int) -> None:
    """Its updates are aggregated, and no checkpoint is written."""
    record = strategy._recorder
    assert isinstance(record, RunRecorder)
    true = record.save_checkpoint

    def save_checkpoint(progress: Any) -> None:
        if progress.state.round_number == rounds:
            raise Killed
        true(progress)

    record.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


def test_a_server_two_checkpoints_back_is_refused_by_those_who_forgot(tmp_path: Path) -> None:
    """A client stores its last two updates. One that has neither is left out; with none left the run ends."""
    nodes = federation("ratings", tmp_path / "devices", 1, folder=tmp_path / "run")
    nodes.run(num_rounds=5)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert len(checkpoints) >= 1
    nodes.strategy.network_state.acknowledged = {
        name: held ^ 1 for name, held in nodes.strategy.network_state.acknowledged.items()
    }
    with pytest.raises(InvalidState, match="tried 10 times"):
        nodes.run(num_rounds=1)
    assert nodes.strategy.progress.rejections.counts == {"the device failed": 10 * USERS}
    assert nodes.strategy.progress.state.round_number == 5


@pytest.mark.parametrize("wiped", ["words", "everything"])
def test_a_device_whose_state_was_wiped(wiped: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without its updates it is refused; without its id as well it is a new client."""
    nodes = federation("ratings", tmp_path, 1)
    nodes.run(num_rounds=2)
    if wiped == "words":
        (tmp_path / "node-2" / FILE).unlink()
    else:
        shutil.rmtree(tmp_path / "node-2")
    nodes.run(num_rounds=2)
    counts = nodes.strategy.progress.rejections.counts
    if wiped == "words":
        assert counts == {"the device failed": 2}
        assert "a run this device does not know" in caplog.text
    else:
        assert counts["the device failed"] == 1, "the server asks for its name again"
    after = USERS - 1 if wiped == "words" else USERS
    assert [report.num_clients for report in nodes.strategy.progress.history] == [USERS, USERS, USERS - 1, after]


def test_another_run_starts_afresh_on_the_same_devices(tmp_path: Path) -> None:
    first = federation("ratings", tmp_path, 1)
    first.run(num_rounds=3)
    second = federation("ratings", tmp_path, 1)
    second.run(num_rounds=3)
    assert not second.strategy.progress.rejections.counts
    assert_exact(second)
    assert_same(second.strategy.progress.state.full, first.strategy.progress.state.full)


def test_two_tasks_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that comes back while a slow device still trains: the later of the two replies is never sent."""
    nodes, app = mortal("ratings", tmp_path, 1)
    nodes.run(num_rounds=2)
    true, state = app.app, nodes.strategy.progress.state
    inner = ClientApp.__call__
    nested: list[str] = []

    def slow(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and context.node_id == 3 and not nested:
            nested.append("begun")
            import fairfold.flower.client_tasks as device

            train = device.TaskRunner.train

            def overtaken(work: Any) -> Any:
                device.TaskRunner.train = train  # type: ignore[method-assign]
                inner(true, message, context)  # the same device, asked again meanwhile: it is the first to end
                return train(work)

            device.TaskRunner.train = overtaken  # type: ignore[assignment,method-assign]
        return inner(true, message, context)

    app.app = slow  # type: ignore[assignment]
    nodes.run(num_rounds=1)
    assert nodes.strategy.progress.rejections.counts == {"the device failed": 1}
    assert "another task that this device has completed meanwhile" in caplog.text
    app.app = true
    nodes.run(num_rounds=1)
    assert nodes.strategy.progress.state.round_number == state.round_number + 2
    assert_exact(nodes)


def test_a_history_that_grows_or_shrinks_within_a_run_joins_with_the_next(tmp_path: Path) -> None:
    """An update is a change of the last one, about the same interactions."""
    from fairfold.flower.client import make_client_app
    from fairfold.flower.grid import InProcessGrid

    lines = [f"{user},{item},{1 + item % 5}" for user in "ab" for item in range(0, 20, 2 if user == "a" else 3)]
    settings = make_settings(
        algorithm="ratings", group_similar=False, rounds=9, clients_per_round=None, capacities="1x", factors=4
    )
    path = tmp_path / "mine.csv"
    path.write_text("user,item,rating\n" + "\n".join(lines))
    grid = InProcessGrid(make_client_app(path, capacity="1x", state=tmp_path / "state"), [{}])
    strategy = FairStrategy(settings, ITEMS, round_timeout=0.0, evaluate=False)
    for change in (lines, [*lines, "a,47,3", "c,3,5"], lines[:10]):
        path.write_text("user,item,rating\n" + "\n".join(change))
        strategy.start(grid, num_rounds=2)
    assert not strategy.progress.rejections.counts
    sums = strategy.progress.state.algorithm_state["sums"]
    rows = sums["item.weight"].view(ITEMS, -1)
    assert bool((rows[47] == 0).all()), "what was added is no part of this run"
    assert bool((rows[18] != 0).any()), "what was removed still is"


def test_correlations_follow_a_history_that_changes_within_a_run(tmp_path: Path) -> None:
    """The sum is that of the current interactions: new ones are uploaded, lost ones retracted, once."""
    from fairfold.algorithms.cooccurrence.cooccurrence import SUM, history_weights, triangle_items
    from fairfold.config import Settings
    from fairfold.flower.client import make_client_app
    from fairfold.flower.grid import InProcessGrid

    lines = [f"{user},{item}" for user in "ab" for item in range(0, 20, 2 if user == "a" else 3)]
    settings = Settings(
        algorithm={"kind": "co_occurrence", "support": 1, "tune": False}, model={"factors": 4},
        fleet={"capacities": "1x"}, run={"rounds": 20},
    )  # fmt: skip
    path = tmp_path / "mine.csv"
    path.write_text("user,item\n" + "\n".join(lines))
    grid = InProcessGrid(make_client_app(path, capacity="1x", state=tmp_path / "state"), [{}])
    strategy = FairStrategy(settings, ITEMS, round_timeout=0.0, evaluate=False)
    grown, without_b = [*lines, "a,3", "c,3", "c,6"], [line for line in lines if line.startswith("a")][:7]
    for change in (lines, grown, without_b, lines):
        path.write_text("user,item\n" + "\n".join(change))
        strategy.start(grid, num_rounds=3)  # a device that lacks numbers of new items receives them first
        place, sums = strategy.network_state.item_numbers, strategy.progress.state.algorithm_state[SUM][SUM]
        histories = dict[str, list[int]]()
        for user, item in (line.split(",") for line in change):
            histories.setdefault(user, []).append(int(item) if place is None else int(place[int(item)]))
        head = triangle_items(len(sums))
        mine = [torch.tensor(sorted(item for item in items if item < head)) for items in histories.values()]
        wanted = cooccurrence_sums(mine, history_weights(torch.tensor([len(one) for one in mine]), 0.5), head)
        assert sums.equal(wanted.double()), change
    assert set(strategy.progress.rejections.counts) <= {"the device failed"}


@pytest.mark.parametrize("kind", ["ratings", "ratings by counts"])
def test_a_device_that_can_hold_another_size_changes_no_sums_but_its_own(kind: str, tmp_path: Path) -> None:
    """In round 3 the first can hold less, and the last can hold more, than at their first update."""
    changed = {0: "4x", USERS - 1: "1x"}

    def fault(number: int, node: int) -> str | None:
        if number == 2 and node in changed:
            place = next(of for of, one in nodes.grid.contexts.items() if one.node_config["partition-id"] == node)
            nodes.grid.contexts[place].node_config["capacity"] = changed[node]
            nodes.strategy.nodes.mark_failed(place)
        return None

    nodes = federation(kind, tmp_path / "devices", 0, fault=fault, folder=tmp_path / "run")
    nodes.run()
    found = {node.partition_id: node for node in nodes.strategy.nodes.usable.values()}
    assert [str(found[node].capacity) for node in changed] == list(changed.values()), "they were asked again"
    assert found[USERS - 1].rounds == ROUNDS, "who can hold more goes on as it was"
    assert found[0].rounds == 3, "the word of who can hold less stays"
    rounds = [event for event in read_events(tmp_path / "run") if event["event"] == ROUND]
    assert OTHER_SIZE in rounds[-1]["left_out"].values()
    for moment, sums in recomputed(nodes).items():
        assert_same(
            {key: of.double() for key, of in nodes.strategy.progress.state.algorithm_state[moment].items()}, sums, 1e-5
        )
