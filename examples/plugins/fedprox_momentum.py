"""FedProx with momentum as a plug-in: another optimizer on the client, and a proximal term by default.

    import examples.plugins.fedprox_momentum
    simulate(Settings(algorithm={"kind": "fedprox_momentum", "momentum": 0.9, "prox": 0.1}))

(Li et al., *Federated Optimization in Heterogeneous Networks*; the momentum starts anew every round.)
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms import Gradient
from fairfold.federation.plugins import register_algorithm


@register_algorithm
class FedProxMomentum(Gradient):
    """Gradient steps with momentum, drawn to the model that the server sent."""

    kind: Literal["fedprox_momentum"] = "fedprox_momentum"  # type: ignore[assignment]
    momentum: float = Field(0.9, ge=0, lt=1)
    prox: float = Field(0.1, ge=0)

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.local_lr, momentum=self.momentum)
