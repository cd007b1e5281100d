"""Parts of the packed triangle: what a device without room for all sends in which rounds, and remembers.

Part p of P has the columns p, p + P, p + 2P, … of the triangle, one after the other. The pairs of the leading items are
a prefix of every part, as they are of the whole: so sizes nest in each part, and P rounds send all of it. What a client
has sent of each part is remembered with each of its items, as the bits of its sync state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import isqrt
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairfold.federation.updates import MAX_DENSE, add_vectors, sparse_vector
from fairfold.kernels.reference import PAIRS_AT_ONCE, ranges, truncated_lengths
from fairfold.subspace.projection import LeadingBlock, Projection, register_projection

MAX_PARTS = 16  # bits of a sync state, of which single precision holds 23; a first model waits for so many rounds


def num_columns(items: int, part: int, parts: int) -> int:
    """Number of columns of a part among those of the leading items."""
    return max(0, -(-(items - part) // parts))


def part_size(items: int, part: int = 0, parts: int = 1) -> int:
    """Number of elements of a part of the packed triangle over some items."""
    columns = num_columns(items, part, parts)
    return columns * (part + 1) + parts * columns * (columns - 1) // 2


@register_projection
@dataclass(frozen=True)
class TrianglePart(LeadingBlock):
    """A part of the pairs of leading items: every P-th column of the ``kept`` numbers of the triangle."""

    kind: ClassVar[str] = "triangle part"
    part: int
    parts: int

    @property
    def items(self) -> int:
        """The number of leading items whose pairs are kept."""
        return (isqrt(8 * self.kept[0] + 1) - 1) // 2

    @property
    def size(self) -> int:  # type: ignore[override]
        return part_size(self.items, self.part, self.parts)

    @cached_property
    def _lengths(self) -> Tensor:
        """Numbers in each of its columns."""
        return torch.arange(self.part, max(self.part, self.items), self.parts) + 1

    @property
    def diagonal(self) -> Tensor:
        """Positions in the part at which an item meets itself."""
        return self._lengths.cumsum(0) - 1

    def places(self) -> Tensor:
        """The position in the triangle of each number of the part."""
        columns, begins = self._lengths - 1, self._lengths.cumsum(0) - self._lengths
        first = columns * (columns + 1) // 2 - begins
        return torch.repeat_interleave(first, self._lengths) + torch.arange(self.size)

    def sum(self, items: Tensor, begins: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        """The part of Σ weight · x xᵀ over histories; see :func:`fairfold.kernels.reference.pair_sums`."""
        lengths = truncated_lengths(items, begins, ends, self.items)
        before = ranges(lengths)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        columns = items[begins[owner] + before]
        mine = columns % self.parts == self.part
        counts = before[mine] + 1
        owner = owner[mine]
        number = torch.div(columns[mine], self.parts, rounding_mode="floor")
        first = number * (self.part + 1) + self.parts * torch.div(number * (number - 1), 2, rounding_mode="floor")
        total = torch.zeros(self.size, dtype=torch.float64)
        batches = counts.cumsum(0) // PAIRS_AT_ONCE
        for batch in torch.unique(batches):
            here = slice(*torch.searchsorted(batches, torch.stack([batch, batch + 1])).tolist())
            of = torch.repeat_interleave(torch.arange(here.start, here.stop), counts[here])
            rows = items[begins[owner[of]] + ranges(counts[here])]
            total.index_add_(0, first[of] + rows, weights[owner[of]])
        return total

    def reduce(self, full: Tensor) -> Tensor:
        return full[self.places()]

    def recover(self, compact: Tensor) -> Tensor:
        return compact.new_zeros(self.shape[0]).index_copy_(0, self.places(), compact)

    def listed(self, compact: Tensor) -> Tensor:
        """The recovered triangle as a sparse vector of its nonzero numbers."""
        known = compact != 0
        return sparse_vector(self.places()[known], compact[known], self.shape[0])

    def check(self, total: Tensor) -> None:
        """Refuse sums that no histories have: less than nothing, or more pairs of an item than users who have it."""
        numbers = numbers_at(total, self.places())
        own = torch.repeat_interleave(numbers[self.diagonal], self._lengths)
        if bool(((numbers < 0) | (numbers > own)).any()):
            raise ValueError("co-occurrences that no histories have")

    def description(self) -> dict[str, Any]:
        return super().description() | {"part": [self.part, self.parts]}

    @classmethod
    def from_description(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        whole = LeadingBlock.from_description(shape, facts)
        part, parts = (int(number) for number in facts["part"])
        if not 0 <= part < parts <= MAX_PARTS:
            raise ValueError(f"part {part} of {parts} of a triangle")
        found = cls(whole.shape, whole.kept, part, parts)
        if part_size(found.items) != whole.kept[0]:
            raise ValueError(f"{whole.kept[0]} numbers of a triangle")
        return found


def numbers_at(total: Tensor, places: Tensor) -> Tensor:
    """The numbers of a packed triangle, dense or sparse, at some positions."""
    if not total.is_sparse:
        return total[places]
    known, values = total.indices()[0], total.values()
    if not len(known):
        return values.new_zeros(len(places))
    found = torch.searchsorted(known, places).clamp(max=len(known) - 1)
    return torch.where(known[found] == places, values[found], 0)


def add_parts(
    before: Tensor | None, uploads: Sequence[tuple[Projection, Tensor]], size: int, *, check: bool = True
) -> Tensor:
    """The sum in double precision of a packed triangle and uploads of its leading numbers, or of parts of these."""
    whole = [upload for block, upload in uploads if not isinstance(block, TrianglePart)]
    parts = [(block, upload.double()) for block, upload in uploads if isinstance(block, TrianglePart)]
    if (before is not None and before.is_sparse) or size > MAX_DENSE:
        total = add_vectors(before, whole + [block.listed(upload) for block, upload in parts], size)
    else:
        total = before.clone() if before is not None and not whole and parts else add_vectors(before, whole, size)
        for block, upload in parts:
            total.index_add_(0, block.places(), upload)
    for block in {block for block, _ in parts if check}:  # before a model is solved, which waits for all parts
        block.check(total)
    return total


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


@dataclass(frozen=True)
class TuningSchedule:
    """Which rounds upload nine tenths of the histories, which try a candidate, and which upload all."""

    first: int  # rounds before the first candidate
    num_candidates: int
    parts: int = 1  # rounds in which one upload is sent

    @classmethod
    def of(cls, rounds: int, wanted: int, parts: int = 1) -> "TuningSchedule":
        """Schedule as many candidates as leave an upload before them and one after; half of the others come before."""
        count = max(0, min(wanted, rounds - 2 * parts))
        return cls((rounds - count) // 2 if count else 0, count, parts)

    def part(self, round_number: int) -> int:
        """The part of the sum that is uploaded in a round."""
        return (round_number - (self.end if round_number >= self.end else 0)) % self.parts

    def uploads(self, round_number: int) -> bool:
        """Whether clients have news in a round that tries no candidate: all parts of what they had not sent before."""
        return round_number < self.parts or 0 <= round_number - self.end < self.parts

    def completes(self, round_number: int, rounds: int) -> bool:
        """Whether a round leaves no part of an upload to wait for before a model is solved for."""
        ends = round_number + 1 in (self.first, rounds) or self.candidate(round_number) is not None
        return ends or self.part(round_number) == self.parts - 1

    def candidate(self, round_number: int) -> int | None:
        """The candidate of a round; None where it tries none."""
        return round_number - self.first if self.first <= round_number < self.end else None

    @property
    def end(self) -> int:
        """The first round after the candidates."""
        return self.first + self.num_candidates
