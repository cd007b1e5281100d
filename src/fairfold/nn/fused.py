"""Updates applied inside the backward: no gradient is stored, no optimiser passes over anything.

Hand one to :meth:`FairTable.update_in_backward`. It suits a table looked up once a step, the usual case: SGD is exact
for any number of lookups (it is linear), Adagrad treats every lookup as a step of its own. Other parameters keep their
optimiser; gradients of the table can be neither clipped nor accumulated over steps, for there are none.
"""

import torch
from torch import Tensor

from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout
from fairfold.nn.optim import checked_rate, extend


class FusedSGD:
    """compact ← compact − lr·Sᵀg in one pass over the batch's rows.

    Args:
        lr: Learning rate; may be changed between steps.
    """

    def __init__(self, lr: float = 1e-3) -> None:
        self.lr = checked_rate(lr)

    def apply(self, layout: Layout, compact: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Update ``compact`` in place."""
        ops.sgd_rows(layout, compact, gradient, rows, self.lr)


class FusedAdagrad:
    """Adagrad on the batch's slots, squared sums kept for touched slots only.

    Args:
        lr: Learning rate; may be changed between steps.
        eps: Added to the root, as in torch.
    """

    def __init__(self, lr: float = 1e-2, eps: float = 1e-10) -> None:
        self.lr = checked_rate(lr)
        self.eps = eps
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def apply(self, layout: Layout, compact: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Update ``compact`` in place."""
        slots, summed = ops.touched_rows(layout, gradient, rows)
        at = extend(self.state, slots, {"sum": 0.0}, compact)
        squares = self.state["sum"][at]
        ops.adagrad_slots(compact, slots, summed.to(compact.dtype), squares, self.lr, self.eps)
        self.state["sum"][at] = squares
