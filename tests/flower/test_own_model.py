"""A model of the user's own over messages: the numbers of the simulator's loop; refused where the two sides differ."""

import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message

from fairfold.data import Dataset
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidState
from fairfold.flower.client import make_client_app
from fairfold.flower.grid import InProcessGrid
from fairfold.flower.local_data import LocalData, node_partition
from fairfold.flower.protocol import FACTS
from fairfold.flower.strategy import FairStrategy
from tests.flower.test_parity import check
from tests.support import own_models
from tests.support.federations import tiny_settings

OWN = "tests.support.own_models:BiasedMF"


def test_rankings_as_in_the_loop(tmp_path: Path) -> None:
    check("fair", "1x-4x", tmp_path, faults=False, model=OWN, rehash=True, local_epochs=2)


def test_ratings_as_in_the_loop(tmp_path: Path) -> None:
    changes = {"model": "tests.support.own_models:Bilinear", "ratings": True, "rated": True, "local_lr": 0.02}
    check("fair", "1x-4x", tmp_path, faults=False, **changes)


@pytest.fixture(scope="module")
def world() -> Dataset:
    """Eighty users."""
    return SyntheticDataset(users=80, items=200, interactions_per_user=40).dataset()


def federation(
    world: Dataset, state: Path, given: str | None, model: str = OWN, **changes: Any
) -> tuple[FairStrategy, InProcessGrid]:
    """Four nodes that were given a model, and a server that asks for one; a round is not tried again."""

    def data(context: Context, _num_items: int) -> LocalData:
        return node_partition(world, context)

    app = make_client_app(data, model=given, state=state, repeatable=True)
    sizes = ("1x", "2x", "1x", "2x")
    grid = InProcessGrid(
        app,
        [{"partition-id": number, "num-partitions": 4, "capacity": size} for number, size in enumerate(sizes)],
    )
    settings = tiny_settings(
        model=model, clients_per_round=None, capacities="1x-2x", aggregation="delta", server_lr=0.1, batch_size=64,
        network={"max_failed_rounds": 1}, **changes,
    )  # fmt: skip
    return FairStrategy(settings, world.num_items, wait_timeout=0.0), grid


def test_it_learns(world: Dataset, tmp_path: Path) -> None:
    strategy, grid = federation(world, tmp_path, OWN, rounds=12, evaluate_every=1)
    strategy.start(grid)
    first, last = (strategy.progress.history[number].quality for number in (0, -1))
    assert not strategy.progress.rejections.counts
    assert first is not None
    assert last is not None
    assert last.server > 1.2 * first.server


@pytest.mark.parametrize(
    ("given", "asked"),
    [(None, OWN), (OWN, "neumf"), ("neumf", OWN), ("tests.support.own_models:Larger", OWN), ("neumf", "mf")],
)
def test_nodes_with_another_model_are_left_out_by_name(
    given: str | None, asked: str, world: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, grid = federation(world, tmp_path, given, asked, rounds=1)
    with caplog.at_level(logging.WARNING, "fairfold.flower"), pytest.raises(InvalidState, match="no node is there"):
        strategy.start(grid)
    assert not strategy.nodes.usable
    assert len(strategy.nodes.left_out) == 4
    mine = "fairfold's own models" if given is None else repr(given)
    assert f"it trains {mine}, and this run is of {asked!r}" in caplog.text


def test_a_device_does_not_load_what_only_the_server_names(
    world: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that lies about what it was given, or never asked: the module it names is not even imported."""
    strategy, grid = federation(world, tmp_path, None, rounds=1)

    def agree(message: Message) -> None:
        if message.metadata.message_type == "query.capacity":
            facts = message.content[FACTS]
            assert isinstance(facts, ConfigRecord)
            facts["model"] = OWN

    grid.inspect = agree
    made = []
    with monkeypatch.context() as patched:
        patched.setattr("fairfold.flower.client_tasks.TaskRunner", lambda *_: made.append(1))
        with pytest.raises(InvalidState, match="4 × the device failed"):
            strategy.start(grid)
    assert len(strategy.nodes.usable) == 4
    assert strategy.progress.rejections.counts == {"the device failed": 4}
    assert f"a task for model.kind={OWN!r}" in caplog.text
    assert not made


def test_another_version_of_the_same_model_is_refused(
    world: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, grid = federation(world, tmp_path, OWN, rounds=1)
    monkeypatch.setattr(own_models, "BiasedMF", own_models.Larger)
    before = {name: vector.clone() for name, vector in strategy.progress.state.full.items()}
    with pytest.raises(InvalidState, match="4 × the device failed"):
        strategy.start(grid)
    assert strategy.progress.rejections.counts == {"the device failed": 4}
    assert "both sides have the same model" in caplog.text
    assert all(before[name].equal(vector) for name, vector in strategy.progress.state.full.items())
