"""What papers report on a public data set's own split stands beside a run on that split, and beside no other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fairfold.data import download
from fairfold.data.download import PUBLIC_DATASETS, Published
from tests.support.commands import works

BESIDE = {"LightGCN, published (He et al. 2020)": 0.1554}


@pytest.fixture
def gowalla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small data set of that name, with a published result on its split of 80 and 40 interactions."""
    folder = tmp_path / "data" / "gowalla"
    folder.mkdir(parents=True)
    histories = [[(user + step) % 11 for step in range(6)] for user in range(20)]
    for name, part in (("train.txt", slice(4)), ("test.txt", slice(4, 6))):
        lines = (" ".join(map(str, [user, *mine[part]])) for user, mine in enumerate(histories))
        (folder / name).write_text("\n".join(lines))
    monkeypatch.setenv("FAIRFOLD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    known = replace(PUBLIC_DATASETS["gowalla"], published=Published(80, 40, "NDCG@20", BESIDE))
    monkeypatch.setitem(download.PUBLIC_DATASETS, "gowalla", known)
    return tmp_path


def test_a_published_result_stands_beside_a_run_on_its_split(gowalla: Path) -> None:
    (name,) = BESIDE
    out = str(gowalla / "run")
    shown = works("train", "--data", "gowalla", "--capacities", "1x", "--rounds", "1", "--out", out)
    server = json.loads((gowalla / "run" / "result.json").read_text())["server"]
    assert server["baselines"][name] == 0.1554
    assert name not in server["differences"]  # no user's value is known
    assert name in shown
    assert f"{server['quality'] - 0.1554:+.4f}" in shown
    works("report", out, "--out", str(gowalla / "page"))
    page = (gowalla / "page" / "report.html").read_text()
    assert "LightGCN, published<br><small>He et al. 2020</small>" in page
    assert "0.1554" in page


@pytest.mark.parametrize("change", ["data.resplit=true", "run.top=10", "run.baselines=false"])
def test_none_stands_beside_another_split_or_metric(gowalla: Path, change: str) -> None:
    options = ["--data", "gowalla", "--capacities", "1x", "--rounds", "1", "--set", change]
    assert "published" not in works("train", *options, "--out", str(gowalla / "run"))


def test_another_metric_or_split_has_none() -> None:
    published = PUBLIC_DATASETS["gowalla"].published
    assert published is not None
    assert published.on(810_128, 217_242, "NDCG@20") == published.values != {}
    assert published.on(810_128, 217_242, "NDCG@10") == published.on(810_127, 217_242, "NDCG@20") == {}
