"""What is packaged: versions that agree, bounds that can be tested (see oldest.py), a release with notes."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairfold import __version__
from fairfold.errors import install_hint
from tests.support.oldest import pins

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_versions_agree() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["project"]["version"] == str(cited["version"]) == __version__


def test_the_oldest_versions_are_those_of_the_bounds() -> None:
    found = pins(PROJECT["project"], ["notebook"])
    assert {"numpy==1.26", "pandas==2.2", "matplotlib==3.8"} <= set(found)  # its own, an extra's, an extra's extra's
    assert len(found) == len({pin.split("==")[0] for pin in found})
    with pytest.raises(SystemExit, match="no lower bound"):
        pins({"name": "x", "dependencies": ["torch"], "optional-dependencies": {}}, [])


def test_every_extra_has_bounds() -> None:
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert pins(PROJECT["project"], [extra])


def test_the_conda_recipe_has_the_bounds_of_the_package() -> None:
    recipe = yaml.safe_load((ROOT / "deploy" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    project = PROJECT["project"]
    wanted = {"python" + project["requires-python"], *project["dependencies"]}
    found = {line.replace(" ", "").replace("pytorch", "torch") for line in recipe["requirements"]["run"]}
    assert found == wanted
    builders = [line.replace(" ", "") for line in recipe["requirements"]["host"] if "scikit" in line]
    assert builders == PROJECT["build-system"]["requires"]
    (command,) = project["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(command)]
    about = (recipe["context"]["version"], recipe["about"]["summary"], recipe["about"]["license"])
    assert about == (__version__, project["description"], project["license"])


def test_no_file_of_the_package_is_left_out() -> None:
    """A pattern without a slash in front is any folder of that name, within the package as well."""
    left_out = PROJECT["tool"]["scikit-build"]["sdist"]["exclude"]
    inside = {part for path in (ROOT / "src").rglob("*") for part in path.relative_to(ROOT).parts}
    assert not [pattern for pattern in left_out if pattern in inside]
    assert all(pattern.removeprefix("/") not in ("src", "native") for pattern in left_out)


def test_workflows_call_the_make_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = []
    for path in WORKFLOWS:
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        called += re.findall(r"^make ([a-z-]+)", "\n".join(steps), re.MULTILINE)
    assert {"test", "test-oldest", "notes"} <= set(called) <= targets


def test_a_release_has_notes() -> None:
    notes = subprocess.run(["make", "-s", "notes"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "Unreleased" not in notes.splitlines()[0]
    assert "fairfold" in notes
    missing = subprocess.run(
        ["make", "-s", "notes", "NOTES=9.9"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert missing.returncode != 0
    assert "no part '## 9.9'" in missing.stderr


def names_of(requirements: list[str]) -> set[str]:
    """The packages of some requirements; an extra of our own is its name in backquotes, as the page has it."""
    found: set[str] = set()
    for requirement in requirements:
        own = re.match(r"fairfold\[(.*)\]", requirement)
        found |= {f"`{extra}`" for extra in own[1].split(",")} if own else {re.split(r"[\[<>=;! ]", requirement)[0]}
    return found


def test_the_page_lists_all_that_pip_installs() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    tables = [table.splitlines()[2:] for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]
    always, extras = [[line.strip("| ").split(" | ") for line in table] for table in tables]
    listed = {name for names, _ in always for name in names.split(", ")}
    assert listed == names_of(PROJECT["project"]["dependencies"])
    of_extras = {name.strip("`"): set(names.replace(" and", "").replace(",", "").split()) for name, names, _ in extras}
    optional = PROJECT["project"]["optional-dependencies"]
    assert of_extras == {name: names_of(requirements) for name, requirements in optional.items()}


@pytest.mark.parametrize("extra", PROJECT["project"]["optional-dependencies"])
def test_the_hint_of_an_error_adds_to_the_fairfold_that_is_installed(extra: str) -> None:
    """Pip finds the installed one with its extra, so that it need not be on an index."""
    pip, *words = shlex.split(install_hint(extra))
    command = [sys.executable, "-m", pip, *words, "--dry-run", "--no-index", "--no-deps"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"Requirement already satisfied: fairfold[{extra}]" in printed
    assert "does not provide" not in printed
