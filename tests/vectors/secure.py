"""Parts of secure aggregation as test vectors."""

import hashlib
import random
from typing import Any
from unittest import mock

import numpy
import torch

from fairfold.federation.updates import Update
from fairfold.privacy.fixed_point import Encoding, MeasuredUpdate, VectorLayout
from fairfold.privacy.secure import keys, messages, shamir
from fairfold.privacy.secure.masking import Ring, add_masks, degrees, quorum
from fairfold.privacy.secure.segments import SegmentLayout
from tests.vectors.log import log_vectors


def secure_vectors() -> dict[str, Any]:
    """All parts."""
    draw = random.Random(7)
    return {
        "keys": key_vectors(draw),
        "masks": mask_vectors(draw),
        "shares": share_vectors(draw),
        "graph": graph_vectors(),
        "messages": message_vectors(draw),
        "fixed_point": fixed_point_vectors(),
        "log": log_vectors(),
    }


def key_vectors(draw: random.Random) -> dict[str, Any]:
    """Key agreement, keys derived for each purpose, and sealed messages."""
    mine, theirs, digest = (draw.randbytes(32) for _ in range(3))
    common = keys.Agreement(mine)(keys.public_of(theirs))
    content = draw.randbytes(2 * shamir.SHARE_BYTES)
    return {
        "secret": mine.hex(), "public": keys.public_of(mine).hex(), "other_public": keys.public_of(theirs).hex(),
        "common": common.hex(), "cohort": digest.hex(),
        "pair": {"segment": 2, "members": [5, 1], "key": keys.pair_mask(common, digest, 2, (5, 1)).hex()},
        "own": {"segment": 2, "seed": mine.hex(), "key": keys.own_mask(mine, digest, 2).hex()},
        "commitment": {"seed": mine.hex(), "member": 3, "value": keys.commitment(mine, digest, 3).hex()},
        "sealed": {"sender": 1, "receiver": 2, "content": content.hex(),
                   "box": keys.seal(common, digest, 1, 2, content).hex()},
        "low_order_public_is_refused": bytes(32).hex(),
    }  # fmt: skip


def mask_vectors(draw: random.Random) -> dict[str, Any]:
    """Streams of ChaCha20 (key, counter and nonce 0) as little-endian numbers, added modulo 2³²."""
    plus, minus = ([draw.randbytes(32) for _ in range(2)] for _ in range(2))
    small = numpy.array([0, 1, 2**32 - 1, 7] * 10, dtype="<u4")
    long = numpy.arange(70_000, dtype="<u4")
    before = small.tolist()
    add_masks(small, plus, minus)
    add_masks(long, plus, minus)
    return {
        "plus": [key.hex() for key in plus], "minus": [key.hex() for key in minus],
        "vector": before, "masked": small.tolist(),
        "counting": {"length": len(long), "sha256": hashlib.sha256(long.tobytes()).hexdigest()},
    }  # fmt: skip


def share_vectors(draw: random.Random) -> dict[str, Any]:
    """Shamir's shares of a secret from given factors of the polynomial."""
    secret, factors = draw.randbytes(32), [draw.randrange(shamir.PRIME) for _ in range(2)]
    places = [1, 2, 5, 9]
    with mock.patch("secrets.randbelow", side_effect=factors):
        shares = shamir.split(secret, places, 3)
    assert shamir.combine(dict(list(zip(places, shares, strict=True))[:3])) == secret
    return {
        "prime": f"{shamir.PRIME:x}", "secret": secret.hex(), "threshold": 3, "places": places,
        "factors": [f"{one:x}" for one in factors], "shares": [one.hex() for one in shares],
    }  # fmt: skip


