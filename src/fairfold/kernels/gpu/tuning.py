"""How much one program of each kernel handles, and by how many warps: the only numbers to tune.

``benchmarks/kernels_gpu.py --tune`` tries others and prints the best for the hardware at hand.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """The work of one program: how many coordinates (a power of two), and the warps of 32 threads that share them."""

    elements: int
    warps: int


TILES: dict[str, Tile] = {
    "recover_range": Tile(2048, 4),
    "recover_rows": Tile(1024, 4),
    "accumulate_range": Tile(2048, 4),
    "accumulate_rows": Tile(1024, 4),
    "segment_mean": Tile(512, 4),
    "count": Tile(1024, 4),
    "touched": Tile(1024, 4),
}
