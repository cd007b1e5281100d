"""What a device keeps of each of its items, so that it can say what has changed since it last spoke.

A mark per item: 1 where the server's sum holds it, else 0. Of an item that the user no longer has it is 2 where the sum
holds it, which is to be taken back, and −1 where it does not.
"""

import torch
from torch import Tensor

SAID = "said"
"""Name of the marks."""


def gone(marks: Tensor) -> Tensor:
    """Which items a user no longer has."""
    return (marks < 0) | (marks > 1)


def marks_of(said: Tensor, lost: Tensor) -> Tensor:
    """Marks of items that the sum holds or does not, and that a user has lost or has."""
    mine = said.to(torch.get_default_dtype())
    return torch.where(lost, 3 * mine - 1, mine)
