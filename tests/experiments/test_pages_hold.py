"""Pages state what records hold: tables are those that are made from records, and no other figure is without one."""

import re
import shutil
from pathlib import Path

import matplotlib
import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.experiment import known_experiments, read_experiment
from experiments.gathered import GATHERED
from experiments.kinds import KINDS
from experiments.pages import COMPARED, FIGURE, MADE, NONE, PART, Pages, RecordedFigures, parts, stated
from experiments.records import Records, fingerprint
from fairfold.errors import InvalidData

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCS = {path: path.read_text(encoding="utf-8") for path in PAGES}
TIES = (PART, MADE, COMPARED, GATHERED)
TIED = [path for path, text in DOCS.items() if any(tie.search(text) for tie in TIES)]
WRONG = "0.77777"


@pytest.fixture(scope="module")
def pages() -> Pages:
    return Pages(RESULTS, ROOT)


def test_pages_about_experiments_are_tied_to_records() -> None:
    names = {path.stem for path in TIED}
    expected = {
        "README",
        "default-recommender-evidence",
        "fedrec",
        "fedrec-tables",
        "reproduction",
        "reproduction-evidence",
        "images-evidence",
    }
    assert expected <= names
    tables = set(known_experiments())
    named = {path.stem for path, text in DOCS.items() if any(f"experiments/results/{name}" in text for name in tables)}
    assert named <= names


@pytest.mark.parametrize("path", TIED, ids=lambda path: path.stem)
def test_a_page_states_what_records_hold(path: Path, pages: Pages) -> None:
    text = path.read_text(encoding="utf-8")
    assert pages.made(text) == text, "run: python -m experiments all --show --out experiments/results --pages docs"
    assert pages.unrecorded_figures(text) == []


def test_pictures_are_drawn_from_records(pages: Pages) -> None:
    made_by = f"Matplotlib v{matplotlib.__version__},".encode()
    drawn = {name: (path, picture) for path, text in DOCS.items() for name, picture in pages.drawn(text).items()}
    assert "subspaces-goodreads.svg" in drawn
    for name, (path, picture) in drawn.items():
        kept = (ROOT / "docs" / name).read_bytes()
        assert f"({name})" in DOCS[path]
        assert kept == picture or made_by not in kept, "run: python -m experiments all --show --pages docs"


@pytest.mark.parametrize("path", TIED, ids=lambda path: path.stem)
def test_no_figure_of_a_page_can_be_changed(path: Path, pages: Pages) -> None:
    """All of them at once: each that is checked is found; and one of every table that is made."""
    text = path.read_text(encoding="utf-8")

    def changed(found: re.Match[str]) -> str:
        return found[0].replace(found["figure"], WRONG)

    checked = stated(text)
    many = sum(
        len(FIGURE.findall(part)) for sources, part in parts(checked) if sources is None or not sources.startswith(NONE)
    )
    assert len(pages.unrecorded_figures(FIGURE.sub(changed, text))) == many
    for table in MADE.finditer(text):
        comment, *lines = table[0].splitlines(keepends=True)
        wrong = comment + "".join([*lines[:2], *(FIGURE.sub(changed, line, count=1) for line in lines[2:])])
        assert pages.made(wrong) == table[0]
    for table in GATHERED.finditer(text):
        made = table[0].removeprefix(table[1])
        assert pages.made(table[1] + FIGURE.sub(changed, made)) == table[0]


def test_a_figure_that_no_record_holds_is_found(pages: Pages) -> None:
    entry = next(entry for entry in pages.result_table("ranking", "goodreads").entries if entry.column == "FAIR-HET")
    assert entry.mean is not None
    text = f"<!-- figures: ranking/goodreads -->\n| {entry.row} | {{:.4f}} |\n"
    assert pages.unrecorded_figures(text.format(entry.mean)) == []
    (wrong,) = pages.unrecorded_figures(text.format(entry.mean + 0.3))
    assert wrong.startswith(f"{entry.mean + 0.3:.4f} in: | {entry.row}")
    assert pages.unrecorded_figures("Nobody says where 0.468 comes from.") == [
        "0.468 in: Nobody says where 0.468 comes from."
    ]
    assert pages.unrecorded_figures("<!-- figures: none: quoted -->\nNobody says where 0.468 comes from.") == []
    ended = "<!-- figures: none: quoted -->\n0.468\n## Another part\n0.468"
    assert len(pages.unrecorded_figures(ended)) == 1
    with pytest.raises(InvalidData, match="rankingg"):
        pages.unrecorded_figures("<!-- figures: rankingg -->\n0.468")


def test_a_line_of_a_table_is_about_its_row() -> None:
    held = RecordedFigures([0.25, 0.5, 0.75], {"one": [0.25], "two": [0.5]}, [0.125])
    assert held.has("0.250", "one", False)
    assert not held.has("0.500", "one", False)
    assert held.has("0.500", "another", False)
    assert held.has("0.75", None, False)
    assert not held.has("0.125", None, False)
    assert held.has("0.125", None, True)


