"""Updates applied inside the backward: no gradient is stored, no optimiser passes over anything.

Hand one to :meth:`FairTable.update_in_backward`. SGD is exact for any number of lookups, since it is linear. Other
parameters keep their optimiser; gradients of the table can be neither clipped nor accumulated over steps, for there are
none.
"""

from torch import Tensor

from fairfold.errors import InvalidSettings
from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout


class FusedSGD:
    """compact ← compact − lr·Sᵀg in one pass over the batch's rows.

    Args:
        lr: Learning rate; may be changed between steps.
    """

    def __init__(self, lr: float = 1e-3) -> None:
        if not lr >= 0:
            raise InvalidSettings(f"lr={lr}", "a rate of 0 or more", "Try 0.01.")
        self.lr = lr

    def apply(self, layout: Layout, compact: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Update ``compact`` in place."""
        ops.sgd_rows(layout, compact, gradient, rows, self.lr)
