"""Commands that are to work, or to be refused, and small runs for them."""

from typer.testing import CliRunner

from fairfold.cli import app

runner = CliRunner()
WORLD = ["--set", "data.users=12", "--set", "data.items=60", "--set", "data.interactions_per_user=10"]
TINY = [*WORLD, "--set", "fleet.clients_per_round=6", "--set", "model.factors=4",
        "--rounds", "4", "--set", "run.evaluate_every=2", "--set", "run.baselines=false"]  # fmt: skip


def fails(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 2, done.output
    return done.output.replace("\n", " ")


def works(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output
