"""What a client remembers of each item of its history: whether the server's sum holds it, and the user still has it."""

from enum import IntEnum

import torch
from torch import Tensor


class SyncState(IntEnum):
    """Whether the server's sum holds an item of a client's history, and whether the user still has it.

    Where uploads come in parts, UPLOADED is the sum of 2ᵖ over the parts p that hold it; −1 less that if it is dropped.
    """

    RETRACT = -2
    DROPPED = -1
    NEW = 0
    UPLOADED = 1


def is_dropped(states: Tensor) -> Tensor:
    """Which items a user no longer has."""
    return states < SyncState.NEW


def uploaded_parts(states: Tensor) -> Tensor:
    """Which parts of the server's sum hold each item, as bits."""
    return torch.where(is_dropped(states), SyncState.DROPPED - states, states).long()


def is_uploaded(states: Tensor) -> Tensor:
    """Which items the server's sum holds."""
    return uploaded_parts(states) > 0


def sync_states(uploaded: Tensor, dropped: Tensor) -> Tensor:
    """The :class:`SyncState` of each item, from the parts that hold it and what the user no longer has."""
    present = uploaded.to(torch.get_default_dtype())
    return torch.where(dropped, SyncState.DROPPED - present, present)
