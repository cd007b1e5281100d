"""The operations in plain torch: short, on any device, and the specification of every faster body.

Over coordinates, functions handle a contiguous *range* of the full vector, chosen *rows* of it (a row being
``row_size`` coordinates), or the *active* slots of a round (see :mod:`fairfold.nn.lookup`). Those of ranges and rows
work in blocks of :data:`BLOCK` coordinates, so that temporary memory stays below :data:`TEMPORARY_BYTES` however many
are asked for. Co-occurrence sums and packed rows stand below.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.errors import InvalidRow
from fairfold.kernels.hashing import Layout, slots_and_signs

BLOCK = 2**17  # coordinates handled at once: enough to hide the cost of a torch call, few enough to stay in cache

TEMPORARY_BYTES = 128 * BLOCK
"""Upper bound of temporary memory of one call here: at most sixteen 8-byte words a coordinate are alive at a time."""

SUM_DTYPE = {torch.float64: torch.float64} | dict.fromkeys(
    (torch.float32, torch.float16, torch.bfloat16), torch.float32
)
"""The dtype that sums of values of a dtype are formed in."""

BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
ADAGRAD_EPSILON = 1e-10
PAIRS_AT_ONCE = 1 << 20  # pairs that are listed at a time


# -- ranges of the full vector ---------------------------------------------------------------------------------------
def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor, counts: Tensor | None = None) -> None:
    """Add the signed values of coordinates from ``start`` on to their slots of ``sums``, and 1 each to ``counts``."""
    for part in _blocks(values.numel()):
        coordinates = torch.arange(start + part.start, start + part.stop, device=sums.device)
        slots, signs = slots_and_signs(layout, coordinates)
        sums.index_add_(0, slots, values[part].to(sums.dtype) * signs)
        if counts is not None:
            counts.index_add_(0, slots, torch.ones_like(slots, dtype=counts.dtype))


def reduce(layout: Layout, full: Tensor) -> Tensor:
    """The signed mean of each slot over the whole full vector, 0 if it is empty; halves are summed in float32."""
    dtype = torch.promote_types(full.dtype, torch.float32)
    sums = torch.zeros(layout.size, dtype=dtype, device=full.device)
    counts = torch.zeros(layout.size, dtype=torch.int32, device=full.device)
    accumulate_range(layout, full, 0, sums, counts)
    return sums.div_(counts.clamp_(min=1)).to(full.dtype)


def count_range(layout: Layout, start: int, stop: int, counts: Tensor) -> None:
    """Raise ``counts`` by how many coordinates of [start, stop) live in each slot, in place."""
    for part in _blocks(stop - start):
        slots, _ = slots_and_signs(layout, torch.arange(start + part.start, start + part.stop, device=counts.device))
        counts.index_add_(0, slots, torch.ones_like(slots, dtype=counts.dtype))


def recover_range(layout: Layout, compact: Tensor, start: int, out: Tensor) -> None:
    """Write the values of coordinates [start, start + len(out)) into ``out``."""
    for part in _blocks(out.numel()):
        coordinates = torch.arange(start + part.start, start + part.stop, device=compact.device)
        out[part] = _signed_values(layout, compact, coordinates)


# -- from one size of a nested chain to another ----------------------------------------------------------------------
def fold_groups(values: Tensor, repeats: int, chunk: int) -> Tensor:
    """Sum the hashed slots of a larger size to those of a smaller: ``repeats`` neighboring chunks become one."""
    return values.view(-1, repeats, chunk).sum(1, dtype=values.dtype).view(-1)


def unfold_groups(values: Tensor, repeats: int, chunk: int, out: Tensor) -> None:
    """Write the hashed slots of a smaller size to ``out``, each chunk repeated."""
    grouped = out.view(-1, repeats, chunk)
    grouped.copy_(values.view(-1, 1, chunk).expand_as(grouped))


# -- rows of a table -------------------------------------------------------------------------------------------------
def recover_rows(layout: Layout, compact: Tensor, rows: Tensor, row_size: int) -> Tensor:
    """The values of chosen rows, shape (len(rows), row_size)."""
    _check_rows(layout, rows, row_size)
    out = torch.empty(len(rows), row_size, dtype=compact.dtype, device=compact.device)
    for part in _blocks(len(rows), row_size):
        out[part] = _signed_values(layout, compact, row_coordinates(rows[part], row_size))
    return out


def accumulate_rows(layout: Layout, values: Tensor, rows: Tensor, sums: Tensor, scale: float = 1.0) -> None:
    """Add ``scale`` times the signed ``values`` (len(rows), row_size) of chosen rows, which may repeat, in place."""
    _check_rows(layout, rows, values.shape[1])
    for part in _blocks(len(rows), values.shape[1]):
        slots, signs = slots_and_signs(layout, row_coordinates(rows[part], values.shape[1]))
        sums.index_add_(0, slots.reshape(-1), (values[part].to(sums.dtype) * signs).reshape(-1), alpha=scale)


def touched_rows(layout: Layout, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a batch as touched slots only: slots in increasing order, each once, and their summed values."""
    _check_rows(layout, rows, values.shape[1])
    slots, signs = slots_and_signs(layout, row_coordinates(rows, values.shape[1]))
    touched, inverse = torch.unique(slots, return_inverse=True)
    sums = torch.zeros(len(touched), dtype=values.dtype, device=values.device)
    sums.index_add_(0, inverse.reshape(-1), (values * signs).reshape(-1))
    return touched, sums


