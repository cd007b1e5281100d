"""Shamir's sharing of 32-byte secrets: any ``threshold`` shares tell the secret, fewer tell nothing of it.

A secret is the value at 0 of a random polynomial of degree ``threshold − 1`` over the integers modulo the smallest
prime above 2²⁵⁶; a share is its value at another place.
"""

import itertools
import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
MOST_TRIES = 2_000  # subsets tried where some shares are wrong


def split(secret: bytes, places: Sequence[int], threshold: int) -> list[bytes]:
    """The shares of a secret at some places, each of them above 0."""
    if not 1 <= threshold <= len(places) or len(secret) != SECRET_BYTES:
        raise ValueError(f"{threshold} of {len(places)} shares of {len(secret)} bytes")
    factors = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(factors, place).to_bytes(SHARE_BYTES, "big") for place in places]


def _value(factors: list[int], place: int) -> int:
    value = 0
    for factor in reversed(factors):
        value = (value * place + factor) % PRIME
    return value


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret by as many shares as its threshold says; None where it is no secret, since a share was wrong."""
    secret = _interpolate({place: int.from_bytes(share, "big") for place, share in shares.items()}, 0)
    return secret.to_bytes(SECRET_BYTES, "big") if secret < 2**256 else None


def _interpolate(points: Mapping[int, int], where: int) -> int:
    """The value at a place of the polynomial through some points (Lagrange)."""
    total = 0
    for place, value in points.items():
        above, below = 1, 1
        for other in points:
            if other != place:
                above = above * (where - other) % PRIME
                below = below * (place - other) % PRIME
        total += value * above * pow(below, -1, PRIME)
    return total % PRIME


def recover(
    shares: Mapping[int, bytes], threshold: int, accept: Callable[[bytes], bool]
) -> tuple[bytes, list[int]] | None:
    """The secret by more shares than are needed, of which some may be wrong, and the places of those that are.

    ``accept`` knows the secret when it sees it. Where the first shares do not give it, others are drawn, and after
    :data:`MOST_TRIES` draws there is None.
    """
    places = sorted(shares)
    if len(places) < threshold:
        return None
    for some in itertools.islice(_subsets(places, threshold), MOST_TRIES):
        secret = combine({place: shares[place] for place in some})
        if secret is not None and accept(secret):
            points = {place: int.from_bytes(shares[place], "big") for place in some}
            rest = (place for place in places if place not in points)
            first = some == places[:threshold]  # the usual case: nobody lies, and there is nothing to look for
            wrong = [place for place in rest if not first and _lies(points, place, shares[place])]
            return secret, wrong
    return None


def _lies(points: Mapping[int, int], place: int, share: bytes) -> bool:
    return _interpolate(points, place) != int.from_bytes(share, "big")


def _subsets(places: list[int], many: int) -> Iterable[list[int]]:
    """The first of them, and then some at random; only the first where there are no others."""
    yield places[:many]
    draw = random.SystemRandom()
    while many < len(places):
        yield sorted(draw.sample(places, many))
