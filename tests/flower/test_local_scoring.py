"""Every recipe is served: on its devices, from a history on the server, and by the example's loader without torch."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from examples.serving import load_fair
from fairfold.config.files import load_settings
from fairfold.data import Interactions
from fairfold.device.stored_model import MODEL_FILE
from fairfold.federation.algorithm import CompactScoring
from fairfold.flower import local_scoring
from fairfold.flower.client_store import ClientStore
from fairfold.flower.fleet.node import NodeFolder
from fairfold.flower.local_data import LocalFile
from fairfold.runs.device_model import read_device_model
from fairfold.runs.loaded import load_run
from fairfold.runs.train import run
from tests.support.commands import fails, works
from tests.support.federations import tiny_data
from tests.support.nodes import Nodes, in_process

ROOT = Path(__file__).parents[2]
USERS, ITEMS = 9, 160
RECIPES = ["paper", "authors", "fair", "ratings"]
CHANGES: dict[str, Any] = {
    "fleet.capacities": "1x-4x-16x", "fleet.clients_per_round": None, "run.rounds": 2, "run.evaluate_every": 2,
    "run.baselines": False,
}  # fmt: skip


@pytest.fixture(scope="module", params=RECIPES)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Nodes, Path]:
    place = tmp_path_factory.mktemp(request.param)
    data = tiny_data(3, USERS, ITEMS, ratings=request.param == "ratings")
    nodes = in_process(data, load_settings(None, CHANGES, request.param), 3, place / "devices", folder=place / "run")
    nodes.strategy.start(nodes.grid)
    return nodes, place


def expected_scores(nodes: Nodes, place: Path, number: int, user: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of all items by the catalogue's numbers, from whole tensors; and the user's own items."""
    plan, own = nodes.strategy.plan, nodes.world.clients.train.of(user)
    device, _ = read_device_model(place / "devices" / f"node-{number}" / MODEL_FILE)
    clients = nodes.world.clients
    state = ClientStore(place / "devices" / f"node-{number}").load()
    stored = state.acknowledged.local_state
    for name in plan.architecture.user_vectors.keys() & stored.keys() & clients.local_state.keys():
        rows = stored[name]
        clients.local_state[name][[int(name) for name in state.user_names]] = rows
    scores = plan.algorithm.scorer(nodes.world.plan, device.recovered(), [], clients)(torch.tensor([user]))[0]
    order = nodes.strategy.network_state.item_numbers
    order = torch.arange(ITEMS) if order is None else order
    return scores[order], order.argsort()[own]


def write_file(path: Path, nodes: Nodes, user: int, items: torch.Tensor) -> None:
    ratings = (
        nodes.world.clients.train.ratings_of(user).tolist() if nodes.world.clients.train.ratings is not None else []
    )
    rows = [f"{user},{item}" for item in items.tolist()]
    rows = [f"{row},{rating}" for row, rating in zip(rows, ratings, strict=True)] if ratings else rows
    path.write_text("\n".join(["user,item" + ",rating" * bool(ratings), *rows]) + "\n")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_device_recommends_by_its_model_and_its_users_own_vector(
    fleet: tuple[Nodes, Path], number: int, tmp_path: Path
) -> None:
    nodes, place = fleet
    user = USERS // 3 * number + 1
    scores, own = expected_scores(nodes, place, number, user)
    write_file(tmp_path / "mine.csv", nodes, user, own)
    found = local_scoring.recommend(
        place / "devices" / f"node-{number}", LocalFile(tmp_path / "mine.csv"), str(user), 5
    )
    scores[own] = -torch.inf
    best = scores.topk(5)
    numpy.testing.assert_allclose([score for _, score in found], best.values.numpy(), rtol=1e-4, atol=1e-6)
    numpy.testing.assert_allclose(scores[[item for item, _ in found]], best.values, rtol=1e-4, atol=1e-6)


def test_the_commands_serve_what_was_trained(fleet: tuple[Nodes, Path], tmp_path: Path) -> None:
    nodes, place = fleet
    _, own = expected_scores(nodes, place, 0, 1)
    write_file(tmp_path / "mine.csv", nodes, 1, own)
    NodeFolder(tmp_path, "a.example:8000", str(tmp_path / "mine.csv"), "1x").save()
    (tmp_path / "state").symlink_to(place / "devices" / "node-0")
    shown = works("node", "recommend", str(tmp_path), "--top", "3")
    assert shown.count("│") == 12
    assert f"Left out: the {len(own)} items" in shown
    for given, count in ((ITEMS - 1, "159"), (ITEMS + 1, "161")):
        (tmp_path / "catalogue.txt").write_text("".join(f"{item}\n" for item in range(given)))
        refused = " ".join(fails("node", "recommend", str(tmp_path)).split())
        assert f"{count} names, for a model of 160 items" in refused
        assert "`fairfold node enrol TOKEN --server" in refused
    (tmp_path / "catalogue.txt").write_text("".join(f"name {item}\n" for item in range(ITEMS)))
    named = (tmp_path / "mine.csv").read_text()
    (tmp_path / "mine.csv").write_text(re.sub(r"^1,", "1,name ", named, flags=re.MULTILINE))
    assert "name " in works("node", "recommend", str(tmp_path))
    (tmp_path / "mine.csv").write_text(named)
    (tmp_path / "catalogue.txt").unlink()
    rated = nodes.world.clients.train.ratings is not None
    history = tmp_path / "history"
    history.write_text("#3 4\n#7 2\n" if rated else "#3\n#7\n")
    for capacity in ([], ["--capacity", "16x"]):  # the run is found in the folder of its server
        assert "Left out: the 2 items" in works("recommend", str(place), "--history", str(history), *capacity)
    refused = " ".join(fails("recommend", str(place / "run"), "--user", "1").split())
    assert "`fairfold node recommend DEVICE --user 1`" in refused
    assert "--history 1,5,9`" in refused
    assert "is not the folder of a device" in fails("node", "recommend", str(place / "elsewhere"))
    refused = " ".join(fails("node", "recommend", str(place / "run"), "--data", str(tmp_path / "mine.csv")).split())
    assert f"`fairfold recommend {place / 'run'} --history 1,5,9`" in refused  # its model is the server's
    (tmp_path / "local" / "nodes" / "0").mkdir(parents=True)
    refused = " ".join(fails("node", "recommend", str(tmp_path / "local")).split())
    assert f"`fairfold node recommend {tmp_path / 'local'}/nodes/0`" in refused
    assert "such as 1. " in fails("node", "recommend", str(tmp_path), "--user", "99")
    (tmp_path / "mine.csv").write_text("user,item,rating\n")
    assert "holds no interactions" in fails("node", "recommend", str(tmp_path))
    (tmp_path / "mine.csv").write_text("user,item,rating\n1,9999,3\n")
    assert "are not in the catalogue" in fails("node", "recommend", str(tmp_path))


