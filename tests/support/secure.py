"""Devices and a server for secure sums, and a way to let devices leave when one wants them to."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy
from cryptography.hazmat.primitives.asymmetric import ec

from fairfold.privacy.secure.client import Memory, SecureClient
from fairfold.privacy.secure.keys import Identity, Trust
from fairfold.privacy.secure.log import LogCopy
from fairfold.privacy.secure.masking import FixedPointVector
from fairfold.privacy.secure.messages import NO_LOG, LogHead, Session
from fairfold.privacy.secure.segments import SegmentLayout
from fairfold.privacy.secure.server import Phase, SecureServer

CHECKED: set[bytes] = set()  # certificates that were checked once in this process


@lru_cache
def identity(number: int) -> Identity:
    return Identity.create(1000 + number, ec.generate_private_key(ec.SECP384R1()))


def a_session(*lengths: int, number: int = 0, min_cohort: int = 2, run: int = 7, log: LogHead = NO_LOG) -> Session:
    return Session(run, number, "train", min_cohort, SegmentLayout.nested(lengths), turn=number, log=log)


def vectors(generator: numpy.random.Generator, words: int) -> FixedPointVector:
    return generator.integers(0, 2**32, words, dtype=numpy.uint32)


class Play:
    """A session with so many devices, whose sizes go round. ``leaving``: the phase that a device does not answer."""

    def __init__(
        self,
        session: Session,
        many: int,
        leaving: Mapping[int, Phase] | None = None,
        *,
        roster: frozenset[bytes] | None = None,
        logs: Sequence[LogCopy] = (),
        seed: int = 0,
        room: int | None = None,
    ) -> None:
        self.session, self.leaving = session, dict(leaving or {})
        self.generator = numpy.random.default_rng(seed)
        self.clients = [identity(number) for number in range(many)]
        sizes = len(session.layout.sizes)
        self.wanted = {one.name: number % sizes for number, one in enumerate(self.clients)}
        self.server = SecureServer(session, self.wanted, room=len(self.leaving) if room is None else room)
        self.server.trust.checked = CHECKED
        trust = [Trust(roster, checked=CHECKED) for _ in self.clients]
        self.devices = {
            one.name: SecureClient(session, one, Memory(of, min_cohort=session.min_cohort, log=log))
            for one, of, log in zip(self.clients, trust, logs or (None,) * many, strict=True)
        }
        self.vectors: dict[int, FixedPointVector] = {}
        self.messages: dict[int, bytes] = {}

    def __getitem__(self, number: int) -> SecureClient:
        return self.devices[1000 + number]

    def stays(self, name: int) -> bool:
        return self.leaving.get(name - 1000) != self.server.phase

    def until(self, phase: Phase) -> "Play":
        """Play all phases before this one: ``messages`` are then those that clients have to answer in it."""
        while self.server.phase < phase:
            self._play()
        return self

    def _play(self) -> None:
        server = self.server
        if server.phase == Phase.KEYS:
            self.messages = dict.fromkeys(self.devices, b"")
        for name, message in self.messages.items():
            reply = self.reply(name, message)
            if self.stays(name):
                server.receive(name, reply)
            else:
                self.messages = {other: of for other, of in self.messages.items() if other != name}
        self.messages = server.close()

    def reply(self, name: int, message: bytes) -> bytes:
        """The reply of a client in the open phase."""
        device, phase = self.devices[name], self.server.phase
        if phase == Phase.KEYS:
            return device.advertise()
        if phase == Phase.SHARES:
            return device.share(message)
        if phase == Phase.VECTORS:
            device.receive(message)
            self.vectors[name] = vectors(self.generator, self.session.layout.length(device.size))
            return device.mask(self.vectors[name].copy())
        return device.sign(message) if phase == Phase.SIGNATURES else device.reveal(message)

    def plain(self) -> list[FixedPointVector]:
        """The sums of the survivors' vectors, as anybody could add them up who saw them."""
        layout = self.session.layout
        sums = [numpy.zeros(length, dtype=numpy.uint32) for length in layout.lengths]
        for name in self.server.survivors:
            for segment, where in layout.slices(self.devices[name].size):
                sums[segment] += self.vectors[name][where]
        return sums

    def exact(self) -> bool:
        """Whether the server's sums are the plain ones."""
        totals = self.until(Phase.DONE).server.sums
        return all(
            numpy.array_equal(total, plain) if len(total) else not plain.any()
            for total, plain in zip(totals, self.plain(), strict=True)
        )
