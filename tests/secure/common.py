"""Devices and a server for secure sums, and a way to let devices leave when one wants them to."""

from collections.abc import Mapping
from functools import lru_cache

import numpy
from cryptography.hazmat.primitives.asymmetric import ec

from fairfold.secure.device import Device, Memory
from fairfold.secure.keys import Identity, Trust
from fairfold.secure.layout import Layout
from fairfold.secure.masks import Words
from fairfold.secure.messages import Session
from fairfold.secure.server import Phase, Server

CHECKED: set[bytes] = set()  # certificates that were checked once in this process


@lru_cache
def identity(number: int) -> Identity:
    return Identity.made(1000 + number, ec.generate_private_key(ec.SECP384R1()))


def a_session(*lengths: int, number: int = 0, smallest: int = 2, run: int = 7) -> Session:
    return Session(run, number, "train", smallest, Layout.nested(lengths), turn=number)


def vectors(generator: numpy.random.Generator, words: int) -> Words:
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
        seed: int = 0,
        room: int | None = None,
    ) -> None:
        self.session, self.leaving = session, dict(leaving or {})
        self.generator = numpy.random.default_rng(seed)
        self.people = [identity(number) for number in range(many)]
        sizes = len(session.layout.sizes)
        self.wanted = {one.name: number % sizes for number, one in enumerate(self.people)}
        self.server = Server(session, self.wanted, room=len(self.leaving) if room is None else room)
        self.server.trust.checked = CHECKED
        trust = [Trust(roster, checked=CHECKED) for _ in self.people]
        self.devices = {
            one.name: Device(session, one, Memory(of, smallest=session.smallest))
            for one, of in zip(self.people, trust, strict=True)
        }
        self.said: dict[int, Words] = {}
        self.told: dict[int, bytes] = {}

    def __getitem__(self, number: int) -> Device:
        return self.devices[1000 + number]

    def stays(self, name: int) -> bool:
        return self.leaving.get(name - 1000) != self.server.phase

    def until(self, phase: Phase) -> "Play":
        """Play all phases before this one: ``told`` are then the messages that devices have to answer in it."""
        while self.server.phase < phase:
            self._play()
        return self

    def _play(self) -> None:
        server = self.server
        if server.phase == Phase.KEYS:
            self.told = dict.fromkeys(self.devices, b"")
        for name, message in self.told.items():
            answer = self.answer(name, message)
            if self.stays(name):
                server.hear(name, answer)
            else:
                self.told = {other: of for other, of in self.told.items() if other != name}
        self.told = server.close()

    def answer(self, name: int, message: bytes) -> bytes:
        """What a device says in the phase that is open."""
        device, phase = self.devices[name], self.server.phase
        if phase == Phase.KEYS:
            return device.advertise()
        if phase == Phase.SHARES:
            return device.share(message)
        if phase == Phase.VECTORS:
            device.receive(message)
            self.said[name] = vectors(self.generator, self.session.layout.words(device.size))
            return device.mask(self.said[name].copy())
        return device.sign(message) if phase == Phase.SIGNATURES else device.reveal(message)

    def plain(self) -> list[Words]:
        """The sums of the survivors' vectors, as anybody could add them up who saw them."""
        layout = self.session.layout
        sums = [numpy.zeros(length, dtype=numpy.uint32) for length in layout.lengths]
        for name in self.server.survivors:
            for segment, where in layout.places(self.devices[name].size):
                sums[segment] += self.said[name][where]
        return sums

    def exact(self) -> bool:
        """Whether the server's sums are the plain ones."""
        totals = self.until(Phase.DONE).server.totals
        return all(
            numpy.array_equal(total, plain) if len(total) else not plain.any()
            for total, plain in zip(totals, self.plain(), strict=True)
        )
