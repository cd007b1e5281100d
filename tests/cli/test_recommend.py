"""Recommend and export, as a person meets them."""

import re
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold.config.files import load_settings
from fairfold.runs.device_model import read_device_model
from fairfold.runs.folder import read_run_settings
from fairfold.runs.loaded import item_name, load_run
from fairfold.runs.train import run
from tests.support.commands import WORLD, fails, works
from tests.support.runs import GRADIENT, RANKED, small


def test_recommend_by_original_ids_with_titles(tmp_path: Path, ratings_folder: Path) -> None:
    out = tmp_path / "run"
    works("train", "--data", str(ratings_folder), "--rounds", "2", "--capacities", "1x-2x",
          "--set", "fleet.clients_per_round=5", "--out", str(out))  # fmt: skip
    opened = load_run(out)
    assert opened.interactions.user_ids is not None
    assert opened.interactions.item_ids is not None
    name = opened.interactions.user_ids[3]
    shown = works("recommend", str(out), "--user", name, "--top", "30")
    assert shown == works("recommend", str(out), "--user", "#3", "--top", "30")
    listed = re.findall(r"│ (\d+) +│ The \[bold\] Film (\d+) \(1990\)", shown)
    assert all(int(item) == 100 + int(title) for item, title in listed)
    known = {opened.interactions.item_ids[item] for item in opened.interactions.train.of(3).tolist()}
    assert {item for item, _ in listed} == set(opened.interactions.item_ids) - known
    assert "8x device" in works("recommend", str(out), "--user", name, "--capacity", "8x")
    assert "an id of ml-tiny" in fails("recommend", str(out), "--user", "nobody")
    assert "#0 to #8" in fails("recommend", str(out), "--user", "#9")


def test_a_model_that_only_gradients_can_train_needs_no_algorithm_named(tmp_path: Path) -> None:
    small = [*WORLD, "--set", "fleet.clients_per_round=4"]
    works("train", "--model", "neumf", "--rounds", "1", *small, "--out", str(tmp_path / "run"))
    assert load_run(tmp_path / "run").settings.algorithm.kind == "gradient"
    refused = fails(
        "train", "--model", "neumf", "--set", "algorithm.kind=closed_form", "--out", str(tmp_path / "other")
    )
    assert "is for model.kind='mf'" in refused


def test_recommend_without_ids_takes_numbers(tmp_path: Path) -> None:
    run(small(**GRADIENT), tmp_path / "run")
    assert "user #11" in works("recommend", str(tmp_path / "run"), "--user", "11")
    assert "#0 to #11" in fails("recommend", str(tmp_path / "run"), "--user", "12")
    assert "settings.toml" in fails("recommend", str(tmp_path / "none"), "--user", "1")


@pytest.mark.parametrize(
    ("method", "capacity", "size"),
    [
        ("fair", "16x", 14), ("fair", "1x", 240), ("fair", "4x", 56), ("fair", "8x", 28), ("fair", "5x", 28),
        ("fair", "33x", 6), ("fair", "100B", 14), ("fair_hom", "2x", 112), ("full_trn", "16x", 8),
        ("fedavg", "4x", 48), ("inconsistent", "16x", 14), ("heterofl", "2x", 120), ("fedhm", "2x", 64),
    ],
)  # fmt: skip
def test_export_serves_any_capacity(method: str, capacity: str, size: int, tmp_path: Path) -> None:
    changes = {} if method in ("fair", "fair_hom", "full_trn", "fedavg") else GRADIENT
    scheme = "1x-2x" if method in ("heterofl", "fedhm") else "1x-4x-16x"
    finished = run(small(method=method, capacities=scheme, **changes), tmp_path / "run")
    shown = works("export", str(tmp_path / "run"), "--capacity", capacity, "--out", str(tmp_path / "device"))
    device, metadata = read_device_model(tmp_path / "device")
    assert device.size == sum(vector.numel() for vector in device.compacts.values()) == size
    assert metadata["quality"]["server"] == finished.result.quality
    assert f"{metadata['quality']['device']:.4f} over all users" in shown
    full = finished.result.state.full
    for name, held in device.projections.items():
        assert torch.equal(device.compacts[name], held.reduce(full[name]))
    whole = method in ("full_trn", "fedavg")  # where a small device holds what nobody held
    trained = not whole and (capacity in scheme.split("-") or capacity == "100B")  # 100 bytes hold what 16x holds
    assert device.trained is trained
    assert ("took part" in shown) is not trained
    if trained and capacity == "1x":
        assert metadata["quality"]["device"] == finished.result.quality