def row_coordinates(rows: Tensor, row_size: int) -> Tensor:
    """The coordinates of chosen rows, shape (len(rows), row_size)."""
    return rows.long()[:, None] * row_size + torch.arange(row_size, device=rows.device)


def bad_rows(layout: Layout, rows: Tensor, row_size: int) -> InvalidRow:
    """The error for row ids outside of the table: the hash would give each of them the values of some other row."""
    count = layout.full_size // row_size
    wrong = int(rows[(rows < 0) | (rows >= count)][0])
    return InvalidRow(f"row {wrong}", f"rows from 0 to {count - 1}", "Check the ids.")


def _check_rows(layout: Layout, rows: Tensor, row_size: int) -> None:
    if not rows.is_cpu or rows.numel() == 0:  # elsewhere reading the ids would stop the device
        return
    if int(rows.min()) < 0 or int(rows.max()) >= layout.full_size // row_size:
        raise bad_rows(layout, rows, row_size)


# -- the active slots of a round -------------------------------------------------------------------------------------
def factorize(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Number keys (int32) in the order of their first appearance; also the distinct keys in that order."""
    flat = keys.reshape(-1).long()
    distinct, inverse = torch.unique(flat, return_inverse=True)
    first = torch.full_like(distinct, len(flat))
    first.scatter_reduce_(0, inverse, torch.arange(len(flat), device=flat.device), "amin")
    order = first.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=flat.device)
    return rank[inverse].to(torch.int32).view(keys.shape), distinct[order]


def recover_positions(source: Tensor, positions: Tensor, signs: Tensor) -> Tensor:
    """Signed values at ``positions`` (int32) of ``source``, each times its sign (int8)."""
    return source[positions.long()] * signs.to(source.dtype)


def accumulate_positions(values: Tensor, positions: Tensor, signs: Tensor, sums: Tensor) -> None:
    """Add signed values at ``positions`` of ``sums``, in place."""
    sums.index_add_(0, positions.reshape(-1), (values.to(sums.dtype) * signs).reshape(-1))


def recover_lines(source: Tensor, positions: Tensor, signs: Tensor, lines: Tensor) -> Tensor:
    """:func:`recover_positions` of chosen lines of ``positions`` and ``signs``, (*lines.shape, row length)."""
    return recover_positions(source, positions[lines], signs[lines])


def accumulate_lines(values: Tensor, positions: Tensor, signs: Tensor, lines: Tensor, sums: Tensor) -> None:
    """:func:`accumulate_positions` at chosen lines of ``positions`` and ``signs``, in place."""
    accumulate_positions(values, positions[lines], signs[lines], sums)


def step_prefix(
    values: Tensor, gradient: Tensor, moments: Sequence[Tensor], rates: Tensor, moving: Tensor, number: Tensor
) -> None:
    """One step of SGD, Adagrad or Adam (0, 1 or 2 moments, from zeros) on a front part of the values, in place.

    Its gradient becomes 0. ``rates`` has a line a step: its size, for Adam already divided by 1 - β₁ᵗ, and the root of
    1 - β₂ᵗ (1 for the others); ``moving`` says how many values move; ``number`` which step it is, from 0.
    """
    step = int(number)
    end, (rate, root) = int(moving[step]), rates[step].tolist()
    values[:end].sub_(direction(gradient[:end], [moment[:end] for moment in moments], root), alpha=rate)
    gradient[:end].zero_()


def direction(gradient: Tensor, moments: Sequence[Tensor], root: float) -> Tensor:
    """The step of SGD, Adagrad or Adam (0, 1 or 2 moments, written) for a gradient, per unit of the learning rate."""
    if len(moments) == 1:
        moments[0].addcmul_(gradient, gradient)
        return gradient / (moments[0].sqrt() + ADAGRAD_EPSILON)
    if len(moments) == 2:
        moments[0].lerp_(gradient, 1 - BETAS[0])
        moments[1].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        return moments[0] / (moments[1].sqrt() / root + ADAM_EPSILON)
    return gradient


def _signed_values(layout: Layout, compact: Tensor, coordinates: Tensor) -> Tensor:
    slots, signs = slots_and_signs(layout, coordinates)
    return compact[slots] * signs.to(compact.dtype)


def _blocks(length: int, coordinates_each: int = 1) -> Iterator[slice]:
    """Slices that cover ``length`` things, at most BLOCK coordinates (but at least one thing) at a time."""
    step = max(1, BLOCK // max(coordinates_each, 1))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def pair_sums(items: Tensor, begins: Tensor, ends: Tensor, weights: Tensor, max_items: int) -> Tensor:
    """The packed co-occurrence matrix Σ weight · x xᵀ over histories, of the first ``max_items`` items.

    History u is ``items[begins[u]:ends[u]]`` and ascends; the pair (i, j), i ≤ j, is at j(j + 1)/2 + i. Sums are formed
    in double precision.
    """
    total = torch.zeros(max_items * (max_items + 1) // 2, dtype=torch.float64)
    lengths = truncated_lengths(items, begins, ends, max_items)
    batches = (lengths * (lengths + 1) // 2).cumsum(0) // PAIRS_AT_ONCE
    for batch in range(int(batches[-1]) + 1 if len(batches) else 0):
        histories = (batches == batch).nonzero().flatten()
        total.index_add_(0, *listed_pairs(items, begins[histories], lengths[histories], weights[histories].double()))
    return total.to(weights.dtype)


def truncated_lengths(items: Tensor, begins: Tensor, ends: Tensor, max_items: int) -> Tensor:
    """The number of each history's items among the first ``max_items``."""
    below = torch.zeros(len(items) + 1, dtype=torch.int32)
    torch.cumsum(items < max_items, 0, dtype=torch.int32, out=below[1:])
    return (below[ends] - below[begins]).long()


def listed_pairs(items: Tensor, begins: Tensor, lengths: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The position of every pair, an item with itself and all before it in the same history, and its weight."""
    start = torch.repeat_interleave(begins, lengths)
    before = ranges(lengths)
    later = torch.repeat_interleave(torch.arange(len(start)), before + 1)
    column = items[start[later] + before[later]]
    places = column * (column + 1) // 2 + items[start[later] + ranges(before + 1)]
    return places, torch.repeat_interleave(weights, lengths)[later]


def ranges(lengths: Tensor) -> Tensor:
    """0, 1, … below each length, concatenated."""
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)


@dataclass(frozen=True)
class PackedRows:
    """A table quantized to 2 to 8 bits a number, in bytes, of which rows are read as they are stored.

    Two bytes for every row come first, the row headers, whose meaning is the caller's. Then come the rows, each from a
    byte of its own, bit by bit: whole numbers from −m to m = 2^(bits − 1) − 1, counted from 0. There may be no columns.
    """

    content: Tensor
    rows: int
    columns: int
    bits: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, ids: Tensor) -> Tensor:
        width = -(-self.columns * self.bits // 8)
        shifts = torch.arange(8, dtype=torch.uint8)
        codes = self.content[2 * self.rows :].view(self.rows, width)[ids]
        digits = (codes[..., None] >> shifts & 1).flatten(1)[:, : self.columns * self.bits]
        whole = digits.view(len(ids), self.columns, self.bits) << shifts[: self.bits]
        values: Tensor = whole.sum(-1, dtype=torch.uint8).float() - (2 ** (self.bits - 1) - 1)
        return values

    @property
    def row_headers(self) -> Tensor:
        """The two bytes of every row, as floats."""
        return self.content[: 2 * self.rows].view(self.rows, 2).float()


def packed_products(table: PackedRows, ids: Tensor, vectors: Tensor) -> Tensor:
    """Products of vectors with chosen rows, [vectors, rows]."""
    return vectors @ table[ids].T


def packed_sum(table: PackedRows, ids: Tensor, factors: Tensor) -> Tensor:
    """The sum of chosen rows, each times its factor."""
    return factors @ table[ids]
