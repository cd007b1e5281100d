"""The commands around runs: train with its options, report, recommend, export, as a person meets them."""

import io
import json
import re
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fairfold.cli import app
from fairfold.cli.progress import Display
from fairfold.runs.callbacks import Callback
from fairfold.runs.device import read_device_model
from fairfold.runs.opened import item_name, open_run
from fairfold.runs.read import read_run_settings
from fairfold.runs.train import run
from fairfold.settings.files import load_settings
from tests.runs.worlds import GRADIENT, SQUARES, small

runner = CliRunner()
WORLD = ["--set", "data.users=12", "--set", "data.items=60", "--set", "data.interactions_per_user=10"]
TINY = [*WORLD, "--set", "fleet.clients_per_round=6", "--set", "model.factors=4",
        "--rounds", "4", "--set", "run.evaluate_every=2"]  # fmt: skip


def fails(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 2, done.output
    return done.output.replace("\n", " ")


def works(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def ratings_folder(tmp_path: Path) -> Path:
    """A small folder in the form of MovieLens 100K: ids of its own, titles, some with odd characters."""
    folder = tmp_path / "ml-tiny"
    folder.mkdir()
    lines = [f"u{user}0\t{100 + item}\t{1 + (user * item) % 5}\t0" for user in range(9) for item in range(20)
             if (user + 2 * item) % 3]  # fmt: skip
    (folder / "u.data").write_text("\n".join(lines).replace("u", "") + "\n")
    titles = [f"{100 + item}|The [bold] Film {item} (1990)|||" for item in range(20)]
    (folder / "u.item").write_text("\n".join(titles) + "\n")
    return folder


def test_train_names_method_data_and_recipe(tmp_path: Path, ratings_folder: Path) -> None:
    out = tmp_path / "run"
    works("train", "--recipe", "paper", "--data", str(ratings_folder), "--method", "heterofl", "--rounds", "1",
          "--set", "fleet.clients_per_round=none", "--out", str(out))  # fmt: skip
    settings = load_settings(out / "settings.toml", {})  # a run's settings are a file like any other
    assert (settings.subspace.method, settings.model.kind) == ("heterofl", "neumf")
    assert settings.fleet.clients_per_round is None
    assert "one of best, paper" in fails("train", "--recipe", "other")
    assert "did you mean" not in fails("train", "--data", "no-such-data")


def test_resume_from_the_command(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert "holds no settings.toml" in fails("train", *TINY, "--out", str(out), "--resume")
    assert not out.exists()
    works("train", *TINY, "--out", str(out))
    assert "Going on after round 4" in works("train", "--out", str(out), "--resume", "--rounds", "6")
    assert json.loads((out / "result.json").read_text())["rounds"] == 6
    assert "seed = 0, now 3" in fails("train", "--out", str(out), "--resume", "--seed", "3")
    assert "--resume without --out" in fails("train", "--resume")
    assert "go on with --resume" in fails("train", *TINY, "--out", str(out))


def test_damaged_files_are_told_by_every_command(tmp_path: Path) -> None:
    out = tmp_path / "run"
    works("train", *TINY, "--out", str(out), "--checkpoint-every", "1")
    (out / "checkpoints" / "round-00000004.safetensors").write_bytes(b"")
    for command in (["recommend", str(out), "--user", "3"], ["export", str(out), "--capacity", "4x"]):
        shown = works(*command)
        assert "Passed over a damaged checkpoint, round-00000004.json" in shown
        assert "this is round 3" in shown
        assert "the newest is damaged" in fails(*command, "--newest")
    lines = (out / "metrics.csv").read_text()
    (out / "metrics.csv").write_text(lines.replace("\n2,", "\n2,1"))
    assert "metrics.csv: damaged (line 3" in fails("report", str(out), "--no-page")
    (out / "settings.toml").write_text("")
    assert "settings.toml: damaged" in fails("report", str(out), "--no-page")
    assert "settings.toml: damaged" in fails("train", "--out", str(out), "--resume")
    (out / "settings.toml").write_text("rounds = 3")
    assert "format 1" in fails("train", "--out", str(out), "--resume")


def test_the_end_says_why(tmp_path: Path) -> None:
    shown = works("train", *TINY, "--set", "run.threshold=0.01", "--set", "fleet.faults.drop=0.5",
                  "--out", str(tmp_path / "run"))  # fmt: skip
    assert "has reached the threshold of 0.01" in shown
    assert "no answer in time (run.log names them)" in shown
    assert "round 2/4  NDCG@20" in shown


def test_train_and_report_say_where_popularity_came_from(tmp_path: Path) -> None:
    for source, words in (("counts", "counted once by"), ("none", "Popularity: none"), ("catalogue", None)):
        out = str(tmp_path / source)
        for said in (
            works("train", *TINY, "--set", f"subspace.popularity={source}", "--out", out),
            works("report", out, "--no-page"),
        ):
            assert ("Popularity:" in said) == (words is not None)
            assert words is None or words in said


def test_interrupting_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Display, "on_round", interrupt)
    done = runner.invoke(app, ["train", *TINY, "--out", str(tmp_path / "run")])
    assert done.exit_code == 130
    assert f"--out {tmp_path / 'run'} --resume" in done.output.replace("\n", "")


def test_tensorboard_is_asked_for_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "fairfold[tensorboard]" in fails("train", *TINY, "--tensorboard", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_terminal_gets_a_bar_with_every_size(tmp_path: Path) -> None:
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=120))
    callbacks: list[Callback] = [display]
    run(small(), tmp_path / "run", callbacks=callbacks)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    for text in ("round", "4/4", "left", "NDCG@20 after round 4", "1x", "4x", "16x", "server", "down", "up"):
        assert text in shown


# -- report ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def several(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    run(small(), runs / "fair")
    run(small(method="full_trn"), runs / "full <trn>")
    run(small(seed=1), runs / "other-world")
    fails("train", *TINY, "--method", "fedhm", "--capacities", "1x-16x", "--set", "algorithm.kind=gradient",
          "--set", "algorithm.aggregation=paper", "--out", str(runs / "fedhm"))  # fmt: skip
    killed = run(small(method="fedavg"), runs / "killed").folder
    (killed.path / "result.json").unlink()
    with (killed.path / "metrics.csv").open("a") as file:
        file.write("5,0.1")
    return runs


def test_report_compares_runs_and_writes_a_page(several: Path, tmp_path: Path) -> None:
    shown = works("report", str(several), "--out", str(tmp_path / "report"))
    assert shown.count("popularity") == 2  # once a data set
    assert "fedavg 1x-4x-16x (unfinished)" in shown
    assert "needs at least 64 numbers" in shown
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 6
    assert "N/A: item.weight (60 × 4) needs at least 64 numbers" in page
    assert "full &lt;trn&gt;" in page
    assert not re.search(r'(src|href)="(?!data:)', page), "nothing may be fetched"
    assert "<script" not in page
    images = sorted((tmp_path / "report").glob("*.png"))
    assert len(images) == 6
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)


