"""Co-occurrence sums of groups of clients, combined so that what few groups alone say counts for little.

Under masks the server sees sums over groups, and one client can send whatever it likes for its group. So each group has
a sum of its own over all rounds, and the model is solved from what follows of them all:

1. Every group's sum is held to what histories allow: a pair weighs at most as much as either of its items.
2. An item's pairs in a group weigh together at most what they weigh in some group that may be honest: where h groups
   may be hostile, the (h + 1)-th largest of what they weigh in any.
3. Of every number the Winsorized sum counts: each group's is held between the (h + 1)-th smallest and largest.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence.cooccurrence import triangle_items
from fairfold.algorithms.cooccurrence.parts import add_parts, numbers_at
from fairfold.config.fleet import FEWEST_GROUPS
from fairfold.federation.robust import hostile_groups, winsorized_sum
from fairfold.federation.updates import PLACES, add_vectors, sparse_vector, stored_vector, vector_in
from fairfold.kernels.sparse_pairs import columns_of
from fairfold.subspace.projection import Projection
from fairfold.typing import Weights

GROUP_SUMS = "group sums"  # group of the server's state: the sum of each group of clients, by its number
AT_ONCE = 1 << 20  # numbers of a sum that are combined at a time


def add_to_groups(
    held: Weights, uploads: Mapping[int, Sequence[tuple[Projection, Tensor]]], size: int
) -> tuple[Weights, Tensor]:
    """The groups' sums with what they have uploaded, and the sum that the model is solved from."""
    names = sorted({name.removesuffix(PLACES) for name in held} | set(map(str, uploads)))
    after, sums = dict[str, Tensor](), list[Tensor]()
    for name in names:
        before = vector_in(held, name, size)
        sums.append(add_parts(before, uploads.get(int(name), []), size, check=False))
        after |= stored_vector(name, sums[-1])
    return after, combined(sums, size)


def combined(sums: Sequence[Tensor], size: int) -> Tensor:
    """The sum of packed triangles by these rules; nothing where there are too few of them to compare."""
    if len(sums) < FEWEST_GROUPS:
        return add_vectors(None, [], size)
    if sums[0].is_sparse:
        places = torch.unique(torch.cat([total.indices()[0] for total in sums]))
    else:
        places = torch.arange(size)
    chunks = [_Chunk.of(places[start : start + AT_ONCE]) for start in range(0, len(places), AT_ONCE)]
    items = torch.zeros(len(sums), triangle_items(size), dtype=torch.float64)  # what the pairs of an item weigh
    for chunk in chunks:
        for total, of in zip(sums, items, strict=True):
            values = chunk.possible(total)
            of.index_add_(0, chunk.columns, values).index_add_(0, chunk.rows, values.masked_fill(chunk.diagonal, 0))
    scales = (
        items.sort(0).values[-1 - hostile_groups(len(sums))] / items.clamp(min=torch.finfo(items.dtype).tiny)
    ).clamp(max=1)
    found = [places[:0].double()]
    for chunk in chunks:
        held = [chunk.possible(total) * chunk.scale(of) for total, of in zip(sums, scales, strict=True)]
        found.append(winsorized_sum(torch.stack(held)))
    return sparse_vector(places, torch.cat(found), size) if sums[0].is_sparse else torch.cat(found)


class _Chunk(NamedTuple):
    """Some positions of a packed triangle, with the items of each."""

    places: Tensor
    rows: Tensor
    columns: Tensor
    diagonal: Tensor

    @classmethod
    def of(cls, places: Tensor) -> "_Chunk":
        columns = columns_of(places)
        rows = places - columns * (columns + 1) // 2
        return cls(places, rows, columns, rows == columns)

    def possible(self, total: Tensor) -> Tensor:
        """The numbers of a triangle, as far as histories allow them."""
        rows, columns = (numbers_at(total, items * (items + 3) // 2) for items in (self.rows, self.columns))
        return numbers_at(total, self.places).minimum(rows).minimum(columns).clamp(min=0)

    def scale(self, of_items: Tensor) -> Tensor:
        """What pairs are scaled by, where each item has a scale; what an item weighs itself is not."""
        return of_items[self.rows].minimum(of_items[self.columns]).masked_fill(self.diagonal, 1)
