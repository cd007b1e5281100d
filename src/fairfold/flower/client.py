"""``make_client_app``: the ClientApp of a device. Flower starts a process for each message: imports here are few."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fairfold.device.store import load_device_id
from fairfold.errors import InvalidSettings, InvalidState, RequestRefused
from fairfold.flower import protocol
from fairfold.flower.protocol import FACTS, VERSION

if TYPE_CHECKING:
    from fairfold.flower.local_data import LocalData, LocalFile, LocalImages

    DataSource = str | Path | LocalFile | Callable[[Context, int], LocalData | LocalImages]

SECURE_PHASES = (protocol.KEYS, protocol.SHARES, protocol.SIGN, protocol.REVEAL)
log = logging.getLogger("fairfold.flower")


def make_client_app(
    data: DataSource | None = None,
    *,
    model: str | None = None,
    capacity: str | Callable[[Context], str] | None = None,
    state: str | Path | None = None,
    share_quality: bool = True,
    repeatable: bool = False,
) -> ClientApp:
    """A ClientApp that takes part in a FAIR federation.

    ``data``, ``capacity`` and ``state`` may be given by ``--node-config`` when the node is started, and so is what it
    requires of secure aggregation (:mod:`.secure_client`): ``key``, ``roster``, ``min-cohort``, ``privacy``.

    Args:
        data: The device's own CSV or SQLite file (or :class:`LocalFile`, which names its columns), or a function from
            Flower's context and the size of the catalogue to :class:`LocalData`.
        model: The model that the device trains, as the settings of the run name it; any of fairfold's if not given. A
            custom one, ``"package.module:Class"``, has to be named here: no server chooses what code a device runs.
        capacity: What the device can hold: ``"40MB"``, or ``"16x"`` for a sixteenth of the model; or a function of the
            context, for simulations. Larger models are refused.
        state: Folder for the device's id, local state and remembered updates; with a ``partition-id``, each node has a
            folder of its own in it.
        share_quality: Reply when the server requests an evaluation of the model on this device's users.
        repeatable: Draw random numbers by the run's seed instead of the device's secret one, for simulations.
    """
    app = ClientApp()
    runtime = ClientRuntime(data, model, capacity, state, share_quality, repeatable)

    def reply(message: Message, context: Context) -> Message:
        try:
            return Message(runtime.handle(message, context), reply_to=message)
        except Exception as error:  # its text quotes names of items, users and files: the server learns its kind alone
            log.exception("this device cannot reply")
            given = f"{type(error).__name__} on the device"
            if isinstance(error, RequestRefused):  # it quotes the server's request and the owner's limits alone
                given = f"{given}: {error.given}; needed: {error.needed}"
            raise InvalidState(given, "a device that can reply", "Its own log has the details.") from None

    for kind in (
        protocol.CAPACITY,
        protocol.STATISTICS,
        protocol.NUMBERING,
        protocol.MODEL,
        protocol.ROWS,
        *SECURE_PHASES,
    ):
        app.query(kind.partition(".")[2])(reply)
    app.train()(reply)
    app.evaluate()(reply)
    return app


@dataclass(frozen=True)
class ClientRuntime:
    """The options of a device's ClientApp (:func:`make_client_app`), and the dispatch of messages to handlers."""

    source: DataSource | None
    model: str | None
    given_capacity: str | Callable[[Context], str] | None
    state: str | Path | None
    share_quality: bool
    repeatable: bool

    def handle(self, message: Message, context: Context) -> RecordDict:
        """The content of the reply to a message."""
        kind = message.metadata.message_type
        if kind in (protocol.MODEL, protocol.ROWS):
            from fairfold.flower import device_model

            if kind == protocol.ROWS:
                return device_model.keep_sums(self, message.content, context)
            signer = str(context.node_config.get("signer", ""))
            return device_model.store_model(self.folder(context), message.content, self.capacity(context), signer)
        if kind in SECURE_PHASES:  # nothing to train: without torch
            from fairfold.flower.secure_client import SECURE_HANDLERS

            return SECURE_HANDLERS[kind](self, message.content, context)
        if kind != protocol.CAPACITY:
            from fairfold.flower.client_tasks import HANDLERS

            return HANDLERS[kind](self, message.content, context)
        facts: dict[str, Any] = {"version": VERSION, "capacity": self.capacity(context)}
        facts |= {"number": _partition_id(context), "name": f"{load_device_id(self.folder(context)):x}"}
        facts |= {} if self.model is None else {"model": self.model}
        return RecordDict({FACTS: ConfigRecord(facts)})

    def capacity(self, context: Context) -> str:
        """The device's capacity, as given or by the node's configuration."""
        if callable(self.given_capacity):
            return self.given_capacity(context)
        capacity = self.given_capacity or context.node_config.get("capacity")
        if capacity is None:
            raise InvalidSettings("no capacity", "what the device can hold", "Give capacity='40MB' or --node-config.")
        return str(capacity)

    def folder(self, context: Context) -> Path:
        """The folder of the device's state."""
        given = self.state if self.state is not None else context.node_config.get("state")
        folder = Path.home() / ".local" / "state" / "fairfold" if given is None else Path(str(given))
        number = _partition_id(context)
        return folder if number < 0 else folder / f"node-{number}"


def _partition_id(context: Context) -> int:
    """A node's number in a simulation; -1 for a real device."""
    number = context.node_config.get("partition-id", -1)
    return number if isinstance(number, int) else -1
