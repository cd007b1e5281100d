"""The server's side of a secure sum: it carries messages between devices and learns the sums of its segments.

``hear`` takes one device's message of the phase that is open, ``close`` ends the phase and says what those who are
still there are told next; after the last one :attr:`Server.totals` has the sums. Whoever is not heard of in time has
left. Vectors are added as they come and are not kept.
"""

import logging
from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cached_property

import numpy

from fairfold.errors import InvalidMessage, SumLost
from fairfold.secure import keys, shamir
from fairfold.secure.graph import Ring, quorum
from fairfold.secure.keys import Trust
from fairfold.secure.masks import Words, add_masks
from fairfold.secure.messages import (
    MASK_KEY,
    SEED,
    Advert,
    Cohort,
    Delivery,
    Masked,
    Revealed,
    Session,
    Shares,
    Signatures,
    Signed,
    Survivors,
    opened,
)  # fmt: skip

log = logging.getLogger("fairfold.secure")


class Phase(IntEnum):
    """What devices are asked for."""

    KEYS, SHARES, VECTORS, SIGNATURES, REVEALED, DONE = range(6)


class Server:
    """One session.

    Args:
        session: What is summed.
        wanted: The size that each device could have, by its name; whoever is not in it is refused.
        room: How many owners a segment is to have beyond the smallest allowed, so that some may leave; where there
            are fewer, their size steps down. None if devices must keep their sizes: those of a thin one are left out.
    """

    def __init__(self, session: Session, wanted: Mapping[int, int], *, room: int | None = 0) -> None:
        self.session, self.wanted, self.room = session, dict(wanted), room
        self.bound, self.phase = session.digest, Phase.KEYS
        self.trust = Trust()
        self.adverts: dict[int, Advert] = {}
        self.cohort = Cohort((), ())
        self._shares: dict[int, Shares] = {}
        self._signed: dict[int, bytes] = {}
        self._staying: set[int] = set()
        self._told: dict[int, dict[int, tuple[int, bytes]]] = {}
        self._sums = [numpy.zeros(0, dtype="<u4")] * len(session.layout.lengths)

    # -- what comes in -------------------------------------------------------------------------------------------------

    def hear(self, name: int, message: bytes | memoryview) -> None:
        """Take what a device says in the phase that is open; refused if it is not that, or not from this device."""
        if self.phase == Phase.KEYS:
            self._hear_advert(name, opened(Advert, message, self.bound))
            return
        member = self.members.get(name)
        if member is None or member not in self._asked:
            raise _wrong("a message of somebody who was not asked", "members who are still there")
        if self.phase == Phase.SHARES:
            shares = opened(Shares, message, self.bound)
            if list(shares.sealed) != self.ring.neighbours(member):
                raise _wrong("shares for others than its neighbours", "one for each of them")
            self._shares[member] = shares
        elif self.phase == Phase.VECTORS:
            self._add(member, opened(Masked, message, self.bound).words)
        elif self.phase == Phase.SIGNATURES:
            signature = opened(Signed, message, self.bound).signature
            signed = self._survivors.signed(self.digest, frozenset(self._shares))
            if not keys.verified(self.cohort.members[member].signer, signature, signed):
                raise _wrong("a signature that is none", "one of the survivors")
            self._signed[member] = signature
        elif self.phase == Phase.REVEALED:
            self._hear_revealed(member, opened(Revealed, message, self.bound).shares)
        self._asked.discard(member)

    def _hear_advert(self, name: int, advert: Advert) -> None:
        if name not in self.wanted or advert.name != name or name in self.adverts:
            raise _wrong("keys of somebody who was not asked, or has given them", "each once")
        self.trust.check_signature(self.bound, advert)
        for what in ("enrolled", "signer", "mask_key", "share_key"):
            if any(getattr(other, what) == getattr(advert, what) for other in self.adverts.values()):
                raise _wrong(f"the {what.replace('_', ' ')} of another device", "its own")
        self.adverts[name] = advert

    def _add(self, member: int, words: Words) -> None:
        layout, size = self.session.layout, self.cohort.sizes[member]
        if len(words) != layout.words(size):
            raise _wrong(f"a vector of {len(words)} words", f"{layout.words(size)}")
        for segment, where in layout.places(size):
            if not len(self._sums[segment]):
                self._sums[segment] = numpy.zeros(layout.lengths[segment], dtype="<u4")
            self._sums[segment] += words[where]
        self._staying.add(member)

    def _hear_revealed(self, member: int, shares: dict[int, tuple[int, bytes]]) -> None:
        kept = set(self.ring.neighbours(member)) & self._shares.keys()
        if not shares.keys() <= kept:
            raise _wrong("shares of others than its neighbours", "those it was given")
        if any(kind != (SEED if of in self._staying else MASK_KEY) for of, (kind, _) in shares.items()):
            raise _wrong("a share of the wrong kind", "of survivors the seed, of others the key")
        self._told[member] = shares

    # -- from phase to phase -------------------------------------------------------------------------------------------

    def close(self) -> dict[int, bytes]:
        """End the phase: what every device is told next, by its name; nothing after the last."""
        ended, self.phase = self.phase, Phase(self.phase + 1)
        if ended == Phase.KEYS:
            return self._form()
        many = len(self.cohort.members)
        heard = (self._shares, self._staying, self._signed, self._told)[ended - 1]
        needed = self.ring.degrees.threshold if ended == Phase.REVEALED else max(quorum(many), self.session.smallest)
        if len(heard) < needed:
            raise SumLost(f"{len(heard)} of {many} devices left", f"at least {needed}", "The next round begins anew.")
        few = self.session.layout.left(self.cohort.by_size, set(heard), self.session.staying)
        if few is not None and ended <= Phase.VECTORS:
            given = f"{few[1]} devices left in segment {few[0]}"
            raise SumLost(given, f"at least {few[2]}, for which noise is sized", "The next round begins anew.")
        self._asked = set(heard)
        if ended == Phase.SHARES:
            return self._to_all(heard, self._delivery)
        if ended == Phase.VECTORS:
            survivors = self._survivors.packed(self.bound)
            return self._to_all(heard, lambda _member: survivors)
        if ended == Phase.SIGNATURES:
            signatures = Signatures(self._signed).packed(self.bound)
            return self._to_all(heard, lambda _member: signatures)
        return {}

    def _form(self) -> dict[int, bytes]:
        """Form the cohort of those who gave keys; sizes that are too thin step down."""
        smallest, layout = self.session.smallest, self.session.layout
        sizes = {name: self.wanted[name] for name in sorted(self.adverts)}
        if self.room is not None:
            sizes = layout.stepped_down(sizes, smallest + self.room)
        sizes = layout.hidden(sizes, smallest)
        if not sizes:
            given = f"{len(self.adverts)} devices that gave keys"
            raise SumLost(given, f"at least {smallest} in every segment", "Wait for more devices.")
        names = list(sizes)
        self.cohort = Cohort(tuple(self.adverts[name] for name in names), tuple(sizes.values()))
        self._asked = set(range(len(names)))
        cohort = self.cohort.packed(self.bound)
        return dict.fromkeys(names, cohort)

    def _to_all(self, members: Iterable[int], message: object) -> dict[int, bytes]:
        assert callable(message)
        return {self.cohort.members[member].name: message(member) for member in sorted(members)}

    def _delivery(self, member: int) -> bytes:
        senders = [other for other in self.ring.neighbours(member) if other in self._shares]
        sealed = {other: self._shares[other].sealed[member] for other in senders}
        return Delivery(frozenset(self._shares), len(self.cohort.members), sealed).packed(self.bound)

    @cached_property
    def members(self) -> dict[int, int]:
        """Places in the cohort, by name."""
        return {advert.name: place for place, advert in enumerate(self.cohort.members)}

    @cached_property
    def digest(self) -> bytes:
        """Of the cohort."""
        return self.cohort.digest(self.bound)

    @cached_property
    def ring(self) -> Ring:
        """In which neighbours keep each other's shares."""
        return Ring(self.digest, range(len(self.cohort.members)))

    @property
    def _survivors(self) -> Survivors:
        return Survivors(frozenset(self._staying), len(self.cohort.members))

    # -- the sums ------------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> dict[int, int]:
        """The size of everybody in the cohort, by name."""
        return {advert.name: size for advert, size in zip(self.cohort.members, self.cohort.sizes, strict=True)}

    @property
    def survivors(self) -> list[int]:
        """The names of those whose vectors are in the sums."""
        return [self.cohort.members[member].name for member in sorted(self._staying)]

    @cached_property
    def totals(self) -> list[Words]:
        """The sums of all segments over the survivors that have them; empty where nobody has."""
        if self.phase != Phase.DONE:
            raise SumLost(f"a sum in the phase {self.phase.name.lower()}", "all phases", "Close them first.")
        secrets = {member: self._secret(member) for member in self._shares}
        left_over = {member: keys.Agreement(of) for member, of in secrets.items() if member not in self._staying}
        common: dict[tuple[int, int], bytes] = {}
        for segment, having in self.session.layout.owners(self.cohort.by_size).items():
            if not len(self._sums[segment]):
                continue
            ring = Ring(self.digest, having)
            plus: list[bytes] = []
            minus = [keys.own_mask(secrets[one], self.digest, segment) for one in having if one in self._staying]
            for left in sorted(left_over.keys() & having):
                for other in ring.neighbours(left):
                    if other not in self._staying:
                        continue
                    if (left, other) not in common:
                        common[left, other] = left_over[left](self.cohort.members[other].mask_key)
                    mask = keys.pair_mask(common[left, other], self.digest, segment, (left, other))
                    (minus if other < left else plus).append(mask)  # the one who stayed had added it, or taken it away
            add_masks(self._sums[segment], plus, minus)
        return self._sums

    def _secret(self, member: int) -> bytes:
        """The seed of a survivor, or the key of one that left, by its neighbours' shares."""
        shares = {teller + 1: told[member][1] for teller, told in self._told.items() if member in told}
        advert, stays = self.cohort.members[member], member in self._staying

        def right(secret: bytes) -> bool:
            if stays:
                return keys.commitment(secret, self.digest, member) == self._shares[member].commitment
            return keys.public_of(secret) == advert.mask_key

        found = shamir.recover(shares, self.ring.degrees.threshold, right)
        if found is None:
            given = f"{len(shares)} shares of device {advert.name:x} that do not tell its secret"
            raise SumLost(given, f"{self.ring.degrees.threshold} that are right", "Leave this device out.")
        for liar in found[1]:
            name = self.cohort.members[liar - 1].name
            log.warning("device %x gave a wrong share of device %x", name, advert.name)
        return found[0]


def _wrong(given: str, needed: str) -> InvalidMessage:
    return InvalidMessage(given, needed, "This device is left out.")