def test_the_same_runs_give_the_same_page(several: Path, tmp_path: Path) -> None:
    pages = []
    for name in ("one", "two"):
        works("report", str(several / "fair"), str(several / "killed"), "--out", str(tmp_path / name))
        pages.append((tmp_path / name / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_report_without_its_extra_shows_the_table_and_says_what_is_missing(
    several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = fails("report", str(several / "fair"), "--out", str(tmp_path / "report"))
    assert "best NDCG@20" in shown
    assert "fairfold[report]" in shown
    works("report", str(several / "fair"), "--no-page")


def test_report_names_what_is_no_run(tmp_path: Path) -> None:
    assert "settings.toml" in fails("report", str(tmp_path))


def test_a_refused_run_leaves_a_note_and_makes_room(several: Path) -> None:
    assert sorted(path.name for path in (several / "fedhm").iterdir()) == ["result.json", "settings.toml"]
    works("train", *TINY, "--out", str(several / "fedhm"))
    assert "refused" not in (several / "fedhm" / "result.json").read_text()


# -- recommend and export ----------------------------------------------------------------------------------------------


def test_recommend_by_original_ids_with_titles(tmp_path: Path, ratings_folder: Path) -> None:
    out = tmp_path / "run"
    works("train", "--data", str(ratings_folder), "--rounds", "2", "--capacities", "1x-2x",
          "--set", "fleet.clients_per_round=5", "--out", str(out))  # fmt: skip
    opened = open_run(out)
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
    assert open_run(tmp_path / "run").settings.algorithm.kind == "gradient"
    refused = fails(
        "train", "--model", "neumf", "--set", "algorithm.kind=closed_form", "--out", str(tmp_path / "other")
    )
    assert "is for model.kind='mf'" in refused


def test_recommend_without_ids_takes_numbers(tmp_path: Path) -> None:
    run(small(**GRADIENT), tmp_path / "run")
    assert "user #11" in works("recommend", str(tmp_path / "run"), "--user", "11")
    assert "#0 to #11" in fails("recommend", str(tmp_path / "run"), "--user", "12")
    assert "settings.toml" in fails("recommend", str(tmp_path), "--user", "1")


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
    device, told = read_device_model(tmp_path / "device")
    assert device.size == sum(vector.numel() for vector in device.compacts.values()) == size
    assert told["quality"]["server"] == finished.result.quality
    assert f"{told['quality']['device']:.4f} over all users" in shown
    full = finished.result.state.full
    for name, held in device.projections.items():
        assert torch.equal(device.compacts[name], held.reduce(full[name]))
    whole = method in ("full_trn", "fedavg")  # where a small device holds what nobody held
    trained = not whole and (capacity in scheme.split("-") or capacity == "100B")  # 100 bytes hold what 16x holds
    assert device.trained is trained
    assert ("took part" in shown) is not trained
    if trained and capacity == "1x":
        assert told["quality"]["device"] == finished.result.quality


def test_the_server_that_an_export_tells_of_is_the_same_at_every_capacity(tmp_path: Path) -> None:
    """With least squares users follow from the rows that are owned: by whom must not depend on what is exported."""
    finished = run(small(**SQUARES, support=0, capacities="1x-8x"), tmp_path / "run")
    told = {}
    for capacity in ("1x", "8x"):
        works("export", str(tmp_path / "run"), "--capacity", capacity, "--out", str(tmp_path / capacity))
        told[capacity] = read_device_model(tmp_path / capacity)[1]["quality"]
    assert told["1x"]["server"] == told["8x"]["server"] == finished.result.quality
    assert told["8x"]["device"] != told["8x"]["server"]  # so that the two could be mistaken for each other


@pytest.mark.parametrize(("capacity", "size"), [("16x", 14 + 60), ("1x", 240 + 60), ("4x", 56 + 60), ("300B", 14 + 60)])
def test_a_bias_is_exported_and_recommended_by(capacity: str, size: int, tmp_path: Path) -> None:
    finished = run(small(item_bias=True, objective="softmax", **GRADIENT), tmp_path / "run")
    works("export", str(tmp_path / "run"), "--capacity", capacity, "--out", str(tmp_path / "device"))
    device, told = read_device_model(tmp_path / "device")
    assert device.size == sum(vector.numel() for vector in device.compacts.values()) == size
    assert torch.equal(device.compacts["item_bias.weight"], finished.result.state.full["item_bias.weight"])
    opened = open_run(tmp_path / "run")
    full = opened.progress.state.full
    scores = opened.scorer(full)(torch.tensor([3]))[0]
    user = opened.progress.private["user.weight"][3]
    expected = full["item.weight"].view(60, 4) @ user + full["item_bias.weight"]
    torch.testing.assert_close(scores, expected)
    assert "user #3" in works("recommend", str(tmp_path / "run"), "--user", "3", "--capacity", capacity)
    assert told["settings"]["model"]["item_bias"] is True


def test_export_says_what_cannot_be(tmp_path: Path) -> None:
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
    assert read_run_settings(out).algorithm.kind == "least_squares"
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
    data = open_run(out).interactions
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


def test_recommend_says_what_a_history_tells(tmp_path: Path) -> None:
    """Items 0, 1, … are had by all, most, …: with support, only the first own a row."""
    folder, out, history = tmp_path / "steps", tmp_path / "run", tmp_path / "history.txt"
    folder.mkdir()
    rows = [f"{user},{item}" for user in range(40) for item in range(40) if (user * 7 + item) % 40 >= item]
    (folder / "interactions.csv").write_text("user,item\n" + "\n".join(rows) + "\n")
    works("train", "--data", str(folder / "interactions.csv"), "--rounds", "3", "--set", "fleet.clients_per_round=none",
          "--set", "model.factors=2", "--set", "subspace.support=15",
          "--capacities", "1x-2x", "--out", str(out))  # fmt: skip
    opened = open_run(out)
    data, everything = opened.interactions, torch.arange(40)
    counts = data.train.counts_by_item
    owned = int(opened.telling(everything).sum())
    assert 2 < owned < 38
    assert opened.telling(everything).tolist() == [True] * owned + [False] * (40 - owned)

    def asked(*items: int) -> str:
        history.write_text("\n".join(item_name(item, data) for item in items))
        return " ".join(works("recommend", str(out), "--history", str(history), "--top", "4").split())

    assert "say what the user likes" not in asked(0, 1)
    assert "Of these 1 of 3 say what the user likes" in asked(0, 38, 39)
    nothing = asked(37, 38)
    assert "Warning: none of the 2 items says what the user likes" in nothing
    assert "by popularity alone" in nothing
    assert "order of popularity" in nothing
    best = counts.argsort(descending=True, stable=True)[:4].tolist()
    assert [item_name(item, data) for item in best] == re.findall(r"│ \d │ (\S+) │", nothing)
    assert f"{int(counts.max())}.0000" in nothing


def test_models_trained_by_gradients_say_what_serves_new_users(tmp_path: Path, ratings_folder: Path) -> None:
    history = tmp_path / "history.txt"
    history.write_text("101")
    for model, recipe in (("neumf-mlp", "ratings"), ("neumf", "best")):
        out = str(tmp_path / model)
        works("train", "--recipe", "paper", "--data", str(ratings_folder), "--model", model, "--rounds", "1",
              "--set", "fleet.clients_per_round=none", "--out", out)  # fmt: skip
        said = fails("recommend", out, "--history", str(history))
        assert f"--recipe {recipe}" in said
        assert "which trains users' vectors" in said


def test_a_recipe_knows_data_sets_and_gives_way_to_what_is_asked() -> None:
    def weighting(**changes: Any) -> Any:
        settings = load_settings(None, {key.replace("_", ".", 1): value for key, value in changes.items()}, "best")
        return settings.plain()["algorithm"]["weighting"]

    best = load_settings(None, {"data.name": "ml-1m"}, "best")
    assert (best.algorithm.kind, best.model.factors) == ("least_squares", 32)
    assert weighting(data_name="ml-1m") == "data"
    assert weighting(data_name="ml-1m", algorithm_weighting=0.5) == 0.5
    assert weighting() == "equal"