def test_parts_end_with_the_next_heading() -> None:
    found = list(parts("a\n<!-- figures: x/y,\nz -->\nb\n## c\nd"))
    assert [(sources, part.strip()) for sources, part in found] == [(None, "a"), ("x/y, z", "b"), (None, "d")]


def test_a_table_is_made_from_records(pages: Pages) -> None:
    text = "<!-- made: ranking/goodreads [FAIR-HET; FAIR-HET: paper; FedHM] -->\nold\n<!-- end -->"
    made = pages.made(text)
    assert MADE.fullmatch(made)
    for entry in pages.result_table("ranking", "goodreads").entries:
        if entry.column in ("FAIR-HET", "FedHM"):
            assert ("N/A" if entry.mean is None else f"{entry.mean:.4f}") in made
        assert entry.column != "FAIR-HET" or f" {entry.paper} |" in made
    assert pages.made(made) == made


def test_a_column_may_be_of_another_table(pages: Pages) -> None:
    made = pages.made("<!-- made: fedrec/ml-1m [NDCG@10; fedrec-audit/first: AUC] -->\nold\n<!-- end -->")
    known = {entry.row: entry for entry in pages.result_table("fedrec-audit", "first").entries if entry.column == "AUC"}
    assert "|  | NDCG@10 | AUC |" in made
    for row in ("FedMF", "ours, 1x"):
        (line,) = (line for line in made.splitlines() if line.startswith(f"| {row} |"))
        assert f"| {known[row].mean:.4f}" in line
    (line,) = (line for line in made.splitlines() if line.startswith("| popularity |"))
    assert line.endswith("|  |")


def test_a_table_is_gathered_from_several_experiments(pages: Pages) -> None:
    """A cell is that of the first table of its data set, none where there is no table, and the best is bold."""
    comment = "<!-- gathered:\ngoodreads-published goodreads = Books\nml-1m = Films\nby:\n{}\n-->\nold\n<!-- end -->"
    places = [
        "popularity = beyond: popularity",
        "FAIR = ranking: 1x-16x > FAIR-HET",
        "1x = beyond beyond-large: 1x > best",
    ]
    made = pages.made(comment.format("\n".join(places)))
    _, _, books, films = [line for line in made.splitlines() if line.startswith("|")]
    popularity = pages.result_table("beyond", "goodreads-published").baselines["popularity"]
    known = pages.result_table("ranking", "goodreads").entries
    (fair,) = (entry.mean for entry in known if (entry.row, entry.column) == ("1x-16x", "FAIR-HET"))
    assert books.startswith(f"| Books | {popularity:.3f} | {fair:.3f} | **".replace(" 0.", " ."))
    assert films.count(" – ") == 1
    assert films.count("**") == 2
    for wrong in ("popularity beyond", "a = beyond: 1x > nothing", "a = nothing: popularity"):
        with pytest.raises(InvalidData):
            pages.made(comment.format(wrong))


def test_pages_are_written_by_the_command(tmp_path: Path) -> None:
    """One whose comment names what is not there stays as it is; the others are written."""
    shutil.copytree(RESULTS / "memory", tmp_path / "out" / "memory")
    (tmp_path / "docs").mkdir()
    texts = {
        "bad": "<!-- made: nothing/there [a] -->\nold\n<!-- end -->",
        "good": "<!-- figures: memory -->\n0.77777\n<!-- made: memory/limit [FedHM] -->\nold\n<!-- end -->",
    }
    for name, text in texts.items():
        (tmp_path / "docs" / f"{name}.md").write_text(text)
    arguments = ["memory", "--show", "--out", str(tmp_path / "out"), "--pages", str(tmp_path / "docs")]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 0, ended.output
    text = " ".join(ended.output.split())
    assert "bad.md is left as it is: nothing" in text
    assert "no record holds 0.77777" in text
    assert (tmp_path / "docs" / "bad.md").read_text() == texts["bad"]
    assert "| N x d | 31.0000 |" in (tmp_path / "docs" / "good.md").read_text()


@pytest.mark.parametrize("name", known_experiments())
def test_kept_cells_are_of_the_settings_of_today(name: str) -> None:
    """Or `--show` would not show them: settings that came later must leave old cells what they are."""
    records, cells = Records(RESULTS / name), read_experiment(name).cells
    assert records.damaged == []
    assert set(records.by_label) <= {cell.label for cell in cells}  # none of a table that is gone
    for cell in cells:
        kept = records.by_label.get(cell.label)
        if kept is not None:
            kind, data = KINDS[cell.kind], kept["outcome"]["data"]
            ways = [cell.values]
            marks = [fingerprint(cell.kind, kind.canonical(values), cell.seed, data) for values in ways]
            assert kept["fingerprint"] in marks, cell.label
