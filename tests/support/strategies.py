"""Generated subspaces and vectors, and the dense matrix they stand for."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from fairfold.subspace import Subspace

seeds = st.integers(0, 2**64 - 1)


@st.composite
def chains(draw: st.DrawFn, max_full: int = 400, links: int = 3) -> list[Subspace]:
    """Nested subspaces of one hash, from small to large; the largest is at times the full space."""
    mapping = draw(st.sampled_from(["element", "chunk", "ranked"]))
    chunk = 1 if mapping == "element" else draw(st.integers(1, 9))
    unit = 2 * chunk if mapping == "ranked" else chunk
    sizes = [unit * draw(st.integers(1, 6))]
    for _ in range(draw(st.integers(0, links - 1))):
        sizes.append(sizes[-1] * draw(st.integers(2, 4)))
    full_size = sizes[-1] + draw(st.integers(1, max_full))
    seed, sign, orthonormal = draw(seeds), draw(st.booleans()), draw(st.booleans())
    if draw(st.booleans()):
        sizes.append(full_size)
    return [Subspace(full_size, size, seed, mapping, chunk, sign=sign, orthonormal=orthonormal) for size in sizes]


subspaces = chains().flatmap(st.sampled_from)


@st.composite
def ranked_with_any_head(draw: st.DrawFn) -> tuple[Subspace, Subspace]:
    """Two nested ranked subspaces whose heads are not half of their size."""
    chunk = draw(st.integers(1, 5))
    small_head, small_tail = chunk * draw(st.integers(1, 6)), chunk * draw(st.integers(1, 6))
    big_head = small_head + chunk * draw(st.integers(0, 6))
    big_tail = small_tail * draw(st.integers(1, 4))
    full_size = big_head + big_tail + draw(st.integers(1, 200))
    seed, sign = draw(seeds), draw(st.booleans())
    small = Subspace(full_size, small_head + small_tail, seed, "ranked", chunk, small_head, sign)
    big = Subspace(full_size, big_head + big_tail, seed, "ranked", chunk, big_head, sign)
    return small, big


nested_pairs = (
    chains(links=3).filter(lambda chain: len(chain) > 1).map(lambda chain: (chain[0], chain[-1]))
    | ranked_with_any_head()
)


def vector(length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A repeatable random vector."""
    return torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(subspace: Subspace) -> Tensor:
    """S itself, n × m: what the library never makes."""
    return dense_of(subspace.recover, subspace.size, subspace.full_size)


def dense_from_definition(subspace: Subspace) -> Tensor:
    """S entry by entry from slots and signs, columns scaled where asked for."""
    slots, signs = subspace.slots(0, subspace.full_size)
    matrix = torch.zeros(subspace.full_size, subspace.size, dtype=torch.float64)
    matrix[torch.arange(subspace.full_size), slots] = signs.double()
    if subspace.orthonormal:
        matrix /= matrix.norm(dim=0).clamp(min=1)
    return matrix


def dense_of(linear: Callable[[Tensor], Tensor], columns: int, rows: int) -> Tensor:
    """The matrix of a linear function, column by column."""
    unit = torch.eye(columns, dtype=torch.float64)
    return torch.stack([linear(unit[column]) for column in range(columns)], dim=1).reshape(rows, columns)
