"""QR codes in the terminal: a text as modules (ISO/IEC 18004, the lowest level of correction), two in a character."""

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise

CORRECTION = (
    7,
    10,
    15,
    20,
    26,
    18,
    20,
    24,
    30,
    18,
    20,
    24,
    26,
    30,
    22,
)  # codewords of each block, by version from 1 on
BLOCKS = (1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 6)
QUIET = 2  # modules of margin: four are asked for, but a terminal is narrow
MASKS: tuple[Callable[[int, int], int], ...] = (
    lambda x, y: (x + y) % 2, lambda _x, y: y % 2, lambda x, _y: x % 3, lambda x, y: (x + y) % 3,
    lambda x, y: (x // 3 + y // 2) % 2, lambda x, y: x * y % 2 + x * y % 3, lambda x, y: (x * y % 2 + x * y % 3) % 2,
    lambda x, y: ((x + y) % 2 + x * y % 3) % 2,
)  # fmt: skip

Grid = list[list[bool]]


def terminal_code(text: str) -> str:
    """A text's QR code as lines of half blocks, dark modules as spaces: for light letters on a dark terminal."""
    modules = encode(text.encode())
    side = len(modules) + 2 * QUIET
    light = [[True] * side for _ in range(side + side % 2)]
    for y, row in enumerate(modules):
        for x, dark in enumerate(row):
            light[y + QUIET][x + QUIET] = not dark
    pairs = zip(light[::2], light[1::2], strict=True)
    return "\n".join("".join(" ▄▀█"[2 * upper + lower] for upper, lower in zip(*rows, strict=True)) for rows in pairs)


def encode(content: bytes) -> Grid:
    """The modules of a code, True where dark, by rows; the smallest version that holds the content."""
    for version in range(1, len(BLOCKS) + 1):
        capacity = _raw_bits(version) // 8 - CORRECTION[version - 1] * BLOCKS[version - 1]
        length_bits = 8 if version < 10 else 16
        if 4 + length_bits + 8 * len(content) <= 8 * capacity:
            bits = f"0100{len(content):0{length_bits}b}" + "".join(f"{byte:08b}" for byte in content)
            bits += "0" * min(4, 8 * capacity - len(bits))
            bits += "0" * (-len(bits) % 8)
            data = [int(bits[start : start + 8], 2) for start in range(0, len(bits), 8)]
            data += [(0xEC, 0x11)[place % 2] for place in range(capacity - len(data))]
            return _drawn(version, _interleaved(version, data))
    raise ValueError(f"{len(content)} bytes: too long for a code of version {len(BLOCKS)}")


def _raw_bits(version: int) -> int:
    """Modules that hold data and correction."""
    bits = (16 * version + 128) * version + 64
    if version > 1:
        places = version // 7 + 2
        bits -= (25 * places - 10) * places - 55
    return bits - 36 * (version > 6)


# -- correction --------------------------------------------------------------------------------------------------------


def _product(one: int, other: int) -> int:
    """The product in GF(2⁸) by x⁸ + x⁴ + x³ + x² + 1."""
    found = 0
    for bit in range(7, -1, -1):
        found = (found << 1) ^ (found >> 7) * 0x11D
        found ^= (other >> bit & 1) * one
    return found


def _divisor(degree: int) -> list[int]:
    found, root = [0] * (degree - 1) + [1], 1
    for _ in range(degree):
        for place in range(degree):
            found[place] = _product(found[place], root) ^ (found[place + 1] if place + 1 < degree else 0)
        root = _product(root, 2)
    return found


def _remainder(data: list[int], divisor: list[int]) -> list[int]:
    found = [0] * len(divisor)
    for byte in data:
        factor = byte ^ found[0]
        found = [*found[1:], 0]
        found = [one ^ _product(other, factor) for one, other in zip(found, divisor, strict=True)]
    return found


def _interleaved(version: int, data: list[int]) -> list[int]:
    """Codewords in the order of the modules: blocks take turns; the last blocks are longer by one."""
    blocks, correction = BLOCKS[version - 1], CORRECTION[version - 1]
    total = _raw_bits(version) // 8
    short, num_short = total // blocks - correction, blocks - total % blocks
    divisor = _divisor(correction)
    parts = list[list[int]]()
    start = 0
    for block in range(blocks):
        stop = start + short + (block >= num_short)
        parts.append(data[start:stop])
        start = stop
    columns = [[part[place] for part in parts if place < len(part)] for place in range(short + 1)]
    rest = zip(*(_remainder(part, divisor) for part in parts), strict=True)
    return [byte for column in [*columns, *map(list, rest)] for byte in column]


# -- modules -----------------------------------------------------------------------------------------------------------


def _drawn(version: int, codewords: list[int]) -> Grid:
    side = 17 + 4 * version
    fixed = dict[tuple[int, int], bool]()  # by column and row
    for x, y in ((3, 3), (side - 4, 3), (3, side - 4)):  # finders
        for dx in range(-4, 5):
            for dy in range(-4, 5):
                if 0 <= x + dx < side and 0 <= y + dy < side:
                    fixed[x + dx, y + dy] = max(abs(dx), abs(dy)) not in (2, 4)
    for place in range(8, side - 8):  # timing
        fixed[6, place] = fixed[place, 6] = place % 2 == 0
    places = _alignment(version, side)
    for x in places:
        for y in places:
            if (x, y) not in ((6, 6), (6, places[-1]), (places[-1], 6)):  # where finders are
                fixed |= {(x + dx, y + dy): max(abs(dx), abs(dy)) != 1 for dx in range(-2, 3) for dy in range(-2, 3)}
    if version > 6:
        rest = version
        for _ in range(12):
            rest = (rest << 1) ^ (rest >> 11) * 0x1F25
        for bit in range(18):
            dark = bool((version << 12 | rest) >> bit & 1)
            fixed[side - 11 + bit % 3, bit // 3] = fixed[bit // 3, side - 11 + bit % 3] = dark
    drawn = []
    for mask, flips in enumerate(MASKS):
        format_bits = _format(mask, side)
        modules = fixed | format_bits
        bits = (byte >> bit & 1 for byte in codewords for bit in range(7, -1, -1))
        for x, y in _zigzag(side):
            if (x, y) not in modules:
                modules[x, y] = bool(next(bits, 0)) != (flips(x, y) == 0)
        drawn.append([[modules[x, y] for x in range(side)] for y in range(side)])
    return min(drawn, key=_penalty)


def _alignment(version: int, side: int) -> list[int]:
    if version == 1:
        return []
    count = version // 7 + 2
    step = (version * 4 + count * 2 + 1) // (count * 2 - 2) * 2
    return [6, *reversed([side - 7 - step * place for place in range(count - 1)])]


def _format(mask: int, side: int) -> dict[tuple[int, int], bool]:
    """The modules that say level and mask, twice, and the one that is always dark."""
    data = 1 << 3 | mask  # level L
    rest = data
    for _ in range(10):
        rest = (rest << 1) ^ (rest >> 9) * 0x537
    bits = [bool(((data << 10 | rest) ^ 0x5412) >> bit & 1) for bit in range(15)]
    first = [(8, y) for y in (0, 1, 2, 3, 4, 5, 7, 8)] + [(x, 8) for x in (7, 5, 4, 3, 2, 1, 0)]
    second = [(side - 1 - bit, 8) for bit in range(8)] + [(8, side - 7 + bit) for bit in range(7)]
    return {**dict(zip(first, bits, strict=True)), **dict(zip(second, bits, strict=True)), (8, side - 8): True}


def _zigzag(side: int) -> Iterator[tuple[int, int]]:
    """Places in the order of the bits: pairs of columns from the right, upwards and downwards in turn."""
    for right in [*range(side - 1, 6, -2), 5, 3, 1]:
        upward = (right + 1) & 2 == 0
        for row in range(side):
            for x in (right, right - 1):
                yield x, side - 1 - row if upward else row


def _penalty(modules: Grid) -> int:
    """How hard a code is to read: long runs, squares, patterns like finders, and too much dark or light."""
    side, total = len(modules), 0
    for lines in (modules, [list(column) for column in zip(*modules, strict=True)]):
        for line in lines:
            runs = [len(list(run)) for _, run in groupby(line)]
            total += sum(run - 2 for run in runs if run > 4)
            text = "".join("01"[dark] for dark in line)
            total += 40 * sum(text.startswith(("10111010000", "00001011101"), start) for start in range(side - 10))
    for upper, lower in pairwise(modules):
        total += 3 * sum(upper[x] == upper[x + 1] == lower[x] == lower[x + 1] for x in range(side - 1))
    dark = sum(map(sum, modules))
    return total + 10 * int(abs(20 * dark - 10 * side * side) // (side * side))
