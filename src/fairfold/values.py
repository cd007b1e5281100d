"""Words for plain values that all parts share."""

from torch import Tensor

Weights = dict[str, Tensor]
"""Tensors by name; the federation's are flat."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""

BYTES = 4
"""Of a number."""
