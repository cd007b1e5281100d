"""Where the compiled kernels come from, what is said without them, and what happens after a fork."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairfold.kernels import native
from fairfold.kernels.native import loader

ROOT = Path(__file__).parents[2]

CHILD = """
import os, signal, torch
from fairfold import Subspace
from fairfold.kernels import native
torch.set_num_threads(2)
subspace = Subspace(2_000_000, 125_000, seed=1, mapping="chunk", chunk=8)
full = torch.randn(2_000_000)
compact = subspace.reduce(full)        # threads of OpenMP start here, in torch and in the kernels
expected = subspace.recover(compact).exp().sum()
child = os.fork()
if child == 0:
    signal.alarm(60)                   # a child that hangs dies with a signal instead
    again = subspace.reduce(full)
    right = torch.equal(again, compact) and torch.allclose(subspace.recover(again).exp().sum(), expected)
    os._exit(0 if right and not native.status().threaded else 3)
_, code = os.waitpid(child, 0)
assert native.status().threaded == bool(native.status().available), "the parent keeps its threads"
assert torch.equal(subspace.reduce(full), compact)
raise SystemExit(os.waitstatus_to_exitcode(code))
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_after_use_works() -> None:
    result = run(CHILD)
    assert result.returncode == 0, result.stderr


def test_the_switch_turns_the_kernels_off_without_a_word() -> None:
    result = run(
        "from fairfold import Subspace; import torch\n"
        "from fairfold.kernels import native\n"
        "Subspace(1000, 100).reduce(torch.randn(1000))\n"
        "status = native.status(); print(status.available, status.reason)",
        FAIRFOLD_NATIVE="0",
    )
    assert result.stdout.split() == ["False", "switched", "off", "by", "FAIRFOLD_NATIVE=0"]
    assert not result.stderr


def test_a_missing_build_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(loader, "_load", lambda: (None, "not built: for this test"))
    with caplog.at_level(logging.WARNING, logger="fairfold"):
        assert loader.library() is None
        assert loader.library() is None
    assert [record.getMessage() for record in caplog.records].count(
        "fairfold runs without its compiled kernels, several times slower on the CPU (not built: for this test)."
    ) == 1
    assert not native.status().available


def test_a_library_of_another_time_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.status().available:
        pytest.skip(native.status().reason)
    monkeypatch.setattr(loader, "ABI", loader.ABI + 1)
    loader._load.cache_clear()
    try:
        assert "install fairfold again" in native.status().reason
        assert not native.status().available
    finally:
        monkeypatch.undo()
        loader._load.cache_clear()
    assert native.status().available


def test_the_number_of_the_abi_is_that_of_the_header() -> None:
    assert f"#define FAIRFOLD_ABI {loader.ABI}\n" in (ROOT / "native" / "fairfold.h").read_text()


@pytest.mark.slow
def test_an_install_without_a_compiler_succeeds_and_serves(tmp_path: Path) -> None:
    """A wheel is built with every compiler hidden, then used from a folder of its own."""
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        env=environment,
        check=True,
        timeout=600,
        capture_output=True,
    )
    wheel = next(tmp_path.glob("fairfold-*.whl"))
    assert wheel.name.endswith("py3-none-any.whl")
    result = run(
        f"import sys; sys.path.insert(0, {str(wheel)!r})\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith('_editable')]\n"
        "import fairfold, torch\n"
        "from fairfold.kernels import native\n"
        f"assert fairfold.__file__.startswith({str(wheel)!r}), fairfold.__file__\n"
        "fairfold.Subspace(1000, 100).reduce(torch.randn(1000))\n"
        "assert not native.status().available"
    )
    assert result.returncode == 0, result.stderr
    assert "without its compiled kernels" in result.stderr
