"""What a device keeps on its disk for secure sums: its signer, what it remembers, and the round that is open.

Files are replaced whole or not at all. What a device must not forget (rounds in which it gave shares) is written before
the answer that follows from it leaves the device. The open round, which has secrets in it, is removed when it is over,
refused, or replaced by the next.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fairfold.errors import InvalidState
from fairfold.files import make_private, remove, write_atomically
from fairfold.sealed import Damaged, content_of, reading, sealed_values, values_in
from fairfold.secure.device import Device, Memory, Step
from fairfold.secure.keys import Identity, Trust, point_of, read_enrolled, read_roster, refuse
from fairfold.secure.messages import MAGIC, Session, opened

FORMAT, ROUND_FORMAT = 1, 2
OWN_KEY, SIGNER, MEMORY, ROUND = "key", "signer.json", "memory.json", "round.json"


@dataclass(frozen=True)
class SecureFolder:
    """A device's folder.

    Attributes:
        folder: Where it is; made if it is not there.
        name: The device's number.
        key: File of its enrolled key; one of its own in the folder if not given.
        roster: File with the enrolled keys that somebody vouches for; without one the server is believed.
        smallest: The device takes part in no sum over fewer devices.
    """

    folder: Path
    name: int
    key: Path | None = None
    roster: Path | None = None
    smallest: int = 100

    def identity(self) -> Identity:
        """Who it is; a signer is made and certified where there is none, or where its enrolled key is another now."""
        make_private(self.folder)
        enrolled = read_enrolled(self.key or self.folder / OWN_KEY)
        point, path = point_of(enrolled.public_key()), self.folder / SIGNER
        if path.exists():
            with reading(path, InvalidState, "this device's signer", "Remove the file: it gets a new one."):
                kept = {key: bytes.fromhex(text) for key, text in values_in(content_of(path)).items()}
                if kept["enrolled"] == point:
                    signer = Ed25519PrivateKey.from_private_bytes(kept["signer"])
                    return Identity(self.name, point, signer, kept["certificate"])
        made = Identity.made(self.name, enrolled)
        kept = {"signer": made.signer.private_bytes_raw(), "certificate": made.certificate, "enrolled": point}
        write_atomically(path, sealed_values({key: of.hex() for key, of in kept.items()}), private=True)
        return made

    def memory(self) -> Memory:
        """What it remembers."""
        path = self.folder / MEMORY
        trust = Trust(None if self.roster is None else read_roster(self.roster))
        if not path.exists():
            return Memory(trust, self.smallest)
        remedy = "Remove the file, if no run of this server is to go on."
        with reading(path, InvalidState, "what this device remembers", remedy):
            kept = values_in(content_of(path))
            if kept["format"] != FORMAT:
                raise Damaged(f"format {kept['format']}")
            trust.seen = {int(name, 16): bytes.fromhex(key) for name, key in kept["seen"].items()}
            trust.checked = {bytes.fromhex(digest) for digest in kept["checked"]}
            spoken = {(int(run, 16), str(purpose)): int(number) for run, purpose, number in kept["spoken"]}
        return Memory(trust, self.smallest, spoken)

    def _remember(self, memory: Memory) -> None:
        kept = {
            "format": FORMAT,
            "spoken": [[f"{run:x}", purpose, number] for (run, purpose), number in memory.spoken.items()],
            "seen": {f"{name:x}": key.hex() for name, key in memory.trust.seen.items()},
            "checked": sorted(digest.hex() for digest in memory.trust.checked),
        }
        write_atomically(self.folder / MEMORY, sealed_values(kept), private=True)

    def _keep(self, device: Device) -> None:
        kept = {"format": ROUND_FORMAT, "round": device.written().hex()}
        write_atomically(self.folder / ROUND, sealed_values(kept), private=True)

    def begin(self, invitation: bytes) -> bytes:
        """Answer an invitation: the advert of a new round, in the place of one that may be open."""
        device = Device(opened(Session, invitation, None), self.identity(), self.memory())
        advert = device.advertise()
        self._keep(device)
        return advert

    @contextlib.contextmanager
    def going_on(self, message: bytes) -> Iterator[Device]:
        """The open round, for one step of it: written down after that, or removed if it is over or was refused."""
        path = self.folder / ROUND
        if not path.exists():
            raise refuse("a message of a round that this device has not open", "an invitation first")
        with reading(path, InvalidState, "the open round", "The next round begins anew."):
            kept = values_in(content_of(path))
            if kept["format"] != ROUND_FORMAT:
                raise Damaged(f"format {kept['format']}")
            device = Device.read(bytes.fromhex(kept["round"]), self.identity(), self.memory())
        if message[len(MAGIC) + 2 :][: len(device.bound)] != device.bound:
            raise refuse("a message of another round than is open", "one of this round")
        try:
            yield device
        except BaseException:
            remove(path)
            raise
        if device.step == Step.SHARED:
            self._remember(device.memory)
        if device.step == Step.REVEALED:
            remove(path)
        else:
            self._keep(device)