def test_an_export_has_the_same_quality_of_the_server_at_every_capacity(tmp_path: Path) -> None:
    """A user's vector follows from a table: from whose must not depend on what is exported."""
    finished = run(small(**RANKED, capacities="1x-8x"), tmp_path / "run")
    metadata = {}
    for capacity in ("1x", "8x"):
        works("export", str(tmp_path / "run"), "--capacity", capacity, "--out", str(tmp_path / capacity))
        metadata[capacity] = read_device_model(tmp_path / capacity)[1]["quality"]
    assert metadata["1x"]["server"] == metadata["8x"]["server"] == finished.result.quality
    assert metadata["8x"]["device"] != metadata["8x"]["server"]  # so that the two could be mistaken for each other


@pytest.mark.parametrize(("capacity", "size"), [("16x", 14 + 60), ("1x", 240 + 60), ("4x", 56 + 60), ("300B", 14 + 60)])
def test_a_bias_is_exported_and_recommended_by(capacity: str, size: int, tmp_path: Path) -> None:
    finished = run(small(item_bias=True, objective="softmax", **GRADIENT), tmp_path / "run")
    works("export", str(tmp_path / "run"), "--capacity", capacity, "--out", str(tmp_path / "device"))
    device, metadata = read_device_model(tmp_path / "device")
    assert device.size == sum(vector.numel() for vector in device.compacts.values()) == size
    assert torch.equal(device.compacts["item_bias.weight"], finished.result.state.full["item_bias.weight"])
    opened = load_run(tmp_path / "run")
    full = opened.progress.state.full
    scores = opened.scorer(full)(torch.tensor([3]))[0]
    user = opened.progress.local_state["user.weight"][3]
    expected = full["item.weight"].view(60, 4) @ user + full["item_bias.weight"]
    torch.testing.assert_close(scores, expected)
    assert "user #3" in works("recommend", str(tmp_path / "run"), "--user", "3", "--capacity", capacity)
    assert metadata["settings"]["model"]["item_bias"] is True


def test_export_refuses_what_cannot_be(tmp_path: Path) -> None:
    run(small(method="heterofl", capacities="1x-2x", **GRADIENT), tmp_path / "run")
    assert "N/A" in fails("export", str(tmp_path / "run"), "--capacity", "16x")
    assert "Check the spelling" in fails("export", str(tmp_path / "run"), "--capacity", "small")
    works("export", str(tmp_path / "run"), "--capacity", "2x")
    assert (tmp_path / "run" / "device-2x.safetensors").is_file()
    (tmp_path / "broken").write_bytes(b"no model")
    with pytest.raises(Exception, match="Export it again"):
        read_device_model(tmp_path / "broken")


def test_recommend_to_a_new_user_from_their_history(tmp_path: Path, ratings_folder: Path) -> None:
    out, history = tmp_path / "run", tmp_path / "history.txt"
    works("train", "--data", str(ratings_folder), "--rounds", "3", "--set", "fleet.clients_per_round=none",
          "--set", "model.factors=4", "--set", "subspace.support=2",
          "--capacities", "1x-2x", "--out", str(out))  # fmt: skip
    history.write_text("101\n104\n")
    for options in ([], ["--capacity", "2x"]):
        shown = works("recommend", str(out), "--history", str(history), "--top", "3", *options)
        assert "Left out: the 2 items" in shown
        assert "104" not in shown
    assert read_run_settings(out).algorithm.kind == "closed_form"
    history.write_text("101\nnobody\n")
    assert "'nobody'" in fails("recommend", str(out), "--history", str(history))
    assert "one of them" in fails("recommend", str(out))


def table_of(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith("│")]


