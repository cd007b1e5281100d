"""Local optimisers over the values of many clients at once: the numbers of torch.optim, one fused pass."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fairfold.algorithms.gradient import Steps



class LocalSteps:
    """An optimiser for one vector. Clients that have finished are a suffix of it, and do not move.

    Args:
        values: What is trained, in place.
        steps: Optimiser and step size.
        moments: What the optimiser kept from earlier steps, by name; it starts fresh without.
        done: How many these were.
    """

    def __init__(
        self, values: Tensor, steps: "Steps", moments: Mapping[str, Tensor] | None = None, done: int = 0
    ) -> None:
        self._kind, self._rate = steps.local_optimiser, steps.local_step
        self._values = values
        names = {"sgd": (), "adagrad": ("square",), "adam": ("mean", "square")}[self._kind]
        self.moments = {name: (moments or {}).get(name, torch.zeros_like(values)).clone() for name in names}
        self._count = torch.full((), float(done), device=values.device)

    @torch.no_grad()
    def step(self, gradient: Tensor, moving: int) -> None:
        """One step on the first ``moving`` numbers."""
        self._count += 1
        part, slope = self._values[:moving], gradient[:moving]
        kept = [moment[:moving] for moment in self.moments.values()]
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
