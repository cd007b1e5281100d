"""Every block of README and docs is run, and every command typed; where that cannot be, here stands why."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.pages import ROOT, Block, Reader, at_home, blocks, name_of, pages

ELSEWHERE = {
    "docs/first-fleet.md": "tests/flower/test_docs.py types it from top to bottom, with real processes",
    "docs/deployment.md": "tests/flower/test_docs.py types it from top to bottom, with real processes",
    "docs/tutorials/browser.md": "tests/device/test_in_chromium.py starts its fleet, and joins it in tabs",
}
"""Pages that another test runs whole: their blocks of `sh`, `python` and `text`."""

MANY = "many real processes; tests/flower/test_federate.py and docs/tutorials/notebook-to-fleet.md start a few"
NOT_TYPED = {
    "pip ": "it would change the environment of the tests",
    "make run": "it is `fairfold demo`, which is typed",
    "make test": "it runs these tests",
    "python benchmarks/": "a measurement of minutes to hours; its script must be there, and say what it takes",
    "fairfold demo --fleet": "it serves until it is stopped; tests/device/test_in_chromium.py types it",
    "fairfold watch ": "it serves until it is stopped; tests/runs/test_watch.py starts it",
    "fairfold server start fleet --watch": "it serves until it is stopped; tests/runs/test_watch.py starts it",
    "fairfold federate --data goodreads-100": MANY,
    "fairfold federate --data ml-100k": MANY,
    "fairfold federate --nodes": MANY,
    "fairfold federate --recipe paper": MANY,
    "fairfold federate --recipe ratings": MANY,
    "fairfold plan --items 10000000 --dim 64 --budget 64MB --measure": "a minute; tests/cli/test_plan.py measures less",
    "python -m experiments ranking": "hours; tests/experiments runs a small experiment in every way",
    "python -m experiments all": "hours; tests/experiments runs a small experiment in every way",
    "python -m experiments ratings --search": "an hour; tests/experiments/test_output.py searches a small one",
    "python -m experiments fedrec": "minutes, on data that is not shipped; tests/experiments/test_fedrec.py runs it",
    "fairfold train --data qmnist-writers": "no small copy of that form is made here; tests/cli/test_images.py has one",
    "fairfold train --data FOLDER": "a placeholder; tests/cli/test_images.py trains on folders",
    "fairfold audit runs/first": "minutes of attacks; tests/audit and tests/cli/test_audit.py run it",
    "torchrun ": "processes that share a run; tests/federation/test_ranks.py starts them",
    "flower-supernode": "it needs a server; tests/flower/test_secure.py starts such devices",
}
"""Commands that are not run from a page, by how they begin, and why. tests/test_pages.py parses them all the same."""

NOT_RUN = {
    ("docs/devices.md", "c"): "tests/device/test_cross.py compiles and runs it",
    ("docs/devices.md", "js"): "a site's script; tests/device/test_in_chromium.py hands over rows like this",
    ("docs/architecture.md", "drawing"): "the way of the data",
    ("docs/runs.md", "synopsis"): "how commands are written; tests/test_pages.py parses what the page types",
    ("docs/fit.md", "diff"): "examples/from_implicit.py is run by tests/estimator",
}
"""Blocks that are nothing to run."""

READ = {"toml", "yaml", "text"}
"""Kinds that are read: settings by tests/test_pages.py, output by what a page says."""

LONG = ("asynchronous", "data", "images", "privacy", "beyond", "settings")
SHORTENED = {f"docs/{name}.md" for name in LONG}
SLOW = {"README.md", "docs/tutorials/notebook-to-fleet.md"} | SHORTENED
"""Pages whose commands are typed by the slow tests; their code always runs."""


def why_not(line: str) -> str | None:
    return next((why for start, why in NOT_TYPED.items() if line.startswith(start)), None)


def shorter(line: str) -> list[str]:
    """Laid over `fairfold train` on pages that train for long: two rounds show that a command works."""
    rounds = [] if "privacy.level=private" in line else ["--rounds", "2"]  # one is all that it takes
    return rounds if "--data mnist" in line else [*rounds, "--set", "run.baselines=false"]


def kind_of(block: Block) -> str:
    """What becomes of a block: run, read, drawn or left out with a reason."""
    if block.kind.startswith("{"):
        return "site"  # an order to the builder of the site, which refuses wrong ones
    if block.kind in READ:
        return "read"
    if block.kind == "python":
        return "run"
    if block.kind in ("", "sh", "bash"):
        if not block.commands:
            return "drawing"
        return "synopsis" if block.synopsis and not block.kind else "run"
    return block.kind


def test_every_block_is_run_or_has_a_reason() -> None:
    """A block of a new kind, or a command that nobody runs and nobody explains, fails here."""
    left: set[tuple[str, str]] = set()
    printed: set[str] = set()
    for page in pages():
        for block in blocks(page):
            what = kind_of(block)
            if what not in ("site", "read", "run"):
                assert (block.page, what) in NOT_RUN, f"{block.page}: nobody runs\n{block.body}"
                left.add((block.page, what))
            printed |= {start for line in block.commands for start in NOT_TYPED if line.startswith(start)}
    assert left == set(NOT_RUN), "reasons that nothing needs"
    assert printed == set(NOT_TYPED), f"reasons that nothing needs: {set(NOT_TYPED) - printed}"


def read_through(page: Path, folder: Path, *, typed: bool) -> Reader:
    """Run a page from top to bottom: its code, and its commands where that is asked for."""
    with at_home(folder) as here:
        reader, before = Reader(here), ""
        for block in blocks(page):
            if block.kind == "python":
                reader.python(block)
            elif block.kind == "toml" and name_of(page) == "docs/settings.md":
                (here / "mine.toml").write_text(block.body)
            elif block.kind == "text" and (typed or before == "python"):
                reader.expect_output(block)
            before = block.kind
            for line in block.commands if typed and kind_of(block) == "run" else []:
                if why_not(line) is not None:
                    continue
                if line.startswith("python "):
                    words = [sys.executable, *shlex.split(line, comments=True)[1:]]
                    clone = os.environ | {"PYTHONPATH": str(ROOT)}  # as in the root of a clone
                    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True, env=clone)
                    reader.printed += done.stdout.splitlines()
                    continue
                brief = name_of(page) in SHORTENED and line.startswith("fairfold train")
                reader.types(line, shorter(line) if brief else [])
        return reader


def has(page: Path, *kinds: str) -> bool:
    return name_of(page) not in ELSEWHERE and any(block.kind in kinds or block.commands for block in blocks(page))


FOLLOWED = [page for page in pages() if has(page, "python")]


@pytest.mark.parametrize("page", FOLLOWED, ids=name_of)
def test_a_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    read_through(page, tmp_path, typed=name_of(page) not in SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(ROOT / name for name in SLOW), ids=name_of)
def test_a_long_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    assert read_through(page, tmp_path, typed=True).printed


def test_measurements_that_pages_name_can_be_started() -> None:
    lines = [line for page in pages() for block in blocks(page) for line in block.commands]
    scripts = {line.split()[1] for line in lines if line.startswith("python benchmarks/")}
    assert scripts
    for script in scripts:
        text = (ROOT / script).read_text()
        options = {word for line in lines if script in line for word in re.findall(r" (--[a-z-]+)", line)}
        assert all(f'"{option}"' in text for option in options), f"{script}: {options}"


def test_settings_of_other_tools_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    for page in pages():
        for block in blocks(page):
            if block.kind == "yaml":
                assert yaml.safe_load(block.body)
            elif block.kind == "toml":
                assert tomllib.loads(block.body)
