"""``--method`` brings what it needs, and ``--plugin`` a file of one's own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairfold.config import Settings
from fairfold.config.settings import methods
from fairfold.errors import InvalidSettings
from fairfold.federation import plugins
from tests.support.commands import fails, works

SMALL = ["--rounds", "1", "--set", "data.users=30", "--set", "data.items=120", "--set", "run.baselines=false"]
PLUGIN = """
from typing import Literal
from fairfold.federation.plugins import register_method
from fairfold.methods import HeteroFL

@register_method
class Mine(HeteroFL):
    method: Literal["mine_of_the_test"] = "mine_of_the_test"
"""


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(plugins.VARIABLE, "")
    yield
    sys.modules.pop("plugin_of_the_test", None)
    plugins._known["method"].pop("mine_of_the_test", None)


@pytest.mark.parametrize("method", [name for name in methods() if name != "truncated"])
def test_every_method_trains_by_its_name_alone(method: str, tmp_path: Path) -> None:
    works("train", "--method", method, *SMALL, "--out", str(tmp_path / "run"))


def test_a_method_brings_the_algorithm_and_what_it_averages() -> None:
    fedhm = Settings(subspace="fedhm")
    assert (fedhm.algorithm.kind, fedhm.algorithm.aggregation, fedhm.fleet.capacities) == ("gradient", "paper", "1x-4x")  # type: ignore[attr-defined]
    assert "aggregation" not in fedhm.given()["algorithm"]
    assert Settings(subspace="fair").algorithm.kind == "closed_form"


def test_a_size_that_a_method_cannot_serve_names_sizes_that_it_can(tmp_path: Path) -> None:
    words = ["train", "--method", "fedhm", *SMALL, "--out", str(tmp_path / "run")]
    refused = fails(*words, "--capacities", "1x-64x")
    assert "Use --capacities 1x-4x (federate: --nodes 1x,4x), or --method fair." in " ".join(refused.split())
    assert "closed_form" not in refused
    works(*words, "--capacities", "1x-4x")


@pytest.mark.usefixtures("clean")
def test_a_plugin_file_is_named_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "plugin_of_the_test.py"
    file.write_text(PLUGIN)
    words = ["--plugin", str(file), "--method", "mine_of_the_test", "--capacities", "1x-2x"]
    works("train", *words, *SMALL, "--out", str(tmp_path / "run"))
    assert os.environ[plugins.VARIABLE] == str(file)  # programs that this one starts load it as well
    assert "or one of your own with --plugin FILE.py" in " ".join(fails("train", "--method", "unheard_of").split())


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = (\n", "line 2: SyntaxError"),
        ("\n\nimport nowhere_at_all\n", "line 3: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("1 / 0\n", "line 1: ZeroDivisionError"),
        (None, "no such file"),
    ],
)
def test_a_plugin_file_with_an_error_is_one_sentence(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "plugin_of_the_test.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidSettings, match=message) as error:
        plugins.load_files([file])
    assert "\n" not in str(error.value)
    assert os.environ[plugins.VARIABLE] == ""
    assert "plugin_of_the_test" not in sys.modules


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", ["json.py", "notes.txt", "two-words.py"])
def test_a_plugin_file_needs_a_name_of_its_own(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x = 1\n")
    with pytest.raises(InvalidSettings, match=r"Rename the file|Name a file"):
        plugins.load_files([tmp_path / name])


def test_a_fleet_of_a_method_has_the_sizes_that_it_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without --nodes; with nodes that it cannot serve, the error names an option that the command has."""
    from fairfold.errors import InvalidState
    from fairfold.flower.fleet.local_fleet import LocalFleet

    def stop(self: LocalFleet, _data: object) -> None:
        raise InvalidState("-".join(map(str, self.capacities)), "nothing", "Stop here.")

    out = ["--out", str(tmp_path / "fleet")]
    refused = fails("federate", "--method", "heterofl", "--nodes", "1x,64x", *out)
    assert "federate: --nodes 1x,4x" in " ".join(refused.split())
    monkeypatch.setattr(LocalFleet, "prepare", stop)
    assert "1x-4x;" in fails("federate", "--method", "heterofl", *out)
    assert "1x-4x-16x;" in fails("federate", "--recipe", "fair", *out)
    assert "1x-4x-16x-64x;" in fails("federate", *out)


@pytest.mark.parametrize("command", [["recommend", "run"], ["export", "run", "--capacity", "1x"],
                                     ["plan", "--data", "ml-100k"],
                                     ["server", "init", "fleet", "--host", "a.example", "--items", "9"]])  # fmt: skip
def test_commands_take_a_plugin(command: list[str], tmp_path: Path) -> None:
    assert "missing.py" in fails(*command, "--plugin", str(tmp_path / "missing.py"))
