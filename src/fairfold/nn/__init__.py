"""Compact torch layers: only the compact vector of the weights is stored."""

from fairfold.nn.base import FairModule, SharedMemory
from fairfold.nn.compression import compress, expand
from fairfold.nn.embedding import FairEmbedding, FairEmbeddingBag
from fairfold.nn.layers import FairConv2d, FairLinear
from fairfold.nn.lookup import ActiveRows, FusedSGD, active

__all__ = [
    "ActiveRows",
    "FairConv2d",
    "FairEmbedding",
    "FairEmbeddingBag",
    "FairLinear",
    "FairModule",
    "FusedSGD",
    "SharedMemory",
    "active",
    "compress",
    "expand",
]
