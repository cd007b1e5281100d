"""What a run says beside its figures: splits and their spread, a seed that changes nothing, caps, empty histories."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest

import fairfold
from fairfold import simulate
from fairfold.cli.train import spread_table
from fairfold.config import read_settings
from fairfold.config.files import load_settings
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidSettings
from fairfold.federation.randomness import uses_seed
from fairfold.runs.loaded import load_run
from tests.support.commands import TINY, fails, works

RECIPES = ["default", "fair", "paper"]
SHORT = ["--rounds", "2", "--set", "run.evaluate_every=2", "--set", "run.baselines=false", "--capacities", "1x-4x"]


def of(recipe: str) -> list[str]:
    return [*SHORT, *(["--recipe", recipe] if recipe != "default" else [])]


@pytest.mark.parametrize("recipe", RECIPES)
def test_splits_give_a_spread_of_runs_that_differ_in_their_split(
    tmp_path: Path, ratings_folder: Path, recipe: str
) -> None:
    shown = works("train", "--data", str(ratings_folder), "--splits", "3", "--out", str(tmp_path / "runs"), *of(recipe))
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == ["split-0", "split-1", "split-2"]
    runs = [load_run(folder) for folder in folders]
    assert [run.settings.data.split_seed for run in runs] == [0, 1, 2]  # type: ignore[union-attr]
    held_out = [run.interactions.test for run in runs]
    assert (
        len(
            {str([(data.train.users * 100 + data.train.items).tolist() for data in [run.interactions]]) for run in runs}
        )
        == 3
    )
    assert len({len(test) for test in held_out}) == 1
    values = [json.loads((folder / "result.json").read_text())["server"]["quality"] for folder in folders]
    assert f"{mean(values):.4f} ± {stdev(values):.4f}" in shown
    assert "over 3 splits" in shown


def test_splits_of_data_that_is_not_split_at_random_are_refused(tmp_path: Path, ratings_folder: Path) -> None:
    split = ["--splits", "2", *SHORT]
    assert "one split" in fails("train", "--data", str(ratings_folder), "--split", "newest", *split)
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text(
            "".join(f"{user} {3 * (name == 'test')} {user + 4}\n" for user in range(6))
        )
    out = ["--out", str(tmp_path / "out")]
    assert "a split of its own" in fails("train", "--data", str(tmp_path), *split)
    assert "over 2 splits" in works("train", "--data", str(tmp_path), "--set", "data.resplit=true", *split, *out)
    assert "--out x/split-0 --resume" in fails("train", "--resume", "--out", "x", *split).replace("  ", " ")
    assert "inactive key 'data.split_seed'" in fails(
        "train", "--data", str(tmp_path), "--split", "newest", "--set", "data.split_seed=1"
    )


def test_spreads_are_over_the_worlds_of_synthetic_data(tmp_path: Path) -> None:
    shown = works("train", "--splits", "2", "--out", str(tmp_path / "runs"), *TINY)
    seeds = [load_run(tmp_path / "runs" / f"split-{place}").settings.run.seed for place in range(2)]
    assert seeds == [0, 1]
    assert re.search(r"best possible\s+│?\s*0\.\d+ ± 0\.\d+", shown)


def test_a_spread_leaves_out_baselines_that_were_cut_on_any_split() -> None:
    data = SyntheticDataset(users=12, items=60, interactions_per_user=10).dataset()
    result = simulate(read_settings({"run": {"rounds": 1}}), data=data, baselines={})
    first = replace(result, baselines={"EASE of 60 items (penalty 10)": 0.5, "iALS of 60 items (a)": 0.2})
    second = replace(result, baselines={"EASE cut to 30 of 60 items (penalty 30)": 0.9, "iALS of 60 items (b)": 0.4})
    names = list(spread_table([first, second]).columns[0].cells)
    assert names[-1] == "iALS"
    assert "EASE" not in names
    assert list(spread_table([first, second]).columns[1].cells)[-1] == "0.3000 ± 0.1414"


CHANGES: dict[str, object] = {
    "fleet.clients_per_round": 5, "fleet.faults.drop": 0.1, "privacy.level": "private", "data.name": "synthetic",
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_seed_that_changes_nothing_says_so(tmp_path: Path, ratings_folder: Path, recipe: str) -> None:
    shown = {
        seed: works("train", "--data", str(ratings_folder), "--out", str(tmp_path / f"run{seed}"), *of(recipe), *seeded)
        for seed, seeded in ((0, []), (7, ["--seed", "7"]))
    }
    states = [load_run(tmp_path / f"run{seed}").progress.state.full for seed in shown]
    same = all(states[0][name].equal(states[1][name]) for name in states[0])
    assert ("run.seed changes nothing" in shown[7]) == same == (recipe == "default")
    assert "run.seed" not in shown[0]
    assert "at random with seed 0; the times in column 4 are not used" in shown[0].replace("\n", " ")


@pytest.mark.parametrize("key", CHANGES)
def test_a_seed_is_used_where_anything_is_drawn(key: str) -> None:
    base = {"data.name": "ml-100k"}
    assert not uses_seed(load_settings(None, base))
    assert uses_seed(load_settings(None, base | {key: CHANGES[key]}))


@pytest.mark.parametrize("recipe", [*RECIPES, "ratings"])
def test_an_empty_history_gets_popularity(tmp_path: Path, ratings_folder: Path, recipe: str) -> None:
    out, empty = str(tmp_path / "run"), tmp_path / "empty.txt"
    works("train", "--data", str(ratings_folder), "--out", out, *of(recipe))
    empty.write_text("\n")
    data = load_run(Path(out)).interactions
    assert data.item_ids is not None
    best = data.train.counts_by_item.argsort(descending=True, stable=True)[:4].tolist()
    for given in ("", str(empty)):
        for size in ([], ["--capacity", "4x"]):
            shown = works("recommend", out, "--history", given, "--top", "4", *size)
            assert "The history is empty" in shown
            assert "A user without a history" in shown
            if recipe != "ratings":
                assert re.findall(r"^\s*│?\s*\d+\s+│?\s*(\d+)", shown, re.MULTILINE) == [
                    data.item_ids[one] for one in best
                ]
    model = fairfold.load(out)
    nothing: object = {} if recipe == "ratings" else []
    found = model.recommend(history=nothing, k=4)
    assert len(found) == 4
    if recipe != "ratings":
        assert list(map(str, found.items)) == [data.item_ids[one] for one in best]
        assert found.note.startswith("Without a history")


def test_the_cap_that_binds_is_named() -> None:
    data = SyntheticDataset(users=40, items=1_000, interactions_per_user=8).dataset()
    rounds = {"run": {"rounds": 1}, "fleet": {"capacities": "1x"}}
    support = int((data.train.counts_by_item >= 3).nonzero()[-1]) + 1
    for most, name in ((20, "algorithm.max_items"), (support, "support"), (8_000, "support")):
        settings = read_settings(rounds | {"algorithm": {"kind": "co_occurrence", "max_items": most}})
        (note,) = [note for note in simulate(settings, data=data).notes if note.startswith("Capped")]
        assert note.startswith(f"Capped by {name}:")
        assert ("no more than 20 items" in note) == (most == 20)
    with pytest.raises(InvalidSettings, match="split"):
        read_settings({"data": {"name": "ml-100k", "split": "oldest"}})
