"""Validation of numbers and vectors that come in."""

import math
import operator

import torch
from torch import Tensor

from fairfold.errors import InvalidDtype, InvalidSubspace, InvalidVector
from fairfold.kernels.reference import SUM_DTYPE

_FINITE_BLOCK = 2**20


def whole_number(name: str, value: object) -> int:
    """``value`` as an int; anything that is not a whole number is refused (True and 3.0 among them)."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InvalidSubspace(f"{name}={value!r}", "a whole number", f"Give {name} as an int.")


def check_vector(name: str, vector: Tensor, length: int, *, trusted: bool = False) -> None:
    """Refuse anything but a finite vector of a length; a ``trusted`` one is not looked at (no wait for a GPU)."""
    if not isinstance(vector, Tensor):
        raise InvalidDtype(f"{name} of type {type(vector).__name__}", "a torch.Tensor", "Use torch.as_tensor(...).")
    check_dtype(name, vector.dtype)
    if vector.dim() != 1 or vector.numel() != length:
        remedy = "Flatten a table with .reshape(-1), and use the subspace made for its size."
        raise InvalidVector(f"{name} of shape {tuple(vector.shape)}", f"shape ({length},)", remedy)
    if not trusted:
        check_finite(name, vector)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse dtypes whose sums are not defined here."""
    if dtype not in SUM_DTYPE:
        accepted = ", ".join(str(known).removeprefix("torch.") for known in SUM_DTYPE)
        raise InvalidDtype(f"{name} of dtype {dtype}", f"one of {accepted}", "Convert it, e.g. with .float().")


def check_finite(name: str, vector: Tensor) -> None:
    """Refuse NaN and infinity: one such value would spread to every device in a round."""
    if vector.is_meta:
        return  # it has a shape, and no values
    length = _FINITE_BLOCK if vector.is_cpu else max(vector.numel(), 1)  # elsewhere every look stops the device
    for start in range(0, vector.numel(), length):
        block = vector[start : start + length]
        ends = torch.stack(torch.aminmax(block)).tolist()  # NaN is both ends: no mask, one pass
        if not all(math.isfinite(end) for end in ends):
            where = start + int((~torch.isfinite(block)).nonzero()[0, 0])
            given = f"{name} with {float(vector[where])} at position {where}"
            raise InvalidVector(given, "finite values only", "Look for a diverged training step, or drop this update.")


def check_range(start: object, stop: object, length: int) -> tuple[int, int]:
    """Both ends of a range of coordinates, as ints within [0, length]."""
    first, last = whole_number("start", start), whole_number("stop", stop)
    if not 0 <= first <= last <= length:
        needed = f"0 <= start <= stop <= {length}"
        raise InvalidVector(f"range [{first}, {last})", needed, "Count from 0; stop is not included.")
    return first, last
