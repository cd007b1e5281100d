"""The dozen names of the front door, and what importing them costs."""

import subprocess
import sys

import pytest

import fairfold


@pytest.mark.parametrize("name", fairfold.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(fairfold, name) is not None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = fairfold.nothing_here


@pytest.mark.parametrize("first", ["", "import fairfold.federation.simulation"])
def test_simulate_is_a_function_whatever_was_imported_before(first: str) -> None:
    checks = "import fairfold\nfrom fairfold import simulate\nassert callable(simulate) and callable(fairfold.simulate)"
    script = f"{first}\n{checks}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import sys, fairfold; assert not {'torch', 'polars', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
