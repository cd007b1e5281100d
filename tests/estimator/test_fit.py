"""Three lines: fit, recommend, keep."""

import io
from pathlib import Path
from typing import Any

import numpy
import polars
import pytest
import torch
from rich.console import Console

import fairfold
from fairfold.config.files import load_settings
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.estimator import Model
from fairfold.federation.evaluation import Callback
from fairfold.federation.simulation import simulate
from fairfold.runs import progress
from fairfold.runs.device_model import read_device_model

QUICK = {"run.rounds": 1, "algorithm.tune": False}


def rows(users: int = 60, items: int = 80, seed: int = 0) -> polars.DataFrame:
    world = SyntheticDataset(users=users, items=items, interactions_per_user=20, seed=seed).dataset()
    found = [torch.cat([getattr(world.train, of), getattr(world.test, of)]).numpy() for of in ("users", "items")]
    return polars.DataFrame({"user_id": found[0], "item_id": [f"i{item}" for item in found[1]]})


def fitted(data: Any, **given: Any) -> Model:
    usual: dict[str, Any] = {"settings": QUICK, "progress": False}
    return fairfold.fit(data, **usual | given)


@pytest.fixture(scope="module")
def model() -> Model:
    titles = {f"i{item}": f"Item {item}" for item in range(80)}
    return fitted(rows(), capacities="1x-4x", titles=titles)


def test_it_is_the_run_that_simulate_makes(model: Model) -> None:
    settings = load_settings(None, {"data.name": "x", "fleet.capacities": "1x-4x", **QUICK}, "default")
    result = simulate(settings, data=model.data)
    assert result.quality == model.result.quality
    assert all(torch.equal(vector, model.result.state.full[name]) for name, vector in result.state.full.items())
    assert model.result.quality > model.result.baselines["popularity"]


def test_a_user_gets_what_is_best_and_new(model: Model) -> None:
    had = set(rows().filter(polars.col("user_id") == 7)["item_id"])
    items, scores = model.recommend(7, k=5)
    assert len(items) == 5
    train = {model.data.item_ids[item] for item in model.data.train.of(model.user_index[7]).tolist()}  # type: ignore[index]
    assert train < had
    assert not train & set(items)
    assert (numpy.diff(scores) <= 0).all()
    both = model.recommend(users=[3, numpy.int64(7)], k=5)
    assert both.items.shape == (2, 5)
    assert (both.items[1] == items).all()
    assert model.recommend(7, k=1).titles[0] == f"Item {items[0][1:]}"


def test_a_new_user_is_their_history(model: Model) -> None:
    mine = [model.data.item_ids[item] for item in model.data.train.of(4).tolist()]  # type: ignore[index]
    known = model.recommend(model.data.user_ids[4], k=8)  # type: ignore[index]
    for history in (mine, numpy.array(mine), tuple(mine)):
        assert (model.recommend(history, k=8).items == known.items).all()
    assert (model.recommend(history=mine, k=8, capacity="4x").items[:3] != "").all()
    with pytest.raises(InvalidData, match="recommend\\(history"):
        model.recommend(999)
    with pytest.raises(InvalidData, match=r"item 'ii3' \(did you mean 'i3'\?\)"):
        model.similar("ii3")
    with pytest.raises(InvalidSettings, match="one of them"):
        model.recommend()


def test_items_that_are_like_one(model: Model) -> None:
    found = model.similar("i3", k=4)
    assert "i3" not in found.items
    assert len(found.items) == 4
    by_vectors = fitted(rows(), recipe="paper", capacities="1x", settings={"run.rounds": 1}).similar("i3", k=4)
    assert "i3" not in by_vectors.items
    assert (numpy.diff(by_vectors.scores) <= 0).all()


def test_saved_and_loaded_it_is_the_same(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "moved")
    again = fairfold.load(tmp_path / "moved")
    assert repr(again) == repr(model)
    assert (again.recommend(7).items == model.recommend(7).items).all()
    assert again.recommend(7).titles[0] == model.recommend(7).titles[0]
    again.save(tmp_path / "copy")
    with pytest.raises(InvalidSettings, match=r"save to .* a new or empty folder\. Name another, or remove it"):
        model.save(tmp_path / "copy")


