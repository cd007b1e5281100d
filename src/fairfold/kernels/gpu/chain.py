"""Steps up and down a chain of nested sizes, and weighted sums of vectors of one size, on CUDA tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairfold.kernels.gpu import device_steps
from fairfold.kernels.gpu.launch import on_device, tiled, writable

TOGETHER = 8
"""Vectors added in one pass over the total: enough to hide its own reading and writing, few enough to unroll."""


def fold_groups(values: Tensor, repeats: int, chunk: int) -> Tensor:
    """The hashed slots of a larger size, added up to those of a smaller: ``repeats`` neighbouring chunks become one."""
    out = torch.empty(values.numel() // repeats, dtype=values.dtype, device=values.device)
    if out.numel():
        grid, elements, warps = tiled("chain", out.numel())
        with on_device(values):
            device_steps.fold_kernel[grid](
                values.detach().contiguous(),
                out,
                out.numel(),
                repeats,
                chunk=chunk,
                elements=elements,
                num_warps=warps,
            )
    return out


def unfold_groups(values: Tensor, repeats: int, chunk: int, out: Tensor, add: bool) -> None:
    """The hashed slots of a smaller size, each chunk repeated, written to ``out`` or added to it."""
    if out.numel() == 0:
        return
    grid, elements, warps = tiled("chain", out.numel())
    with writable(out) as work, on_device(out):
        device_steps.unfold_kernel[grid](
            values.detach().contiguous(),
            work,
            work.numel(),
            repeats,
            add=add,
            chunk=chunk,
            elements=elements,
            num_warps=warps,
        )


def weighted_sum(total: Tensor, vectors: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Add the weighted vectors, all shaped like ``total``, to it in place, in their order; each is read once."""
    if len(vectors) != len(weights):
        raise ValueError(f"{len(vectors)} vectors and {len(weights)} weights")
    if not vectors or total.numel() == 0:
        return
    dtype = vectors[0].dtype
    # Kept in a list: the kernel knows their addresses alone, so they must outlive this call.
    sources = [_aligned(vector.detach().to(dtype)) for vector in vectors]
    addresses = torch.tensor([vector.data_ptr() for vector in sources], device=total.device)
    shares = torch.tensor(weights, dtype=torch.float64, device=total.device)
    grid, elements, warps = tiled("chain", total.numel())
    with writable(total) as work, on_device(total):
        for first in range(0, len(sources), TOGETHER):
            group = slice(first, min(first + TOGETHER, len(sources)))
            device_steps.weighted_sum_kernel[grid](
                work,
                sources[0],
                addresses[group],
                shares[group],
                work.numel(),
                vectors=group.stop - group.start,
                elements=elements,
                num_warps=warps,
            )


def _aligned(vector: Tensor) -> Tensor:
    """The vector without gaps, beginning on 16 bytes."""
    vector = vector.contiguous()
    return vector if vector.data_ptr() % 16 == 0 else vector.clone()
