"""Writes slots.json: slots and signs computed one coordinate at a time with plain Python integers.

Independent of torch on purpose: every backend of fairfold is held to this file. Run it only to add cases; a change of
an existing line means that every stored model of every user reads differently.

    python tests/golden/make.py
"""

import json
from pathlib import Path

WORD, LONG = 2**32 - 1, 2**64 - 1


def expand(seed: int) -> int:
    word = (seed + 0x9E3779B97F4A7C15) & LONG
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & LONG
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & LONG
    return word ^ (word >> 31)


def mix(word: int, inner: int = 0) -> int:
    word ^= word >> 16
    word = (word * 0x7FEB352D + inner) & WORD
    word ^= word >> 15
    word = (word * 0x846CA68B) & WORD
    return word ^ (word >> 16)


def slot_and_sign(coordinate: int, head: int, tail: int, chunk: int, key: int, signed: bool) -> tuple[int, int]:
    if coordinate < head:
        return coordinate, 1
    block, offset = divmod(coordinate, chunk)
    high, low = block >> 32, block & WORD
    hashed = mix(low ^ mix(high ^ (key & WORD)), mix((high + (key >> 32)) & WORD))
    slot = head + (hashed * (tail // chunk) // 2**32) * chunk + offset
    word = mix((hashed + 0x9E3779B9 * (1 + offset // 32)) & WORD)
    sign = 1 - 2 * ((word >> (offset % 32)) & 1) if signed else 1
    return slot, sign


CASES = [
    # full_size, head, tail, chunk, seed, signed
    (1_000, 0, 64, 1, 0, True),
    (1_000, 0, 64, 1, 1, True),
    (1_000, 0, 63, 1, 0, False),
    (1_000, 0, 96, 8, 7, True),
    (1_003, 0, 96, 8, 7, True),
    (1_000, 40, 40, 1, 7, True),
    (1_000, 48, 48, 16, 2**63 + 5, True),
    (5_000, 0, 1_200, 100, 3, True),
    (1_000, 1_000, 0, 1, 3, True),
    (10**9, 0, 62_500_000, 1, 42, True),
    (6_400_000_000, 0, 100_000_000, 1, 42, True),
    (6_400_000_000, 50_000_000, 50_000_000, 8, 2**64 - 1, True),
]


def main() -> None:
    cases = []
    for full_size, head, tail, chunk, seed, signed in CASES:
        edges = [
            *range(40),
            head - 1,
            head,
            head + 1,
            full_size // 2,
            full_size - 2,
            full_size - 1,
            2**32 - 1,
            2**32,
        ]
        spread = [(i * 2654435761) % full_size for i in range(1, 60)]
        coordinates = sorted({c for c in [*edges, *spread] if 0 <= c < full_size})
        pairs = [slot_and_sign(c, head, tail, chunk, expand(seed), signed) for c in coordinates]
        cases.append(
            {
                "full_size": full_size,
                "head": head,
                "tail": tail,
                "chunk": chunk,
                "seed": seed,
                "signed": signed,
                "coordinates": coordinates,
                "slots": [slot for slot, _ in pairs],
                "signs": [sign for _, sign in pairs],
            }
        )
    path = Path(__file__).with_name("slots.json")
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
