"""Notebooks run as they stand, and are stored with their outputs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from fairfold.estimator import Model, Recommendations
from tests.support.pages import alike

NOTEBOOK = Path(__file__).parents[2] / "examples" / "three_lines.ipynb"


def run(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell, and give the value of its last line, as a notebook shows it."""
    lines = ast.parse(cell)
    last = lines.body.pop() if isinstance(lines.body[-1], ast.Expr) else None
    exec(compile(lines, str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)  # type: ignore[attr-defined]


def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    assert len(notebook["cells"]) == 10
    names: dict[str, Any] = {}
    shown = [run("".join(cell["source"]), names) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    _, model, _, known, new, small, alike, picture, quality = shown
    assert isinstance(model, Model)
    assert "16x" in model._repr_html_()
    for found in (known, new, small):
        assert isinstance(found, Recommendations)
        assert len(found) == 5
    assert len(alike) == 5
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert quality.loc["server", "ndcg@20"] > quality.loc["popularity", "ndcg@20"]
    assert (tmp_path / "readings-model" / "result.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fair_step_by_step", "how_private", "your_data"])
def test_other_notebooks_run_and_show_what_is_stored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.with_name(f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        capsys.readouterr()
        run("".join(cell["source"]), names)
        stored = "".join(line for out in cell["outputs"] for line in out.get("text", []))
        printed = capsys.readouterr().out
        for line, other in zip(stored.splitlines(), printed.splitlines(), strict=True):
            assert alike(line, other), f"{other!r}, and stored is {line!r}"


@pytest.mark.parametrize("path", sorted(NOTEBOOK.parent.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_with_outputs_and_small(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells[-1]["outputs"]
    assert not [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]
    assert path.stat().st_size < 100_000
