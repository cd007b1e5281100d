"""FedProx with momentum as a plug-in: another optimiser on the device, and a pull to what was received.

    import examples.plugins.fedprox_momentum
    simulate(Settings(algorithm={"kind": "fedprox_momentum", "momentum": 0.9, "prox": 0.1}))

(Li et al., *Federated Optimization in Heterogeneous Networks*; the momentum starts anew every round.)
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms import Gradient
from fairfold.protocol.plugins import register_algorithm


@register_algorithm
class FedProxMomentum(Gradient):
    """Gradient steps with momentum, drawn to the model that the server sent.

    Attributes:
        kind: Its name.
        momentum: How much of the last step goes into the next.
        prox: μ of FedProx.
    """

    kind: Literal["fedprox_momentum"] = "fedprox_momentum"  # type: ignore[assignment]
    momentum: float = Field(0.9, ge=0, lt=1)
    prox: float = Field(0.1, ge=0)

    def optimiser(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """What a device takes its steps with."""
        return torch.optim.SGD(parameters, lr=self.local_step, momentum=self.momentum)
