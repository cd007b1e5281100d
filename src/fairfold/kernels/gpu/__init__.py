"""The kernels for CUDA tensors, written in Triton.

Import :mod:`.calls` only where :func:`available` says so: it imports Triton, which is no dependency of fairfold
(PyTorch's CUDA wheels for Linux bring it along).
"""

from functools import cache
from importlib import metadata
from importlib.util import find_spec

import torch

from fairfold.errors import install_hint

__all__ = ["available", "triton_problem"]

MIN_TRITON = (3, 2)
"""Of Triton, which torch 2.6 brings along. Older ones refuse arithmetic of these kernels."""


def triton_problem() -> str | None:
    """Why Triton cannot compile these kernels: there is none, or it is too old."""
    if find_spec("triton") is None:
        return f"Triton is not installed ({install_hint('gpu')})"
    try:
        found = metadata.version("triton")
    except metadata.PackageNotFoundError:  # a build of another name; all of these are newer
        return None
    if tuple(int(part) for part in found.split(".")[:2]) >= MIN_TRITON:
        return None
    return f"Triton {found} is too old; {'.'.join(map(str, MIN_TRITON))} or newer comes with torch 2.6"


@cache
def available() -> bool:
    """Whether these kernels can serve: Triton is installed, recent enough, and there is a CUDA device."""
    return triton_problem() is None and torch.cuda.is_available()
