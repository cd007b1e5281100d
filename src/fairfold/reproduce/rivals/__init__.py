"""Federated recommenders of the literature, each one file, as a plug-in of anybody's would be (docs/fedrec.md)."""

from fairfold.reproduce.rivals.colr import CoLR
from fairfold.reproduce.rivals.fedmf import FedMF
from fairfold.reproduce.rivals.fedncf import FedNCF
from fairfold.reproduce.rivals.fedrap import FedRAP
from fairfold.reproduce.rivals.fedrecon import FedRecon
from fairfold.reproduce.rivals.hetefedrec import HeteFedRec
from fairfold.reproduce.rivals.lightfr import LightFR
from fairfold.reproduce.rivals.pfedrec import PFedRec

__all__ = ["CoLR", "FedMF", "FedNCF", "FedRAP", "FedRecon", "HeteFedRec", "LightFR", "PFedRec"]
