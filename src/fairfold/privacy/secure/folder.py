"""A client's files for secure aggregation: its signer, its memory, and the open round.

What a client must not forget (rounds in which it gave shares) is written before its reply leaves. The open round, which
contains secrets, is removed when it is over, refused, or replaced by the next.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fairfold.atomic_io import make_private_folder, remove, write_atomically
from fairfold.checksums import Damaged, parse_with_checksum, read_errors, read_limited, with_checksum
from fairfold.errors import InvalidState
from fairfold.privacy.secure.client import Memory, SecureClient, Step
from fairfold.privacy.secure.keys import Identity, Trust, point_of, read_enrolled, read_roster
from fairfold.privacy.secure.log import LogCopy
from fairfold.privacy.secure.messages import MAGIC, Session, parse_message
from fairfold.privacy.secure.segments import refuse

FORMAT, ROUND_FORMAT = 2, 3
OWN_KEY, SIGNER, MEMORY, ROUND = "key", "signer.json", "memory.json", "round.json"


@dataclass(frozen=True)
class SecureFolder:
    """The folder of one client."""

    folder: Path  # created if missing
    name: int
    key: Path | None = None  # file of its enrolled key; a key in the folder if not given
    roster: Path | None = None  # file of all accepted enrolled keys; without one the server is trusted
    min_cohort: int = 100  # the client takes part in no sum over fewer clients
    log: LogCopy | None = None  # of the keys that its server enrolled; None for a server without such a log

    def identity(self) -> Identity:
        """The client's identity; a signer is created and certified if there is none, or if the enrolled key changed."""
        make_private_folder(self.folder)
        enrolled = read_enrolled(self.key or self.folder / OWN_KEY)
        point = point_of(enrolled.public_key())
        path = self.folder / SIGNER
        if path.exists():
            with read_errors(path, InvalidState, "this device's signer", "Remove the file: it gets a new one."):
                stored = {key: bytes.fromhex(text) for key, text in parse_with_checksum(read_limited(path)).items()}
                if stored["enrolled"] == point:
                    signer = Ed25519PrivateKey.from_private_bytes(stored["signer"])
                    return Identity(self.name, point, signer, stored["certificate"])
        created = Identity.create(self.name, enrolled)
        stored = {"signer": created.signer.private_bytes_raw(), "certificate": created.certificate, "enrolled": point}
        write_atomically(path, with_checksum({key: value.hex() for key, value in stored.items()}), private=True)
        return created

    def memory(self) -> Memory:
        """What the client remembers beyond a round."""
        path = self.folder / MEMORY
        trust = Trust(None if self.roster is None else read_roster(self.roster))
        if not path.exists():
            return Memory(trust, self.min_cohort, log=self.log)
        remedy = "Remove the file, if no run of this server is to go on."
        with read_errors(path, InvalidState, "what this device remembers", remedy):
            stored = parse_with_checksum(read_limited(path))
            if stored["format"] != FORMAT:
                raise Damaged(f"format {stored['format']}")
            trust.seen = {int(name, 16): bytes.fromhex(key) for name, key in stored["seen"].items()}
            trust.checked = {bytes.fromhex(digest) for digest in stored["checked"]}
            last_turns = {(int(run, 16), str(purpose)): int(number) for run, purpose, number in stored["last_turns"]}
        return Memory(trust, self.min_cohort, last_turns, self.log)

    def _save_memory(self, memory: Memory) -> None:
        stored = {
            "format": FORMAT,
            "last_turns": [[f"{run:x}", purpose, number] for (run, purpose), number in memory.last_turns.items()],
            "seen": {f"{name:x}": key.hex() for name, key in memory.trust.seen.items()},
            "checked": sorted(digest.hex() for digest in memory.trust.checked),
        }
        write_atomically(self.folder / MEMORY, with_checksum(stored), private=True)

    def _save_round(self, client: SecureClient) -> None:
        stored = {"format": ROUND_FORMAT, "round": client.serialized().hex()}
        write_atomically(self.folder / ROUND, with_checksum(stored), private=True)

    def begin(self, invitation: bytes) -> bytes:
        """Accept an invitation: open a new round, replacing one that may be open, and return its advert."""
        client = SecureClient(parse_message(Session, invitation, None), self.identity(), self.memory())
        advert = client.advertise()
        self._save_round(client)
        return advert

    @contextlib.contextmanager
    def resume_round(self, message: bytes) -> Iterator[SecureClient]:
        """The open round, for one step: saved afterwards, or removed if it is over or the step was refused."""
        path = self.folder / ROUND
        if not path.exists():
            raise refuse("a message of a round that this device has not open", "an invitation first")
        with read_errors(path, InvalidState, "the open round", "The next round begins anew."):
            stored = parse_with_checksum(read_limited(path))
            if stored["format"] != ROUND_FORMAT:
                raise Damaged(f"format {stored['format']}")
            client = SecureClient.read(bytes.fromhex(stored["round"]), self.identity(), self.memory())
        if message[len(MAGIC) + 2 :][: len(client.session_digest)] != client.session_digest:
            raise refuse("a message of another round than is open", "one of this round")
        try:
            yield client
        except BaseException:
            remove(path)
            raise
        if client.step == Step.SHARED:
            self._save_memory(client.memory)
        if client.step == Step.REVEALED:
            remove(path)
        else:
            self._save_round(client)
