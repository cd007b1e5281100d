"""The specification of what is done with lists of pairs of items: sums of those that occur, and their matrix.

A packed triangle has the pair (i, j), i ≤ j, at j(j + 1)/2 + i; of a long one the pairs that occur are listed.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fairfold.kernels.reference import PAIRS_AT_ONCE, ranges, truncated_lengths

ROWS_AT_ONCE = 16  # rows of a sparse matrix that are spread out together
MEMBERS_AT_ONCE = 1 << 15  # rows of blocks that are copied together
PADDED_AT_ONCE = 1 << 22  # numbers of rows that are searched together
LISTED_AT_ONCE = 1 << 21  # pairs of a sum that are put into rows together


def columns_of(places: Tensor) -> Tensor:
    """The larger item of each pair."""
    columns = ((8 * places + 1).double().sqrt() - 1).div(2).long()
    columns += (columns + 1) * (columns + 2) // 2 <= places  # where the root was rounded
    return columns - (columns * (columns + 1) // 2 > places).long()


def listed_pair_sums(
    items: Tensor, begins: Tensor, ends: Tensor, weights: Tensor, max_items: int
) -> tuple[Tensor, Tensor]:
    """The pairs that occur in weighted histories: positions in the packed triangle, ascending, and sums.

    Some columns of the triangle are summed at a time, so that little is held beside the result.
    """
    items, lengths = items.long(), truncated_lengths(items, begins, ends, max_items)
    start, before = torch.repeat_interleave(begins, lengths), ranges(lengths)
    columns, weight = items[start + before], torch.repeat_interleave(weights.double(), lengths)
    batches = torch.bincount(columns, before + 1, minlength=max_items).cumsum(0).div(PAIRS_AT_ONCE).long()[columns]
    found = [(items.new_empty(0), weights.new_empty(0))]
    for batch in torch.unique(batches):
        mine = (batches == batch).nonzero().flatten()
        later = torch.repeat_interleave(mine, before[mine] + 1)
        places = columns[later] * (columns[later] + 1) // 2 + items[start[later] + ranges(before[mine] + 1)]
        distinct, owners = torch.unique(places, return_inverse=True)
        sums = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, owners, weight[later])
        found.append((distinct, sums.to(weights.dtype)))
    places, sums = (torch.cat(parts) for parts in zip(*found, strict=True))
    return places, sums


def symmetric_rows(
    places: Tensor, values: Tensor, rows: int, kind: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The matrix of a packed triangle by rows: where each starts, columns ascending, numbers; and the diagonal."""
    places = places.long()
    before, after = torch.zeros(2, rows, dtype=torch.int64)  # numbers of every row, up to the diagonal and beyond
    for later, earlier, _ in _listed_parts(places, values):
        before += torch.bincount(later, minlength=rows)
        after += torch.bincount(earlier[earlier != later], minlength=rows)
    starts = (before + after).cumsum(0) - before - after
    free = starts + before  # where the next number beyond the diagonal stands
    columns = torch.empty(int(before.sum() + after.sum()), dtype=kind)
    numbers = torch.empty(len(columns), dtype=dtype)
    diagonal = torch.zeros(rows, dtype=torch.float64)
    first = before.cumsum(0) - before
    for start, (later, earlier, here) in enumerate(_listed_parts(places, values)):
        rank = torch.arange(len(later)) + start * LISTED_AT_ONCE - first[later]
        columns[starts[later] + rank] = earlier.to(kind)
        numbers[starts[later] + rank] = here.to(dtype)
        own = later == earlier
        diagonal[later[own]] = here[own].double()
        mirrored, order = earlier[~own].sort(stable=True)
        known, sizes = torch.unique_consecutive(mirrored, return_counts=True)
        rank = torch.arange(len(mirrored)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        columns[free[mirrored] + rank] = later[~own][order].to(kind)
        numbers[free[mirrored] + rank] = here[~own][order].to(dtype)
        free[known] += sizes
    return starts, columns, numbers, diagonal


def _listed_parts(places: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The later and the earlier item of pairs of a packed triangle, and their values, some at a time."""
    for here, numbers in zip(torch.split(places, LISTED_AT_ONCE), torch.split(values, LISTED_AT_ONCE), strict=True):
        later = columns_of(here)
        yield later, here - later * (later + 1) // 2, numbers


def strongest(
    starts: Tensor, columns: Tensor, values: Tensor, roots: Tensor, users: Tensor | None, most: int
) -> tuple[Tensor, Tensor]:
    """The ``most`` other columns of every row with the largest strengths above 0, and these, both [rows, most].

    The strength of (r, c) is value · roots_r · roots_c or, of as many ``users``, Jaccard's of that and users_r and
    users_c. Where there are fewer, a row stands for itself, with 0; of equal ones the first column is the stronger.
    """
    size = len(starts)
    found, strengths = torch.arange(size)[:, None].repeat(1, most), values.new_zeros(size, most)
    starts = starts.long()
    lengths, at = torch.cat([starts[1:], starts.new_tensor([len(columns)])]) - starts, 0
    order = lengths.argsort(descending=True)
    while at < size:
        width = max(1, int(lengths[order[at]]))
        rows = order[at : at + max(1, PADDED_AT_ONCE // width)]
        at += len(rows)
        places = starts[rows, None] + torch.arange(width)
        real = places < starts[rows, None] + lengths[rows, None]
        places = torch.where(real, places, 0)
        mine = columns[places].long() if len(columns) else torch.zeros_like(places)
        given = (values[places] if len(values) else values.new_zeros(places.shape)) * roots[rows, None] * roots[mine]
        if users is not None:
            given = given / (users[rows, None] + users[mine] - given).clamp(min=1e-12)
        given, nearest = torch.where(real & (mine != rows[:, None]), given, 0).sort(stable=True, dim=1, descending=True)
        given, kept = given[:, :most].clamp(min=0), slice(min(most, width))
        found[rows, kept] = torch.where(given > 0, mine.gather(1, nearest[:, :most]), rows[:, None])
        strengths[rows, kept] = given
    return found, strengths


def member_blocks(starts: Tensor, columns: Tensor, values: Tensor, members: Tensor) -> Tensor:
    """Blocks of a matrix that is given by rows, [lists, width, width], for the rows in members, [lists, width]."""
    members = members.contiguous()
    size, width = members.shape
    blocks = values.new_empty(size, width, width)
    listed, order = members.view(-1).sort(stable=True)
    first = torch.searchsorted(listed, torch.arange(size + 1))
    spread = values.new_zeros(ROWS_AT_ONCE, size)
    starts = torch.cat([starts.long(), torch.tensor([len(columns)])])
    for start in range(0, size, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, size)
        here = slice(int(starts[start]), int(starts[stop]))
        rows = torch.repeat_interleave(torch.arange(stop - start), starts[start : stop + 1].diff())
        mine = columns[here].long()
        spread[rows, mine] = values[here]
        for wanted in torch.split(order[first[start] : first[stop]], MEMBERS_AT_ONCE):
            item, place = torch.div(wanted, width, rounding_mode="floor"), wanted % width
            row = members.view(-1)[wanted] - start
            blocks[item, place] = spread.view(-1)[row[:, None] * size + members[item]]
        spread[rows, mine] = 0
    return blocks
