"""Device code: counts of chunks, and means by a stored order of them, each slot written once, by one program."""

import triton
import triton.language as tl

from fairfold.kernels.gpu.device import PLAIN, flip, hash_blocks, locate


@triton.jit(do_not_specialize=PLAIN)
def count_kernel(tally, first: tl.int64, count, blocks, key_low, key_high, wide: tl.constexpr, pieces: tl.constexpr):
    """tally[slot] += 1 for each of the ``count`` hashed chunks from number ``first`` on."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    hashed = hash_blocks(first + index, key_low, key_high, wide)
    place = tl.umulhi(hashed, blocks.to(tl.uint32)).to(tl.int64)
    tl.atomic_add(tally + place, tl.full((pieces,), 1, tl.int32), mask=index < count, sem="relaxed")


@triton.jit(do_not_specialize=PLAIN)
def block_kernel(found, first: tl.int64, count, blocks, key_low, key_high, wide: tl.constexpr, pieces: tl.constexpr):
    """Found = the place, counted in chunks, of each of the ``count`` hashed chunks from number ``first`` on."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    hashed = hash_blocks(first + index, key_low, key_high, wide)
    tl.store(found + index, tl.umulhi(hashed, blocks.to(tl.uint32)).to(tl.int32), mask=index < count)


@triton.jit(do_not_specialize=PLAIN)
def segment_mean_kernel(
    values, chunks, starts, means, count, head: tl.int64, blocks, key_low, key_high,
    parts: tl.constexpr, width: tl.constexpr, signed: tl.constexpr, wide: tl.constexpr, has_head: tl.constexpr,
    pieces: tl.constexpr,
):  # fmt: skip
    """Means of the ``count`` hashed places; those of place p are ``chunks[starts[p] : starts[p + 1]]``.

    A program handles one part of each chunk of its tile. The slots of a tile are summed in step, as many steps as its
    fullest place has chunks.
    """
    tile = tl.program_id(0) // parts
    part = tl.program_id(0) - tile * parts
    index = tile.to(tl.int64) * pieces + tl.arange(0, pieces)
    lane = tl.arange(0, width)
    inside = index < count
    begin = tl.load(starts + index, mask=inside, other=0)
    terms = tl.load(starts + index + 1, mask=inside, other=0) - begin
    most = tl.max(terms, 0)
    kind: tl.constexpr = means.dtype.element_ty
    total = tl.zeros((pieces, width), kind)
    term = most * 0
    while term < most:
        live = term < terms
        piece = tl.load(chunks + begin + term, mask=live, other=0).to(tl.int64) * parts + part
        _, flips = locate(piece, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
        source = values + (piece[:, None] * width + lane[None, :])
        total += flip(tl.load(source, mask=live[:, None], other=0).to(kind), flips, lane)
        term += 1
    target = means + ((head + index * parts + part)[:, None] * width + lane[None, :])
    tl.store(target, total / tl.maximum(terms, 1).to(kind)[:, None], mask=inside[:, None])
