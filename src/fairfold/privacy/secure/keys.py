"""Identities of clients, who vouches for them, and the keys of a round.

A client's *enrolled* key (ECDSA, P-384: of its Flower node, or its own) outlives runs. It signs, once, a *signer*
(Ed25519, quick to check), which signs what the client advertises in every round: two fresh X25519 keys, one for masks
and one for shares, and a number for the graph.

With a **roster**, a list of enrolled public keys from a party that the server does not control, invented clients are
refused. Without one a client trusts the server on who is enrolled, and refuses only a name that comes with another key
than it first saw: enough against an honest-but-curious server, and not against one that invents clients.
"""

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fairfold.atomic_io import write_atomically
from fairfold.errors import InvalidState
from fairfold.privacy.secure.messages import CERTIFICATE, KEY, Advert
from fairfold.privacy.secure.segments import refuse

_HASH = ec.ECDSA(hashes.SHA384())
_HALF = CERTIFICATE // 2
_CERTIFIED = b"fairfold signer"


@dataclass(frozen=True)
class Identity:
    """A client's name, enrolled key, signer and certificate."""

    name: int
    enrolled: bytes
    signer: Ed25519PrivateKey
    certificate: bytes

    @classmethod
    def create(cls, name: int, enrolled: ec.EllipticCurvePrivateKey, signer: bytes | None = None) -> "Identity":
        """Certify a signer (a new one, or that of 32 given secret bytes) with the enrolled key."""
        key = Ed25519PrivateKey.generate() if signer is None else Ed25519PrivateKey.from_private_bytes(signer)
        first, second = decode_dss_signature(enrolled.sign(_CERTIFIED + _public(key), _HASH))
        certificate = first.to_bytes(_HALF, "big") + second.to_bytes(_HALF, "big")
        return cls(name, point_of(enrolled.public_key()), key, certificate)

    def advert(self, session: bytes, mask_key: bytes, share_key: bytes) -> Advert:
        """The signed advert of a round with the round's public keys."""
        own = self.name, self.enrolled, _public(self.signer), self.certificate
        unsigned = Advert(*own, mask_key, share_key, os.urandom(KEY))
        return replace(unsigned, signature=self.signer.sign(unsigned.signed(session)))


def point_of(key: ec.EllipticCurvePublicKey) -> bytes:
    """Encode an enrolled public key for messages."""
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)


def read_enrolled(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read an enrolled key in the format of ``ssh-keygen -t ecdsa -b 384``; generate it if the file is missing."""
    if not path.exists():
        created = ec.generate_private_key(ec.SECP384R1())
        form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        write_atomically(path, created.private_bytes(*form), private=True)
        return created
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
            raise ValueError("another kind of key")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        needed = "a key of ssh-keygen -t ecdsa -b 384"
        raise InvalidState(f"{path}: {error}", needed, "Name the file of such a key.") from None
    return key


def read_roster(path: Path) -> frozenset[bytes]:
    """Read a roster: the enrolled public keys (``.pub`` files) of all clients, one per line."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip() and not line.startswith(b"#")]
        keys = [serialization.load_ssh_public_key(line) for line in lines]
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InvalidState(f"{path}: {error}", "a list of public keys", "Put the .pub files together.") from None
    return frozenset(point_of(key) for key in keys if isinstance(key, ec.EllipticCurvePublicKey))


@dataclass
class Trust:
    """Which enrolled keys a client accepts."""

    roster: frozenset[bytes] | None = None  # accepted enrolled keys; None if the server is trusted
    seen: dict[int, bytes] = field(default_factory=dict)  # the first key of every name, where there is no roster
    checked: set[bytes] = field(default_factory=set)  # digests of certificates that were verified before

    def check(self, session: bytes, adverts: tuple[Advert, ...]) -> None:
        """Refuse a cohort with a member that is not vouched for, or that is in it twice."""
        for what in Advert.UNIQUE:
            if len({getattr(advert, what) for advert in adverts}) < len(adverts):
                raise refuse(f"a cohort in which one {what.replace('_', ' ')} comes twice", "different devices")
        for advert in adverts:
            if self.roster is not None and advert.enrolled not in self.roster:
                raise refuse(f"device {advert.name:x}, whose key is not on the roster", "devices that are enrolled")
            if self.roster is None and self.seen.get(advert.name, advert.enrolled) != advert.enrolled:
                raise refuse(f"device {advert.name:x} with another key than before", "the key that it had")
            self.check_signature(session, advert)
        if self.roster is None:
            self.seen |= {advert.name: advert.enrolled for advert in adverts}

    def check_signature(self, session: bytes, advert: Advert) -> None:
        """Refuse an advert that its client did not sign, or not for this round."""
        certified = hashlib.sha256(advert.enrolled + advert.signer + advert.certificate).digest()
        if certified not in self.checked:
            if not _certified(advert):
                raise refuse(f"device {advert.name:x}, whose enrolled key did not sign", "keys that are vouched for")
            self.checked.add(certified)
        if not verified(advert.signer, advert.signature, advert.signed(session)):
            needed = "keys of this round, and not of another"
            raise refuse(f"keys that device {advert.name:x} did not sign for this round", needed)


def _certified(advert: Advert) -> bool:
    first, second = (int.from_bytes(advert.certificate[part : part + _HALF], "big") for part in (0, _HALF))
    try:
        enrolled = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), advert.enrolled)
        enrolled.verify(encode_dss_signature(first, second), _CERTIFIED + advert.signer, _HASH)
    except (ValueError, InvalidSignature):
        return False
    return True


