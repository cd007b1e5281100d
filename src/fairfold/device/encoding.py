"""Rows of all items that pass by a device after its model: it keeps the sum of each of its users' histories.

The blocks come one message after another, from the first item to the last. Of each the sums are brought up to date,
and the block is dropped. The reply is the same whatever a device's users have.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairfold.atomic_io import write_atomically
from fairfold.checksums import parse_with_checksum, read_errors, read_limited, with_checksum
from fairfold.device.cooccurrence import streamed_part
from fairfold.device.facts import MAX_ITEMS, invalid_message, number_in
from fairfold.device.model import ROWS, STREAM, encode, packed_bytes
from fairfold.device.stored_model import MODEL_FILE, StoredModel, parse_model, signed_number
from fairfold.errors import InvalidState

ENCODING_FILE = "encoding.json"
Histories = Callable[[int], Mapping[str, Sequence[int]]]  # of all users, by the size of the catalogue


def signed_rows(model: bytes, first: int, rows: bytes) -> bytes:
    """What a server signs of a block of rows, as of a model: the hash of the model, the first item, and the rows."""
    return b"fairfold rows" + hashlib.sha256(model).digest() + first.to_bytes(8, "big") + rows


def keep_sums(folder: Path, content: bytes, facts: Mapping[str, Any], histories: Histories, signer: str = "") -> None:
    """Add a block of rows to the sums of all users' histories; only a block that follows the last one is taken."""
    first, file = number_in(dict(facts), "first", MAX_ITEMS), _model_file(folder)
    if signer:
        signed_number(folder, signed_rows(file, first, content), facts, signer)
    model, name = parse_model(file), hashlib.sha256(file).hexdigest()
    part = streamed_part(model.metadata["projections"][ROWS], model.metadata["settings"]).get(STREAM)
    if part is None:
        raise invalid_message("rows beside a model that needs none", "none")
    items, width = part["kept"][0], packed_bytes(part) // part["kept"][0]
    count, rest = divmod(len(content), width)
    kept: dict[str, Any] = {"model": name, "next": 0, "users": {}} if first == 0 else _kept(folder)
    if rest or not count or kept["model"] != name or kept["next"] != first or first + count > items:
        raise invalid_message("rows of other items than those that follow", f"rows of this model, {width} bytes each")
    for user, history in histories(model.items).items():
        ranks = model.ranks(history)
        before = kept["users"].setdefault(user, {"history": _digest(ranks), "sum": [0.0] * (width - 2)})
        block = encode(content, width - 2, ranks, first)
        before["sum"] = [total + number for total, number in zip(before["sum"], block, strict=True)]
    write_atomically(folder / ENCODING_FILE, with_checksum(kept | {"next": first + count}), private=True)


def kept_sum(folder: Path, model: StoredModel, user: str, ranks: Sequence[int]) -> list[float] | None:
    """The sum of a user's history by rows that passed by; None where they did not, or the history has changed."""
    if not (folder / ENCODING_FILE).exists():
        return None
    part = streamed_part(model.metadata["projections"][ROWS], model.metadata["settings"]).get(STREAM)
    kept = _kept(folder)
    mine = kept["users"].get(user)
    whole = (
        part is not None
        and kept["next"] == part["kept"][0]
        and kept["model"] == hashlib.sha256(_model_file(folder)).hexdigest()
    )
    return mine["sum"] if whole and mine is not None and mine["history"] == _digest(ranks) else None


def _model_file(folder: Path) -> bytes:
    path = folder / MODEL_FILE
    with read_errors(path, InvalidState, "the model that this device was sent", "The server sends it again."):
        return path.read_bytes()


def _kept(folder: Path) -> dict[str, Any]:
    path = folder / ENCODING_FILE
    with read_errors(path, InvalidState, "the sums of this device's histories", "Remove it: the server sends again."):
        return parse_with_checksum(read_limited(path))


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, sorted(set(ranks)))).encode()).hexdigest()
