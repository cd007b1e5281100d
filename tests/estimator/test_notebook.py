"""The notebook runs as it stands: ten cells, from a DataFrame to recommendations and a plot."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from fairfold.estimator import Model, Recommendations

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
