"""FedMF: matrix factorisation whose user vectors stay on the devices.

(Chai et al., *Secure Federated Matrix Factorization*, 2019.) Its homomorphic encryption, which changes no number, is
left out.
"""

from typing import Literal

from fairfold.protocol.plugins import register_algorithm
from fairfold.reproduce.rivals.pointwise import Pointwise


@register_algorithm
class FedMF(Pointwise):
    """Score ⟨u, v⟩.

    Attributes:
        kind: Its name.
    """

    kind: Literal["fedmf"] = "fedmf"
