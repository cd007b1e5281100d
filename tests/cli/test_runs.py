"""The commands around runs: train with its options, report, recommend, export, as a person meets them."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fairfold.cli import app
from fairfold.config.files import load_settings
from fairfold.federation.evaluation import Callback
from fairfold.runs.progress import Display
from fairfold.runs.train import run
from tests.support.commands import TINY, fails, runner, works
from tests.support.runs import small


def test_train_names_method_data_and_recipe(tmp_path: Path, ratings_folder: Path) -> None:
    out = tmp_path / "run"
    works("train", "--recipe", "paper", "--data", str(ratings_folder), "--method", "heterofl", "--rounds", "1",
          "--set", "fleet.clients_per_round=none", "--out", str(out))  # fmt: skip
    settings = load_settings(out / "settings.toml", {})  # a run's settings are a file like any other
    assert (settings.subspace.method, settings.model.kind) == ("heterofl", "neumf")
    assert settings.fleet.clients_per_round is None
    assert "one of authors, default, fair, paper" in fails("train", "--recipe", "other")
    assert "did you mean" not in fails("train", "--data", "no-such-data")


def test_resume_from_the_command(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert "holds no settings.toml" in fails("train", *TINY, "--out", str(out), "--resume")
    assert not out.exists()
    works("train", *TINY, "--out", str(out))
    assert "Resuming after round 4" in works("train", "--out", str(out), "--resume", "--rounds", "6")
    assert json.loads((out / "result.json").read_text())["rounds"] == 6
    assert "seed = 0, now 3" in fails("train", "--out", str(out), "--resume", "--seed", "3")
    assert "--resume without --out" in fails("train", "--resume")
    assert "go on with --resume" in fails("train", *TINY, "--out", str(out))


def test_damaged_files_are_reported_by_every_command(tmp_path: Path) -> None:
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


def test_the_last_line_has_the_reason_for_the_end(tmp_path: Path) -> None:
    shown = works("train", *TINY, "--set", "run.threshold=0.01", "--set", "fleet.faults.drop=0.5",
                  "--out", str(tmp_path / "run"))  # fmt: skip
    assert "has reached the threshold of 0.01" in shown
    assert "no update in time (run.log names them)" in shown
    assert "round 2/4  NDCG@20" in shown


def test_train_and_report_say_where_popularity_came_from(tmp_path: Path) -> None:
    for source, words in (("counts", "counted once by"), ("none", "Popularity: none"), ("catalogue", None)):
        out = str(tmp_path / source)
        for output in (
            works("train", *TINY, "--set", f"subspace.popularity={source}", "--out", out),
            works("report", out, "--no-page"),
        ):
            assert ("Popularity:" in output) == (words is not None)
            assert words is None or words in output


def test_strong_baselines_stand_beside_a_ranking_and_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    wanted = [*TINY, "--set", "run.baselines=true"]
    first = works("train", *wanted, "--out", str(tmp_path / "first"))
    again = works("train", *wanted, "--seed", "0", "--out", str(tmp_path / "again"))
    without = works("train", *TINY, "--out", str(tmp_path / "without"))
    assert "Computing baselines" in first
    assert "Computing baselines" not in again + without
    metadata = [json.loads((tmp_path / name / "result.json").read_text())["server"] for name in ("first", "again")]
    assert metadata[0] == metadata[1]
    kinds = [name.split(" of ")[0] for name in metadata[0]["baselines"]]
    assert set(kinds) == {"popularity", "best possible", "EASE", "iALS", "item-kNN"}
    for name, value in metadata[0]["baselines"].items():
        mean, error = metadata[0]["differences"][name]
        assert mean == pytest.approx(metadata[0]["quality"] - value)
        assert 0 <= error < 0.5
        assert f"{mean:+.4f} ± {error:.4f}" in first
    assert "EASE" not in without
    works("report", str(tmp_path / "first"), "--out", str(tmp_path / "page"))
    page = (tmp_path / "page" / "report.html").read_text()
    assert "± " in page
    assert "<h1>A federated run: " in page
    assert re.search(r"<tr><th>Privacy</th><td class=\"note\">plain\. ", page)
    assert re.search(r"</span>EASE<br><small>penalty \d+</small>", page)
    kept = next((tmp_path / "cache" / "baselines").iterdir())
    kept.write_bytes(kept.read_bytes()[:-8])
    assert "Computing baselines" in works("train", *wanted, "--out", str(tmp_path / "damaged"))


def test_an_interruption_prints_the_command_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Display, "on_round", interrupt)
    done = runner.invoke(app, ["train", *TINY, "--out", str(tmp_path / "run")])
    assert done.exit_code == 130
    assert f"--out {tmp_path / 'run'} --resume" in done.output.replace("\n", "")


def test_tensorboard_is_asked_for_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "fairfold[tensorboard]" in fails("train", *TINY, "--track", "tensorboard", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_terminal_gets_a_bar_with_every_size(tmp_path: Path) -> None:
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=120))
    callbacks: list[Callback] = [display]
    run(small(), tmp_path / "run", callbacks=callbacks)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    for text in ("round", "4/4", "NDCG@20 after round 4", "1x", "4x", "16x", "server", "down", "up"):
        assert text in shown


def test_a_file_gets_a_line_per_round_with_the_time_left(tmp_path: Path) -> None:
    screen = io.StringIO()
    callbacks: list[Callback] = [Display(Console(file=screen, force_terminal=False, width=120))]
    run(small(), tmp_path / "run", callbacks=callbacks)
    lines = [line for line in screen.getvalue().splitlines() if line.startswith("round ")]
    assert lines
    assert all((" left" in line) != line.startswith("round 4/4") for line in lines)


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
    assert page.count("data:image/svg+xml;base64,") == 8
    assert "N/A: item.weight (60 × 4) needs at least 64 numbers" in page
    assert "full &lt;trn&gt;" in page
    assert not re.search(r'(src|href)="(?!data:)', page), "nothing may be fetched"
    assert "<script" not in page
    assert "memory of a device" in page
    assert re.search(r'class="lead">The best of \d runs, .*? reaches NDCG@20 0\.\d{4} .*A device of 1x holds', page)
    images = sorted((tmp_path / "report").glob("*.png"))
    assert len(images) == 8
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)


def test_runs_of_fleets_are_found_where_federate_and_servers_leave_them(tmp_path: Path) -> None:
    server = tmp_path / "fleets" / "one" / "server"
    run(small(), server / "run")
    (server / "settings.toml").write_text("# fairfold run, format 1\n")  # the server's own, which is no run's
    for folder in (server, server.parent, server.parent.parent):
        assert "fair 1x-4x-16x" in works("report", str(folder), "--no-page")
    (server / "server.toml").touch()
    for folder in (server, server.parent):
        assert "server.toml" in fails("watch", str(folder), "--host", "0.0.0.0")


def test_the_same_runs_give_the_same_page(several: Path, tmp_path: Path) -> None:
    pages = []
    for name in ("one", "two"):
        works("report", str(several / "fair"), str(several / "killed"), "--out", str(tmp_path / name))
        pages.append((tmp_path / name / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_report_without_its_extra_shows_the_table_and_names_the_extra(
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
