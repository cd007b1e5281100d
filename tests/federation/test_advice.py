"""A run below popularity says so first, and names settings that help; any other run says nothing."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fairfold
from fairfold.cli.federate import _warnings
from fairfold.config import Settings
from fairfold.config.files import load_settings, recipes
from fairfold.config.settings import read_settings
from fairfold.data.synthetic import SyntheticDataset
from fairfold.federation.evaluation import CATALOGUE_ORDER, POPULARITY, below_popularity
from fairfold.federation.simulation import simulate
from fairfold.flower.fleet.training import TrainingLauncher
from fairfold.metrics import evaluate_ranking
from fairfold.runs.folder import RunFolder, read_result
from tests.support.commands import TINY, works
from tests.support.federations import tiny_data
from tests.support.nodes import in_process
from tests.support.settings import make_settings


def advised(line: str) -> dict[str, Any]:
    """The settings that a sentence names by ``--set``."""
    words = line.rstrip(".").replace(",", " ").split()
    named = [after for word, after in pairwise(words) if word == "--set"]
    return {key: float(value) for key, value in (word.split("=") for word in named)}


@pytest.mark.parametrize("name", [name for name in recipes() if name != "ratings"])
def test_what_is_advised_are_settings(name: str) -> None:
    settings = load_settings(None, {}, name)
    (line,) = below_popularity(settings, 0.2, 0.25)
    assert line.startswith("Below popularity: NDCG@20 is 0.2000, and 0.2500 ")
    settings.with_changes(advised(line))  # none is refused


def test_gradient_steps_are_sent_to_fair_and_to_larger_values() -> None:
    (line,) = below_popularity(load_settings(None, {}, "authors"), 0.2, 0.25)
    assert "--recipe fair" in line
    assert "--rounds 400" in line
    assert advised(line) == {"fleet.clients_per_round": 60, "algorithm.local_lr": 0.01}
    (line,) = below_popularity(load_settings(None, {}, "fair"), 0.2, 0.25)
    assert "--recipe fair" not in line
    assert advised(line) == {"algorithm.item_ridge": 0.004}
    everybody = load_settings(None, {"fleet.clients_per_round": None}, "authors")
    assert "clients_per_round" not in below_popularity(everybody, 0.2, 0.25)[0]


def test_newton_steps_of_few_clients_are_sent_to_all_of_them_or_to_more_rounds() -> None:
    few = load_settings(None, {"fleet.clients_per_round": 10}, "fair")
    (line,) = below_popularity(few, 0.2, 0.25)
    assert "fleet.clients_per_round=none" in line
    assert "--rounds 100." in line
    assert "item_ridge" not in line


def test_other_runs_say_nothing() -> None:
    settings = load_settings(None, {}, "fair")
    assert not below_popularity(settings, 0.25, 0.25)
    assert not below_popularity(settings, 0.2, None)
    assert not below_popularity(settings, float("nan"), 0.25)
    assert not below_popularity(load_settings(None, {"data.name": "ml-1m"}, "ratings"), 0.2, 0.25)
    assert not below_popularity(read_settings({"model": {"kind": "mlp"}, "data": {"name": "mnist"}}), 0.2, 0.25)


def test_train_says_it_before_the_table_and_in_its_files(tmp_path: Path) -> None:
    out = tmp_path / "run"
    output = works("train", "--recipe", "authors", *TINY, "--rounds", "1", "--out", str(out))
    assert output.index("Below popularity: ") < output.index("by device size")
    assert "Below popularity: " in (out / "result.json").read_text()
    world = ["--set", "data.users=200", "--set", "data.items=300", "--set", "run.baselines=false"]
    good = works("train", "--recipe", "fair", *world, "--rounds", "5", "--out", str(tmp_path / "good"))
    assert "Below popularity" not in good


def test_fit_says_it_in_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    readings = [(user, item) for user in range(30) for item in range(user % 3, 60, 3)]
    given: dict[str, Any] = {"recipe": "authors", "rounds": 1, "capacities": "1x"}
    model = fairfold.fit(readings, **given)
    worse = model.result.quality < model.result.baselines[POPULARITY]
    assert bool(model.result.warnings) == worse
    assert ("Below popularity" in capsys.readouterr().out) == worse
    assert ("Below popularity" in model._repr_html_()) == worse


def test_a_fleet_on_one_machine_is_compared_with_its_users_popularity() -> None:
    data, settings = tiny_data(1), Settings()
    assert _warnings(settings, data, None) == []
    assert _warnings(settings, data, 1.0) == []
    (line,) = _warnings(settings, data.__class__("tiny", data.train.where(data.train.items < 3), data.train), -0.1)
    assert line.startswith("Below popularity")


@pytest.mark.parametrize("popularity", ["counts", "none"])
def test_a_fleet_measures_the_items_order_before_its_first_step_and_says_so(popularity: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 1, "evaluate_every": 1, "capacities": "1x-2x", "clients_per_round": None}
    data = SyntheticDataset(users=12, items=40, interactions_per_user=14).dataset()
    settings = make_settings(algorithm="closed_form", mapping="ranked", popularity=popularity, local_lr=1e-9, **keys)
    nodes = in_process(data, settings, 4, tmp_path, folder=tmp_path / "run")
    nodes.run()
    result, name = read_result(tmp_path / "run"), POPULARITY if popularity == "counts" else CATALOGUE_ORDER
    order = -torch.arange(40).float()
    ordered = nodes.world.interactions if popularity == "counts" else data
    expected = evaluate_ranking(
        lambda users: order.repeat(len(users), 1), ordered.train, ordered.test, settings.run.top
    )
    assert result["server"]["baselines"] == {name: pytest.approx(expected.ndcg, rel=1e-6)}
    assert result["server"]["quality"] < expected.ndcg
    (line,) = result["warnings"]
    assert line.startswith(
        f"Below {name}: NDCG@20 is {result['server']['quality']:.4f}, and {expected.ndcg:.4f} by the "
    )


def test_server_train_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works("server", "init", str(tmp_path / "fleet"), "--host", "localhost", "--items", "40", "--recipe", "authors")

    def trained(launcher: TrainingLauncher, *_: Any, **__: Any) -> None:
        settings = launcher.server.settings(1)
        run = simulate(settings, data=SyntheticDataset(users=12, items=40, interactions_per_user=14).dataset())
        run = replace(run, quality=0.2, baselines={CATALOGUE_ORDER: 0.25})
        launcher.server.run.mkdir()
        RunFolder(launcher.server.run).begin(settings, run.history)
        RunFolder(launcher.server.run).finish(run, 1.0, "done", {})

    monkeypatch.setattr(TrainingLauncher, "train", trained)
    output = works("server", "train", str(tmp_path / "fleet"), "--rounds", "1")
    assert output.index("Below order of the catalogue: NDCG@20 is 0.2000, and 0.2500") < output.index("Trained.")
    assert "--recipe fair" in output
