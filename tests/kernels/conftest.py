from collections.abc import Iterator

import pytest
import torch

from fairfold.kernels import native

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