def graph_vectors() -> dict[str, Any]:
    """Degrees, quorum, and neighbors of some members."""
    digest = hashlib.sha256(b"cohort").digest()
    sizes = (2, 3, 10, 41, 42, 100, 200, 1_000)
    rings = []
    for size in (5, 60, 200):
        ring = Ring(digest, range(size))
        gone = set(ring.order[4 : 4 + size // 3])
        rings.append({
            "members": size, "order": ring.order,
            "neighbors": {str(member): ring.neighbors(member) for member in (0, 1, size - 1)},
            "survivors": sorted(set(range(size)) - gone), "isolated": ring.isolated(set(range(size)) - gone),
        })  # fmt: skip
    some = Ring(digest, [1, 4, 6, 7])
    return {
        "cohort": digest.hex(),
        "degrees": [[n, *(degrees(n).degree, degrees(n).threshold, degrees(n).staying), quorum(n)] for n in sizes],
        "rings": rings, "ring_of_some": {"members": [1, 4, 6, 7], "order": some.order},
    }  # fmt: skip


def message_vectors(draw: random.Random) -> list[dict[str, Any]]:
    """Every kind of message, with its fields."""
    layout = SegmentLayout((6, 10), ((0,), (0, 1)))
    log = messages.LogHead(2, "5a" * 32)
    session = messages.Session(0x1F, 3, "train", 3, layout, 70, 0.5, 9, log)
    sizes = (messages.POINT, messages.KEY, messages.CERTIFICATE, *(messages.KEY,) * 3, messages.SIGNATURE)
    advert = messages.Advert(0xABC, *(draw.randbytes(size) for size in sizes))
    other = messages.Advert(0xABD, *(draw.randbytes(size) for size in sizes))
    sealed = {2: draw.randbytes(messages.SEALED), 5: draw.randbytes(messages.SEALED)}
    everything: list[tuple[messages.Message, dict[str, Any]]] = [
        (session, {"run": "1f", "round": 3, "turn": 9, "purpose": "train", "min_cohort": 3, "staying": 70, "sigma": 0.5,
                   "lengths": [6, 10], "sizes": [[0], [0, 1]], "log": {"lines": 2, "hash": "5a" * 32}}),
        (advert, {"name": "abc", **{key: getattr(advert, key).hex() for key in (
            "enrolled", "signer", "certificate", "mask_key", "share_key", "nonce", "signature")}}),
        (messages.Cohort((advert, other), (0, 1)), {"names": ["abc", "abd"], "sizes": [0, 1]}),
        (messages.Shares(draw.randbytes(32), sealed), {"sealed": {str(k): v.hex() for k, v in sealed.items()}}),
        (messages.Delivery(frozenset({0, 2, 9}), 11, sealed), {"sharing": [0, 2, 9], "cohort_size": 11,
                                                               "sealed": {str(k): v.hex() for k, v in sealed.items()}}),
        (messages.Masked(numpy.array([1, 2**32 - 1], dtype="<u4")), {"vector": [1, 2**32 - 1]}),
        (messages.Survivors(frozenset({0, 8}), 9), {"staying": [0, 8], "cohort_size": 9}),
        (messages.Signed(bytes(range(64))), {"signature": bytes(range(64)).hex()}),
        (messages.Signatures({3: bytes(range(64))}), {"by_member": {"3": bytes(range(64)).hex()}}),
        (messages.Revealed({3: (messages.MASK_KEY, bytes(range(33)))}), {"shares": {"3": [1, bytes(range(33)).hex()]}}),
    ]  # fmt: skip
    digest = session.digest
    found = [
        {"kind": one.KIND, "name": type(one).__name__, "fields": fields, "bytes": one.packed(digest).hex()}
        for one, fields in everything
    ]
    cohort = messages.Cohort((advert, other), (0, 1))
    survivors = messages.Survivors(frozenset({0, 8}), 9)
    signed = {
        "session_digest": digest.hex(), "cohort_digest": cohort.digest(digest).hex(),
        "advert_signed": advert.signed(digest).hex(),
        "survivors_signed": survivors.signed(cohort.digest(digest), {0, 1, 8}).hex(),
    }  # fmt: skip
    return [*found, {"name": "digests and signed bytes", "fields": signed}]


def fixed_point_vectors() -> list[dict[str, Any]]:
    """Updates as integers: the header of weight, quality and users, then tensors in the order of their names."""
    cases = []
    for clients in (3, 100, 1_000):
        sums = {"sum": torch.tensor([0.25, -0.5, 65_535 / 65_536, 0.0, 1 / 65_536])}
        encoding = Encoding(VectorLayout({0: {"sum": 5}}, frozenset({"sum"})), 1.0, clients, {"sum": 65_536})
        measured = MeasuredUpdate(Update(sums, 2.0), 1.375, 2.0)
        cases.append({"what": "train", "clients": clients, "weight": 2.0, "quality": 1.375, "users": 2.0,
                      "sums": {"sum": sums["sum"].tolist()}, "steps": {"sum": 65_536},
                      "encoded": encoding.encode(measured, 0).tolist()})  # fmt: skip
    counts = {
        "counts": torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64),
        "users": torch.tensor([2.0, 3.0, 0.0]).double(),
    }
    encoding = Encoding(VectorLayout({0: {"counts": 3, "users": 3}}), 1.0, 10, {"counts": 1, "users": 1})
    cases.append({"what": "statistics", "clients": 10, "weight": 2.0, "quality": 0.0, "users": 0.0,
                  "sums": {name: of.tolist() for name, of in counts.items()}, "steps": {"counts": 1, "users": 1},
                  "encoded": encoding.encode(MeasuredUpdate(Update(counts, 2.0)), 0).tolist()})  # fmt: skip
    encoding = Encoding(VectorLayout({0: {}}), 1.0, 10)
    measured = MeasuredUpdate(Update({}, 0.0), 1.9999695, 2.0)
    cases.append({"what": "evaluate", "clients": 10, "weight": 0.0, "quality": 1.9999695, "users": 2.0, "sums": {},
                  "steps": {}, "encoded": encoding.encode(measured, 0).tolist()})  # fmt: skip
    # A tensor of no declared steps: a power of two, chosen by the clipping bound and the number of clients.
    value = {"table": torch.tensor([0.1, -3.0, 0.7])}
    encoding = Encoding(VectorLayout({0: {"table": 3}}), 1.0, 7)
    cases.append({"what": "gradient", "clients": 7, "weight": 1.0, "quality": 0.0, "users": 0.0, "clip": 1.0,
                  "sums": {"table": value["table"].tolist()}, "steps": {"table": encoding.steps("table")},
                  "encoded": encoding.encode(MeasuredUpdate(Update(value, 1.0)), 0).tolist()})  # fmt: skip
    return cases
