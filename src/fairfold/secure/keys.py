"""Who a device is, who vouches for it, and which keys serve for what.

A device has an *enrolled* key (ECDSA, P-384: the key of its Flower node, or one of its own), which outlives runs. It
signs, once, a *signer* (Ed25519, quick to check), and the signer signs what the device advertises in every round: two
fresh X25519 keys, one for masks and one for shares, and a number for the graph.

Who vouches for enrolled keys decides what holds against a server that lies. With a **roster**, the list of enrolled
public keys from somebody the server does not own, devices of the server's invention are refused. Without one a device
believes the server on who is enrolled, and notes who had which key when it first saw them: a name that comes with
another key later is refused, a newcomer is not. That is enough against a server that is curious, and not against one
that invents devices.
"""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)  # fmt: skip

from fairfold.errors import InvalidState, Refused
from fairfold.files import write_atomically
from fairfold.secure.messages import CERTIFICATE, KEY, Advert

_HASH = ec.ECDSA(hashes.SHA384())
_HALF = CERTIFICATE // 2
_CERTIFIED = b"fairfold signer"


def refuse(given: str, needed: str) -> Refused:
    """What a device says to what it does not do."""
    return Refused(given, needed, "This device takes no part; ask whoever runs the server.")


# -- who a device is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """A device's name, signer and certificate."""

    name: int
    enrolled: bytes
    signer: Ed25519PrivateKey
    certificate: bytes

    @classmethod
    def made(cls, name: int, enrolled: ec.EllipticCurvePrivateKey, signer: bytes | None = None) -> "Identity":
        """By the enrolled key, and the signer's 32 secret bytes, if it has one already."""
        key = Ed25519PrivateKey.generate() if signer is None else Ed25519PrivateKey.from_private_bytes(signer)
        first, second = decode_dss_signature(enrolled.sign(_CERTIFIED + _public(key), _HASH))
        certificate = first.to_bytes(_HALF, "big") + second.to_bytes(_HALF, "big")
        return cls(name, point_of(enrolled.public_key()), key, certificate)

    def advertises(self, session: bytes, mask_key: bytes, share_key: bytes) -> Advert:
        """Its advert of a round, by the public keys of that."""
        unsigned = Advert(
            self.name, self.enrolled, _public(self.signer), self.certificate, mask_key, share_key, os.urandom(KEY)
        )
        return Advert(**{**unsigned.__dict__, "signature": self.signer.sign(unsigned.signed(session))})


