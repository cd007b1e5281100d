"""Updates applied inside the backward: no gradient is stored, no optimiser passes over anything.

Hand one to :meth:`FairTable.update_in_backward`. It suits a table looked up once a step, the usual case: SGD is exact
for any number of lookups (it is linear), Adagrad treats every lookup as a step of its own. Other parameters keep their
optimiser; gradients of the table can be neither clipped nor accumulated over steps, for there are none.
"""

import torch
from torch import Tensor

from fairfold.errors import InvalidSettings
from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout
from fairfold.nn.lookup import slots_of_rows
from fairfold.nn.optim import _extend


class FusedSGD:
    """compact ← compact − lr·Sᵀg in one pass over the batch's rows.

    Args:
        lr: Learning rate; may be changed between steps.
    """

    def __init__(self, lr: float = 1e-3) -> None:
        if not lr >= 0:
            raise InvalidSettings(f"lr={lr}", "a rate of 0 or more", "Try 0.01.")
        self.lr = lr

    @torch.no_grad()
    def apply(self, layout: Layout, compact: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Update ``compact`` in place."""
        ops.accumulate_rows(layout, gradient * -self.lr, rows, compact)


class FusedAdagrad:
    """Adagrad on the batch's slots, squared sums kept for touched slots only.

    Args:
        lr: Learning rate; may be changed between steps.
        eps: Added to the root, as in torch.
    """

    def __init__(self, lr: float = 1e-2, eps: float = 1e-10) -> None:
        if not lr >= 0:
            raise InvalidSettings(f"lr={lr}", "a rate of 0 or more", "Try 0.01.")
        self.lr = lr
        self.eps = eps
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def apply(self, layout: Layout, compact: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Update ``compact`` in place."""
        slots, signs = slots_of_rows(layout, rows, gradient.shape[1])
        touched, position = torch.unique(slots, return_inverse=True)
        summed = torch.zeros(len(touched), dtype=compact.dtype, device=compact.device)
        summed.index_add_(0, position.view(-1), (gradient * signs).view(-1))
        at = _extend(self.state, touched, {"sum": 0.0}, compact)
        squares = self.state["sum"][at].addcmul_(summed, summed)
        self.state["sum"][at] = squares
        compact[touched] = compact[touched].addcdiv_(summed, squares.sqrt_().add_(self.eps), value=-self.lr)
