"""The same rounds by the readable backend and the fast one, in either precision."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fairfold.data import Dataset
from fairfold.federation.replies import Rejections
from fairfold.federation.settings import Settings
from fairfold.simulate import batched, loop
from tests.federations import tiny_federation

DOUBLE, SINGLE = "double", "single"
"""What devices really compute in is single; in double a mistake shows to the last digits, but lost digits do not."""


@contextmanager
def precision(name: str) -> Iterator[None]:
    torch.set_default_dtype({DOUBLE: torch.float64, SINGLE: torch.float32}[name])
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def check_rounds(data: Callable[[], Dataset], settings: Settings, digits: str = DOUBLE, rounds: int = 3) -> None:
    """Everything that is left after some rounds is the same: model, sums, users' vectors, refusals."""
    results = []
    with precision(digits):
        for backend in (loop, batched):
            federation, state, private = tiny_federation(data(), settings)
            rejections = Rejections()
            for _ in range(rounds):
                state = backend.run_round(state, private, federation, rejections)
            results.append((state, private, rejections.counts))
    (state, own, left_out), (batched_state, batched_own, batched_left_out) = results
    assert state.moments.keys() == batched_state.moments.keys()
    compared = [(state.full, batched_state.full), (own, batched_own)]
    compared += [(of, batched_state.moments[key]) for key, of in state.moments.items()]
    for expected, found in compared:
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            relative, absolute = 1e-6, 1e-8
            if digits == SINGLE:  # numbers that are small by cancelling have the digits of what they came from
                relative, absolute = 0.0, 1e-5 * float(tensor.abs().max())
            torch.testing.assert_close(found[name], tensor, rtol=relative, atol=absolute)
    assert left_out == batched_left_out
