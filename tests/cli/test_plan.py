"""``fairfold plan`` answers in a table."""

import pytest
from typer.testing import CliRunner

from fairfold.cli import app
from fairfold.config import read_settings
from fairfold.federation.federation import load_federation
from fairfold.runs.units import human_bytes


def plan(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *options])
    return result.exit_code, result.output


def test_one_line_a_budget() -> None:
    code, text = plan("--items", "10000000", "--dim", "64", "--budget", "40MB", "--budget", "16x", "--chunk", "8")
    assert code == 0
    assert "10,000,000" in text
    assert "64x" in text
    assert "40 MB + 40 MB" in text
    assert "40,000,000" in text
    assert "2.56 GB" in text


def test_a_bias_is_held_beside_the_table() -> None:
    options = ("--items", "1000000", "--dim", "8", "--item-bias")
    code, text = plan(*options, "--budget", "16x", "--budget", "8MB")
    assert code == 0
    assert "1,500,000" in text  # 500,000 slots and a number an item: 6x, not 16x
    assert "6x" in text
    assert "6 MB + 6 MB" in text
    assert "8 MB + 8 MB" in text
    code, text = plan(*options, "--budget", "4MB")
    assert code == 2
    assert "4,000,000 bytes held beside the table" in " ".join(text.split())
    assert plan(*options, "--budget", "16x", "--measure")[0] == 2


def test_measured() -> None:
    code, text = plan("--items", "5000", "--dim", "8", "--budget", "4x", "--interactions", "20", "--measure")
    assert code == 0
    assert "measured" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "much"], "capacity 'much'"),
        (["--budget", "2B", "--chunk", "8"], "can hold 0"),
        (["--budget", "4x", "--mapping", "odd"], "mapping"),
    ],
)
def test_wrong_options_are_explained(options: list[str], message: str) -> None:
    code, text = plan("--items", "100", "--dim", "4", *options)
    assert code == 2
    assert message in " ".join(text.split())


def test_bytes_are_shown_with_units() -> None:
    assert [human_bytes(count) for count in (7, 1500, 40_000_000, 999_900_000, 25_600_000_000)] == [
        "7 B",
        "1.5 kB",
        "40 MB",
        "1,000 MB",
        "25.6 GB",
    ]


def test_what_a_federation_gives_to_every_size() -> None:
    """The table says what is held, to the byte, and what a device of each size sends."""
    code, text = plan("--data", "synthetic", "--capacities", "1x-16x")
    assert code == 0, text
    settings = read_settings({"algorithm": {"kind": "co_occurrence"}, "fleet": {"capacities": "1x-16x"}})
    known = load_federation(settings)[0].plan
    for size, held in enumerate(known.assignments(0)):
        assert held.projections is not None
        rows = held.projections["rows"].description()
        line = next(line for line in text.splitlines() if f" {known.capacities[size]} " in line)
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        assert cells[1].split()[0] == f"{rows['kept'][0]:,}"
        assert cells[2:4] == [str(rows["kept"][1] - 2), str(rows["bits"])]
        assert cells[6] == human_bytes(held.bytes())
        assert cells[8] == human_bytes(known.algorithm.traffic(known, size)[1])
    code, text = plan("--data", "synthetic", "--set", "subspace.method=fair", "--capacities", "4x")
    assert code == 0, text
    assert "columns" not in text


def test_data_or_a_table() -> None:
    for options in ([], ["--items", "5", "--dim", "2"], ["--data", "synthetic", "--dim", "4"]):
        code, text = plan(*options)
        assert code == 2, text