@pytest.mark.parametrize("options", [[], ["--capacity", "2x"]])
def test_a_new_user_with_the_ratings_of_a_known_one_gets_the_same(
    tmp_path: Path, ratings_folder: Path, options: list[str]
) -> None:
    out, history = tmp_path / "run", tmp_path / "history.txt"
    works("train", "--recipe", "ratings", "--data", str(ratings_folder), "--rounds", "6", "--set", "model.factors=3",
          "--set", "fleet.clients_per_round=none", "--capacities", "1x-2x", "--out", str(out))  # fmt: skip
    data = load_run(out).interactions
    assert data.item_ids is not None
    past = zip(data.train.of(3).tolist(), data.train.ratings_of(3).tolist(), strict=True)
    lines = [
        f"{data.item_ids[item]}{mark}{rating:g}" for (item, rating), mark in zip(past, cycle(" \t,"), strict=False)
    ]
    history.write_text("\n".join(lines))
    new = table_of(works("recommend", str(out), "--history", str(history), *options))
    assert len(new) > 3
    assert new == table_of(works("recommend", str(out), "--user", "#3", *options))
    other = [line[:-1] + str(6 - int(line[-1])) for line in lines]
    history.write_text("\n".join(other))
    assert new != table_of(works("recommend", str(out), "--history", str(history), *options))
    for line in ("101", "101 good", "101,9"):
        history.write_text(line)
        assert "its rating, 1 to 5" in fails("recommend", str(out), "--history", str(history))


def test_recommend_reports_how_much_of_a_history_is_used(tmp_path: Path) -> None:
    """Items 0, 1, … are had by all, most, …: with support, only the first own a row."""
    folder, out, history = tmp_path / "steps", tmp_path / "run", tmp_path / "history.txt"
    folder.mkdir()
    rows = [f"{user},{item}" for user in range(40) for item in range(40) if (user * 7 + item) % 40 >= item]
    (folder / "interactions.csv").write_text("user,item\n" + "\n".join(rows) + "\n")
    works("train", "--data", str(folder / "interactions.csv"), "--rounds", "3", "--set", "fleet.clients_per_round=none",
          "--set", "algorithm.support=15",
          "--capacities", "1x-2x", "--out", str(out))  # fmt: skip
    opened = load_run(out)
    data, everything = opened.interactions, torch.arange(40)
    counts = data.train.counts_by_item
    owned = int(opened.informative_items(everything).sum())
    assert 2 < owned < 38
    assert opened.informative_items(everything).tolist() == [True] * owned + [False] * (40 - owned)

    def asked(*items: int) -> str:
        history.write_text("\n".join(item_name(item, data) for item in items))
        return " ".join(works("recommend", str(out), "--history", str(history), "--top", "4").split())

    assert "it does not know the others" not in asked(0, 1)
    assert "The model uses 1 of these 3; it does not know the others" in asked(0, 38, 39)
    nothing = asked(37, 38)
    assert "Warning: the model knows none of the 2 items" in nothing
    assert "by popularity alone" in nothing
    assert "ranked by popularity" in nothing
    best = counts.argsort(descending=True, stable=True)[:4].tolist()
    assert [item_name(item, data) for item in best] == re.findall(r"│ \d │ (\S+) │", nothing)
    assert f"{int(counts.max())}.0000" in nothing


def test_models_trained_by_gradients_fold_a_history_in(tmp_path: Path, ratings_folder: Path) -> None:
    history = tmp_path / "history.txt"
    for model, line in (("neumf-mlp", "101 4"), ("neumf", "101")):
        history.write_text(line)
        out = str(tmp_path / model)
        works("train", "--recipe", "paper", "--data", str(ratings_folder), "--model", model, "--rounds", "1",
              "--set", "fleet.clients_per_round=none", "--out", out)  # fmt: skip
        for size in ([], ["--capacity", "2x"]):
            shown = works("recommend", out, "--history", str(history), "--top", "3", *size)
            assert "Left out: the 1 items" in shown
            assert shown == works("recommend", out, "--history", str(history), "--top", "3", *size)


def test_a_recipe_knows_data_sets_and_gives_way_to_what_is_asked() -> None:
    def resplit(**changes: Any) -> Any:
        asked = {f"data.{key}": value for key, value in changes.items()}
        settings = load_settings(None, asked, "ratings")
        assert settings.algorithm.kind == "ratings"
        return settings.plain()["data"]["resplit"]

    assert resplit(name="ml-1m")
    assert not resplit(name="ml-1m", resplit=False)
    assert not resplit(name="ml-100k")
