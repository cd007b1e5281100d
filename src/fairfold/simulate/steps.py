"""Local optimisers over the values of many clients at once: the numbers of torch.optim, one fused pass."""

import torch
from torch import Tensor

from fairfold.federation.settings import Settings


class LocalSteps:
    """A fresh optimiser for one vector. Clients that have finished are a suffix of it, and do not move.

    Args:
        values: What is trained, in place.
        settings: Optimiser and step size.
    """

    def __init__(self, values: Tensor, settings: Settings) -> None:
        self._kind, self._rate = settings.local_optimiser, settings.local_step
        self._values = values
        moments = {"sgd": 0, "adagrad": 1, "adam": 2}[self._kind]
        self._moments = [torch.zeros_like(values) for _ in range(moments)]
        self._count = torch.zeros((), device=values.device)

    @torch.no_grad()
    def step(self, gradient: Tensor, moving: int) -> None:
        """One step on the first ``moving`` numbers."""
        self._count += 1
        part, slope = self._values[:moving], gradient[:moving]
        kept = [moment[:moving] for moment in self._moments]
        if self._kind == "sgd":
            part.add_(slope, alpha=-self._rate)
        elif self._kind == "adagrad":
            kept[0].addcmul_(slope, slope)
            part.addcdiv_(slope, kept[0].sqrt().add_(1e-10), value=-self._rate)
        else:
            torch._fused_adam_(  # what torch.optim.Adam(fused=True) calls, here on a part of a vector
                [part], [slope], [kept[0]], [kept[1]], [], [self._count],
                lr=self._rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
