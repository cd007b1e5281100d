"""From one size of a nested chain to another, by the operations on ranges and the folding of groups."""

import torch
from torch import Tensor

from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout


def fold(big: Layout, small: Layout, sums: Tensor) -> Tensor:
    """Sums (or counts, int32) at the size of ``small`` from those at the size of ``big``, which ``small`` nests in.

    Counts of owned slots are 1 each, so for counts the owned slots that ``small`` hashes are counted, not summed.
    """
    low, high = small.head, big.head
    out = torch.zeros(small.size, dtype=sums.dtype, device=sums.device)
    out[:low] = sums[:low]
    if big.tail:
        out[low:] = ops.fold_groups(sums[high:], big.tail // small.tail, small.chunk)
    if sums.is_floating_point():
        ops.accumulate_range(small, sums[low:high], low, out)
    else:
        ops.count_range(small, low, high, out)
    return out


def unfold(small: Layout, big: Layout, compact: Tensor) -> Tensor:
    """The compact vector of ``big`` that stands for the same full vector."""
    low, high = small.head, big.head
    target = torch.empty(big.size, dtype=compact.dtype, device=compact.device)
    target[:low] = compact[:low]
    ops.recover_range(small, compact, low, target[low:high])
    if big.tail:
        ops.unfold_groups(compact[low:], big.tail // small.tail, small.chunk, target[high:])
    return target