def point_of(key: ec.EllipticCurvePublicKey) -> bytes:
    """An enrolled public key as it travels."""
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def read_enrolled(path: Path) -> ec.EllipticCurvePrivateKey:
    """A device's enrolled key, as ``ssh-keygen -t ecdsa -b 384`` writes it; made if it is not there."""
    if not path.exists():
        made = ec.generate_private_key(ec.SECP384R1())
        write_atomically(path, made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), private=True)
        return made
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InvalidState(
            f"{path}: {error}", "a key of ssh-keygen -t ecdsa -b 384", "Name the file of such a key."
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InvalidState(
            f"{path}: another kind of key", "a key of ssh-keygen -t ecdsa -b 384", "Name the file of such a key."
        )
    return key


def read_roster(path: Path) -> frozenset[bytes]:
    """The enrolled public keys that somebody vouches for: the ``.pub`` files of the devices, one after the other."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip() and not line.startswith(b"#")]
        keys = [load_ssh_public_key(line) for line in lines]
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InvalidState(f"{path}: {error}", "a list of public keys", "Put the .pub files together.") from None
    return frozenset(point_of(key) for key in keys if isinstance(key, ec.EllipticCurvePublicKey))


# -- who vouches -------------------------------------------------------------------------------------------------------


@dataclass
class Trust:
    """Whom a device believes.

    Attributes:
        roster: Enrolled keys that somebody vouches for; None where the server is believed.
        seen: The enrolled key of every name that came before; where there is no roster, names keep their keys.
        checked: Digests of certificates that were found right before.
    """

    roster: frozenset[bytes] | None = None
    seen: dict[int, bytes] = field(default_factory=dict)
    checked: set[bytes] = field(default_factory=set)

    def check(self, session: bytes, adverts: tuple[Advert, ...]) -> None:
        """Refuse a cohort with somebody in it whom nobody vouches for, or who is in it twice."""
        for what in ("name", "enrolled", "signer", "mask_key", "share_key"):
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
        """Refuse an advert that its device did not sign, or not for this round."""
        certified = hashlib.sha256(advert.enrolled + advert.signer + advert.certificate).digest()
        if certified not in self.checked:
            if not _certified(advert):
                raise refuse(f"device {advert.name:x}, whose enrolled key did not sign", "keys that are vouched for")
            self.checked.add(certified)
        if not verified(advert.signer, advert.signature, advert.signed(session)):
            given = f"keys that device {advert.name:x} did not sign for this round"
            raise refuse(given, "keys of this round, and not of another")


def _certified(advert: Advert) -> bool:
    first, second = (int.from_bytes(advert.certificate[part : part + _HALF], "big") for part in (0, _HALF))
    try:
        enrolled = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), advert.enrolled)
        enrolled.verify(encode_dss_signature(first, second), _CERTIFIED + advert.signer, _HASH)
    except (ValueError, InvalidSignature):
        return False
    return True


def verified(signer: bytes, signature: bytes, signed: bytes) -> bool:
    """Whether a signature is a signer's."""
    try:
        Ed25519PublicKey.from_public_bytes(signer).verify(signature, signed)
    except (ValueError, InvalidSignature):
        return False
    return True


# -- keys of a round ---------------------------------------------------------------------------------------------------


def new_secret() -> bytes:
    """A secret X25519 key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(secret: bytes) -> bytes:
    """The public half of a secret X25519 key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


class Agreement:
    """What the owner of a secret key knows together with others, each alone (X25519)."""

    def __init__(self, secret: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(secret)

    def __call__(self, public: bytes) -> bytes:
        """With the owner of a public key."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # one of few points that would make everybody agree on the same
            raise refuse("a key that is no secret to anybody", "a public key of X25519") from None


def derived(secret: bytes, digest: bytes, purpose: bytes, *facts: int) -> bytes:
    """A key for one purpose of one cohort (HKDF-SHA256)."""
    info = b"fairfold " + purpose + b"".join(fact.to_bytes(4, "big") for fact in facts)
    return HKDF(hashes.SHA256(), 32, salt=digest, info=info).derive(secret)


def pair_mask(common: bytes, cohort: bytes, segment: int, pair: tuple[int, int]) -> bytes:
    """The key of the mask of two members in a segment, by what they agreed on."""
    return derived(common, cohort, b"pair", segment, min(pair), max(pair))


def own_mask(seed: bytes, cohort: bytes, segment: int) -> bytes:
    """The key of a device's own mask in a segment."""
    return derived(seed, cohort, b"own", segment)


def commitment(seed: bytes, cohort: bytes, member: int) -> bytes:
    """What binds a member to the seed of its own mask, and tells nothing of it."""
    return derived(seed, cohort, b"commitment", member)


def seal(common: bytes, cohort: bytes, sender: int, receiver: int, content: bytes) -> bytes:
    """Encrypt what one member gives to another. The key serves this once, so its nonce may be fixed."""
    return AESGCM(derived(common, cohort, b"share", sender, receiver)).encrypt(bytes(12), content, cohort)


def unseal(common: bytes, cohort: bytes, sender: int, receiver: int, box: bytes) -> bytes | None:
    """The same again; None where it is not what the sender sealed for this cohort."""
    try:
        return AESGCM(derived(common, cohort, b"share", sender, receiver)).decrypt(bytes(12), box, cohort)
    except InvalidTag:
        return None


def _public(signer: Ed25519PrivateKey) -> bytes:
    return signer.public_key().public_bytes_raw()
