"""Methods: FAIR and the baselines that it is compared with, which turn capacities into what clients hold."""

from fairfold.methods.base import Method, Tensors
from fairfold.methods.baselines import FedAvg, FedHM, FullTrn, HeteroFL
from fairfold.methods.fair import Fair, FairHom, Inconsistent
from fairfold.methods.truncated import Truncated

METHODS: tuple[type[Method], ...] = (Fair, FairHom, FullTrn, FedAvg, FedHM, HeteroFL, Inconsistent, Truncated)

__all__ = [
    "METHODS", "Fair", "FairHom", "FedAvg", "FedHM", "FullTrn", "HeteroFL", "Inconsistent", "Method", "Tensors",
    "Truncated",
]  # fmt: skip
