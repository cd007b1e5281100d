"""`fairfold data` from the outside: tables, one clear message and status 2 when something is wrong."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fairfold.cli import app


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FAIRFOLD_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    path.write_text("user,item,rating\n" + "".join(f"{row % 8},{row},{row % 5 + 1}\n" for row in range(80)) + "0,0,3\n")
    return path


def test_prepare_ends_with_a_table_of_counts(ratings: Path) -> None:
    result = run("prepare", ratings, "--top-users", 3)
    assert result.exit_code == 0, result.output
    words = result.output.replace("│", " ").split("\n")
    rows = {line.split()[0]: line.split()[1:] for line in words if len(line.split()) in (2, 3)}
    assert rows["users"] == ["8", "3"]
    assert rows["interactions"] == ["81", "30"]
    assert rows["train"] == ["21"]
    assert rows["test"] == ["9"]
    assert "duplicate pairs, the last one kept" in result.output
    assert "prepared now" in result.output
    assert "was in the cache already" in run("prepare", ratings, "--top-users", 3).output
    assert "prepared now" in run("prepare", ratings, "--top-users", 3, "--refresh").output


def test_every_option_reaches_the_data(ratings: Path, tmp_path: Path) -> None:
    from fairfold.data import load

    other = tmp_path / "other.txt"
    other.write_text(ratings.read_text().replace(",", "|").replace("user|item|rating", "who|what|how"))
    columns = ["--user-column", "who", "--item-column", "what", "--rating-column", "how", "--separator", "|"]
    split = ["--split", "0.5", "--valid", "0.2", "--seed", "3"]
    options = [*columns, *split, "--ratings", "--scale", "1", "5", "--cache", tmp_path / "there"]
    result = run("prepare", other, *options)
    assert result.exit_code == 0, result.output
    data = load(next((tmp_path / "there").iterdir()))
    assert data.train.ratings is not None
    assert data.valid is not None
    assert data.train.counts_by_user.tolist() == [4] * 8
    assert data.valid.counts_by_user.tolist() == [1] * 8


def test_min_rating_core_and_resplit(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for split, items in (("train", range(8)), ("test", range(8, 10))):
        lines = (f"{user}\t{item}\t{item % 5 + 1}\t0" for user in range(4) for item in items)
        (tmp_path / "set" / f"x.{split}.rating").write_text("\n".join(lines) + "\n")
    result = run("prepare", tmp_path / "set", "--min-rating", 4, "--core", 2, "--resplit", "--split", 0.5)
    assert result.exit_code == 0, result.output
    assert "interactions rated lower than asked" in result.output
    assert run("prepare", tmp_path / "set", "--split", 0.5).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "nothing"], "neither a file or folder nor a known data set"),
        (["prepare", "goodreads"], "Did you mean one of: goodreads-100"),
        (["prepare", "goodreads-100"], "train.txt, test.txt in"),
    ],
)
def test_errors_are_one_message_and_status_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_list_shows_what_is_known_and_what_is_here(
    ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "gowalla").mkdir(parents=True)
    (tmp_path / "mine" / "gowalla" / "train.txt").write_text("0 1\n")
    monkeypatch.setenv("FAIRFOLD_DATA", str(tmp_path / "mine"))
    folder = tmp_path / "cache" / "broken-1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    run("prepare", ratings)
    output = run("list").output
    for name in ("goodreads-100", "amazonproducts-100", "ml-32m", "book-crossing", "femnist", "qmnist-writers"):
        assert name in output
    assert "https://grouplens.org/datasets/movielens/1m/" in output
    assert f"gowalla  on disk: {tmp_path / 'mine' / 'gowalla'}" in output
    assert "8 users, 80 items" in output
    assert "unreadable" in output


def test_help_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom fairfold.cli import app\n"
        "assert CliRunner().invoke(app, ['data', 'prepare', '--help']).exit_code == 0\n"
        "assert not {'torch', 'polars', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
