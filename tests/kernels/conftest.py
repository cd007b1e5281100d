from collections.abc import Iterator

import pytest
import torch

from fairfold.kernels import native
from fairfold.kernels.native import loader

INSTRUCTIONS = ("avx512", "avx2", "portable")


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set this processor has, one after another."""
    status = native.status()
    if not status.available:
        pytest.skip(status.reason)
    if not native.use_instructions(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.use_instructions(status.instructions)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native", "reference"])
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library, then plain torch."""
    if request.param == "reference":
        monkeypatch.setattr(loader, "_load", lambda: (None, "switched off for this test"))
    elif loader.library() is None:
        pytest.skip(loader.status().reason)
