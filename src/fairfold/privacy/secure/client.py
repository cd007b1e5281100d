"""The client's side of secure aggregation: a state machine that answers one message after another, or refuses.

``advertise → share → receive → mask → sign → reveal``, serializable after every step. Each is taken once: one session
has no second cohort and no second set of survivors, so no client ever reveals both kinds of share of another. Every
refusal is logged here, with its reason; the round goes on without the client.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property, wraps
from typing import Any, TypeVar, cast

from fairfold.errors import FairfoldError
from fairfold.privacy.secure import keys, messages, shamir
from fairfold.privacy.secure.keys import Identity, Trust
from fairfold.privacy.secure.log import LogCopy
from fairfold.privacy.secure.masking import FixedPointVector, Ring, add_masks, quorum
from fairfold.privacy.secure.messages import KEY, MASK_KEY, SEED, Advert, Cohort, Session, Survivors, parse_message
from fairfold.privacy.secure.reader import MAX_CLIENTS, Reader, pack_by_member, unreadable
from fairfold.privacy.secure.segments import refuse

log = logging.getLogger("fairfold.privacy.secure")

Method = TypeVar("Method", bound=Callable[..., Any])


class Step(IntEnum):
    """The last step that a client took."""

    ADVERTISED, SHARED, RECEIVED, MASKED, SIGNED, REVEALED = range(6)


@dataclass
class Memory:
    """What a client remembers beyond a round."""

    trust: Trust = field(default_factory=Trust)
    min_cohort: int = 100  # it takes part in no sum over fewer clients, whatever the server demands
    last_turns: dict[tuple[int, str], int] = field(default_factory=dict)  # by run and purpose; in which it gave shares
    log: LogCopy | None = None  # of the keys that its server enrolled; None for a server without such a log


def _logged(step: Method) -> Method:
    """Log every refusal in the client's own log."""

    @wraps(step)
    def logged(self: "SecureClient", *given: Any) -> Any:
        try:
            return step(self, *given)
        except FairfoldError as error:
            where = f"run {self.session.run:x}, {self.session.purpose} {self.session.round}"
            log.warning("%s: refused: %s", where, error)
            raise

    return cast(Method, logged)


