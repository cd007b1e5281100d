"""Device code: where pieces live, the kernels over ranges and rows, and the touched slots of a batch.

A program handles a tile of ``pieces × width`` values; ``width`` neighbors form one piece (see :mod:`.launch`), which is
hashed once and moved as one vector. Tiles are masked by whole pieces: a mask that could cut through a vector would make
the compiler split it. Words are uint32; numbers of pieces and slots are int64, as tables may have more than 2**31
values. ``head, blocks, key_low, key_high`` and ``parts, width, signed, wide, has_head`` are the fields of a
:class:`~.launch.PieceLayout`.
"""

import triton
import triton.language as tl

from fairfold.kernels import hashing

MULTIPLIER_1 = tl.constexpr(hashing.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(hashing.MULTIPLIER_2)
GOLDEN = tl.constexpr(hashing.GOLDEN)

# Seeds and sizes vary from model to model: no new kernel should be compiled for the value 1 or a multiple of 16.
PLAIN = ["first", "head", "blocks", "key_low", "key_high"]


@triton.jit
def mix(word, inner_key):
    """Mix 32-bit words as :func:`fairfold.kernels.hashing.mix` does; uint32 wraps by itself."""
    word = word ^ (word >> 16)
    word = word * MULTIPLIER_1 + inner_key
    word = word ^ (word >> 15)
    word = word * MULTIPLIER_2
    return word ^ (word >> 16)


@triton.jit
def hash_blocks(block, key_low, key_high, wide: tl.constexpr):
    """Hash blocks as :func:`fairfold.kernels.hashing.hash_blocks` does; keys are mixed already unless ``wide`` is 2."""
    outer_key = key_low.to(tl.uint32)
    inner_key = key_high.to(tl.uint32)
    if wide == 2:
        high = (block >> 32).to(tl.uint32)
        zero = high ^ high
        outer_key = mix(high ^ outer_key, zero)
        inner_key = mix(high + inner_key, zero)
    return mix(block.to(tl.uint32) ^ outer_key, inner_key)


@triton.jit
def locate(
    piece, head, blocks, key_low, key_high,
    parts: tl.constexpr, width: tl.constexpr, signed: tl.constexpr, wide: tl.constexpr, has_head: tl.constexpr,
):  # fmt: skip
    """The places of pieces (int64), counted in pieces, and a word whose bit j is set if value j is negated."""
    if wide == 0:
        # All in 32 bits: less work, and right. In 64 bits the places of chunks of 48 or 100 came out 2**32 chunks too
        # low on an H200 (Triton 3.6, CUDA 13.0), although the PTX is correct.
        number_of_piece = piece.to(tl.uint32)
        block = number_of_piece // parts
        part = number_of_piece - block * parts
        hashed = hash_blocks(block, key_low, key_high, wide)
        place = (head.to(tl.uint32) + tl.umulhi(hashed, blocks.to(tl.uint32)) * parts + part).to(tl.int64)
    else:
        block = piece // parts
        part = (piece - block * parts).to(tl.uint32)
        hashed = hash_blocks(block, key_low, key_high, wide)
        place = head + tl.umulhi(hashed, blocks.to(tl.uint32)).to(tl.int64) * parts + part.to(tl.int64)
    flips = hashed ^ hashed
    if signed:
        offset = part * width
        flips = mix(hashed + GOLDEN * (1 + (offset >> 5)), flips) >> (offset & 31)
    if has_head:
        owned = piece < head
        place = tl.where(owned, piece, place)
        flips = tl.where(owned, flips ^ flips, flips)
    return place, flips


@triton.jit
def flip(value, flips, lane):
    """Negate the values of each piece whose bit is set."""
    bit = (flips[:, None] >> lane[None, :].to(tl.uint32)) & 1
    if value.dtype == tl.bfloat16:  # exact by way of float32; the interpreter cannot negate bfloat16
        wide_value = value.to(tl.float32)
        return tl.where(bit != 0, -wide_value, wide_value).to(tl.bfloat16)
    else:  # noqa: RET505 (an early return without it would be two results of one branch to Triton)
        return tl.where(bit != 0, -value, value)


@triton.jit
def number(value, kind: tl.constexpr):
    """A Python number in the given type: it arrives as float64, or in Triton's interpreter as it is."""
    return (tl.full((), 0, kind) + value).to(kind)


@triton.jit
def row_piece(rows, index, inside, row_count, row_pieces: tl.constexpr):
    """The piece of the full vector that is piece ``index`` of the batch; a bad row id stops the program."""
    row = index // row_pieces
    chosen = tl.load(rows + row, mask=inside, other=0).to(tl.int64)
    tl.device_assert((chosen >= 0) & (chosen < row_count), "a row that the table does not have")
    return chosen * row_pieces + (index - row * row_pieces)


@triton.jit(do_not_specialize=PLAIN)
def place_kernel(
    coordinates, slots, signs, count, head: tl.int64, blocks, key_low, key_high,
    parts: tl.constexpr, width: tl.constexpr, signed: tl.constexpr, wide: tl.constexpr, has_head: tl.constexpr,
    pieces: tl.constexpr,
):  # fmt: skip
    """Slots and signs of single coordinates, by way of the pieces they lie in."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    inside = index < count
    coordinate = tl.load(coordinates + index, mask=inside, other=0)
    piece = coordinate // width
    lane = coordinate - piece * width
    place, flips = locate(piece, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
    bit = ((flips >> lane.to(tl.uint32)) & 1).to(tl.int32)
    tl.store(slots + index, place * width + lane, mask=inside)
    tl.store(signs + index, (1 - 2 * bit).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=PLAIN)
def recover_range_kernel(
    compact, out, first: tl.int64, count, head: tl.int64, blocks, key_low, key_high,
    parts: tl.constexpr, width: tl.constexpr, signed: tl.constexpr, wide: tl.constexpr, has_head: tl.constexpr,
    pieces: tl.constexpr,
):  # fmt: skip
    """Out = the ``count`` pieces from number ``first`` on."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    lane = tl.arange(0, width)
    inside = (index < count)[:, None]
    place, flips = locate(first + index, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
    # The compact vector is read again and again, the output never: keep the one in cache, stream the other.
    value = tl.load(compact + (place[:, None] * width + lane[None, :]), mask=inside, eviction_policy="evict_last")
    target = out + (index[:, None] * width + lane[None, :])
    tl.store(target, flip(value, flips, lane), mask=inside, cache_modifier=".cs")


@triton.jit(do_not_specialize=PLAIN)
def accumulate_range_kernel(
    values, sums, first: tl.int64, count, head: tl.int64, blocks, key_low, key_high,
    parts: tl.constexpr, width: tl.constexpr, signed: tl.constexpr, wide: tl.constexpr, has_head: tl.constexpr,
    pieces: tl.constexpr,
):  # fmt: skip
    """Sums += the signed values of the ``count`` pieces from number ``first`` on."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    lane = tl.arange(0, width)
    inside = (index < count)[:, None]
    place, flips = locate(first + index, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
    source = values + (index[:, None] * width + lane[None, :])
    value = tl.load(source, mask=inside, other=0, eviction_policy="evict_first").to(sums.dtype.element_ty)
    target = sums + (place[:, None] * width + lane[None, :])
    # Relaxed: the order of additions is free, and the default would fence every one of them.
    tl.atomic_add(target, flip(value, flips, lane), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=[*PLAIN, "row_count"])
def recover_rows_kernel(
    compact, rows, out, row_count: tl.int64, count, head: tl.int64, blocks, key_low, key_high,
    row_pieces: tl.constexpr, parts: tl.constexpr, width: tl.constexpr, signed: tl.constexpr, wide: tl.constexpr,
    has_head: tl.constexpr, pieces: tl.constexpr,
):  # fmt: skip
    """Recover the chosen rows into ``out``: ``count`` pieces, each read from its slots and multiplied by its signs."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    lane = tl.arange(0, width)
    inside = index < count
    piece = row_piece(rows, index, inside, row_count, row_pieces)
    place, flips = locate(piece, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
    value = tl.load(compact + (place[:, None] * width + lane[None, :]), mask=inside[:, None])
    target = out + (index[:, None] * width + lane[None, :])
    tl.store(target, flip(value, flips, lane), mask=inside[:, None])


@triton.jit(do_not_specialize=[*PLAIN, "row_count", "scale"])
def accumulate_rows_kernel(
    values, rows, sums, scale: tl.float64, row_count: tl.int64, count, head: tl.int64, blocks, key_low, key_high,
    row_pieces: tl.constexpr, parts: tl.constexpr, width: tl.constexpr, signed: tl.constexpr, wide: tl.constexpr,
    has_head: tl.constexpr, pieces: tl.constexpr,
):  # fmt: skip
    """Sums += scale · the signed values of the chosen rows, ``count`` pieces in all."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    lane = tl.arange(0, width)
    inside = index < count
    piece = row_piece(rows, index, inside, row_count, row_pieces)
    place, flips = locate(piece, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
    source = values + (index[:, None] * width + lane[None, :])
    kind: tl.constexpr = sums.dtype.element_ty
    value = tl.load(source, mask=inside[:, None], other=0).to(kind) * number(scale, kind)
    target = sums + (place[:, None] * width + lane[None, :])
    tl.atomic_add(target, flip(value, flips, lane), mask=inside[:, None], sem="relaxed")


@triton.jit(do_not_specialize=[*PLAIN, "row_count"])
def place_rows_kernel(
    rows, places, row_count: tl.int64, count, head: tl.int64, blocks, key_low, key_high,
    row_pieces: tl.constexpr, parts: tl.constexpr, width: tl.constexpr, signed: tl.constexpr, wide: tl.constexpr,
    has_head: tl.constexpr, pieces: tl.constexpr,
):  # fmt: skip
    """Places = where each piece of the chosen rows lives, counted in pieces."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    inside = index < count
    piece = row_piece(rows, index, inside, row_count, row_pieces)
    place, _ = locate(piece, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
    tl.store(places + index, place.to(places.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*PLAIN, "row_count"])
def gather_touched_kernel(
    values, rows, order, positions, touched, sums, row_count: tl.int64, count, head: tl.int64, blocks, key_low,
    key_high,
    row_pieces: tl.constexpr, parts: tl.constexpr, width: tl.constexpr, signed: tl.constexpr, wide: tl.constexpr,
    has_head: tl.constexpr, pieces: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of a batch, taken in the order of their places: one sum a touched place."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    lane = tl.arange(0, width)
    inside = index < count
    origin = tl.load(order + index, mask=inside, other=0)
    position = tl.load(positions + index, mask=inside, other=0).to(tl.int64)
    piece = row_piece(rows, origin, inside, row_count, row_pieces)
    place, flips = locate(piece, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
    tl.store(touched + position, place, mask=inside)  # all that share a position store the same number
    source = values + (origin[:, None] * width + lane[None, :])
    value = tl.load(source, mask=inside[:, None], other=0).to(sums.dtype.element_ty)
    target = sums + (position[:, None] * width + lane[None, :])
    tl.atomic_add(target, flip(value, flips, lane), mask=inside[:, None], sem="relaxed")


# -- Counts of chunks, and means by a stored order of them, each slot written once, by one program.


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
