"""Reduction of a full vector that arrives in pieces: the paper's alternative, in which the server broadcasts θ."""

from bisect import bisect_left

import torch
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.kernels import ops
from fairfold.subspace.checks import SUM_DTYPE, check_dtype, check_vector, whole_number
from fairfold.subspace.subspace import Subspace


class StreamReducer:
    """Takes blocks of the full vector in any order and ends with the compact vector.

    Holds one sum and one count a slot, never anything of the full size. Every coordinate must arrive exactly once, as
    is checked: where the blocks lie that have arrived is remembered.

    Args:
        subspace: What to project on.
        dtype: Of the result; sums of half-precision blocks are kept in float32.
        device: Where the sums are kept; blocks are moved there.
    """

    def __init__(
        self, subspace: Subspace, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        check_dtype("dtype", dtype)
        self.subspace = subspace
        self._dtype = dtype
        self._sums = torch.zeros(subspace.size, dtype=SUM_DTYPE[dtype], device=device)
        self._counts = torch.zeros(subspace.size, dtype=torch.int32, device=device)
        self._blocks: list[tuple[int, int]] = []

    @torch.no_grad()
    def add(self, start: int, block: Tensor) -> None:
        """Take the coordinates [start, start + len(block))."""
        start = whole_number("start", start)
        length = block.numel() if isinstance(block, Tensor) else 0
        check_vector("block", block, length)
        self._claim(start, start + length)
        ops.accumulate_range(self.subspace.layout, block.to(self._sums.device), start, self._sums, self._counts)

    def finish(self) -> Tensor:
        """The compact vector; refused while coordinates are missing."""
        gap = 0
        for start, stop in self._blocks:
            gap = stop if start == gap else gap
        if gap != self.subspace.full_size:
            arrived = sum(stop - start for start, stop in self._blocks)
            given = f"{arrived} of {self.subspace.full_size} coordinates"
            remedy = f"Add the missing blocks, the first of which starts at {gap}."
            raise InvalidVector(given, "every coordinate once", remedy)
        return self.subspace._divided(self._sums.clone(), self._counts).to(self._dtype)

    def _claim(self, start: int, stop: int) -> None:
        """Note that [start, stop) has arrived; refuse it, unchanged, if it is out of range or was there before."""
        if start < 0 or stop > self.subspace.full_size:
            within = f"a block within [0, {self.subspace.full_size})"
            raise InvalidVector(f"block [{start}, {stop})", within, "Check its start.")
        if start == stop:
            return
        at = bisect_left(self._blocks, (start, stop))
        before = at > 0 and self._blocks[at - 1][1] > start
        after = at < len(self._blocks) and self._blocks[at][0] < stop
        if before or after:
            given = f"block [{start}, {stop}), part of which arrived before"
            raise InvalidVector(given, "every coordinate once", "Send it once.")
        self._blocks.insert(at, (start, stop))
