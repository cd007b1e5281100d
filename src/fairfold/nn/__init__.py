"""Layers that store their compact vector and nothing else, and models made of them."""

from fairfold.nn.active import ActiveRows, active
from fairfold.nn.bag import FairEmbeddingBag
from fairfold.nn.base import FairModule, SharedMemory
from fairfold.nn.compression import compress, expand
from fairfold.nn.conv import FairConv2d
from fairfold.nn.linear import FairLinear
from fairfold.nn.table import FairEmbedding

__all__ = [
    "ActiveRows",
    "FairConv2d",
    "FairEmbedding",
    "FairEmbeddingBag",
    "FairLinear",
    "FairModule",
    "SharedMemory",
    "active",
    "compress",
    "expand",
]
