"""Subspace: the projection matrix S of the paper, as an object that stores a handful of integers."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fairfold.errors import InvalidSubspace, InvalidVector
from fairfold.kernels import ops
from fairfold.kernels.hashing import MAX_BLOCKS, Layout, expand_seed, slots_and_signs
from fairfold.kernels.reference import SUM_DTYPE
from fairfold.subspace import nesting
from fairfold.subspace.checks import check_dtype, check_finite, check_range, check_vector, whole_number

MAPPINGS = ("element", "chunk", "ranked")


class Subspace:
    """A subspace of ``size`` dimensions in the space of ``full_size`` coordinates (S, n × m, in the paper).

    Row a of S has one non-zero, ``sign(a)`` in column ``slot(a)``, both computed from the seed when needed. The object
    holds no array; every operation works in blocks and needs, beyond its result, at most
    ``fairfold.kernels.reference.TEMPORARY_BYTES`` (16 MiB).

    A subspace as large as the full space *is* the full space: its S is the identity. A device that can hold the whole
    model therefore trains the whole model, and FAIR among such devices is FedAvg.

    Args:
        full_size: n, the number of coordinates of the full vector.
        size: m, what the device can hold; 1 <= size <= full_size.
        seed: Seed of the hash; subspaces nest only if they share it. 0 <= seed < 2**64.
        mapping: ``"element"`` hashes every coordinate alone; ``"chunk"`` hashes ``chunk`` adjacent ones together;
            ``"ranked"`` gives the first ``head`` coordinates a slot each and hashes the others (in chunks, if asked),
            for tables whose rows are in order of popularity.
        chunk: Z, how many adjacent coordinates share one hash; must divide the hashed part of ``size``.
        head: For ``"ranked"``: how many coordinates own their slot; 0 picks half of ``size``.
        sign: Whether coordinates have random signs (count sketch), or none (count-min sketch, the paper's equations).
        orthonormal: Scale each column to unit length, as the convergence proof assumes. Reduction is then Sᵀ itself.
            Keeps the counts of all slots (size ``size``) once they are needed.



    Example:
        >>> import torch
        >>> small, large = Subspace(1_000, 50, seed=7), Subspace(1_000, 100, seed=7)
        >>> compact = small.reduce(torch.ones(1_000))
        >>> compact.shape, small.recover(compact).shape
        (torch.Size([50]), torch.Size([1000]))
        >>> small.nests_in(large)
        True
        >>> torch.equal(large.recover(small.unfold(compact, large)), small.recover(compact))
        True
    """

    def __init__(
        self,
        full_size: int,
        size: int,
        seed: int = 0,
        mapping: str = "element",
        chunk: int = 1,
        head: int = 0,
        sign: bool = True,
        *,
        orthonormal: bool = False,
    ) -> None:
        full_size, size = whole_number("full_size", full_size), whole_number("size", size)
        seed, chunk, head = whole_number("seed", seed), whole_number("chunk", chunk), whole_number("head", head)
        _check_sizes(full_size, size, seed)
        _check_mapping(mapping, chunk, head)
        # Columns of the full space are of unit length as they are.
        self.orthonormal = bool(orthonormal) and size < full_size
        if size == full_size:
            head = full_size
        elif mapping == "ranked":
            head = _head_of(size, chunk, head)
        tail = size - head
        if tail % chunk:
            given = f"chunk={chunk} with {tail} hashed slots of size={size}"
            remedy = f"Use size={head + tail // chunk * chunk or head + chunk}, or another chunk."
            raise InvalidSubspace(given, "a chunk that divides the hashed slots", remedy)
        if tail // chunk > MAX_BLOCKS:
            given, remedy = f"{tail // chunk} hashed blocks", "Hash longer chunks (mapping='chunk')."
            raise InvalidSubspace(given, f"at most {MAX_BLOCKS}", remedy)
        self.full_size = full_size
        self.size = size
        self.is_full = tail == 0
        self.seed, self.sign = seed, bool(sign)
        self.mapping, self.chunk, self.head = mapping, chunk, head
        self.layout = Layout(full_size, head, tail, chunk, expand_seed(seed), bool(sign))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subspace) and (self.layout, self.orthonormal) == (other.layout, other.orthonormal)

    def __hash__(self) -> int:
        return hash((self.full_size, self.size, self.seed))

    def __repr__(self) -> str:
        owns = bool(self.head) and not self.is_full
        unusual = {"chunk": self.chunk > 1, "head": owns, "sign": not self.sign, "orthonormal": self.orthonormal}
        names = ["full_size", "size", "seed", "mapping", *(name for name, shown in unusual.items() if shown)]
        return f"Subspace({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def description(self) -> dict[str, Any]:
        """Plain values that make it again, but for ``orthonormal``."""
        facts = {"full_size": self.full_size, "size": self.size, "seed": self.seed, "mapping": self.mapping}
        return facts | {"chunk": self.chunk, "head": 0 if self.is_full else self.head, "sign": self.sign}

    def slots(self, start: int, stop: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Slots (int64) and signs (int8) of the coordinates [start, stop)."""
        start, stop = check_range(start, stop, self.full_size)
        return slots_and_signs(self.layout, torch.arange(start, stop, device=device))

    def counts(self, device: torch.device | str | None = None) -> Tensor:
        """How many coordinates live in each slot (int32): the squared column lengths of S."""
        counts = torch.zeros(self.size, dtype=torch.int32, device=device)
        ops.count_range(self.layout, 0, self.full_size, counts)
        return counts

    @cached_property
    def _kept_counts(self) -> Tensor:
        return self.counts()

    def _column_lengths(self, like: Tensor) -> Tensor:
        """The length of each column of S (1 for an empty one), in the dtype and on the device of ``like``."""
        return self._kept_counts.to(like.device, like.dtype).clamp_(min=1).sqrt_()

    def _unscaled(self, compact: Tensor) -> Tensor:
        """Divided by the lengths of the columns, where these are scaled to 1."""
        return compact / self._column_lengths(compact) if self.orthonormal else compact

    @torch.no_grad()
    def reduce(self, full: Tensor, *, trusted: bool = False) -> Tensor:
        """Project on the subspace (eq. reduction): the signed mean of each slot, 0 if it is empty."""
        check_vector("full", full, self.full_size, trusted=trusted)
        if self.is_full:
            return full.clone()
        if not self.orthonormal:
            return ops.reduce(self.layout, full)
        return self._divided(*self.sums_and_counts(full, trusted=True)).to(full.dtype)

    @torch.no_grad()
    def sums_and_counts(self, full: Tensor, *, trusted: bool = False) -> tuple[Tensor, Tensor]:
        """Signed sums and the number of coordinates of every slot, the form that can be folded to smaller sizes."""
        check_vector("full", full, self.full_size, trusted=trusted)
        sums = torch.zeros(self.size, dtype=SUM_DTYPE[full.dtype], device=full.device)
        counts = torch.zeros(self.size, dtype=torch.int32, device=full.device)
        ops.accumulate_range(self.layout, full, 0, sums, counts)
        return sums, counts

    def _divided(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Means from sums, in place; with orthonormal columns sums are divided by the column's length instead."""
        divisor = counts.to(sums.dtype).clamp_(min=1)
        return sums.div_(divisor.sqrt_() if self.orthonormal else divisor)

    @torch.no_grad()
    def recover(self, compact: Tensor, out: Tensor | None = None, *, trusted: bool = False) -> Tensor:
        """Back to the full space (eq. recovery): full[a] = sign(a) · compact[slot(a)]; into ``out`` where given."""
        check_vector("compact", compact, self.size, trusted=trusted)
        if out is None:
            out = torch.empty(self.full_size, dtype=compact.dtype, device=compact.device)
        elif out.shape != (self.full_size,) or out.dtype != compact.dtype or out.device != compact.device:
            given = f"out of shape {tuple(out.shape)}, {out.dtype} on {out.device}"
            needed = f"shape ({self.full_size},), {compact.dtype} on {compact.device}"
            raise InvalidVector(given, needed, "Allocate it with torch.empty, or leave it out.")
        return self._recover_into(compact, 0, out)

    @torch.no_grad()
    def recover_range(self, compact: Tensor, start: int, stop: int, *, trusted: bool = False) -> Tensor:
        """The coordinates [start, stop) alone (eq. partial recovery): what a device realises of its model at a time."""
        check_vector("compact", compact, self.size, trusted=trusted)
        start, stop = check_range(start, stop, self.full_size)
        return self._recover_into(compact, start, torch.empty(stop - start, dtype=compact.dtype, device=compact.device))

    def _recover_into(self, compact: Tensor, first: int, out: Tensor) -> Tensor:
        if self.is_full:
            return out.copy_(compact[first : first + out.numel()])
        ops.recover_range(self.layout, self._unscaled(compact), first, out)
        return out

    @torch.no_grad()
    def recover_rows(self, compact: Tensor, rows: Tensor, row_size: int) -> Tensor:
        """Chosen rows of the full vector seen as a table of rows of ``row_size``: shape (len(rows), row_size)."""
        check_vector("compact", compact, self.size)
        row_size = self._check_rows(rows, row_size)
        return ops.recover_rows(self.layout, self._unscaled(compact), rows, row_size)

    @torch.no_grad()
    def accumulate(self, full: Tensor) -> Tensor:
        """Sᵀ: signed sums without division, which takes a gradient of the full space to one of the subspace."""
        check_vector("full", full, self.full_size)
        if self.is_full:
            return full.clone()
        sums, _ = self.sums_and_counts(full, trusted=True)
        return self._unscaled(sums).to(full.dtype)

    @torch.no_grad()
    def accumulate_rows(self, values: Tensor, rows: Tensor) -> Tensor:
        """Sᵀ for a gradient that is zero outside chosen rows: values (len(rows), row_size), rows may repeat."""
        if values.dim() != 2 or len(values) != len(rows):
            given = f"values of shape {tuple(values.shape)} for {len(rows)} rows"
            raise InvalidVector(given, f"shape ({len(rows)}, row_size)", "Give one line of values per row.")
        check_dtype("values", values.dtype)
        check_finite("values", values.reshape(-1))
        self._check_rows(rows, values.shape[1])
        sums = torch.zeros(self.size, dtype=SUM_DTYPE[values.dtype], device=values.device)
        ops.accumulate_rows(self.layout, values, rows, sums)
        return self._unscaled(sums).to(values.dtype)

    def shares_hash(self, other: "Subspace") -> bool:
        """Whether both place the coordinates they hash by the same hash: *consistent* in the paper's words."""
        one, two = (replace(subspace.layout, head=0, tail=0) for subspace in (self, other))
        return one == two

    def nests_in(self, big: "Subspace") -> bool:
        """Whether this subspace lies inside ``big``: *collapsible* in the paper's words."""
        return nesting.nesting_obstacle(self, big) is None

    @torch.no_grad()
    def unfold(self, compact: Tensor, big: "Subspace", *, trusted: bool = False) -> Tensor:
        """The compact vector of ``big`` that stands for the same full vector: big.recover(unfold(p)) = recover(p)."""
        check_vector("compact", compact, self.size, trusted=trusted)
        nesting.require(self, big)
        if self == big:
            return compact.clone()
        if big.is_full:
            return self.recover(compact, trusted=True)
        out = nesting.unfolded(self.layout, big.layout, self._unscaled(compact))
        return out.mul_(big._column_lengths(out)) if big.orthonormal else out

    @torch.no_grad()
    def fold(self, sums: Tensor, counts: Tensor, small: "Subspace", *, trusted: bool = False) -> tuple[Tensor, Tensor]:
        """Sums and counts of this subspace, added up to those of ``small``; means would not fold."""
        check_vector("sums", sums, self.size, trusted=trusted)
        if counts.shape != (self.size,) or counts.is_floating_point():
            given, needed = f"counts of shape {tuple(counts.shape)}, {counts.dtype}", f"({self.size},), whole numbers"
            raise InvalidVector(given, needed, "Take sums and counts from one call of sums_and_counts.")
        nesting.require(small, self)
        if small == self:
            return sums.clone(), counts.clone()
        return nesting.folded(self.layout, small.layout, sums), nesting.folded(self.layout, small.layout, counts)

    def _check_rows(self, rows: Tensor, row_size: int) -> int:
        row_size = whole_number("row_size", row_size)
        if row_size < 1 or self.full_size % row_size:
            given = f"row_size={row_size} for {self.full_size} coordinates"
            raise InvalidVector(given, "a positive divisor of the full size", "Use the number of columns of the table.")
        if rows.dim() != 1 or rows.dtype not in (torch.int64, torch.int32):
            given = f"rows of shape {tuple(rows.shape)}, {rows.dtype}"
            raise InvalidVector(given, "a vector of int64", "Use torch.tensor([...]).")
        count = self.full_size // row_size
        if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < count):
            given = f"rows from {int(rows.min())} to {int(rows.max())}"
            raise InvalidVector(given, f"rows from 0 to {count - 1}", "Check the ids.")
        return row_size


def _check_sizes(full_size: int, size: int, seed: int) -> None:
    if full_size < 1:
        raise InvalidSubspace(f"full_size={full_size}", "at least 1", "Use the number of parameters of the model.")
    if not 1 <= size <= full_size:
        given = f"size={size} for full_size={full_size}"
        raise InvalidSubspace(given, f"1 <= size <= {full_size}", "See fairfold.subspace.fit_sizes.")
    if not 0 <= seed < 2**64:
        raise InvalidSubspace(f"seed={seed}", "0 <= seed < 2**64", "Take the seed modulo 2**64.")


def _check_mapping(mapping: str, chunk: int, head: int) -> None:
    if mapping not in MAPPINGS:
        raise InvalidSubspace(f"mapping={mapping!r}", f"one of {', '.join(MAPPINGS)}", "Check the spelling.")
    if chunk < 1:
        raise InvalidSubspace(f"chunk={chunk}", "at least 1", "Use chunk=1 to hash every coordinate alone.")
    if chunk > 1 and mapping == "element":
        raise InvalidSubspace(f"chunk={chunk} with mapping='element'", "chunk=1", "Use mapping='chunk'.")
    if head and mapping != "ranked":
        raise InvalidSubspace(f"head={head} with mapping={mapping!r}", "head=0", "Use mapping='ranked'.")


def _head_of(size: int, chunk: int, head: int) -> int:
    """The head of a ranked subspace: what was asked for, or half of the size in whole chunks."""
    if head == 0:
        return size // 2 // chunk * chunk
    if not 0 < head < size or head % chunk:
        given, needed = f"head={head} for size={size} and chunk={chunk}", f"a multiple of the chunk below {size}"
        raise InvalidSubspace(given, needed, "Leave head out for half of the size.")
    return head
