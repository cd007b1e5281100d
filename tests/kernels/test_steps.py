"""LocalSgd that touch only some slots give the numbers of dense training with a fresh optimiser."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout, expand_seed

LAYOUT = Layout(300 * 12, 240, 480, 8, expand_seed(4), True)
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}


pytestmark = pytest.mark.usefixtures("body")


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(0, 60, (25,), generator=generator),
            torch.randn(25, 12, dtype=dtype, generator=generator),
        )
        for _ in range(6)
    ]


def train_dense(make: Callable[[list[Tensor]], torch.optim.Optimizer], start: Tensor) -> Tensor:
    compact = torch.nn.Parameter(start.clone())
    optimizer = make([compact])
    for rows, values in batches(start.dtype):
        compact.grad = torch.zeros_like(compact)
        ops.accumulate_rows(LAYOUT, values, rows, compact.grad)
        optimizer.step()
    return compact.detach()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sgd(dtype: torch.dtype) -> None:
    start = torch.randn(LAYOUT.size, dtype=dtype)
    compact = start.clone()
    for rows, values in batches(dtype):
        ops.sgd_rows(LAYOUT, compact, values, rows, 0.1)
    expected = train_dense(lambda parameters: torch.optim.SGD(parameters, lr=0.1), start)
    assert torch.allclose(compact, expected, rtol=0, atol=TOLERANCE[dtype])


def test_autograd_notices_a_step_in_place_and_does_not_follow_it() -> None:
    compact = torch.nn.Parameter(torch.randn(LAYOUT.size))
    before = compact._version
    with torch.no_grad():
        ops.sgd_rows(LAYOUT, compact, torch.randn(2, 12), torch.tensor([1, 2]), 0.1)
    assert compact._version > before
    assert compact.is_leaf


def test_a_lookup_that_autograd_follows_keeps_its_gradient() -> None:
    compact = torch.randn(LAYOUT.size, requires_grad=True)
    rows, weights = torch.tensor([3, 4, 3]), torch.randn(3, 12)
    (ops.recover_rows(LAYOUT, compact, rows, 12) * weights).sum().backward()  # type: ignore[no-untyped-call]
    expected = torch.zeros(LAYOUT.size)
    ops.accumulate_rows(LAYOUT, weights, rows, expected)
    assert compact.grad is not None
    assert torch.allclose(compact.grad, expected)
