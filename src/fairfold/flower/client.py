"""``make_client_app``: what a device runs. Light to import: torch comes in only when there is something to train.

Flower starts a new process for every message, so whatever is imported here is paid for each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fairfold.errors import InvalidSettings, InvalidState, Refused
from fairfold.files import make_private, write_atomically
from fairfold.flower.protocol import (
    CAPACITY,
    DIGITS,
    FACTS,
    KEYS,
    MODEL,
    NUMBERING,
    REVEAL,
    SHARES,
    SIGN,
    SURVEY,
    VERSION,
    new_word,
)
from fairfold.sealed import Damaged, content_of, lines_in, reading, sealed_line

if TYPE_CHECKING:
    from fairfold.flower.local import LocalData, LocalFile, LocalImages

    DataSource = str | Path | LocalFile | Callable[[Context, int], LocalData | LocalImages]


log = logging.getLogger("fairfold.flower")


def make_client_app(
    data: DataSource | None = None,
    *,
    model: str | None = None,
    budget: str | Callable[[Context], str] | None = None,
    state: str | Path | None = None,
    share_quality: bool = True,
    repeatable: bool = False,
) -> ClientApp:
    """A ClientApp that takes part in a FAIR federation.

    What is not given here is taken from ``--node-config`` when the node is started: ``data``, ``capacity``, ``state``;
    and what it wants of secure sums (:mod:`.secure_device`): ``key``, ``roster``, ``smallest-cohort``, ``privacy``.

    Args:
        data: The device's own CSV or SQLite file (or :class:`LocalFile`, which names its columns), or a function from
            Flower's context and the size of the catalogue to :class:`LocalData`.
        model: What the device trains, as the settings of the run name it; any of fairfold's if not given. One of your
            own, ``"package.module:Class"``, has to be named here: no server chooses what code a device runs.
        budget: What the device can hold: ``"40MB"``, or ``"16x"`` for a sixteenth of the model; or a function of the
            context, for simulations. More is refused.
        state: Folder for what the device keeps (its name, its users' vectors, its last words); with a
            ``partition-id``, a folder of its own in it.
        share_quality: Answer when the server asks how well the model serves this device's users.
        repeatable: Draw by the run's seed instead of the device's secret one: for simulations, to be repeated.
    """
    app = ClientApp()
    device = Device(data, model, budget, state, share_quality, repeatable)

    def answer(message: Message, context: Context) -> Message:
        """What goes wrong is told in full in the device's own log; the server learns its kind, and why it was refused.

        Flower sends an exception's text to the server, and ours quote what was given: names of items, users, files.
        """
        try:
            return Message(device.says(message, context), reply_to=message)
        except Exception as error:
            log.exception("this device cannot answer")
            told = f"{type(error).__name__} on the device"
            if isinstance(error, Refused):  # it quotes what the server said, and what this device's owner allows
                told = f"{told}: {error.given}; needed: {error.needed}"
            raise InvalidState(told, "a device that can answer", "Its own log says more.") from None

    for kind in (CAPACITY, SURVEY, NUMBERING, MODEL, KEYS, SHARES, SIGN, REVEAL):
        app.query(kind.partition(".")[2])(answer)
    app.train()(answer)
    app.evaluate()(answer)
    return app


@dataclass(frozen=True)
class Device:
    """What a device was given, here or when its node was started."""

    source: DataSource | None
    model: str | None
    budget: str | Callable[[Context], str] | None
    state: str | Path | None
    share_quality: bool
    repeatable: bool

    def says(self, message: Message, context: Context) -> RecordDict:
        """What it can hold, which model it trains, and its name; or what an order makes of its data."""
        kind = message.metadata.message_type
        if kind == MODEL:
            from fairfold.flower.offline import keep_model

            return keep_model(self.folder(context), message.content, self.capacity(context))
        if kind in (KEYS, SHARES, SIGN, REVEAL):  # nothing to train: torch stays away
            from fairfold.flower.secure_device import STEPS

            return STEPS[kind](self, message.content, context)
        if kind != CAPACITY:
            from fairfold.flower.answers import WORK

            return WORK[kind](self, message.content, context)
        facts: dict[str, Any] = {
            "version": VERSION,
            "capacity": self.capacity(context),
            "number": _number(context),
            "name": f"{name_of(self.folder(context)):x}",
        }
        if self.model is not None:
            facts["model"] = self.model
        return RecordDict({FACTS: ConfigRecord(facts)})

    def capacity(self, context: Context) -> str:
        """What it can hold."""
        if callable(self.budget):
            return self.budget(context)
        found = self.budget if self.budget is not None else context.node_config.get("capacity")
        if found is None:
            raise InvalidSettings("no capacity", "what the device can hold", "Give budget='40MB' or --node-config.")
        return str(found)

    def folder(self, context: Context) -> Path:
        """Of what it keeps."""
        given = self.state if self.state is not None else context.node_config.get("state")
        folder = Path.home() / ".local" / "state" / "fairfold" if given is None else Path(str(given))
        number = _number(context)
        return folder if number < 0 else folder / f"node-{number}"


def _number(context: Context) -> int:
    """A node's place in a simulation; -1 for a device of its own."""
    found = context.node_config.get("partition-id", -1)
    return found if isinstance(found, int) else -1


def name_of(folder: Path) -> int:
    """The name of the device that lives in a folder: a number of its own choice, which outlives server and network."""
    path = folder / "name"
    with reading(path, InvalidState, "the device's name", "Remove the file: it gets a new one."):
        if not path.exists():
            name = new_word()
            make_private(folder)
            # With a checksum: a device of another name would be counted beside what it had said.
            write_atomically(path, sealed_line(f"{name:x}").encode())
            return name
        digits = lines_in(content_of(path, largest=64))
        if len(digits) != 1 or not DIGITS.fullmatch(digits[0]):
            raise Damaged("no name")
        return int(digits[0], 16)
