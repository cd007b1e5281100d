"""A device's state as tensors, for what torch trains: the file that :mod:`fairfold.device.store` describes and checks.

The file is replaced as a whole or not at all. What a client would remember of its update (the *pending* one) is written
before the update is sent. The next task names the update that the server has acknowledged: the pending one, or the one
before where the reply was lost, late or refused, or the server resumed from an older checkpoint. Of two tasks at the
same time, the one that ends last finds another file than it began with, and is never answered.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairfold.checksums import Damaged
from fairfold.data import Interactions
from fairfold.device.store import FILE, DeviceState, DeviceStore, RememberedUpdate, Table
from fairfold.flower.local_data import LocalData
from fairfold.typing import Weights

__all__ = ["FILE", "ClientState", "ClientStore", "RememberedUpdate", "fixed_history", "merged_history"]

_CODES = {torch.float32: "f", torch.float64: "d", torch.int32: "i", torch.int64: "q", torch.uint8: "B"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
State = TypeVar("State", bound=DeviceState)


class ClientState(DeviceState):
    """The stored state of a client, whose tables are tensors."""

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
        self._stored = DeviceStore(folder)

    def load(self) -> ClientState:
        """Return the state that was saved last, or a new one with a secret of its own."""
        state = ClientState(**vars(self._stored.load()))
        with self._stored.read_errors():
            return _converted(state, _tensor)

    def save(self, state: ClientState) -> None:
        """Replace the saved state; refuse if another process has done so since this one loaded it."""
        self._stored.save(_converted(state, _table))


def _tensor(table: Table) -> Tensor:
    shape, numbers = table
    if prod(shape) != len(numbers):
        raise Damaged("a shape of another length")
    tensor = torch.frombuffer(numbers, dtype=_DTYPES[numbers.typecode]) if len(numbers) else torch.empty(0)
    if not bool(torch.isfinite(tensor).all()):
        raise Damaged("NaN or infinity")
    return tensor.to(_DTYPES[numbers.typecode]).view(shape)


def _table(tensor: Tensor) -> Table:
    numbers = tensor.detach().contiguous().view(-1)
    return list(tensor.shape), array(_CODES[tensor.dtype], numbers.numpy().tobytes())


def _converted(state: State, convert: Callable[[Any], Any]) -> State:
    """Convert all tables of a state, to tensors or back."""

    def of_update(update: RememberedUpdate) -> RememberedUpdate:
        return replace(update, local_state={name: convert(table) for name, table in update.local_state.items()})

    pending = None if state.pending is None else of_update(state.pending)
    history = {name: convert(table) for name, table in state.history.items()}
    return replace(state, acknowledged=of_update(state.acknowledged), pending=pending, history=history)


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
