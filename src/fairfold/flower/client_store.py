"""What a client stores on its disk: a secret, its users' local state, and its last two updates.

The file is replaced as a whole or not at all. What a client would remember of its update (the *pending* one) is written
before the update is sent. The next task names the update that the server has acknowledged: the pending one, or the one
before where the reply was lost, late or refused, or the server resumed from an older checkpoint. Of two tasks at the
same time, the one that ends last finds another file than it began with, and is never answered.
"""

import json
import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fairfold.atomic_io import locked, make_private_folder, remove_temporary_files
from fairfold.checksums import Damaged, parse_json_object, read_errors
from fairfold.data import Interactions
from fairfold.errors import InvalidState
from fairfold.flower.local_data import LocalData
from fairfold.runs.tensors import CHECKSUM_KEY, read_checked_tensors, stored_checksum, write_checked_tensors
from fairfold.typing import Weights

FORMAT = 5
FILE = "local_state.safetensors"
NUMBERS = ("run", "secret", "numbering")  # stored in hexadecimal digits
NO_FILE = "no file"  # in place of a checksum
START_ANEW = "Remove the file to let the device start anew."


@dataclass(frozen=True)
class RememberedUpdate:
    """What a client remembers of an update: its id, 0 before the first, and the users' local state after it."""

    update_id: int = 0
    local_state: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class ClientState:
    """The stored state of a client."""

    acknowledged: RememberedUpdate = RememberedUpdate()  # by the server; where it remembers none, the newest
    pending: RememberedUpdate | None = None  # sent last, and not known to be acknowledged
    user_names: list[str] = field(default_factory=list)  # in the order of the rows
    run: int = 0  # id of the run of these updates
    history: Weights = field(default_factory=dict)  # the interactions that the updates are about
    # Seed of the random draws: the drawn negatives would reveal which items a user does not have.
    secret: int = field(default_factory=lambda: secrets.randbelow(2**62))
    numbering: int = 0  # id of the numbering of the items
    item_numbers: dict[int, int] = field(default_factory=dict)  # of the client's own items

    def reconcile(self, run: int, acknowledged_id: int) -> "ClientState":
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

    def local_state_of(self, user_names: list[str], initial: Weights) -> Weights:
        """Return the local state of some users, in their order; that of ``initial`` for new users."""
        stored_rows = {name: row for row, name in enumerate(self.user_names)}
        known = [(row, stored_rows[name]) for row, name in enumerate(user_names) if name in stored_rows]
        local_state = {key: rows.clone() for key, rows in initial.items()}
        for key, rows in local_state.items():
            stored = self.acknowledged.local_state.get(key)
            if stored is not None and stored.shape[1:] == rows.shape[1:] and len(stored) == len(self.user_names):
                for row, stored_row in known:
                    rows[row] = stored[stored_row]
        return local_state


class ClientStore:
    """The folder of one client's state, private to its owner."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: str | None = None

    def load(self) -> ClientState:
        """Return the state that was saved last, or a new one with a secret of its own."""
        path = self.folder / FILE
        self._seen = NO_FILE
        if not path.exists():
            return ClientState()
        tensors, metadata = read_checked_tensors(path, START_ANEW, InvalidState, FORMAT)
        with _reading(path):
            facts = parse_json_object(metadata["facts"])
            known = [key for key in ("acknowledged", "pending") if facts[key] is not None]
            updates = {key: RememberedUpdate(int(facts[key], 16), _under(key, tensors)) for key in known}
            state = ClientState(
                updates["acknowledged"],
                updates.get("pending"),
                [str(name) for name in facts["user_names"]],
                history=_under("history", tensors),
                item_numbers={int(item): int(number) for item, number in facts["item_numbers"].items()},
                **{key: int(facts[key], 16) for key in NUMBERS},
            )
            stored = [rows for update in updates.values() for rows in update.local_state.values()]
            if not all(bool(torch.isfinite(rows).all()) for rows in stored):
                raise Damaged("NaN or infinity")
        self._seen = metadata[CHECKSUM_KEY]
        return state

    def save(self, state: ClientState) -> None:
        """Replace the saved state; refuse if another process has done so since this one loaded it."""
        make_private_folder(self.folder)
        remove_temporary_files(self.folder)
        tables = {"acknowledged": state.acknowledged.local_state, "history": state.history}
        if state.pending is not None:
            tables["pending"] = state.pending.local_state
        tensors = {f"{key}/{name}": rows.contiguous() for key, table in tables.items() for name, rows in table.items()}
        facts = {
            "acknowledged": f"{state.acknowledged.update_id:x}",
            "pending": None if state.pending is None else f"{state.pending.update_id:x}",
            "user_names": state.user_names,
            **{key: f"{getattr(state, key):x}" for key in NUMBERS},
            "item_numbers": state.item_numbers,
        }
        with locked(self.folder):
            if self._seen is not None and self._seen != self._stored_checksum():
                given = "another task that this device has completed meanwhile"
                raise InvalidState(given, "one at a time", "The server asks again.")
            metadata = {"format": str(FORMAT), "facts": json.dumps(facts)}
            self._seen = write_checked_tensors(self.folder / FILE, tensors, metadata, private=True)["checksum"]

    def _stored_checksum(self) -> str:
        path = self.folder / FILE
        if not path.exists():
            return NO_FILE
        with _reading(path):
            return stored_checksum(path)


def _under(key: str, tensors: Weights) -> Weights:
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{key}/")}


def _reading(path: Path) -> AbstractContextManager[None]:
    return read_errors(path, InvalidState, "what this device saved", START_ANEW)


def _history_of(interactions: Interactions) -> Weights:
    history = {"offsets": interactions.offsets, "items": interactions.items}
    return history | ({} if interactions.ratings is None else {"ratings": interactions.ratings})


def fixed_history(data: LocalData, state: ClientState) -> tuple[LocalData, Weights]:
    """Return the data as at the run's first update, and as a history to store; newer data count in the next run."""
    if not state.history:
        return data, _history_of(data.local_interactions())
    if data.client_ids:  # a simulation, whose data does not change
        return data, state.history
    offsets, items = state.history["offsets"], state.history["items"]
    train = Interactions(len(offsets) - 1, data.train.num_items, offsets, items, state.history.get("ratings"))
    test = data.test if data.test is not None and data.names == state.user_names else None
    return LocalData(train, test, user_ids=state.user_names), state.history


def merged_history(data: LocalData, state: ClientState) -> tuple[LocalData, Weights, Tensor, Tensor]:
    """Return current and stored interactions together, for algorithms that retract updates, and as a history to store.

    With them come the indices of the stored ones, and a mask of those (of users who have left, too) that are lost.
    """
    current, num_items = data.local_interactions(), data.train.num_items
    names = list(dict.fromkeys([*state.user_names, *data.names]))
    rows = torch.tensor([names.index(name) for name in data.names], dtype=torch.int64)
    counts = state.history["offsets"].diff()
    stored_pairs = torch.repeat_interleave(torch.arange(len(counts)), counts) * num_items + state.history["items"]
    current_pairs = rows[current.users] * num_items + current.items
    pairs = torch.cat([stored_pairs, current_pairs])
    train = Interactions.from_pairs(pairs // num_items, pairs % num_items, len(names), num_items)
    merged_pairs = train.users * num_items + train.items
    test = data.test
    if test is not None:
        test = Interactions.from_pairs(rows[test.users], test.items, len(names), num_items)
    indices, lost = torch.searchsorted(merged_pairs, stored_pairs), ~torch.isin(merged_pairs, current_pairs)
    return LocalData(train, test, user_ids=names), _history_of(train), indices, lost
