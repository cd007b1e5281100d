"""The device's side of a secure sum: a machine that answers one message after another, or refuses with a reason.

``advertise → share → receive → mask → sign → reveal``. It can be written down after every step and go on in another
process. Each step is taken once: there is no second cohort and no second set of survivors for one session, so no device
ever gives both kinds of share of another. Every refusal is logged here, with its reason; the round goes on without it.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

from fairfold.errors import FairfoldError
from fairfold.secure import keys, shamir
from fairfold.secure.graph import Ring, quorum
from fairfold.secure.keys import Identity, Trust, refuse
from fairfold.secure.masks import Words, add_masks
from fairfold.secure.messages import (
    KEY,
    MASK_KEY,
    SEED,
    Advert,
    Cohort,
    Delivery,
    Masked,
    Message,
    Revealed,
    Session,
    Shares,
    Signatures,
    Signed,
    Survivors,
    opened,
)
from fairfold.secure.reader import MOST_DEVICES, Reader, unreadable

log = logging.getLogger("fairfold.secure")

Method = TypeVar("Method", bound=Callable[..., Any])


class Step(IntEnum):
    """What a device did last."""

    ADVERTISED, SHARED, RECEIVED, MASKED, SIGNED, REVEALED = range(6)


@dataclass
class Memory:
    """What a device remembers beyond a round.

    Attributes:
        trust: Whom it believes.
        smallest: It takes part in no sum over fewer devices, whatever the server says.
        spoken: The last turn of every run and purpose in which it gave shares.
    """

    trust: Trust = field(default_factory=Trust)
    smallest: int = 100
    spoken: dict[tuple[int, str], int] = field(default_factory=dict)


def _logged(step: Method) -> Method:
    """Whatever is refused is told in the device's own log."""

    @wraps(step)
    def logged(self: "Device", *given: Any) -> Any:
        try:
            return step(self, *given)
        except FairfoldError as error:
            where = f"run {self.session.run:x}, {self.session.purpose} {self.session.round}"
            log.warning("%s: refused: %s", where, error)
            raise

    return cast(Method, logged)


