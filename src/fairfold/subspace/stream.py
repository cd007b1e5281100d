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
    is checked: what has arrived is remembered as intervals, neighbours merged.

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
        self._starts: list[int] = []
        self._stops: list[int] = []

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
        arrived = sum(stop - start for start, stop in zip(self._starts, self._stops, strict=True))
        if arrived != self.subspace.full_size:
            raise InvalidVector(
                f"{arrived} of {self.subspace.full_size} coordinates",
                "every coordinate once",
                f"Add the missing blocks, the first of which starts at {self._first_gap()}.",
            )
        return self.subspace._divided(self._sums.clone(), self._counts).to(self._dtype)

    def _first_gap(self) -> int:
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0

    def _claim(self, start: int, stop: int) -> None:
        """Note that [start, stop) has arrived; refuse it, unchanged, if it is out of range or was there before."""
        if start < 0 or stop > self.subspace.full_size:
            raise InvalidVector(
                f"block [{start}, {stop})", f"a block within [0, {self.subspace.full_size})", "Check its start."
            )
        if start == stop:
            return
        at = bisect_left(self._starts, start)
        before = at > 0 and self._stops[at - 1] > start
        after = at < len(self._starts) and self._starts[at] < stop
        if before or after:
            raise InvalidVector(
                f"block [{start}, {stop}), part of which arrived before", "every coordinate once", "Send it once."
            )
        joins_left = at > 0 and self._stops[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == stop
        first = at - 1 if joins_left else at
        last = at + 1 if joins_right else at
        start = self._starts[first] if joins_left else start
        stop = self._stops[last - 1] if joins_right else stop
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]
