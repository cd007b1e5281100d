"""Types that all packages share."""

from torch import Tensor

Weights = dict[str, Tensor]
"""Tensors by name; the federation's are flat."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""

FLOAT_BYTES = 4
"""Bytes of a float32."""
