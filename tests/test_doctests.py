"""The examples in docstrings of public names run and say what they say."""

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import fairfold
import fairfold.data
import fairfold.nn
import fairfold.subspace

NEED_NONE = {
    "__version__", "MAPPINGS", "Sums", "ActiveRows", "FairModule", "SharedMemory",
    "Dataset", "ImageDataset", "Images", "Prepared", "load_images", "prepare",
}  # fmt: skip
"""Public names without an example: values, what others return, and what docs/modules.md and docs/data.md show."""

PUBLIC = [fairfold, fairfold.data, fairfold.nn, fairfold.subspace]


SOURCES = Path(__file__).parents[1] / "src"


def with_examples() -> list[str]:
    found = [path for path in SOURCES.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
    return sorted(".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in found)


@pytest.mark.parametrize("name", with_examples())
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    tests = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    assert tests
    for test in tests:
        output: list[str] = []
        failed = doctest.DocTestRunner().run(test, out=output.append).failed
        assert not failed, "".join(output)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_have_an_example(module: Any) -> None:
    without = [
        name
        for name in module.__all__
        if name not in NEED_NONE and ">>> " not in (inspect.getdoc(_plain(getattr(module, name))) or "")
    ]
    assert not without


def _plain(found: Any) -> Any:
    """Of ``fairfold.simulate``, which is a package and a function, the function."""
    return found.simulate if inspect.ismodule(found) else found
