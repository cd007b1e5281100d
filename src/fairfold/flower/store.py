"""What a device keeps for itself: its users' vectors and a secret, in one file that only its owner can read.

The file is replaced whole or not at all, so a device that loses power, or room on its disk, goes on with what it had.
"""

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fairfold.errors import CannotWrite, InvalidState
from fairfold.federation.task import Weights
from fairfold.files import remove_leftovers
from fairfold.runs.tensors import write_tensors

FORMAT = 1
FILE = "own.safetensors"


@dataclass(frozen=True)
class DeviceState:
    """What a device knows of its users.

    Attributes:
        vectors: Name of each of a user's vectors, a row a user.
        names: Of the users, in the order of the rows.
        secret: Seed of this device's random draws: whoever knew it could tell which items were drawn as negatives,
            and so which were not.
        round_number: Rounds done when it was written.
    """

    vectors: Weights = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    secret: int = field(default_factory=lambda: secrets.randbelow(2**62))
    round_number: int = 0

    def rows_of(self, names: list[str], fresh: Weights) -> Weights:
        """The vectors of some users, in their order; those of ``fresh`` for whoever is new."""
        known = {name: place for place, name in enumerate(self.names)}
        found = {}
        for key, rows in fresh.items():
            mine, result = self.vectors.get(key), rows.clone()
            if mine is not None and mine.shape[1:] == rows.shape[1:]:
                for place, name in enumerate(names):
                    if name in known:
                        result[place] = mine[known[name]]
            found[key] = result
        return found


class DeviceStore:
    """A folder of one device.

    Args:
        folder: Made if it is not there, for its owner alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> DeviceState:
        """What was saved last; a new state, with a secret of its own, if nothing was."""
        path = self.folder / FILE
        if not path.exists():
            return DeviceState()
        try:
            with safe_open(path, "pt") as opened:
                facts = opened.metadata() or {}
                if facts.get("format") != str(FORMAT):
                    found = f"{path} of format {facts.get('format')!r}"
                    raise InvalidState(found, f"format {FORMAT}", "Use the fairfold that wrote it.")
                vectors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
            names, secret, number = json.loads(facts["names"]), int(facts["secret"], 16), int(facts["round"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise InvalidState(
                f"{path}: {error}", "what this device saved", "Remove the file to let the device start anew."
            ) from None
        if not all(torch.isfinite(rows).all() and len(rows) == len(names) for rows in vectors.values()):
            raise InvalidState(f"{path}: rows that are not its users'", "one row a user", "Remove the file.")
        return DeviceState(vectors, names, secret, number)

    def save(self, state: DeviceState) -> None:
        """Replace what was saved."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.chmod(self.folder, 0o700)
            remove_leftovers(self.folder)
        except OSError as error:
            raise CannotWrite(f"{self.folder}: {error.strerror}", "a folder to write to", "Name another.") from None
        facts = {
            "format": str(FORMAT),
            "names": json.dumps(state.names),
            "secret": f"{state.secret:x}",
            "round": str(state.round_number),
        }
        write_tensors(self.folder / FILE, state.vectors, facts, private=True)
