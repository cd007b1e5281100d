"""A device's state file, in plain Python; the worker reads and writes it by ``fairfold.flower.client_store``.

So a device may go on where the worker ended, and the other way round. The file is replaced as a whole or not at all.
"""

import hashlib
import json
import secrets
from array import array
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from fairfold.atomic_io import locked, make_private_folder, remove_temporary_files, write_atomically
from fairfold.checksums import (
    Damaged,
    line_with_checksum,
    parse_json_object,
    parse_lines,
    read_errors,
    read_limited,
)
from fairfold.errors import InvalidState
from fairfold.flower.protocol import HEX_ID, new_id

FORMAT, FILE, CHECKSUM_KEY = "5", "local_state.safetensors", "sha256"
NO_FILE = "no file"  # in place of a checksum
START_ANEW = "Remove the file to let the device start anew."
_CODES = {"F32": "f", "F64": "d", "I32": "i", "I64": "q", "U8": "B"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}

Table = tuple[list[int], Any]  # shape and numbers of a tensor
Tables = dict[str, Table]


def pack_tables(tables: Tables, metadata: dict[str, str]) -> tuple[bytes, str]:
    """A safetensors file with its own checksum in the metadata; returns it with the checksum."""
    checksum = _checksum(tables, metadata)
    described: dict[str, Any] = {"__metadata__": metadata | {CHECKSUM_KEY: checksum}}
    end = 0
    for name, (shape, numbers) in tables.items():
        start, end = end, end + len(numbers) * numbers.itemsize
        described[name] = {"dtype": _DTYPES[numbers.typecode], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = [len(text).to_bytes(8, "little"), text, *(numbers.tobytes() for _, numbers in tables.values())]
    return b"".join(content), checksum


def parse_tables(content: bytes) -> tuple[Tables, dict[str, str], str]:
    """The tables, metadata and checksum of such a file; raises one of ``PARSE_ERRORS`` where it is damaged."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    checksum = metadata.pop(CHECKSUM_KEY, None)
    tables = Tables()
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tables[name] = list(entry["shape"]), array(_CODES[entry["dtype"]], content[start:end])
    if checksum is None or _checksum(tables, metadata) != checksum:
        raise Damaged(f"another checksum than it says, or none, and of format {metadata.get('format')!r}")
    return tables, metadata, checksum


def _checksum(tables: Tables, metadata: dict[str, str]) -> str:
    shapes = {name: [_DTYPES[numbers.typecode], shape] for name, (shape, numbers) in tables.items()}
    checksum = hashlib.sha256(json.dumps([metadata, shapes], sort_keys=True).encode())
    for name in sorted(tables):
        checksum.update(tables[name][1].tobytes())
    return checksum.hexdigest()


@dataclass(frozen=True)
class RememberedUpdate:
    """What a device remembers of an update: its id, 0 before the first, and the local state after it."""

    update_id: int = 0
    local_state: dict[str, Any] = field(default_factory=dict)  # tables; tensors where torch trains


@dataclass(frozen=True)
class DeviceState:
    """The stored state of a device."""

    acknowledged: RememberedUpdate = RememberedUpdate()  # by the server; where it remembers none, the newest
    pending: RememberedUpdate | None = None  # sent last, and not known to be acknowledged
    user_names: list[str] = field(default_factory=list)  # in the order of the rows
    run: int = 0  # id of the run of these updates
    history: dict[str, Any] = field(default_factory=dict)  # the interactions that the updates are about
    # Seed of the worker's random draws: the drawn negatives would reveal which items a user does not have.
    secret: int = field(default_factory=lambda: secrets.randbelow(2**62))
    numbering: int = 0  # id of the numbering of the items
    item_numbers: dict[int, int] = field(default_factory=dict)  # of the device's own items

    def reconcile(self, run: int, acknowledged_id: int) -> Self:
        """Return the state with the update that the server has acknowledged; refuse one that is no longer stored."""
        if run != self.run and not acknowledged_id:
            return replace(self, acknowledged=RememberedUpdate(), pending=None, user_names=[], run=run, history={})
        if run == self.run and self.pending is not None and acknowledged_id == self.pending.update_id:
            return replace(self, acknowledged=self.pending, pending=None)
        if run == self.run and acknowledged_id == self.acknowledged.update_id:
            return replace(self, pending=None)
        missing = "an update this device no longer has" if run == self.run else "a run this device does not know"
        needed = "one of its last two updates in this run"
        raise InvalidState(f"a task that builds on {missing}", needed, "It takes part again in the next run.")


class DeviceStore:
    """The folder of one device's state, private to its owner."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / FILE
        self._seen: str | None = None

    def load(self) -> DeviceState:
        """Return the state that was saved last, or a new one with a secret of its own."""
        self._seen = NO_FILE
        if not self.path.exists():
            return DeviceState()
        with self.read_errors():
            tables, metadata, self._seen = parse_tables(read_limited(self.path))
            if metadata.get("format") != FORMAT:
                raise Damaged(f"of format {metadata.get('format')!r}, and not {FORMAT}")
            facts = parse_json_object(metadata["facts"])
            known = [key for key in ("acknowledged", "pending") if facts[key] is not None]
            updates = {key: RememberedUpdate(int(facts[key], 16), _under(key, tables)) for key in known}
            return DeviceState(
                updates["acknowledged"],
                updates.get("pending"),
                [str(name) for name in facts["user_names"]],
                int(facts["run"], 16),
                _under("history", tables),
                int(facts["secret"], 16),
                int(facts["numbering"], 16),
                {int(item): int(number) for item, number in facts["item_numbers"].items()},
            )

    def save(self, state: DeviceState) -> None:
        """Replace the saved state; refuse if another process has done so since this one loaded it."""
        make_private_folder(self.folder)
        remove_temporary_files(self.folder)
        parts = {"acknowledged": state.acknowledged.local_state, "history": state.history}
        if state.pending is not None:
            parts["pending"] = state.pending.local_state
        tables = {f"{key}/{name}": table for key, part in parts.items() for name, table in part.items()}
        facts = {
            "acknowledged": f"{state.acknowledged.update_id:x}",
            "pending": None if state.pending is None else f"{state.pending.update_id:x}",
            "user_names": state.user_names,
            **{key: f"{getattr(state, key):x}" for key in ("run", "secret", "numbering")},
            "item_numbers": state.item_numbers,
        }
        content, checksum = pack_tables(tables, {"format": FORMAT, "facts": json.dumps(facts)})
        with locked(self.folder):
            if self._seen is not None and self._seen != self._stored_checksum():
                given = "another task that this device has completed meanwhile"
                raise InvalidState(given, "one at a time", "The server asks again.")
            write_atomically(self.path, content, private=True)
            self._seen = checksum

    def _stored_checksum(self) -> str:
        if not self.path.exists():
            return NO_FILE
        with self.read_errors():
            return parse_tables(read_limited(self.path))[2]

    def read_errors(self) -> AbstractContextManager[None]:
        """Turn errors of reading the file into one that says what to do."""
        return read_errors(self.path, InvalidState, "what this device saved", START_ANEW)


def _under(key: str, tables: Tables) -> Tables:
    return {name.partition("/")[2]: table for name, table in tables.items() if name.startswith(f"{key}/")}


def load_device_id(folder: Path) -> int:
    """The id of the device whose state is in a folder: of its enrolled key, or a random one, made on first use."""
    path = folder / "name"
    with read_errors(path, InvalidState, "the device's name", "Remove the file: it gets a new one."):
        if not path.exists():
            return save_device_id(folder, new_id())
        digits = parse_lines(read_limited(path, largest=64))
        if len(digits) != 1 or not HEX_ID.fullmatch(digits[0]):
            raise Damaged("no name")
        return int(digits[0], 16)


def save_device_id(folder: Path, device_id: int) -> int:
    """Write a device's id into the folder of its state; returns it."""
    make_private_folder(folder)
    # With a checksum: with another id, the device's earlier updates would be counted beside its new ones.
    write_atomically(folder / "name", line_with_checksum(f"{device_id:x}").encode())
    return device_id
