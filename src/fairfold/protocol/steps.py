"""How a device takes its steps: the keys, and an optimiser that takes them for many clients at once."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.settings.base import Frozen


class Steps(Frozen):
    """How a device takes its steps.

    Attributes:
        local_epochs: E, passes over the device's samples per round.
        batch_size: Samples per step.
        shuffle: New order of the samples every epoch.
        local_optimiser: ``"sgd"``, ``"adagrad"`` or ``"adam"``, fresh every round.
        local_step: Its step size.
    """

    local_epochs: int = Field(1, ge=1, lt=2**31)
    batch_size: int = Field(512, ge=1, lt=2**31)
    shuffle: bool = True
    local_optimiser: Literal["sgd", "adagrad", "adam"] = "sgd"
    local_step: float = Field(1.0, gt=0)


class RankingSteps(Steps):
    """The same for recommenders.

    Attributes:
        objective: What steps make small where items are ranked: ``"bpr"`` (an item the user touched scores above each
            one drawn for it), ``"softmax"`` (it is the one to choose among these) or ``"squared"`` (squared error over
            the whole catalogue, of which those drawn are a sample); docs/beyond.md.
        negatives: Items the user did not touch, drawn for each one they did.
        regulariser: Weight of the squared norm of the vectors a sample uses (rankings).
        unobserved_weight: What an item the user did not touch counts, against 1 for one they did (``"squared"``).
        RANKING_KEYS: Those that mean nothing where ratings are predicted.
    """

    NEEDS: ClassVar = {"unobserved_weight": ("objective", ("squared",))}
    RANKING_KEYS: ClassVar = ("objective", "negatives", "regulariser", "unobserved_weight")

    objective: Literal["bpr", "softmax", "squared"] = "bpr"
    negatives: int = Field(1, ge=1, lt=2**31)
    regulariser: float = Field(1e-6, ge=0)
    unobserved_weight: float = Field(0.5, gt=0, le=1)


class LocalSteps:
    """An optimiser for one vector, in place. Clients that have finished are a suffix of it, and do not move.

    It starts fresh, or goes on with the moments that it kept from so many steps done.
    """

    def __init__(
        self, values: Tensor, steps: Steps, moments: Mapping[str, Tensor] | None = None, done: int = 0
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
