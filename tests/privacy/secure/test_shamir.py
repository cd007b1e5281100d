"""Sharing of secrets, against an interpolation by hand with fractions of whole numbers."""

import itertools
import os
from fractions import Fraction

import pytest

from fairfold.privacy.secure import shamir
from fairfold.privacy.secure.shamir import PRIME, combine, recover, split


def by_hand(points: dict[int, int], where: int) -> int:
    """Lagrange's polynomial through points, in exact fractions, and only then modulo the prime."""
    total = Fraction(0)
    for place, value in points.items():
        factor = Fraction(value)
        for other in points.keys() - {place}:
            factor *= Fraction(where - other, place - other)
        total += factor
    return total.numerator * pow(total.denominator, -1, PRIME) % PRIME


def test_the_prime_is_one_and_no_smaller_one_is_above_every_secret() -> None:
    def probably_prime(number: int) -> bool:  # Miller and Rabin
        odd, twos = number - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
            value = pow(base, odd, number)
            if value in (1, number - 1):
                continue
            for _ in range(twos - 1):
                value = value * value % number
                if value == number - 1:
                    break
            else:
                return False
        return True

    assert probably_prime(PRIME)
    assert not any(probably_prime(number) for number in range(2**256 + 1, PRIME, 2))


def test_any_shares_of_the_threshold_tell_the_secret_and_agree_with_the_hand() -> None:
    secret, places = os.urandom(32), [1, 4, 5, 9, 17]
    shares = dict(zip(places, split(secret, places, 3), strict=True))
    for some in itertools.combinations(places, 3):
        points = {place: int.from_bytes(shares[place], "big") for place in some}
        assert by_hand(points, 0) == int.from_bytes(secret, "big")
        assert combine({place: shares[place] for place in some}) == secret


def test_fewer_shares_fit_any_secret() -> None:
    places = [2, 3, 7]
    shares = [int.from_bytes(share, "big") for share in split(os.urandom(32), places, 3)]
    for secret in (0, 1, 2**255):  # two shares and this secret lie on a polynomial, as with the true one
        points = {0: secret, 2: shares[0], 3: shares[1]}
        assert by_hand(points, 2) == shares[0]
        assert by_hand(points, 7) != shares[2]


def test_the_edges_of_secrets_and_thresholds() -> None:
    for secret in (bytes(32), b"\xff" * 32):
        assert combine({5: split(secret, [5], 1)[0]}) == secret
        shares = split(secret, range(1, 31), 30)
        assert combine(dict(enumerate(shares, start=1))) == secret
    for threshold in (0, 3):
        with pytest.raises(ValueError, match="of 2 shares"):
            split(bytes(32), [1, 2], threshold)


def test_wrong_shares_are_found_and_named() -> None:
    secret, places = os.urandom(32), list(range(1, 12))
    shares = dict(zip(places, split(secret, places, 5), strict=True))
    for wrong in ([], [2], [1, 3, 11]):
        spoilt = shares | {place: os.urandom(33) for place in wrong}
        assert recover(spoilt, 5, secret.__eq__) == (secret, wrong)
    assert recover({place: shares[place] for place in places[:4]}, 5, secret.__eq__) is None


def test_it_gives_up_when_too_many_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shamir, "MAX_TRIES", 20)
    shares = dict(zip(range(1, 8), split(bytes(32), range(1, 8), 4), strict=True))
    assert recover(shares | {place: os.urandom(33) for place in (1, 2, 3, 4)}, 4, bytes(32).__eq__) is None
