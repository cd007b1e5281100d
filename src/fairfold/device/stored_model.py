"""The model that a device stores: pushed by the server at the end of a run, and used for offline recommendations.

It is one file in the format of ``fairfold export`` (docs/export.md), replaced as a whole: old and new ones are never
mixed. Models of the default algorithm are scored here, others by :mod:`.offline`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fairfold.atomic_io import make_private_folder, remove_temporary_files, write_atomically
from fairfold.checksums import line_with_checksum, parse_lines, read_errors, read_limited
from fairfold.device.facts import budget_of, id_in, invalid_message
from fairfold.device.model import CoOccurrenceModel, packed_bytes
from fairfold.device.store import parse_tables
from fairfold.errors import InvalidMessage, InvalidState

NEWEST = "newest-model"  # the file of the number of the newest signed model
MODEL_FILE, MODEL_FORMAT = "model.safetensors", "8"  # the format is that of fairfold.runs.device_model
LEADING = "leading"  # the tensor of leading items, by which those of the catalogue are numbered in the model


@dataclass(frozen=True)
class StoredModel:
    """A model file's content: packed tensors, as arrays of numbers, and the metadata written with them."""

    tensors: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def round_number(self) -> int:
        """The round after which the model was written."""
        return int(self.metadata["round"])

    @property
    def kind(self) -> str:
        """The algorithm that trained it."""
        return str(self.metadata["settings"]["algorithm"]["kind"])

    @property
    def items(self) -> int:
        """Size of the catalogue."""
        return int(self.metadata["data"]["items"])

    @cached_property
    def _model(self) -> CoOccurrenceModel:
        projections = self.metadata["projections"]
        packed = {name: self.tensors[name].tobytes() for name in projections}
        return CoOccurrenceModel(packed, projections, float(self.metadata["settings"]["algorithm"]["pair_weight"]))

    def scores(self, history: Sequence[int], encoded: Sequence[float] | None = None) -> list[float]:
        """Scores of the leading items by their ranks; minus infinity where the history gives none."""
        reach = self._model.reach
        informative = encoded is not None or any(item < reach for item in history)
        return list(self._model.scores(history, reach, encoded)) if informative else [-inf] * reach

    def ranks(self, history: Sequence[int]) -> list[int]:
        """The numbers that a history's items have in the model, where it names its items."""
        if LEADING not in self.tensors:
            return list(history)
        wanted = set(history)
        return [place for place, item in enumerate(self.tensors[LEADING]) if item in wanted]

    def recommend(
        self, history: Sequence[int], top: int, encoded: Sequence[float] | None = None
    ) -> list[tuple[int, float | None]]:
        """The best items outside a history with their scores (or None); of equal ones the more popular come first.

        ``encoded`` is the history's sum by rows that passed by (:mod:`.encoding`), else by the model's own.
        """
        catalogue = self.tensors.get(LEADING, range(self.items))  # in the order of the model's own numbers
        excluded = set(self.ranks(history))
        scores = self.scores(sorted(excluded), encoded)
        scores += [-inf] * (len(catalogue) - len(scores))
        ranked = sorted(range(len(catalogue)), key=lambda item: -scores[item])
        best = [item for item in ranked if item not in excluded][:top]
        return [(catalogue[item], scores[item] if scores[item] > -inf else None) for item in best]


def parse_model(content: bytes) -> StoredModel:
    """Parse a model file; raises one of ``PARSE_ERRORS`` where it is damaged, or lies about its sizes."""
    tables, metadata, _ = parse_tables(content)
    if metadata["format"] != MODEL_FORMAT:
        raise invalid_message(f"a model of format {metadata['format']}", f"format {MODEL_FORMAT}")
    parsed = {key: json.loads(metadata[key]) for key in ("projections", "settings", "data")}
    for name, held in parsed["projections"].items():
        if held["kind"].startswith("quantized") and len(tables[name][1]) != packed_bytes(held):
            raise invalid_message("tensors of other lengths than their sizes", "a whole model")
    return StoredModel({name: numbers for name, (_, numbers) in tables.items()}, metadata | parsed)


def signed_model(number: int, content: bytes) -> bytes:
    """What a server signs of a model: a number that grows from model to model, and the hash of the file."""
    return b"fairfold model" + number.to_bytes(8, "big") + hashlib.sha256(content).digest()


def store_model(
    folder: Path, content: bytes, capacity: str, facts: Mapping[str, Any] = MappingProxyType({}), signer: str = ""
) -> None:
    """Store a model file in place of the last one, if it is whole and within the device's capacity.

    With the public key of a ``signer``, a model that it did not sign, or one older than the last, is refused.
    """
    number = signed_number(folder, content, facts, signer) if signer else None
    model = parse_model(content)
    size = sum(len(of) * of.itemsize for name, of in model.tensors.items() if name != LEADING)
    budget = budget_of(capacity)
    if budget is not None and size > budget:
        raise InvalidMessage(f"a model of {size} bytes", f"at most {capacity}", "Request its capacity first.")
    make_private_folder(folder)
    remove_temporary_files(folder)
    if number is not None:  # first: the same model may come again, an older one may not
        write_atomically(folder / NEWEST, line_with_checksum(f"{number:x}").encode(), private=True)
    write_atomically(folder / MODEL_FILE, content, private=True)


def signed_number(folder: Path, content: bytes, facts: Mapping[str, Any], signer: str) -> int:
    """The number of a signed model; refused without a valid signature, or below that of the stored model."""
    from cryptography.exceptions import InvalidSignature  # all that is loaded: a plain round needs no ciphers
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    needed, remedy = "one that this device's server has signed", "The stored one is kept; ask the server's operator."
    try:
        number, signature = id_in(dict(facts), "number"), bytes.fromhex(facts["signature"])
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer)).verify(signature, signed_model(number, content))
    except (InvalidMessage, InvalidSignature, LookupError, TypeError, ValueError):
        raise InvalidMessage("a model without its server's signature", needed, remedy) from None
    path = folder / NEWEST
    newest = 0
    if path.exists():
        with read_errors(path, InvalidState, "the number of the stored model", "Remove it: any signed model is taken."):
            newest = int(parse_lines(read_limited(path, largest=64))[0], 16)
    if number < newest:
        raise InvalidMessage("an older model than the stored one", "a newer one", remedy)
    return number


def read_model(folder: Path) -> StoredModel:
    """Read the model that a device stores; refused where there is none, or its checksum is wrong."""
    path = folder / MODEL_FILE
    remedy = "The server sends it again when it trains next, or: fairfold server train --resume."
    if not path.is_file():
        given = f"{folder}, which holds no {MODEL_FILE}"
        raise InvalidState(given, "the folder of a device that was sent a model", "Train first. " + remedy)
    with read_errors(path, InvalidState, "the model that this device was sent", remedy):
        try:
            return parse_model(path.read_bytes())
        except InvalidMessage as error:
            raise ValueError(error.given) from None