class Device:
    """One device in one session."""

    def __init__(self, session: Session, identity: Identity, memory: Memory) -> None:
        self.session, self.identity, self.memory = session, identity, memory
        self.bound, self.step = session.digest, Step.ADVERTISED
        self.mask_secret, self.share_secret, self.seed = keys.new_secret(), keys.new_secret(), os.urandom(KEY)
        self.advert = identity.advertises(
            self.bound, keys.public_of(self.mask_secret), keys.public_of(self.share_secret)
        )
        self.cohort = Cohort((), ())
        self.sharing: frozenset[int] = frozenset()
        self.survivors: Survivors | None = None
        self.received: dict[int, bytes] = {}  # both shares of those who gave them

    @property
    def smallest(self) -> int:
        """Of devices in any segment: the larger of what the server and the device itself say."""
        return max(self.session.smallest, self.memory.smallest)

    def _only_after(self, step: Step, asked: str) -> None:
        if self.step != step:
            raise refuse(f"{asked} after it has {self.step.name.lower()}", f"one after it has {step.name.lower()}")

    # -- who takes part ------------------------------------------------------------------------------------------------

    @_logged
    def advertise(self) -> bytes:
        """Its keys of this round."""
        self._require_new()
        return self.advert.packed(self.bound)

    def _require_new(self) -> None:
        last = self.memory.spoken.get((self.session.run, self.session.purpose), -1)
        if self.session.turn <= last:
            given = f"{self.session.purpose} {self.session.round}, turn {self.session.turn} again, after {last}"
            raise refuse(f"{given} (a repeated cohort)", "a later turn")

    @_logged
    def share(self, message: bytes) -> bytes:
        """Check the cohort; give shares of its secrets to its neighbours in it."""
        cohort = opened(Cohort, message, self.bound)
        self._only_after(Step.ADVERTISED, "a second cohort for one round")
        self._require_new()
        many, layout = len(cohort.members), self.session.layout
        if many < self.smallest:
            raise refuse(f"a cohort of {many} devices", f"at least {self.smallest}")
        if self.advert not in cohort.members:
            raise refuse("a cohort without this device, or with other keys of it", "one that it takes part in")
        if max(cohort.sizes) >= len(layout.sizes):
            raise refuse("a size that there is not", f"one of {len(layout.sizes)}")
        thin = layout.thin(cohort.by_size, self.smallest)
        if thin is not None:
            raise refuse(f"a segment ({thin[0]}) that {thin[1]} devices have", f"at least {self.smallest}")
        self.memory.trust.check(self.bound, cohort.members)
        self.cohort = cohort
        self.memory.spoken[self.session.run, self.session.purpose] = self.session.turn
        self.step = Step.SHARED
        neighbours, threshold = self.keepers, self.ring.degrees.threshold
        places = [member + 1 for member in neighbours]
        seeds, mask_keys = (shamir.split(secret, places, threshold) for secret in (self.seed, self.mask_secret))
        sealed = {
            member: keys.seal(self._common(member), self.digest, self.place, member, seed + mask_key)
            for member, seed, mask_key in zip(neighbours, seeds, mask_keys, strict=True)
        }
        return Shares(keys.commitment(self.seed, self.digest, self.place), sealed).packed(self.bound)

    @cached_property
    def digest(self) -> bytes:
        """Of the cohort that it agreed to."""
        return self.cohort.digest(self.bound)

    @cached_property
    def place(self) -> int:
        """Its own in the cohort."""
        return self.cohort.members.index(self.advert)

    @cached_property
    def ring(self) -> Ring:
        """In which neighbours keep each other's shares."""
        return Ring(self.digest, range(len(self.cohort.members)))

    @cached_property
    def keepers(self) -> list[int]:
        """Who keeps its shares, and whose it keeps."""
        return self.ring.neighbours(self.place)

    @property
    def size(self) -> int:
        """That it has in this sum: its vector has the words of this size."""
        return self.cohort.sizes[self.place]

    @cached_property
    def _agreement(self) -> keys.Agreement:
        return keys.Agreement(self.share_secret)

    def _common(self, member: int) -> bytes:
        return self._agreement(self.cohort.members[member].share_key)

    # -- its vector ----------------------------------------------------------------------------------------------------

    @_logged
    def receive(self, message: bytes) -> None:
        """Check who gave shares, and keep those for this device. A share that cannot be read is refused alone."""
        delivery = opened(Delivery, message, self.bound)
        self._only_after(Step.SHARED, "a second delivery of shares")
        self._check_set(delivery.sharing, delivery.of, "gave shares")
        expected = {member for member in self.keepers if member in delivery.sharing}
        if set(delivery.sealed) != expected:
            raise refuse("shares withheld, or of others than neighbours", "those of all neighbours who gave them")
        if len(expected) < self.ring.degrees.threshold:
            given = f"{len(expected)} of {len(self.keepers)} neighbours left"
            raise refuse(given, f"at least {self.ring.degrees.threshold}")
        for member, box in delivery.sealed.items():
            content = keys.unseal(self._common(member), self.digest, member, self.place, box)
            if content is None:
                name = self.cohort.members[member].name
                log.warning("the share of device %x does not decrypt: it is not kept", name)
            else:
                self.received[member] = content
        if len(self.received) < self.ring.degrees.threshold:
            given = f"{len(self.received)} shares that decrypt, of {len(expected)}"
            raise refuse(given, f"at least {self.ring.degrees.threshold}")
        self.sharing, self.step = delivery.sharing, Step.RECEIVED

    def _check_set(self, members: frozenset[int], of: int, did: str) -> None:
        """Refuse a set of members that is too small, or without this device."""
        if of != len(self.cohort.members):
            raise refuse(f"a cohort of {of} devices all at once", f"the {len(self.cohort.members)} that it agreed to")
        if self.place not in members:
            raise refuse(f"a server that says this device is dead, though it {did}", "what is true")
        if len(members) < quorum(of):
            raise refuse(f"{len(members)} of {of} devices left", f"at least {quorum(of)}")
        thin = self.session.layout.thin({member: self.cohort.sizes[member] for member in members}, self.smallest)
        if thin is not None:
            raise refuse(f"{thin[1]} devices left in segment {thin[0]}", f"at least {self.smallest}")
        few = self.session.layout.left(self.cohort.by_size, members, self.session.staying)
        if few is not None:
            raise refuse(f"{few[1]} devices left in segment {few[0]}", f"at least {few[2]}, for which noise is sized")

    @_logged
    def mask(self, words: Words) -> bytes:
        """Its vector under its masks; ``words`` are used up."""
        self._only_after(Step.RECEIVED, "a vector")
        layout, place = self.session.layout, self.place
        if len(words) != layout.words(self.size):
            raise refuse(f"a vector of {len(words)} words", f"{layout.words(self.size)}, those of its size")
        self.step = Step.MASKED
        owners, common = layout.owners(self.cohort.by_size), dict[int, bytes]()
        agreement = keys.Agreement(self.mask_secret)
        for segment, where in layout.places(self.size):
            masks: dict[bool, list[bytes]] = {True: [keys.own_mask(self.seed, self.digest, segment)], False: []}
            for other in Ring(self.digest, owners[segment]).neighbours(place):
                if other not in self.sharing:
                    continue
                if other not in common:
                    common[other] = agreement(self.cohort.members[other].mask_key)
                masks[place < other].append(keys.pair_mask(common[other], self.digest, segment, (place, other)))
            add_masks(words[where], masks[True], masks[False])
        return Masked(words).packed(self.bound)

    # -- unmasking -----------------------------------------------------------------------------------------------------

    @_logged
    def sign(self, message: bytes) -> bytes:
        """Check whose vectors are in the sum, and sign that."""
        survivors = opened(Survivors, message, self.bound)
        if self.survivors is not None and survivors != self.survivors:
            raise refuse("a second set of survivors, to have both shares of a device", "one set per round")
        self._only_after(Step.MASKED, "survivors")
        self._check_set(survivors.staying, survivors.of, "gave its vector")
        if not survivors.staying <= self.sharing:
            raise refuse("survivors who gave no shares", "some of those who did")
        for owners in self.session.layout.owners(self.cohort.by_size).values():
            alone = Ring(self.digest, owners).alone(survivors.staying)
            if alone is not None:
                name = self.cohort.members[alone].name
                raise refuse(f"survivors that leave device {name:x} alone", "enough neighbours of everybody")
        self.survivors, self.step = survivors, Step.SIGNED
        return Signed(self.identity.signer.sign(survivors.signed(self.digest, self.sharing))).packed(self.bound)

    @_logged
    def reveal(self, message: bytes) -> bytes:
        """Once enough have signed the same: of every neighbour one share, of its seed or, if it left, of its key."""
        signatures = opened(Signatures, message, self.bound).by_member
        self._only_after(Step.SIGNED, "a second request for shares")
        assert self.survivors is not None
        signed = self.survivors.signed(self.digest, self.sharing)
        right = sum(
            member in self.survivors.staying and keys.verified(self.cohort.members[member].signer, signature, signed)
            for member, signature in signatures.items()
        )
        needed = quorum(len(self.cohort.members))
        if right < needed:
            raise refuse(f"survivors that {right} devices have signed", f"at least {needed}")
        self.step = Step.REVEALED
        shares, half = {}, shamir.SHARE_BYTES
        for member, both in self.received.items():
            stays = member in self.survivors.staying
            shares[member] = (SEED, both[:half]) if stays else (MASK_KEY, both[half:])
        return Revealed(shares).packed(self.bound)

    # -- between two messages ------------------------------------------------------------------------------------------

    def written(self) -> bytes:
        """All that it has to know for the next step: secrets too."""
        parts: list[Message] = [self.session, self.advert, self.cohort, Survivors(self.sharing, MOST_DEVICES)]
        parts.append(self.survivors or Survivors(frozenset(), 1))
        secrets = self.mask_secret + self.share_secret + self.seed + len(self.received).to_bytes(4, "big")
        received = b"".join(member.to_bytes(4, "big") + both for member, both in self.received.items())
        return bytes([self.step]) + b"".join(part.body() for part in parts) + secrets + received

    @classmethod
    def read(cls, data: bytes, identity: Identity, memory: Memory) -> "Device":
        """The same again."""
        reader = Reader(data)
        step = Step(reader.number(1, Step.REVEALED))
        device = cls(Session.read(reader), identity, memory)
        device.step, device.advert, device.cohort = step, Advert.read(reader), Cohort.read(reader)
        device.sharing, survivors = Survivors.read(reader).staying, Survivors.read(reader)
        device.survivors = survivors if survivors.staying else None
        device.mask_secret, device.share_secret, device.seed = (reader.take(KEY) for _ in range(3))
        both = 2 * shamir.SHARE_BYTES
        many = reader.count(4 + both, MOST_DEVICES)
        device.received = {reader.number(4, MOST_DEVICES): reader.take(both) for _ in range(many)}
        reader.end()
        if device.advert.name != identity.name:
            raise unreadable("a round of another device")
        return device
