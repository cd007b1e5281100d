"""FAIR and its rivals: how capacities become what devices hold, one method per file."""

from fairfold.methods.base import Method, Tensors
from fairfold.methods.fair import Fair, FairHom, Inconsistent
from fairfold.methods.fedhm import FedHM
from fairfold.methods.heterofl import HeteroFL
from fairfold.methods.leading import Leading
from fairfold.methods.whole_model import FedAvg, FullTrn

METHODS: tuple[type[Method], ...] = (Fair, FairHom, FullTrn, FedAvg, FedHM, HeteroFL, Inconsistent, Leading)

__all__ = [
    "METHODS", "Fair", "FairHom", "FedAvg", "FedHM", "FullTrn", "HeteroFL", "Inconsistent", "Leading", "Method",
    "Tensors",
]  # fmt: skip
