"""Which Triton serves: none and old ones do not, and say why."""

from importlib import metadata

import pytest

from fairfold.kernels import gpu


def triton_of(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(gpu, "find_spec", lambda _: object())
    monkeypatch.setattr(metadata, "version", found)


@pytest.mark.parametrize("version", ["3.2.0", "3.10.1+git1", "4.0", None])
def test_a_recent_triton_serves(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_of(version, monkeypatch)
    assert gpu.triton_problem() is None


@pytest.mark.parametrize("version", ["3.0.0", "2.3.1"])
def test_an_old_triton_does_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_of(version, monkeypatch)
    assert f"Triton {version} is too old; 3.2" in str(gpu.triton_problem())


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda _: None)
    assert "not installed" in str(gpu.triton_problem())
