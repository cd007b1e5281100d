"""The one definition of ``slot`` and ``sign``: every backend must give these integers, bit for bit.

A full vector of ``full_size`` coordinates is laid out in a compact one of ``head + tail`` slots. The first ``head``
coordinates own a slot each. Every other coordinate ``a`` is hashed, ``chunk`` neighbors together, into the tail::

    block, offset = divmod(a, chunk)
    hash          = mixed 32 bits of (seed, block)
    slot          = head + floor(hash * (tail / chunk) / 2**32) * chunk + offset
    sign          = +1 or -1 by bit (offset mod 32) of a second mix of the hash

In the paper's symbols S[a, slot(a)] = sign(a). The seed is mixed first: a small one XORed into the key would only
permute the coordinates. Why leading bits choose the slot, where the paper writes ``h(a) % m``, and why a bijective
mixer: docs/decisions/hash.md. Words are unsigned 32-bit in int64 tensors, as torch has no unsigned arithmetic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
LONG = 0xFFFFFFFFFFFFFFFF
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
GOLDEN = 0x9E3779B9

MAX_BLOCKS = 2**31  # the most hashed blocks (tail / chunk) a layout may have: hash * blocks must fit 63 bits


@dataclass(frozen=True, slots=True)
class Layout:
    """All that a kernel must know of a subspace: six integers and a flag, nothing of size n or m."""

    full_size: int  # n, the number of coordinates of the full vector
    head: int  # how many leading coordinates own a slot
    tail: int  # how many slots the other coordinates are hashed into; 0 only if head == full_size
    chunk: int  # Z, how many neighboring coordinates share one hash
    key: int  # the seed, mixed to 64 bits by expand_seed
    signed: bool  # whether hashed coordinates carry a random sign

    @property
    def size(self) -> int:
        """m, the number of slots."""
        return self.head + self.tail

    @property
    def blocks(self) -> int:
        """Into how many blocks of ``chunk`` slots the tail is divided."""
        return self.tail // self.chunk


def expand_seed(seed: int) -> int:
    """Turn any 64-bit seed into 64 well-mixed bits (the finaliser of splitmix64)."""
    word = (seed + 0x9E3779B97F4A7C15) & LONG
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & LONG
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & LONG
    return word ^ (word >> 31)


def mix(word: Tensor, inner_key: Tensor | int = 0) -> Tensor:
    """Mix 32-bit words bijectively; ``inner_key`` is added between the two multiplications."""
    word = word ^ (word >> 16)
    word = (word * MULTIPLIER_1 + inner_key) & WORD
    word = word ^ (word >> 15)
    word = (word * MULTIPLIER_2) & WORD
    return word ^ (word >> 16)


def hash_blocks(key: int, blocks: Tensor) -> Tensor:
    """Hash block numbers (int64) to words: the low word is mixed under two keys, which depend on the high one."""
    high = blocks >> 32
    outer_key = mix(high ^ (key & WORD))
    inner_key = mix((high + (key >> 32)) & WORD)
    return mix((blocks & WORD) ^ outer_key, inner_key)


def slots_and_signs(layout: Layout, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Slots (int64) and signs (int8, +1 or -1) of coordinates (int64), each in [0, full_size)."""
    signs = torch.ones_like(coordinates, dtype=torch.int8)
    if layout.tail == 0:
        return coordinates, signs
    block = torch.div(coordinates, layout.chunk, rounding_mode="floor")
    offset = coordinates - block * layout.chunk
    hashed = hash_blocks(layout.key, block)
    slots = layout.head + ((hashed * layout.blocks) >> 32) * layout.chunk + offset
    if layout.signed:
        sign_word = mix((hashed + GOLDEN * (1 + (offset >> 5))) & WORD)
        signs = (1 - 2 * ((sign_word >> (offset & 31)) & 1)).to(torch.int8)
    if layout.head:
        in_head = coordinates < layout.head
        slots = torch.where(in_head, coordinates, slots)
        signs = torch.where(in_head, torch.ones_like(signs), signs)
    return slots, signs
