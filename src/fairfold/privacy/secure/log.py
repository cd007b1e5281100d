"""The signed, append-only log of the keys that a server enrolled, and a device's copy of it: key transparency in small.

A line is one enrolled key, with its node and the users that it acts for, and holds the hash of the line before; the
server's signer signs it. An invitation to a sum names the log's number of lines and its head (the hash of the last), to
which all adverts are bound: so the devices of a sum have all been shown the same log, or take no part. A device keeps
the lines that it has seen, fetches those that it lacks, and accepts members that stand in it alone.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from fairfold.atomic_io import make_private_folder, write_atomically
from fairfold.checksums import PARSE_ERRORS, Damaged, read_errors
from fairfold.errors import InvalidState
from fairfold.privacy.secure.keys import verified
from fairfold.privacy.secure.messages import NO_LOG, POINT, Advert, LogHead
from fairfold.privacy.secure.segments import refuse

MAX_USERS = 1_000_000  # of one device
MAX_LINE = 1024  # bytes: a line has about 400

Fetch = Callable[[int], Generator[bytes]]  # the server's log from a byte on, in pieces


class Enrolled(NamedTuple):
    """A device of the log: its key (a compressed point), its node, and the most users that it acts for."""

    key: bytes
    node: int
    users: int

    @property
    def name(self) -> int:
        """The name that follows from its key."""
        return device_name(self.key)


def device_name(key: bytes) -> int:
    """The name of the device with an enrolled key: from 1 to 2⁶³ − 1."""
    digest = hashlib.sha256(b"fairfold device" + key).digest()
    return 1 + int.from_bytes(digest[:8], "big") % (2**63 - 1)


def signed_entry(one: Enrolled, before: LogHead) -> bytes:
    """What the signer signs of an enrolment: its values and the hash of the line before, ordered by name."""
    return b"fairfold roster" + json.dumps(_entry(one, before), sort_keys=True).encode()


def line_of(one: Enrolled, before: LogHead, signature: bytes) -> bytes:
    """The line of an enrolment, without its end."""
    return json.dumps(_entry(one, before) | {"signature": signature.hex()}).encode()


def _entry(one: Enrolled, before: LogHead) -> dict[str, str | int]:
    return {"key": one.key.hex(), "node": f"{one.node:x}", "users": one.users, "previous": before.hash}


def read_line(line: bytes, signer: bytes, before: LogHead) -> Enrolled:
    """Check the line that follows a head: the server's signer signed it, and the hash of the line before in it."""
    try:
        entry = json.loads(line)
        one = Enrolled(bytes.fromhex(entry["key"]), int(entry["node"], 16), entry["users"])
        in_range = type(one.users) is int and 1 <= one.users <= MAX_USERS and 0 <= one.node < 2**64
        if len(one.key) != POINT or not in_range:
            raise ValueError("no key, or no number of users")
        signature = bytes.fromhex(entry["signature"])
        if line != line_of(one, before, signature):
            raise ValueError("it does not follow the line before")
        if not verified(signer, signature, signed_entry(one, before)):
            raise ValueError("the server's signer did not sign it")
    except PARSE_ERRORS as error:
        given = f"line {before.lines + 1} of the roster ({str(error)[:100]})"
        raise InvalidState(given, "what the server enrolled and signed", "Ask its operator.") from None
    return one


def read_log(content: bytes, signer: bytes) -> tuple[list[Enrolled], list[LogHead]]:
    """Check a whole log; returns its devices, and the head before the first line and after each."""
    heads = [NO_LOG]
    found = dict[bytes, Enrolled]()
    for line in content.splitlines():
        one = read_line(line, signer, heads[-1])
        if one.key in found:
            given = f"line {len(heads)} of the roster (a key that comes twice)"
            raise InvalidState(given, "what the server enrolled and signed", "Ask its operator.")
        found[one.key] = one
        heads.append(heads[-1].after(line))
    return list(found.values()), heads


def _split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines of what comes in pieces; one that does not end is none."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE:
            raise refuse("a roster with a line that does not end", f"lines of at most {MAX_LINE} bytes")


@dataclass(frozen=True)
class LogCopy:
    """A device's copy of its server's log, as far as invitations have named it: it grows, and never goes back."""

    path: Path
    signer: bytes  # the public key by which the server signs, as the device learnt it when it enrolled
    fetch: Fetch

    def follow(self, named: LogHead, own: bytes) -> None:
        """Fetch the lines that an invitation names beyond the copy; refuse what contradicts it, or lacks this device.

        The copy is written before the device takes part, and not at all if anything is wrong.
        """
        known = self.head()
        if not named.lines:
            raise refuse("an invitation without the roster", "the roster of the server that this device enrolled with")
        if named.lines < known.lines:
            given = f"an invitation by a roster of {named.lines} lines, after one of {known.lines}"
            raise refuse(given, "a log that only grows")
        if named.lines > known.lines:
            make_private_folder(self.path.parent)
            try:
                write_atomically(self.path, self._extended(known, named), private=True)
            except InvalidState as error:
                raise refuse(error.given, error.needed) from None
        elif named != known:
            raise refuse(f"another roster of {known.lines} lines than before", "one log for all devices")
        if own not in self._among({own}):
            raise refuse("a roster without this device's key", "all that have enrolled")

    def require_members(self, named: LogHead, members: tuple[Advert, ...]) -> None:
        """Refuse a cohort with a member whose enrolled key is not in the log that its invitation named."""
        found = self._among({advert.enrolled for advert in members}) if self.head() == named else set()
        for advert in members:
            if advert.enrolled not in found:
                given = f"device {advert.name:x}, whose key is not in the server's roster of {named.lines} lines"
                raise refuse(given, "devices that have enrolled")

    def head(self) -> LogHead:
        """How far the copy goes."""
        head = NO_LOG
        with self._read_errors():
            for line in self._lines():
                if f'"previous": "{head.hash}"'.encode() not in line:
                    raise Damaged(f"line {head.lines + 1} does not follow the one before")
                head = head.after(line)
        return head

    def _lines(self) -> Iterator[bytes]:
        """The lines of the copy."""
        if not self.path.exists():
            return
        with self._read_errors(), self.path.open("rb") as file:
            yield from (line.removesuffix(b"\n") for line in file)

    def _read_errors(self) -> contextlib.AbstractContextManager[None]:
        return read_errors(self.path, InvalidState, "the roster as this device saw it", "Remove it to begin anew.")

    def _among(self, keys: set[bytes]) -> set[bytes]:
        """Those of some keys that are in the copy; it is read line by line, since it may be long."""
        wanted = {key.hex(): key for key in keys}
        with self._read_errors():
            return {wanted[key] for line in self._lines() if (key := json.loads(line)["key"]) in wanted}

    def _extended(self, head: LogHead, named: LogHead) -> Iterator[bytes]:
        """The lines of the copy, and those after it up to the ones named, checked as they come."""
        size = 0
        for line in self._lines():
            yield line + b"\n"
            size += len(line) + 1
        with contextlib.closing(self.fetch(size)) as pieces:
            for line in islice(_split_lines(pieces), named.lines - head.lines):
                read_line(line, self.signer, head)
                head = head.after(line)
                yield line + b"\n"
        if head.lines < named.lines:
            raise refuse(f"a roster of {head.lines} lines where its invitation names {named.lines}", "the one it names")
        if head != named:
            raise refuse("another roster than its invitation names", "one log for all devices")