def test_a_device_model_as_a_file(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "device.safetensors"
    device = model.export("4x", path)
    again, recorded = read_device_model(path)
    assert again.size == device.size
    assert (recorded["capacity"], recorded["trained"]) == ("4x", True)
    assert sum(held.bytes for held in device.projections.values()) < 4 * 80 * 80
    assert repr(device).startswith(f"<fairfold.DeviceModel of 4x: {device.size:,} numbers (rows ")


def test_new_interactions_join_those_of_a_model(model: Model) -> None:
    new = polars.DataFrame({"user_id": [900, 900, 900, 7], "item_id": ["i1", "i2", "new", "new"]})
    grown = fitted(new, start=model, settings={}, split=1.0)
    assert (grown.data.num_users, grown.data.num_items) == (model.data.num_users + 1, model.data.num_items + 1)
    assert "new" not in grown.recommend(7, k=50).items
    assert len(grown.recommend(900, k=3)) == 3
    assert grown.result.settings.fleet.capacities == "1x-4x"
    whole = fitted(grown.data, capacities="1x-4x")  # one sum over devices: as if they had been together
    assert whole.result.quality == pytest.approx(grown.result.quality)


def test_tables_that_are_trained_go_on_from_where_they_were() -> None:
    given: dict[str, Any] = {"recipe": "paper", "capacities": "1x", "seed": 3}
    data = rows(20, 60)
    first = fitted(data, settings={"run.rounds": 3}, **given)
    same = fitted(data.head(1), settings={"algorithm.local_lr": 1e-12, "run.rounds": 1}, start=first, split=1.0)
    for name, (many, width) in first.run.plan.architecture.tables.items():
        old = first.run.progress.state.full[name].view(many, width)
        new = same.run.progress.state.full[name].view(many, width)
        places = [same.data.item_ids.index(word) for word in first.data.item_ids]  # type: ignore[union-attr]
        assert torch.allclose(new[places], old, atol=1e-5), name


def test_seeds_and_callbacks() -> None:
    recorded: list[str] = []

    class Recorder(Callback):
        def on_start(self, *_: Any) -> None:
            recorded.append("start")

        def on_round(self, report: Any) -> None:
            recorded.append(f"round {report.round_number}")

        def on_end(self, result: Any) -> None:
            recorded.append("end")

        def close(self) -> None:
            recorded.append("close")

    given: dict[str, Any] = {"recipe": "paper", "capacities": "1x", "settings": {"run.rounds": 2}}
    models = [fitted(rows(20, 60), seed=seed, callbacks=[Recorder()], **given) for seed in (1, 1, 2)]
    assert recorded[:5] == ["start", "round 1", "round 2", "end", "close"]
    first, second, third = (next(iter(one.run.progress.state.full.values())) for one in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_ratings(tmp_path: Path) -> None:
    frame = rows().with_columns(rating=polars.Series(numpy.random.default_rng(1).integers(1, 6, rows().height)))
    model = fitted(frame, recipe="ratings", settings={"run.rounds": 2, "fleet.capacities": "1x"})
    assert model.result.metric == "MSE"
    assert len(model.recommend({"i1": 5, "i2": 1}, k=3)) == 3
    assert (fairfold.load(model.save(tmp_path / "rated")).recommend(7).items == model.recommend(7).items).all()


def test_devices_that_hold_less_than_they_may_are_in_the_notes() -> None:
    def recorded(support: int) -> list[str]:
        own = {"run.rounds": 1, "subspace.support": support}
        model = fitted(rows(), capacities="1x-4x", method="fair", settings=own)
        return [line for line in model.result.notes if "Capped by support" in line]

    (line,) = recorded(30)
    assert "1x" in line
    assert "fewer than 30 users" in line
    assert not recorded(0)


def test_how_it_shows_itself(model: Model, tmp_path: Path) -> None:
    assert repr(model).startswith("<fairfold.Model of 60 users × 80 items, co_occurrence, NDCG@20: 1x 0.")
    html = model._repr_html_()
    assert "popularity" in html
    assert "60 users × 80 items" in html
    pandas = pytest.importorskip("pandas")
    assert isinstance(model.to_pandas(), pandas.DataFrame)
    assert list(model.to_pandas()["devices"]) == ["1x", "4x", "server"]
    assert len(model.to_pandas("rounds")) == 1
    assert list(model.recommend(7, k=2).to_pandas()["rank"]) == [1, 2]
    pytest.importorskip("matplotlib")
    model.plot(tmp_path / "plot.png")
    assert model.plot()._repr_png_() == model.plot()._repr_png_()  # type: ignore[attr-defined]


def test_a_pipe_gets_lines_and_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.02)
    out = io.StringIO()
    display = progress.Display(Console(file=out, width=140))
    settings = load_settings(None, {}, "default")
    display.on_start(settings, [], 1)
    for _ in range(500):
        if "goes on" in out.getvalue():
            break
        display._ended.wait(0.01)
    display.close()
    assert f"round 1/{settings.run.rounds} goes on" in out.getvalue()


def test_settings_that_do_not_exist_are_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidSettings, match="did you mean 'rounds'"):
        fairfold.fit(rows(), settings={"run.round": 3})
    with pytest.raises(InvalidSettings, match="did you mean 'default'"):
        fairfold.fit(rows(), recipe="defualt")
    with pytest.raises(InvalidSettings, match="did you mean 'capacities'"):
        fairfold.fit(rows(), capacity="1x")
