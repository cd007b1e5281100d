"""What a device keeps for itself: a secret, its users' vectors, and its last two words.

The file is replaced whole or not at all, so a device that loses power, or room on its disk, goes on with what it had.

What a device would remember of its answer (the *pending* word) is written before the answer is sent. The next order
names the word that the server holds: if that is the pending one, it is now what was said; if it is the one before, the
answer was lost, late or refused, or the server went on from an older checkpoint, and the pending word is dropped.
Of two orders at work at once the later one to end finds another file than it began with, and is never answered.
"""

import json
import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fairfold.errors import InvalidState
from fairfold.files import locked, make_private, remove_leftovers
from fairfold.runs.tensors import SEAL, read_values, seal_of, write_sealed
from fairfold.sealed import Damaged, reading, table_in
from fairfold.values import Weights

FORMAT = 4
FILE = "own.safetensors"
NOTHING = "nothing"  # in the place of a checksum, where no file is
START_ANEW = "Remove the file to let the device start anew."


@dataclass(frozen=True)
class Word:
    """What a device remembers of an answer: its number, 0 before the first, and its users' private tensors after it."""

    number: int = 0
    own: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceState:
    """What a device knows of its users."""

    said: Word = Word()  # as far as it knows; for algorithms whose devices keep what they learned, the newest
    pending: Word | None = None  # what it said to the last order, which the server may or may not have taken
    names: list[str] = field(default_factory=list)  # of the users, in the order of the rows
    run: int = 0  # of which these words are
    # What the words of a run are about: what its users have done since joins with the next run.
    history: Weights = field(default_factory=dict)
    # Seed of the random draws: whoever knew it could tell which items were drawn as negatives, and so which were not.
    secret: int = field(default_factory=lambda: secrets.randbelow(2**62))
    numbering: int = 0  # which numbering of the items it was told, and the numbers of its own items there
    numbers: dict[int, int] = field(default_factory=dict)

    def agreed(self, run: int, holds: int) -> "DeviceState":
        """The same, with the word that the server holds as what was said; refused if this device no longer has it."""
        if run != self.run and not holds:
            return replace(self, said=Word(), pending=None, names=[], run=run, history={})
        if run == self.run and self.pending is not None and holds == self.pending.number:
            return replace(self, said=self.pending, pending=None)
        if run == self.run and holds == self.said.number:
            return replace(self, pending=None)
        missing = "a word this device no longer has" if run == self.run else "words of a run this device does not know"
        needed, remedy = "one of its last two in this run", "It takes part again in the next run."
        raise InvalidState(f"an order that builds on {missing}", needed, remedy)

    def rows_of(self, names: list[str], fresh: Weights) -> Weights:
        """The vectors of some users, in their order; those of ``fresh`` for whoever is new."""
        known = {name: place for place, name in enumerate(self.names)}
        found = {}
        for key, rows in fresh.items():
            mine, result = self.said.own.get(key), rows.clone()
            if mine is not None and mine.shape[1:] == rows.shape[1:] and len(mine) == len(self.names):
                for place, name in enumerate(names):
                    if name in known:
                        result[place] = mine[known[name]]
            found[key] = result
        return found


class DeviceStore:
    """A folder of one device, made if it is not there, for its owner alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: str | None = None

    def load(self) -> DeviceState:
        """What was saved last; a new state, with a secret of its own, if nothing was."""
        path = self.folder / FILE
        self._seen = NOTHING
        if not path.exists():
            return DeviceState()
        tensors, metadata = read_values(path, START_ANEW, InvalidState, FORMAT)
        with _reading(path):
            facts = table_in(metadata["facts"])
            told = [word for word in ("said", "pending") if facts[word] is not None]
            words = {word: Word(int(facts[word], 16), _under(word, tensors)) for word in told}
            state = DeviceState(
                words["said"], words.get("pending"), [str(name) for name in facts["names"]], int(facts["run"], 16),
                _under("history", tensors), int(facts["secret"], 16), int(facts["numbering"], 16),
                {int(item): int(number) for item, number in facts["numbers"].items()},
            )  # fmt: skip
            if not all(bool(torch.isfinite(rows).all()) for word in words.values() for rows in word.own.values()):
                raise Damaged("numbers that are none")
        self._seen = metadata[SEAL]
        return state

    def save(self, state: DeviceState) -> None:
        """Replace what was saved; refused if another has done so since this one loaded."""
        make_private(self.folder)
        remove_leftovers(self.folder)
        words = {"said": state.said, "pending": state.pending}
        kept = {key: word.own for key, word in words.items() if word is not None} | {"history": state.history}
        tensors = {f"{key}/{name}": rows.contiguous() for key, of in kept.items() for name, rows in of.items()}
        facts = json.dumps({
            "said": f"{state.said.number:x}",
            "pending": None if state.pending is None else f"{state.pending.number:x}",
            "names": state.names, "run": f"{state.run:x}",
            "secret": f"{state.secret:x}", "numbering": f"{state.numbering:x}", "numbers": state.numbers,
        })  # fmt: skip
        with locked(self.folder):
            if self._seen is not None and self._seen != self._saved():
                given = "another order that this device has answered meanwhile"
                raise InvalidState(given, "one at a time", "The server asks again.")
            metadata = {"format": str(FORMAT), "facts": facts}
            self._seen = write_sealed(self.folder / FILE, tensors, metadata, private=True)["seal"]

    def _saved(self) -> str:
        """Checksum of what lies there now."""
        path = self.folder / FILE
        if not path.exists():
            return NOTHING
        with _reading(path):
            return seal_of(path)


def _under(key: str, tensors: Weights) -> Weights:
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{key}/")}


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(path, InvalidState, "what this device saved", START_ANEW)
