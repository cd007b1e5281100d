"""Shamir's sharing of 32-byte secrets: any ``threshold`` shares recover the secret, fewer reveal nothing of it.

A secret is the value at 0 of a random polynomial of degree ``threshold − 1`` over the integers modulo the smallest
prime above 2²⁵⁶; a share is its value at another place.
"""

import itertools
import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
MAX_TRIES = 2_000  # subsets tried where some shares are wrong


def split(secret: bytes, places: Sequence[int], threshold: int) -> list[bytes]:
    """Split a secret into shares at some places, each of them above 0."""
    if not 1 <= threshold <= len(places) or len(secret) != SECRET_BYTES:
        raise ValueError(f"{threshold} of {len(places)} shares of {len(secret)} bytes")
    factors = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    values = (
        sum(factor * pow(place, power, PRIME) for power, factor in enumerate(factors)) % PRIME for place in places
    )
    return [value.to_bytes(SHARE_BYTES, "big") for value in values]


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """Recover a secret from exactly its threshold of shares; None if a wrong share leads to a number out of range."""
    secret = _interpolate({place: int.from_bytes(share, "big") for place, share in shares.items()}, 0)
    return secret.to_bytes(SECRET_BYTES, "big") if secret < 2**256 else None


def _interpolate(points: Mapping[int, int], where: int) -> int:
    """Evaluate the polynomial through some points at a place (Lagrange)."""
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
    """Recover a secret, which ``accept`` recognizes, from shares of which some may be wrong; and the wrong places."""
    places = sorted(shares)
    if len(places) < threshold:
        return None
    for some in itertools.islice(_subsets(places, threshold), MAX_TRIES):
        secret = combine({place: shares[place] for place in some})
        if secret is not None and accept(secret):
            if some == places[:threshold]:
                return secret, []  # the usual case: no share is wrong
            values = {place: int.from_bytes(share, "big") for place, share in shares.items()}
            points = {place: values[place] for place in some}
            rest = (place for place in places if place not in points)
            return secret, [place for place in rest if _interpolate(points, place) != values[place]]
    return None


def _subsets(places: list[int], size: int) -> Iterable[list[int]]:
    """The first places, then random subsets of the same size, if there are others."""
    yield places[:size]
    draw = random.SystemRandom()
    while size < len(places):
        yield sorted(draw.sample(places, size))
