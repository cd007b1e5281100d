"""Steps up and down a chain of nested sizes, in plain torch: the specification."""

from torch import Tensor


def fold_groups(values: Tensor, repeats: int, chunk: int) -> Tensor:
    """The hashed slots of a larger size, added up to those of a smaller: ``repeats`` neighbouring chunks become one."""
    return values.view(-1, repeats, chunk).sum(1, dtype=values.dtype).view(-1)


def unfold_groups(values: Tensor, repeats: int, chunk: int, out: Tensor, add: bool) -> None:
    """The hashed slots of a smaller size, each chunk repeated, written to ``out`` or added to it."""
    grouped, source = out.view(-1, repeats, chunk), values.view(-1, 1, chunk)
    if add:
        grouped.add_(source)
    else:
        grouped.copy_(source.expand_as(grouped))
