"""The kernels for CUDA tensors, written in Triton.

:mod:`.calls` has the operations, named and shaped as in :mod:`fairfold.kernels.reference`. Import it only where
:func:`available` says so: it imports Triton, which is no dependency of fairfold (PyTorch's CUDA wheels for Linux bring
it along). Slots and signs are those of :mod:`fairfold.kernels.hashing`, bit for bit.
"""

from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["available"]


@cache
def available() -> bool:
    """Whether these kernels can serve: Triton is installed and there is a CUDA device."""
    return find_spec("triton") is not None and torch.cuda.is_available()
