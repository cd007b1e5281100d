"""Secure sums: what they cost a device, the server and the line, measured on both sides of the real messages.

    python benchmarks/privacy/secure.py --devices 100 --words 1000000 --leaving 0.3

All devices are played in one process, one after the other, so seconds are of one core; they are processor time, since
clocks on a shared machine measure others too. A device's time is that of all its steps (keys, shares, masks,
signatures, shares again); certificates of devices that it has met before are not checked again, and what the first
meeting costs is printed beside it. The server's is everything from the first message to the sums. Bytes are those of
messages that go up, against the plain vector.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict

import numpy
from cryptography.hazmat.primitives.asymmetric import ec

from fairfold.privacy.secure.client import Memory, SecureClient
from fairfold.privacy.secure.keys import Identity, Trust
from fairfold.privacy.secure.masking import degrees
from fairfold.privacy.secure.messages import Session
from fairfold.privacy.secure.segments import SegmentLayout
from fairfold.privacy.secure.server import Phase, SecureServer


class Clock:
    """Adds up what is spent between its two ends."""

    def __init__(self) -> None:
        self.seconds: defaultdict[int, float] = defaultdict(float)
        self.who = 0

    def of(self, who: int) -> "Clock":
        """For somebody."""
        self.who = who
        return self

    def __enter__(self) -> None:
        self._started = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.who] += time.process_time() - self._started


def measure(devices: int, words: int, leaving: float, rounds: int) -> None:
    """Play some rounds and print what they cost."""
    clients = [Identity.create(1 + number, ec.generate_private_key(ec.SECP384R1())) for number in range(devices)]
    memories = [Memory(Trust(), min_cohort=2) for _ in clients]
    draw = numpy.random.default_rng(0)
    chosen = degrees(devices)
    print(f"{devices} devices, {words:,} numbers, {chosen.degree} neighbors, threshold {chosen.threshold}, "
          f"{leaving:.0%} leave after giving shares; load {os.getloadavg()[0]:.1f}")  # fmt: skip
    for number in range(rounds):
        session = Session(1, number, "train", 2, SegmentLayout.nested((words,)), turn=number)
        clock, up = Clock(), defaultdict[int, int](int)
        members = {
            one.name: SecureClient(session, one, memory) for one, memory in zip(clients, memories, strict=True)
        }  # fmt: skip
        gone = set(draw.choice([one.name for one in clients], int(leaving * devices), replace=False).tolist())
        server, messages = SecureServer(session, dict.fromkeys(members, 0)), dict.fromkeys(members, b"")
        server_seconds, plain = 0.0, numpy.zeros(words, dtype=numpy.uint32)
        while server.phase != Phase.DONE:
            for name, message in messages.items():
                device = members[name]
                if server.phase == Phase.VECTORS:
                    if name in gone:
                        continue
                    vector = draw.integers(0, 2**32, words, dtype=numpy.uint32)
                    plain += vector
                with clock.of(name):
                    if server.phase == Phase.KEYS:
                        update = device.advertise()
                    elif server.phase == Phase.SHARES:
                        update = device.share(message)
                    elif server.phase == Phase.VECTORS:
                        device.receive(message)
                        update = device.mask(vector)
                    else:
                        update = (device.sign if server.phase == Phase.SIGNATURES else device.reveal)(message)
                up[name] += len(update)
                started = time.process_time()
                server.receive(name, update)
                server_seconds += time.process_time() - started
            started = time.process_time()
            messages = server.close()
            server_seconds += time.process_time() - started
        started = time.process_time()
        total = server.sums[0]
        server_seconds += time.process_time() - started
        stayed = [name for name in members if name not in gone]
        each, task = [clock.seconds[name] for name in stayed], [up[name] for name in stayed]
        print(f"round {number + 1}{' (nobody has met)' if number == 0 else ''}: "
              f"upload {max(task) / (4 * words):.4f} x plain; a device {statistics.median(each):.3f} s (median), "
              f"{max(each):.3f} (most); the server {server_seconds:.2f} s; "
              f"the sum is {'exact' if numpy.array_equal(total, plain) else 'WRONG'}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--words", type=int, default=1_000_000)
    parser.add_argument("--leaving", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    measure(options.devices, options.words, options.leaving, options.rounds)