class SecureClient:
    """A client's side of one session of secure aggregation: a state machine."""

    def __init__(self, session: Session, identity: Identity, memory: Memory) -> None:
        self.session, self.identity, self.memory = session, identity, memory
        self.session_digest = session.digest
        self.step = Step.ADVERTISED
        self.mask_secret = keys.new_secret()
        self.share_secret = keys.new_secret()
        self.seed = os.urandom(KEY)
        public = keys.public_of(self.mask_secret), keys.public_of(self.share_secret)
        self.advert = identity.advert(self.session_digest, *public)
        self.cohort = Cohort((), ())
        self.sharing: frozenset[int] = frozenset()
        self.survivors: Survivors | None = None
        self.received: dict[int, bytes] = {}  # both shares of each member that gave them

    @property
    def min_cohort(self) -> int:
        """Fewest owners of any segment: the larger of the server's and the client's own minimum."""
        return max(self.session.min_cohort, self.memory.min_cohort)

    def _require_step(self, step: Step, asked: str) -> None:
        if self.step != step:
            raise refuse(f"{asked} after it has {self.step.name.lower()}", f"one after it has {step.name.lower()}")

    @_logged
    def advertise(self) -> bytes:
        """The client's identity and public keys of this round."""
        self._require_new()
        if self.memory.log is not None:
            self.memory.log.follow(self.session.log, self.identity.enrolled)
        return self.advert.packed(self.session_digest)

    def _require_new(self) -> None:
        last = self.memory.last_turns.get((self.session.run, self.session.purpose), -1)
        if self.session.turn <= last:
            given = f"{self.session.purpose} {self.session.round}, turn {self.session.turn} again, after {last}"
            raise refuse(f"{given} (a repeated cohort)", "a later turn")

    @_logged
    def share(self, message: bytes) -> bytes:
        """Check the cohort, and share the client's secrets among its neighbors in it."""
        cohort = parse_message(Cohort, message, self.session_digest)
        self._require_step(Step.ADVERTISED, "a second cohort for one round")
        self._require_new()
        layout = self.session.layout
        if len(cohort.members) < self.min_cohort:
            raise refuse(f"a cohort of {len(cohort.members)} devices", f"at least {self.min_cohort}")
        if self.advert not in cohort.members:
            raise refuse("a cohort without this device, or with other keys of it", "one that it takes part in")
        if max(cohort.sizes) >= len(layout.sizes):
            raise refuse("a size that there is not", f"one of {len(layout.sizes)}")
        if (thin := layout.thin_segment(cohort.by_size, self.min_cohort)) is not None:
            raise refuse(f"a segment ({thin[0]}) that {thin[1]} devices have", f"at least {self.min_cohort}")
        self.memory.trust.check(self.session_digest, cohort.members)
        if self.memory.log is not None:
            self.memory.log.require_members(self.session.log, cohort.members)
        self.cohort, self.step = cohort, Step.SHARED
        self.memory.last_turns[self.session.run, self.session.purpose] = self.session.turn
        places, threshold = [member + 1 for member in self.share_holders], self.ring.degrees.threshold
        seeds, mask_keys = (shamir.split(secret, places, threshold) for secret in (self.seed, self.mask_secret))
        sealed = {
            member: keys.seal(self._shared_secret(member), self.digest, self.place, member, seed + mask_key)
            for member, seed, mask_key in zip(self.share_holders, seeds, mask_keys, strict=True)
        }
        return messages.Shares(keys.commitment(self.seed, self.digest, self.place), sealed).packed(self.session_digest)

    @cached_property
    def digest(self) -> bytes:
        """Digest of the cohort that the client agreed to."""
        return self.cohort.digest(self.session_digest)

    @cached_property
    def place(self) -> int:
        """The client's own position in the cohort."""
        return self.cohort.members.index(self.advert)

    @cached_property
    def ring(self) -> Ring:
        """The graph in which neighbors keep each other's shares."""
        return Ring(self.digest, range(len(self.cohort.members)))

    @cached_property
    def share_holders(self) -> list[int]:
        """The members that keep this client's shares, and whose shares it keeps."""
        return self.ring.neighbors(self.place)

    @property
    def size(self) -> int:
        """The client's size in this sum, which decides the length of its vector."""
        return self.cohort.sizes[self.place]

    @cached_property
    def _agreement(self) -> keys.Agreement:
        return keys.Agreement(self.share_secret)

    def _shared_secret(self, member: int) -> bytes:
        return self._agreement(self.cohort.members[member].share_key)

    @_logged
    def receive(self, message: bytes) -> None:
        """Check which members gave shares, and keep those for this client; an unreadable share is dropped alone."""
        delivery = parse_message(messages.Delivery, message, self.session_digest)
        self._require_step(Step.SHARED, "a second delivery of shares")
        self._check_members(delivery.sharing, delivery.cohort_size, "gave shares")
        expected = {member for member in self.share_holders if member in delivery.sharing}
        threshold = self.ring.degrees.threshold
        if set(delivery.sealed) != expected:
            raise refuse("shares withheld, or of others than neighbors", "those of all neighbors who gave them")
        if len(expected) < threshold:
            raise refuse(f"{len(expected)} of {len(self.share_holders)} neighbors left", f"at least {threshold}")
        for member, box in delivery.sealed.items():
            content = keys.unseal(self._shared_secret(member), self.digest, member, self.place, box)
            if content is not None:
                self.received[member] = content
                continue
            log.warning("the share of device %x does not decrypt: it is not kept", self.cohort.members[member].name)
        if len(self.received) < threshold:
            raise refuse(f"{len(self.received)} shares that decrypt, of {len(expected)}", f"at least {threshold}")
        self.sharing, self.step = delivery.sharing, Step.RECEIVED

    def _check_members(self, members: frozenset[int], cohort_size: int, did: str) -> None:
        """Refuse a set of members that is too small, or without this client."""
        if cohort_size != len(self.cohort.members):
            needed = f"the {len(self.cohort.members)} that it agreed to"
            raise refuse(f"a cohort of {cohort_size} devices all at once", needed)
        if self.place not in members:
            raise refuse(f"a server that reports this device as dead, though it {did}", "what is true")
        if len(members) < quorum(cohort_size):
            raise refuse(f"{len(members)} of {cohort_size} devices left", f"at least {quorum(cohort_size)}")
        layout = self.session.layout
        sizes = {member: self.cohort.sizes[member] for member in members}
        if (thin := layout.thin_segment(sizes, self.min_cohort)) is not None:
            raise refuse(f"{thin[1]} devices left in segment {thin[0]}", f"at least {self.min_cohort}")
        if (few := layout.depleted_segment(self.cohort.by_size, members, self.session.staying)) is not None:
            raise refuse(f"{few[1]} devices left in segment {few[0]}", f"at least {few[2]}, for which noise is sized")

    @_logged
    def mask(self, vector: FixedPointVector) -> bytes:
        """Mask the client's vector, in place, for the server."""
        self._require_step(Step.RECEIVED, "a vector")
        layout = self.session.layout
        if len(vector) != layout.length(self.size):
            raise refuse(f"a vector of {len(vector)} numbers", f"{layout.length(self.size)}, those of its size")
        self.step = Step.MASKED
        owners = layout.owners(self.cohort.by_size)
        agree = cache(keys.Agreement(self.mask_secret))
        for segment, where in layout.slices(self.size):
            plus, minus = [keys.own_mask(self.seed, self.digest, segment)], list[bytes]()
            for other in Ring(self.digest, owners[segment]).neighbors(self.place):
                if other not in self.sharing:
                    continue
                secret = agree(self.cohort.members[other].mask_key)
                mask = keys.pair_mask(secret, self.digest, segment, (self.place, other))
                (plus if self.place < other else minus).append(mask)
            add_masks(memoryview(vector)[where], plus, minus)
        return messages.Masked(vector).packed(self.session_digest)

    @_logged
    def sign(self, message: bytes) -> bytes:
        """Check whose vectors are in the sum, and sign that set."""
        survivors = parse_message(Survivors, message, self.session_digest)
        if self.survivors is not None and survivors != self.survivors:
            raise refuse("a second set of survivors, to have both shares of a device", "one set per round")
        self._require_step(Step.MASKED, "survivors")
        self._check_members(survivors.staying, survivors.cohort_size, "gave its vector")
        if not survivors.staying <= self.sharing:
            raise refuse("survivors who gave no shares", "some of those who did")
        for owners in self.session.layout.owners(self.cohort.by_size).values():
            if (isolated := Ring(self.digest, owners).isolated(survivors.staying)) is not None:
                name = self.cohort.members[isolated].name
                raise refuse(f"survivors that leave device {name:x} alone", "enough neighbors of everybody")
        self.survivors, self.step = survivors, Step.SIGNED
        signature = self.identity.signer.sign(survivors.signed(self.digest, self.sharing))
        return messages.Signed(signature).packed(self.session_digest)

    @_logged
    def reveal(self, message: bytes) -> bytes:
        """Reveal one share of every neighbor (of its seed, or of its key if it left), once enough have signed."""
        signatures = parse_message(messages.Signatures, message, self.session_digest).by_member
        self._require_step(Step.SIGNED, "a second request for shares")
        assert self.survivors is not None
        signed = self.survivors.signed(self.digest, self.sharing)
        valid = sum(
            member in self.survivors.staying and keys.verified(self.cohort.members[member].signer, signature, signed)
            for member, signature in signatures.items()
        )
        if valid < (needed := quorum(len(self.cohort.members))):
            raise refuse(f"survivors that {valid} devices have signed", f"at least {needed}")
        self.step = Step.REVEALED
        half, staying = shamir.SHARE_BYTES, self.survivors.staying
        shares = {
            member: (SEED, both[:half]) if member in staying else (MASK_KEY, both[half:])
            for member, both in self.received.items()
        }
        return messages.Revealed(shares).packed(self.session_digest)

    def serialized(self) -> bytes:
        """All that the next step needs, secrets included."""
        sets = Survivors(self.sharing, MAX_CLIENTS), self.survivors or Survivors(frozenset(), 1)
        parts = b"".join(part.body() for part in (self.session, self.advert, self.cohort, *sets))
        secrets = self.mask_secret + self.share_secret + self.seed
        return bytes([self.step]) + parts + secrets + pack_by_member(self.received)

    @classmethod
    def read(cls, data: bytes, identity: Identity, memory: Memory) -> "SecureClient":
        """Restore a serialized client."""
        reader = Reader(data)
        step = Step(reader.number(1, Step.REVEALED))
        client = cls(Session.read(reader), identity, memory)
        client.step = step
        client.advert = Advert.read(reader)
        client.cohort = Cohort.read(reader)
        client.sharing, survivors = Survivors.read(reader).staying, Survivors.read(reader)
        client.survivors = survivors if survivors.staying else None
        client.mask_secret, client.share_secret, client.seed = (reader.take(KEY) for _ in range(3))
        client.received = reader.by_member(2 * shamir.SHARE_BYTES)
        reader.end()
        if client.advert.name != identity.name:
            raise unreadable("a round of another device")
        return client