def verified(signer: bytes, signature: bytes, signed: bytes) -> bool:
    """Whether an Ed25519 signature is valid."""
    try:
        Ed25519PublicKey.from_public_bytes(signer).verify(signature, signed)
    except (ValueError, InvalidSignature):
        return False
    return True


def new_secret() -> bytes:
    """Generate a secret X25519 key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(secret: bytes) -> bytes:
    """The public half of a secret X25519 key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


class Agreement:
    """X25519 key agreement between the owner of a secret key and owners of public keys."""

    def __init__(self, secret: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(secret)

    def __call__(self, public: bytes) -> bytes:
        """The secret shared with the owner of a public key."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # a low-order point: the shared secret would be known to anyone
            raise refuse("a key that leads to no secret", "a public key of X25519") from None


def derived(secret: bytes, digest: bytes, purpose: bytes, *facts: int) -> bytes:
    """Derive a key for one purpose of one cohort (HKDF-SHA256)."""
    info = b"fairfold " + purpose + b"".join(fact.to_bytes(4, "big") for fact in facts)
    return HKDF(hashes.SHA256(), 32, salt=digest, info=info).derive(secret)


def pair_mask(common: bytes, cohort: bytes, segment: int, pair: tuple[int, int]) -> bytes:
    """Key of the pairwise mask of two members in a segment, from their shared secret."""
    return derived(common, cohort, b"pair", segment, min(pair), max(pair))


def own_mask(seed: bytes, cohort: bytes, segment: int) -> bytes:
    """Key of a client's own mask in a segment."""
    return derived(seed, cohort, b"own", segment)


def commitment(seed: bytes, cohort: bytes, member: int) -> bytes:
    """Commitment of a member to the seed of its own mask; reveals nothing of the seed."""
    return derived(seed, cohort, b"commitment", member)


def seal(common: bytes, cohort: bytes, sender: int, receiver: int, content: bytes) -> bytes:
    """Encrypt a message from one member to another. The key serves once, so the nonce may be fixed."""
    return AESGCM(derived(common, cohort, b"share", sender, receiver)).encrypt(bytes(12), content, cohort)


def unseal(common: bytes, cohort: bytes, sender: int, receiver: int, box: bytes) -> bytes | None:
    """Decrypt what :func:`seal` encrypted; None if it is not what the sender sealed for this cohort."""
    try:
        return AESGCM(derived(common, cohort, b"share", sender, receiver)).decrypt(bytes(12), box, cohort)
    except InvalidTag:
        return None


def _public(signer: Ed25519PrivateKey) -> bytes:
    return signer.public_key().public_bytes_raw()
