"""Federated recommenders of the literature as baselines, each written like a plug-in (docs/fedrec.md)."""

from experiments.baselines.colr import CoLR
from experiments.baselines.fedncf import FedNCF
from experiments.baselines.fedrap import FedRAP
from experiments.baselines.fedrecon import FedRecon
from experiments.baselines.hetefedrec import HeteFedRec
from experiments.baselines.lightfr import LightFR
from experiments.baselines.pfedrec import PFedRec
from experiments.baselines.pointwise import FedMF

__all__ = ["CoLR", "FedMF", "FedNCF", "FedRAP", "FedRecon", "HeteFedRec", "LightFR", "PFedRec"]
