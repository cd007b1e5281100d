"""What a disk may hold after a kill or a power loss, derived from the calls that ``shim.c`` recorded.

The rules are those of POSIX, and no kinder: what was written to a file is safe once the file was flushed; a name, made,
renamed or removed, is safe once its folder was flushed, and a folder's own name once *its* folder was. Of everything
else any part may be on the disk after a power loss, in any order, a write also in part.
"""

import hashlib
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MARK, OPEN, WRITE, SYNC, RENAME, UNLINK, MKDIR, TRUNCATE, RMDIR = range(9)
NAMES = ("mark", "open", "write", "sync", "rename", "unlink", "mkdir", "truncate", "rmdir")
LOSSES = ("all lost", "names kept", "some lost")
"""All that was not flushed; contents alone; a random part of both."""


@dataclass(frozen=True)
class Call:
    """One call, with names below the folder that was watched; a mark is what the program had promised by then."""

    kind: int
    number: int
    first: str
    second: str
    data: bytes

    def __str__(self) -> str:
        return f"{NAMES[self.kind]} {self.first}{' to ' + self.second if self.second else ''} ({len(self.data)} bytes)"


def read_trace(path: Path, folder: Path) -> list[Call]:
    """All calls of a trace, in order."""
    content, place, calls = path.read_bytes(), 0, list[Call]()
    base = str(folder.resolve())
    while place < len(content):
        kind, number, first, second, size = struct.unpack_from("=5q", content, place)
        place += 40
        fields = []
        for length in (first, second, size):
            fields.append(content[place : place + length])
            place += length
        names = [field_bytes.decode() for field_bytes in fields[:2]]
        if kind != MARK:
            names = [name.removeprefix(base).strip("/") for name in names]
        calls.append(Call(kind, number, names[0], names[1], fields[2]))
    return calls


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    safe: bytes = b""  # what was flushed
    pending: list[tuple[int, bytes]] = field(default_factory=list)  # writes since, and cuts, as (-1 - size, b"")


@dataclass
class _Folder:
    entries: "dict[str, _File | _Folder]" = field(default_factory=dict)
    safe: "dict[str, _File | _Folder]" = field(default_factory=dict)
    pending: "list[dict[str, _File | _Folder | None]]" = field(default_factory=list)  # changes since


Tree = dict[str, bytes | None]
"""What a folder holds, by name; None for a folder."""


class Disk:
    """Follows a trace call by call."""

    def __init__(self) -> None:
        self.root = _Folder()

    def _at(self, path: str) -> tuple[_Folder, str]:
        *above, name = path.split("/")
        folder = self.root
        for part in above:
            found = folder.entries[part]
            assert isinstance(found, _Folder)
            folder = found
        return folder, name

    def _find(self, path: str) -> "_File | _Folder":
        if not path:
            return self.root
        folder, name = self._at(path)
        return folder.entries[name]

    def _change(self, folder: _Folder, change: "dict[str, _File | _Folder | None]") -> None:
        folder.pending.append(change)
        _apply(folder.entries, change)

    def follow(self, call: Call) -> None:
        """What a call does."""
        if call.kind == OPEN:
            self._open(call)
        elif call.kind in (WRITE, TRUNCATE):
            file = self._find(call.first)
            assert isinstance(file, _File)
            change = (call.number, call.data) if call.kind == WRITE else (-1 - call.number, b"")
            file.pending.append(change)
            _write(file.content, *change)
        elif call.kind == SYNC:
            found = self._find(call.first)
            if isinstance(found, _File):
                found.safe = bytes(found.content)
            else:
                found.safe = dict(found.entries)
            found.pending.clear()
        elif call.kind == RENAME:
            (old, old_name), (new, new_name) = self._at(call.first), self._at(call.second)
            assert old is new, "no file is moved to another folder"
            self._change(new, {old_name: None, new_name: old.entries[old_name]})
        elif call.kind in (UNLINK, RMDIR):
            folder, name = self._at(call.first)
            self._change(folder, {name: None})
        elif call.kind == MKDIR:
            folder, name = self._at(call.first)
            self._change(folder, {name: _Folder()})

    def _open(self, call: Call) -> None:
        folder, name = self._at(call.first) if call.first else (self.root, "")
        if name and name not in folder.entries and call.number & os.O_CREAT:
            self._change(folder, {name: _File()})
        found = self._find(call.first)
        if call.number & os.O_TRUNC and isinstance(found, _File) and found.content:
            found.pending.append((-1, b""))
            found.content.clear()

    def killed(self) -> Tree:
        """The folder that a killed process leaves."""
        return dict(_walk(self.root, "", lambda folder: folder.entries, lambda file: bytes(file.content)))

    def lost_power(self, how: str, chance: random.Random) -> Tree:
        """What is there after the power was lost, by one of :data:`LOSSES`."""

        def entries(folder: _Folder) -> "dict[str, _File | _Folder]":
            if how == "names kept":
                return folder.entries
            found = dict(folder.safe)
            if how == "some lost":
                for change in folder.pending:
                    if chance.random() < 0.5:
                        _apply(found, change)
            return found

        def content(file: _File) -> bytes:
            found = bytearray(file.safe)
            if how == "some lost":
                for number, data in file.pending:
                    if chance.random() < 0.6:
                        torn = chance.randrange(len(data) + 1) if data and chance.random() < 0.3 else len(data)
                        _write(found, number, data[:torn])
            return bytes(found)

        return dict(_walk(self.root, "", entries, content))


def _apply(entries: "dict[str, _File | _Folder]", change: "dict[str, _File | _Folder | None]") -> None:
    for name, found in change.items():
        if found is None:
            entries.pop(name, None)
        else:
            entries[name] = found


def _write(content: bytearray, number: int, data: bytes) -> None:
    if number < 0:
        size = -1 - number
        content[size:] = bytes(max(size - len(content), 0))
        return
    content.extend(bytes(max(number - len(content), 0)))  # a hole reads as zeros
    content[number : number + len(data)] = data


def _walk(folder: _Folder, above: str, entries: object, content: object) -> Iterator[tuple[str, bytes | None]]:
    assert callable(entries)
    assert callable(content)
    for name, found in sorted(entries(folder).items()):
        path = f"{above}{name}"
        if isinstance(found, _File):
            yield path, content(found)
        else:
            yield path, None
            yield from _walk(found, f"{path}/", entries, content)


def torn(calls: list[Call], number: int) -> list[Call]:
    """The calls up to one that is a write, of which only half was done."""
    last = calls[number]
    half = Call(last.kind, last.number, last.first, last.second, last.data[: len(last.data) // 2])
    return [*calls[:number], half]


def lay_out(tree: Tree, folder: Path) -> None:
    """Put it into an empty folder."""
    for name, content in tree.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


def fingerprint(tree: Tree) -> bytes:
    """Equal for equal trees."""
    digest = hashlib.sha256()
    for name, content in sorted(tree.items()):
        digest.update(repr((name, content)).encode())
    return digest.digest()
