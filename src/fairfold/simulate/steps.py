"""Local optimisers over vectors of many clients at once: the numbers of torch.optim, one fused pass a vector."""

import torch
from torch import Tensor

from fairfold.federation.settings import Settings


class LocalSteps:
    """A fresh optimiser for some vectors. Clients that have finished are a suffix of each vector, and do not move.

    Args:
        vectors: What is trained, in place.
        settings: Optimiser and step size.
    """

    def __init__(self, vectors: list[Tensor], settings: Settings) -> None:
        self._kind, self._rate = settings.local_optimiser, settings.local_step
        self._vectors = vectors
        moments = {"sgd": 0, "adagrad": 1, "adam": 2}[self._kind]
        self._moments = [[torch.zeros_like(vector) for _ in range(moments)] for vector in vectors]
        self._count = 0

    @torch.no_grad()
    def step(self, gradients: list[Tensor], moving: list[int]) -> None:
        """Step number count + 1 on the first ``moving`` numbers of each vector."""
        self._count += 1
        for vector, gradient, moments, length in zip(self._vectors, gradients, self._moments, moving, strict=True):
            part, slope = vector.view(-1)[:length], gradient.reshape(-1)[:length]
            kept = [moment.view(-1)[:length] for moment in moments]
            if self._kind == "sgd":
                part.add_(slope, alpha=-self._rate)
            elif self._kind == "adagrad":
                kept[0].addcmul_(slope, slope)
                part.addcdiv_(slope, kept[0].sqrt().add_(1e-10), value=-self._rate)
            else:
                self._adam(part, slope, kept[0], kept[1])

    def _adam(self, part: Tensor, slope: Tensor, first: Tensor, second: Tensor) -> None:
        count = torch.tensor(float(self._count), device=part.device)
        torch._fused_adam_(  # what torch.optim.Adam(fused=True) calls, here on a part of a vector
            [part], [slope], [first], [second], [], [count],
            lr=self._rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