def test_a_user_who_came_after_training_is_folded_in(fleet: tuple[Nodes, Path], tmp_path: Path) -> None:
    """Their recommendations follow from their items: two users with the same items get the same ones."""
    nodes, place = fleet
    _, own = expected_scores(nodes, place, 0, 1)
    write_file(tmp_path / "mine.csv", nodes, 1, own)
    text = (tmp_path / "mine.csv").read_text().replace("\n1,", "\nnew,")
    (tmp_path / "new.csv").write_text(text)
    found = local_scoring.recommend(place / "devices" / "node-0", LocalFile(tmp_path / "new.csv"), "new", 5)
    again = local_scoring.recommend(place / "devices" / "node-0", LocalFile(tmp_path / "new.csv"), "new", 5)
    assert found == again
    assert len(found) == 5
    assert not {item for item, _ in found} & set(own.tolist())


@pytest.mark.parametrize("recipe", ["paper", "authors"])
def test_a_history_folded_in_finds_its_own_items(recipe: str, tmp_path: Path) -> None:
    """Folded into the trained tables, a user's items score above others, as often as by trained vectors."""
    changes = CHANGES | {
        "data.users": 40,
        "data.items": 60,
        "data.interactions_per_user": 12,
        "run.rounds": 20,
        "algorithm.local_lr": 0.02,
    }
    run(load_settings(None, changes, recipe), tmp_path)
    loaded = load_run(tmp_path)
    history = loaded.interactions.train
    score = loaded.scorer(loaded.progress.state.full, None, history)(torch.arange(40))
    trained = loaded.scorer(loaded.progress.state.full)(torch.arange(40))

    def share_above(scores: torch.Tensor) -> float:
        own = torch.zeros(40, 60, dtype=torch.bool)
        own[history.users, history.items] = True
        pairs = [(row[mine][:, None] > row[~mine]).double().mean() for row, mine in zip(scores, own, strict=True)]
        return float(torch.stack(pairs).mean())

    assert share_above(score) > 0.6
    assert share_above(score) > share_above(trained) - 0.05


@pytest.mark.parametrize("capacity", ["1x", "4x", "16x"])
@pytest.mark.parametrize("recipe", ["paper", "authors", "fair"])
def test_the_example_scores_compact_tables_as_the_product_does(recipe: str, capacity: str, tmp_path: Path) -> None:
    run(
        load_settings(None, CHANGES | {"data.users": 12, "data.items": 90, "data.interactions_per_user": 12}, recipe),
        tmp_path / "run",
    )
    works("export", str(tmp_path / "run"), "--capacity", capacity, "--out", str(tmp_path / "model"))
    loaded, history = load_run(tmp_path / "run"), [2, 5, 40]
    device, _ = read_device_model(tmp_path / "model")
    clients, user = loaded.federation.clients, None
    if recipe == "fair":
        clients = loaded.clients(Interactions.from_pairs(torch.zeros(3).long(), torch.tensor(history), 1, 90))
    else:
        user = {name: rows[0].numpy() for name, rows in loaded.progress.local_state.items()}
    score = CompactScoring.of(loaded.plan.algorithm).compact_scorer(
        loaded.plan, device.projections, device.stored(), clients
    )
    found = load_fair.scores(load_fair.load(str(tmp_path / "model")), history, user)
    numpy.testing.assert_allclose(found, score(torch.tensor([0]))[0].numpy(), rtol=1e-4, atol=1e-6)
    if recipe == "fair":
        path = ROOT / "examples" / "serving" / "load_fair.py"
        code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
        given = [sys.executable, "-c", code, str(path), str(tmp_path / "model"), "2,5,40"]
        assert len(subprocess.run(given, capture_output=True, text=True, check=True).stdout.splitlines()) == 10


def test_the_example_is_short() -> None:
    assert len((ROOT / "examples" / "serving" / "load_fair.py").read_text().splitlines()) <= 60
