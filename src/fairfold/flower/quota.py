"""How much of the SuperLink one node may fill.

Flower's SuperLink keeps whatever a node with a key uploads, until it is fetched or the run ends. Here a node may upload
only what answers a message it was given, in pieces that together stay within its share. What was fetched since is
taken off; what nobody fetched in time is thrown away.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from flwr.proto.message_pb2 import ObjectTree

SMALLEST_CHARGE = 1 << 16
"""Bytes that an announced piece counts at least: its names and lists take memory too, even if it never comes."""

TRIES = 8  # how often one message may be answered: a connection may break in the middle
REMEMBERED = 64  # messages a node may have open; Flower gives it one at a time
PAUSE = 1.0  # seconds between two looks at what is still there, so that being refused costs the server nothing


class Refused(Exception):
    """An upload that is not taken; it may be taken later where others fill the server, not this node."""

    def __init__(self, reason: str, *, later: bool = False) -> None:
        super().__init__(reason)
        self.later = later


@dataclass
class _Account:
    """What a node was given and what it has stored."""

    # Messages it may answer: how often still, and until when.
    given: dict[str, tuple[int, float]] = field(default_factory=dict)
    # What it has stored, by answer: the message answered, until when it is kept, and the charge of every piece.
    answers: dict[str, tuple[str, float, dict[str, int]]] = field(default_factory=dict)
    used: int = 0


class Quota:
    """Keeps the accounts of all nodes: the bytes that each, and all together, may have stored."""

    def __init__(self, each: int, total: int) -> None:
        self.each, self.total = each, total
        self.lock = threading.RLock()
        self.stored = 0  # what all nodes are charged for now
        self.accounts: dict[int, _Account] = {}
        self._looked = -PAUSE

    def given(self, node: int, message: str, until: float) -> None:
        """A node was given a message, which it may answer until a time (seconds since the epoch)."""
        with self.lock:
            account = self.accounts.setdefault(node, _Account())
            account.given[message] = (TRIES, until)
            while len(account.given) > REMEMBERED:
                del account.given[next(iter(account.given))]  # the oldest

    def announce(self, node: int, asked: str, tree: ObjectTree, size: int, state: Any) -> None:
        """Charge a node for an answer that it announces; refused unless it was asked, and has room.

        ``size`` is that of the announcement itself; ``state`` is Flower's, with its store of pieces.
        """
        with self.lock:
            account = self.accounts.get(node, _Account())
            if asked not in account.given:
                raise Refused("an answer to a message that this node was not given")
            tries, until = account.given[asked]
            if tries < 1 or until < time.time():
                raise Refused("an answer too late or too often")
            account.given[asked] = (tries - 1, until)
            names = _consistent(tree, state.object_store)
            _, _, charges = account.answers.setdefault(tree.object_id, (asked, until, {}))
            wanted = {name: max(charges.get(name, 0), SMALLEST_CHARGE) for name in names}
            wanted[tree.object_id] = max(wanted[tree.object_id], size)
            try:
                self._charge(account, charges, wanted, state)
            except Refused:
                if not charges:
                    account.answers.pop(tree.object_id, None)
                raise

    def upload(self, node: int, name: str, size: int, state: Any) -> None:
        """Charge a node for a piece of an answer that it has announced."""
        with self.lock:
            account = self.accounts.get(node, _Account())
            for _, _, charges in account.answers.values():
                if name in charges:
                    self._charge(account, charges, {name: max(charges[name], size)}, state)
                    return
            raise Refused("a piece of no answer that this node has announced")

    def _charge(self, account: _Account, charges: dict[str, int], wanted: dict[str, int], state: Any) -> None:
        def more() -> int:
            return sum(size - charges.get(name, 0) for name, size in wanted.items())

        def over() -> tuple[bool, bool]:
            return account.used + more() > self.each, self.stored + more() > self.total

        if any(over()) and time.monotonic() - self._looked >= PAUSE:
            for other in self.accounts.values():
                self._look(other, state, keep=charges)
            self._looked = time.monotonic()
        too_much, too_full = over()
        if too_much:
            raise Refused(f"more than the {self.each} bytes that a node may have stored")
        if too_full:
            raise Refused(f"more than the {self.total} bytes that all nodes may have stored", later=True)
        self._book(account, more())
        charges.update(wanted)

    def _book(self, account: _Account, size: int) -> None:
        account.used, self.stored = account.used + size, self.stored + size

    def _look(self, account: _Account, state: Any, keep: dict[str, int]) -> None:
        """Throw away what nobody fetched in time, and forget what is not there any more."""
        store = state.object_store
        for root, (asked, until, charges) in list(account.answers.items()):
            if until < time.time():
                state.delete_messages({asked})
                store.delete(root)
            for name in [name for name in charges if name not in store]:
                self._book(account, -charges.pop(name))
            if not charges and charges is not keep:
                del account.answers[root]


def _consistent(tree: ObjectTree, store: Any) -> set[str]:
    """The names in a tree; refused if a name stands for two things, here or in the store.

    Flower keeps the children of every piece once, by its name, and writes the tree out again for whoever fetches the
    answer. A few pieces that each contain the next one twice would become more than any memory holds.
    """
    seen = _contents(tree)
    waiting, done = [tree], set()
    while waiting:
        one = waiting.pop()
        if one.object_id in done:
            continue
        done.add(one.object_id)
        if one.object_id not in store:
            waiting.extend(one.children)
            continue
        stored = _contents(store.get_object_tree(one.object_id))
        if any(seen.get(name) != children for name, children in stored.items()):
            raise Refused("a piece with another content than the one that is stored")
    return set(seen)


def _contents(tree: ObjectTree) -> dict[str, list[str]]:
    """Of what every piece is made; not every store keeps the order."""
    found: dict[str, list[str]] = {}
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        children = sorted(child.object_id for child in one.children)
        if found.setdefault(one.object_id, children) != children:
            raise Refused("a piece with two contents")
        waiting.extend(one.children)
    return found
