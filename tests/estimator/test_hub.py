"""A folder to share, as the Hugging Face hub has them: it recommends as the device would, and reports no user."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import fairfold
from fairfold.errors import FairfoldError, InvalidCheckpoint, InvalidData, InvalidSettings
from fairfold.estimator import Model
from tests.estimator.test_fit import fitted, rows


@pytest.fixture(scope="module")
def model() -> Model:
    named = [(f"secret-person-{user}", f"book {item.removeprefix('i')}") for user, item in rows().iter_rows()]
    return fitted(named, capacities="1x-16x", titles={"book 3": "The Third"})


@pytest.mark.parametrize("capacity", ["1x", "16x"])
def test_it_recommends_as_the_device_would(model: Model, capacity: str, tmp_path: Path) -> None:
    shared = fairfold.from_pretrained(model.save_pretrained(tmp_path / "shared", capacity))
    for history in (["book 3", "book 5"], ["book 7"], [f"book {item}" for item in range(10, 20)]):
        mine, theirs = shared.recommend(history, 5), model.recommend(history, 5, capacity=capacity)
        assert mine.items.tolist() == theirs.items.tolist()
        assert mine.scores == pytest.approx(theirs.scores)
    assert (
        shared.similar("book 3", 4).items.tolist() == model.recommend(["book 3"], 4, capacity=capacity).items.tolist()
    )
    assert f"80 items, {capacity}" in repr(shared)
    everything = shared.recommend(["book 5"], 100)
    assert len(everything) == 79
    assert dict(zip(everything.items.tolist(), everything.titles.tolist(), strict=True))["book 3"] == "The Third"


def test_no_user_is_in_it(model: Model, tmp_path: Path) -> None:
    folder = model.save_pretrained(tmp_path / "shared")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert not any(b"secret-person" in path.read_bytes() for path in folder.iterdir())


def test_the_card_can_be_read_and_its_lines_run(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model.save_pretrained(tmp_path / "shared", "16x", title="Books of a village")
    text = (folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    facts: dict[str, Any] = yaml.safe_load(front)
    assert facts["library_name"] == "fairfold"
    (metric,) = facts["model-index"][0]["results"][0]["metrics"]
    assert metric["name"] == "NDCG@20"
    held = model.evaluate().loc["16x", "ndcg@20"]
    assert metric["value"] == pytest.approx(held, abs=5e-5)
    assert re.search(rf"[|] 16x [|] [\d.]+ k?B [|] {held:.4f} [|]", body)
    assert "| popularity | | " in body
    (code,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code, names)
    assert len(names["items"]) == 10


def test_the_hub_takes_the_card(model: Model, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install huggingface_hub")
    found = hub.ModelCard.load(model.save_pretrained(tmp_path / "shared") / "README.md")
    assert found.data.library_name == "fairfold"
    assert found.data.eval_results[0].metric_type == "ndcg"


def test_what_is_no_such_folder_is_refused(model: Model, tmp_path: Path) -> None:
    folder = model.save_pretrained(tmp_path / "shared")
    with pytest.raises(InvalidSettings, match="holds something"):
        model.save_pretrained(folder)
    with pytest.raises(InvalidData, match=r"config\.json"):
        fairfold.from_pretrained(tmp_path)
    with pytest.raises(FairfoldError, match="from_pretrained"):
        fairfold.load(folder)
    shared = fairfold.from_pretrained(folder)
    with pytest.raises(InvalidData, match="did you mean 'book 3"):
        shared.recommend(["bok 3"])
    assert shared.recommend([], k=3).note == "The most popular items."
    assert len(shared.recommend([], k=3)) == 3
    config = json.loads((folder / "config.json").read_text())
    for change in ({"format": 2}, {"items": config["items"][:5]}, {"pair_weight": "much"}):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InvalidCheckpoint):
            fairfold.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(InvalidCheckpoint):
        fairfold.from_pretrained(folder)


def test_a_model_with_users_in_it_is_refused(tmp_path: Path) -> None:
    model = fitted(rows(20, 40), recipe="paper", settings={}, rounds=1)
    with pytest.raises(InvalidSettings, match=r"model\.save"):
        model.save_pretrained(tmp_path / "shared")
