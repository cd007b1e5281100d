"""The server's side of secure aggregation: it relays messages between clients and learns the sums of the segments.

:meth:`SecureServer.receive` takes a client's message of the open phase; :meth:`SecureServer.close` ends the phase. A
client whose message does not arrive in time has left. Vectors are added as they arrive and are not stored.
"""

import logging
from collections.abc import Mapping
from enum import IntEnum
from functools import cache, cached_property
from itertools import product

import numpy

from fairfold.errors import AggregationFailed, InvalidMessage
from fairfold.privacy.secure import keys, messages, shamir
from fairfold.privacy.secure.keys import Trust
from fairfold.privacy.secure.masking import FixedPointVector, Ring, add_masks, quorum
from fairfold.privacy.secure.messages import MASK_KEY, SEED, Advert, Cohort, Session, Survivors, parse_message

log = logging.getLogger("fairfold.privacy.secure")


class Phase(IntEnum):
    """What the server is collecting from clients."""

    KEYS, SHARES, VECTORS, SIGNATURES, REVEALED, DONE = range(6)


class SecureServer:
    """One session, with the size that each invited client could have by its name; others are refused.

    ``room`` is how many owners a segment should have beyond the minimum, so that some may leave; or their size steps
    down. None if clients must keep their sizes: those of a thin size are left out. ``enrolled`` has the keys of those
    that are in the session's log, by name: all others would have the cohort refused.
    """

    def __init__(
        self,
        session: Session,
        wanted: Mapping[int, int],
        *,
        room: int | None = 0,
        enrolled: Mapping[int, bytes] | None = None,
    ) -> None:
        self.session = session
        self.wanted = dict(wanted)
        self.room = room
        self.enrolled = enrolled
        self.session_digest = session.digest
        self.phase, self.trust = Phase.KEYS, Trust()
        self.adverts: dict[int, Advert] = {}
        self.cohort = Cohort((), ())
        self._expected: set[int] = set()
        self._shares: dict[int, messages.Shares] = {}
        self._signed: dict[int, bytes] = {}
        self._staying: set[int] = set()
        self._revealed: dict[int, dict[int, tuple[int, bytes]]] = {}
        self._sums = [numpy.zeros(0, dtype="<u4")] * len(session.layout.lengths)

    def receive(self, name: int, message: bytes | memoryview) -> None:
        """Take a client's message of the open phase; refuse one of another kind, or not from this client."""
        if self.phase == Phase.KEYS:
            self._add_advert(name, parse_message(Advert, message, self.session_digest))
            return
        member = self.members.get(name)
        if member is None or member not in self._expected:
            raise _wrong("a message of a client that was not asked", "members who are still there")
        if self.phase == Phase.SHARES:
            shares = parse_message(messages.Shares, message, self.session_digest)
            if list(shares.sealed) != self.ring.neighbors(member):
                raise _wrong("shares for others than its neighbors", "one for each of them")
            self._shares[member] = shares
        elif self.phase == Phase.VECTORS:
            self._add_vector(member, parse_message(messages.Masked, message, self.session_digest).vector)
        elif self.phase == Phase.SIGNATURES:
            signature = parse_message(messages.Signed, message, self.session_digest).signature
            signed = self._survivors.signed(self.digest, frozenset(self._shares))
            if not keys.verified(self.cohort.members[member].signer, signature, signed):
                raise _wrong("a signature that is none", "one of the survivors")
            self._signed[member] = signature
        elif self.phase == Phase.REVEALED:
            self._add_revealed(member, parse_message(messages.Revealed, message, self.session_digest).shares)
        self._expected.discard(member)

    def _add_advert(self, name: int, advert: Advert) -> None:
        if name not in self.wanted or advert.name != name or name in self.adverts:
            raise _wrong("keys of a client that was not asked, or has given them", "each once")
        if self.enrolled is not None and self.enrolled.get(name) != advert.enrolled:
            raise _wrong("another key than it has in the roster", "the key that it enrolled")
        self.trust.check_signature(self.session_digest, advert)
        for other, what in product(self.adverts.values(), Advert.UNIQUE):
            if getattr(advert, what) == getattr(other, what):
                raise _wrong(f"the {what.replace('_', ' ')} of another device", "its own")
        self.adverts[name] = advert

    def _add_vector(self, member: int, vector: FixedPointVector) -> None:
        layout, size = self.session.layout, self.cohort.sizes[member]
        if len(vector) != layout.length(size):
            raise _wrong(f"a vector of {len(vector)} numbers", f"{layout.length(size)}")
        for segment, where in layout.slices(size):
            if not len(self._sums[segment]):
                self._sums[segment] = numpy.zeros(layout.lengths[segment], dtype="<u4")
            self._sums[segment] += numpy.asarray(vector[where])
        self._staying.add(member)

    def _add_revealed(self, member: int, shares: dict[int, tuple[int, bytes]]) -> None:
        if not shares.keys() <= set(self.ring.neighbors(member)) & self._shares.keys():
            raise _wrong("shares of others than its neighbors", "those it was given")
        if any(kind != (SEED if owner in self._staying else MASK_KEY) for owner, (kind, _) in shares.items()):
            raise _wrong("a share of the wrong kind", "of survivors the seed, of others the key")
        self._revealed[member] = shares

    def close(self) -> dict[int, bytes]:
        """End the phase; return the next message of every remaining client by name, nothing after the last phase."""
        ended, self.phase = self.phase, Phase(self.phase + 1)
        if ended == Phase.KEYS:
            return self._form_cohort()
        cohort_size = len(self.cohort.members)
        present = set((self._shares, self._staying, self._signed, self._revealed)[ended - 1])
        last, remedy = ended == Phase.REVEALED, "The next round begins anew."
        needed = self.ring.degrees.threshold if last else max(quorum(cohort_size), self.session.min_cohort)
        if len(present) < needed:
            raise AggregationFailed(f"{len(present)} of {cohort_size} devices left", f"at least {needed}", remedy)
        few = self.session.layout.depleted_segment(self.cohort.by_size, present, self.session.staying)
        if few is not None and ended <= Phase.VECTORS:
            needs = f"at least {few[2]}, for which noise is sized"
            raise AggregationFailed(f"{few[1]} devices left in segment {few[0]}", needs, remedy)
        self._expected = present
        names = {member: self.cohort.members[member].name for member in sorted(present)}
        if ended == Phase.SHARES:
            return {name: self._delivery(member) for member, name in names.items()}
        if last:
            return {}
        message = self._survivors if ended == Phase.VECTORS else messages.Signatures(self._signed)
        return dict.fromkeys(names.values(), message.packed(self.session_digest))

    def _form_cohort(self) -> dict[int, bytes]:
        """Form the cohort of the clients that gave keys; where too few have a size, they take the next smaller."""
        layout, min_cohort = self.session.layout, self.session.min_cohort
        sizes = {name: self.wanted[name] for name in sorted(self.adverts)}
        if self.room is not None:
            sizes = layout.step_down(sizes, min_cohort + self.room)
        sizes = layout.without_thin_sizes(sizes, min_cohort)
        if not sizes:
            given = f"{len(self.adverts)} devices that gave keys"
            raise AggregationFailed(given, f"at least {min_cohort} in every segment", "Wait for more devices.")
        self.cohort = Cohort(tuple(self.adverts[name] for name in sizes), tuple(sizes.values()))
        self._expected = set(range(len(sizes)))
        return dict.fromkeys(sizes, self.cohort.packed(self.session_digest))

    def _delivery(self, member: int) -> bytes:
        neighbors = self.ring.neighbors(member)
        sealed = {other: self._shares[other].sealed[member] for other in neighbors if other in self._shares}
        return messages.Delivery(frozenset(self._shares), len(self.cohort.members), sealed).packed(self.session_digest)

    @cached_property
    def members(self) -> dict[int, int]:
        """Position in the cohort by client name."""
        return {advert.name: place for place, advert in enumerate(self.cohort.members)}

    @cached_property
    def digest(self) -> bytes:
        """Hash of session and cohort, which every later message has to name."""
        return self.cohort.digest(self.session_digest)

    @cached_property
    def ring(self) -> Ring:
        """The graph in which neighbors keep each other's shares."""
        return Ring(self.digest, range(len(self.cohort.members)))

    @property
    def _survivors(self) -> Survivors:
        return Survivors(frozenset(self._staying), len(self.cohort.members))

    @property
    def sizes(self) -> dict[int, int]:
        """Size of every cohort member by name."""
        return {advert.name: size for advert, size in zip(self.cohort.members, self.cohort.sizes, strict=True)}

    @property
    def survivors(self) -> list[int]:
        """Names of the clients whose vectors are in the sums."""
        return [self.cohort.members[member].name for member in sorted(self._staying)]

    @cached_property
    def sums(self) -> list[FixedPointVector]:
        """The unmasked sum of every segment over the survivors that own it; empty where none does."""
        if self.phase != Phase.DONE:
            raise AggregationFailed(f"a sum in the phase {self.phase.name.lower()}", "all phases", "Close them first.")
        secrets = {member: self._recover_secret(member) for member in self._shares}
        left = {one: cache(keys.Agreement(secret)) for one, secret in secrets.items() if one not in self._staying}
        for segment, owners in self.session.layout.owners(self.cohort.by_size).items():
            if not len(self._sums[segment]):
                continue
            ring = Ring(self.digest, owners)
            plus: list[bytes] = []
            minus = [keys.own_mask(secrets[one], self.digest, segment) for one in owners if one in self._staying]
            for gone in sorted(left.keys() & owners):
                for other in ring.neighbors(gone):
                    if other not in self._staying:
                        continue
                    secret = left[gone](self.cohort.members[other].mask_key)
                    mask = keys.pair_mask(secret, self.digest, segment, (gone, other))
                    (minus if other < gone else plus).append(mask)  # the survivor had added it, or subtracted it
            add_masks(self._sums[segment], plus, minus)
        return self._sums

    def _recover_secret(self, member: int) -> bytes:
        """The seed of a survivor, or the mask key of a client that left, from its neighbors' shares."""
        shares = {holder + 1: of[member][1] for holder, of in self._revealed.items() if member in of}
        advert = self.cohort.members[member]

        def accept(secret: bytes) -> bool:
            if member in self._staying:
                return keys.commitment(secret, self.digest, member) == self._shares[member].commitment
            return keys.public_of(secret) == advert.mask_key

        threshold = self.ring.degrees.threshold
        if (found := shamir.recover(shares, threshold, accept)) is None:
            given = f"{len(shares)} shares of device {advert.name:x} that do not give its secret"
            raise AggregationFailed(given, f"{threshold} that are right", "Leave this device out.")
        secret, wrong_places = found
        for place in wrong_places:
            wrong = self.cohort.members[place - 1]
            log.warning("device %x gave a wrong share of device %x", wrong.name, advert.name)
        return secret


def _wrong(given: str, needed: str) -> InvalidMessage:
    return InvalidMessage(given, needed, "This device is left out.")
