"""``fairfold central`` from the command line: one table at the end, and errors that say what to do."""

import re

import pytest
from typer.testing import CliRunner

from fairfold.cli import app

FAST = ["central", "--data", "synthetic", "--epochs", "2", "--device", "cpu"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "100"})
    return result.exit_code, result.output


def test_the_model_stands_beside_the_reference_rows() -> None:
    code, output = run(*FAST, "--model", "mf", "--batch-size", "1000")
    assert code == 0, output
    for name in ("popularity", "user-kNN", "PureSVD-8", "PureSVD-16", "ridge", "NDCG@20", "coverage"):
        assert name in output
    assert "validation: best NDCG@20" in output
    assert re.search(r"^ *mf +1 +0\.\d{4}", output, re.MULTILINE)


def test_without_validation_every_epoch_is_trained_and_shown() -> None:
    code, output = run(*FAST, "--batch-size", "2000", "--valid-share", "0", "--no-references", "--k", "7")
    assert code == 0, output
    assert "NDCG@7" in output
    assert "popularity" not in output
    assert re.search(r"^ *neumf +2 ", output, re.MULTILINE)


def test_the_same_seed_prints_the_same_figures() -> None:
    options = [*FAST, "--model", "mf", "--batch-size", "4000", "--no-references", "--seed", "3"]
    seconds = re.compile(r" +\d+\.\d *$", re.MULTILINE)  # a cell ends with a space
    first, second = (seconds.sub("", run(*options)[1]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--epochs", "0"], "epochs = 0"),
        (["--lr", "-1"], "learning_rate = -1"),
        (["--factors", "0"], "factors = 0"),
        (["--dropout", "1"], "dropout = 1"),
        (["--valid-share", "1.5"], "share = 1.5"),
        (["--patience", "0"], "patience = 0"),
        (["--k", "0"], "k = 0"),
        (["--seed", "-1"], "seed = -1"),
        (["--device", "cuda:99"], "device = cuda:99"),
        (["--device", "toaster"], "device = toaster"),
        (["--model", "neumf-mlp"], "ratings"),
    ],
)
def test_wrong_options_end_with_what_was_given(options: list[str], said: str) -> None:
    code, output = run(*FAST, "--model", "mf", "--batch-size", "4000", "--no-references", *options)
    assert code == 2
    assert said in output.replace("\n", " ")
    assert "Traceback" not in output
