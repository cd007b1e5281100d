"""A server's table on disk, trained at the cost of what clients hold and touch, whatever its length.

A client of a compact size changes every coordinate of a slot, and so all of the table. But recovery is linear, and the
server's optimizers treat equal changes alike. So θ = B + S·a: blocks B on disk, and a vector a of the largest compact
size, which takes the steps of all compact sizes. Clients that hold the whole table change single rows of B. What is
sent follows from the mean of each slot, which both keep up to date: an added S·d raises the means by d, a number v
added to one coordinate raises its slot's by sign·v / count. Nothing in a round reads all coordinates.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fairfold.kernels import ops
from fairfold.kernels.reference import SUM_DTYPE
from fairfold.subspace.nesting import Sums, require_nested
from fairfold.subspace.projection import SizeSum
from fairfold.subspace.subspace import Subspace
from fairfold.subspace.table_file import TableFile, whole_copy
from fairfold.typing import Weights


class TableChange(NamedTuple):
    """A change of a table: one in the largest compact subspace, and a sparse one of single coordinates."""

    compact: Tensor | None
    rows: Tensor | None


class StoredTable(Tensor):
    """A flat vector in a :class:`TableFile`, plus a compact change that is recovered when it is read.

    It is a tensor, so that whatever reads the server's vectors can read it: chosen coordinates at their cost, all else
    from a copy of the whole. Only :meth:`take_step` changes it.
    """

    file: TableFile
    space: Subspace | None
    kept: Weights

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, file: TableFile, space: Subspace | None, kept: Weights) -> "StoredTable":
        values = file.values
        made: StoredTable = Tensor._make_wrapper_subclass(cls, (len(values),), dtype=values.dtype)
        return made

    def __init__(self, file: TableFile, space: Subspace | None, kept: Weights) -> None:
        super().__init__()
        self.file, self.space, self.kept = file, space, kept

    @classmethod
    @torch.no_grad()
    def of(cls, file: TableFile, subspaces: Sequence[Subspace]) -> "StoredTable":
        """The table in a file for clients with these subspaces: one pass over it, the only one."""
        chain = [space for space in require_nested(subspaces) if not space.is_full]
        if not chain:
            return cls(file, None, {})
        space = chain[-1]
        means = torch.zeros(space.size, dtype=SUM_DTYPE[file.values.dtype])
        counts = torch.zeros(space.size, dtype=torch.int32)
        for start, block in file.blocks():
            ops.accumulate_range(space.layout, block, start, means, counts)
        means.div_(counts.clamp(min=1))
        return cls(file, space, {"added": torch.zeros_like(means), "means": means, "counts": counts})

    @classmethod
    def at_checkpoint(
        cls, folder: Path, facts: dict[str, Any], kept: Weights, number: int, *, resumes: bool
    ) -> "StoredTable":
        """The table that :meth:`checkpoint` has described, as it was then; to train on, or only to read."""
        space = None if facts["subspace"] is None else Subspace(**facts["subspace"])
        path, dtype = folder / Path(facts["file"]).name, getattr(torch, facts["dtype"])
        file = TableFile(path, facts["length"], dtype, private=not resumes)
        file.go_back(number)
        return cls(file, space, kept)

    def checkpoint(self, number: int) -> dict[str, Any]:
        """Flush the file; return what the table is made of, beside ``kept``."""
        assert self.file.path is not None
        self.file.checkpoint(number)
        dtype = str(self.dtype).removeprefix("torch.")
        subspace = None if self.space is None else self.space.description()
        return {"file": self.file.path.name, "length": len(self), "dtype": dtype, "subspace": subspace}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        if func is aten.index_select.default and isinstance(args[0], cls):
            return args[0].read(args[2])
        if func is aten.detach.default:
            return cls(args[0].file, args[0].space, args[0].kept)

        def dense(value: Any) -> Any:
            return value.whole() if isinstance(value, cls) else value

        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    def read(self, coordinates: Tensor) -> Tensor:
        """The values of some coordinates."""
        values = self.file.read(coordinates)
        if self.space is not None:
            slots, signs = ops.slots_and_signs(self.space.layout, coordinates)
            values += self.kept["added"].index_select(0, slots) * signs
        return values

    @torch.no_grad()
    def whole(self) -> Tensor:
        """A copy of all values; in a temporary file where memory is short."""
        out = whole_copy(len(self), self.dtype, self.file.path)
        for start, block in self.file.blocks():
            part = out[start : start + len(block)].copy_(block)
            if self.space is not None:
                part += self.space.recover_range(self.kept["added"], start, start + len(block), trusted=True)
        return out

    def reduce_each(self, projections: Sequence[Any]) -> list[Tensor]:
        """Reduce for several sizes at the cost of these sizes; the full space is the table itself, not a copy."""
        chain = require_nested(held.subspace for held in projections if not held.subspace.is_full)
        if not chain or self.space is None:
            return [self for _ in projections]
        means, counts = self.kept["means"], self.kept["counts"]
        found, above = {self.space: means.clone()}, (means * counts, counts)
        for large, small in pairwise([self.space, *(space for space in reversed(chain) if space != self.space)]):
            above = large.fold(*above, small, trusted=True)
            found[small] = above[0] / above[1].clamp(min=1)
        return [found.get(held.subspace, self) for held in projections]

    def sparse(self, coordinates: Tensor, values: Tensor) -> Tensor:
        """A sparse vector of this length; values of one coordinate are summed."""
        return torch.sparse_coo_tensor(coordinates[None], values, (len(self),), check_invariants=False).coalesce()

    def mean_change(self, parts: Sequence[SizeSum]) -> TableChange:
        """The weighted mean of changes by clients of all sizes."""
        weight = sum(part.weight for part in parts)
        whole = [part.total for part in parts if part.projection.subspace.is_full]
        sums = Sums()
        for part in parts:
            if not part.projection.subspace.is_full:
                sums.add_sum(part.projection.subspace, part.total, part.weight)
        compact = None
        if sums.totals and self.space is not None:
            sums.weight = weight
            largest, mean = sums.mean()
            compact = largest.unfold(mean, self.space, trusted=True)
        rows = [
            (total if total.is_sparse else total.to_sparse()).to(self.dtype) for total in whole
        ]  # sums may be double
        return TableChange(compact, (sum(rows[1:], rows[0]) / weight).coalesce() if rows else None)

    @torch.no_grad()
    def take_step(self, change: TableChange, step: float = 1.0) -> None:
        """Add a change, times a step, in place."""
        if change.compact is not None:
            moved = change.compact * step
            self.kept["added"] += moved
            self.kept["means"] += moved.mul_(self.kept["counts"] > 0)  # a slot without coordinates has mean 0
        if change.rows is not None:
            coordinates, values = change.rows.indices()[0], change.rows.values() * step
            self.file.add(coordinates, values)
            if self.space is not None:
                slots, signs = ops.slots_and_signs(self.space.layout, coordinates)
                self.kept["means"].index_add_(0, slots, values * signs / self.kept["counts"][slots])
        self.file.release()
