"""``make_client_app``: what a device runs. Light to import: torch comes in only when there is something to train.

Flower starts a new process for every message, so whatever is imported here is paid for each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fairfold.errors import InvalidCapacity, InvalidData, InvalidMessage, InvalidSettings, InvalidState
from fairfold.flower.protocol import CAPACITY, FACTS, VERSION

if TYPE_CHECKING:
    from fairfold.flower.device import LocalTask
    from fairfold.flower.local import LocalData, LocalFile
    from fairfold.flower.store import DeviceState, DeviceStore

    DataSource = str | Path | LocalFile | Callable[[Context, int], LocalData]


log = logging.getLogger("fairfold.flower")


def make_client_app(
    data: DataSource | None = None,
    *,
    model: str | None = None,
    budget: str | Callable[[Context], str] | None = None,
    state: str | Path | None = None,
    share_quality: bool = True,
    repeatable: bool = False,
    mods: list[Any] | None = None,
) -> ClientApp:
    """A ClientApp that takes part in a FAIR federation.

    What is not given here is taken from ``--node-config`` when the node is started: ``data``, ``capacity``, ``state``.

    Args:
        data: The device's own CSV or SQLite file (or :class:`LocalFile`, which names its columns), or a function from
            Flower's context and the size of the catalogue to :class:`LocalData`.
        model: What the device trains, as the settings of the run name it; any of fairfold's if not given. One of your
            own, ``"package.module:Class"``, has to be named here: no server chooses what code a device runs.
        budget: What the device can hold: ``"40MB"``, or ``"16x"`` for a sixteenth of the model; or a function of the
            context, for simulations. More is refused.
        state: Folder for what the device keeps to itself; with a ``partition-id``, a folder of its own in it.
        share_quality: Answer when the server asks how well the model serves this device's users.
        repeatable: Draw by the run's seed instead of the device's secret one: for simulations, to be repeated.
        mods: Flower's, wrapped around every call.
    """
    app = ClientApp(mods=mods)
    node = _Device(data, model, budget, state, share_quality, repeatable)

    @app.query(CAPACITY.partition(".")[2])
    def capacity(message: Message, context: Context) -> Message:
        return _discreetly(node.capacity, message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _discreetly(node.train, message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _discreetly(node.evaluate, message, context)

    return app


def _discreetly(work: Callable[[Message, Context], Message], message: Message, context: Context) -> Message:
    """What goes wrong is told in full in the device's own log; the server learns its kind alone.

    Flower sends an exception's text to the server, and ours quote what was given: names of items, users, files.
    """
    try:
        return work(message, context)
    except Exception as error:
        log.exception("this device cannot answer")
        raise InvalidState(
            f"{type(error).__name__} on the device", "a device that can answer", "Its own log says more."
        ) from None


class _Device:
    """The three things a device does."""

    def __init__(
        self,
        data: DataSource | None,
        model: str | None,
        budget: str | Callable[[Context], str] | None,
        state: str | Path | None,
        share_quality: bool,
        repeatable: bool,
    ) -> None:
        self._data, self._model, self._budget, self._state = data, model, budget, state
        self._share_quality, self._repeatable = share_quality, repeatable

    def capacity(self, message: Message, context: Context) -> Message:
        """Say what this device can hold."""
        facts: dict[str, Any] = {"version": VERSION, "capacity": self._capacity(context), "number": _number(context)}
        if self._model is not None:
            facts["model"] = self._model
        return Message(RecordDict({FACTS: ConfigRecord(facts)}), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Train inside the subspace; keep what is private, send what was changed."""
        from dataclasses import replace

        from fairfold.flower.store import DeviceState
        from fairfold.flower.wire import pack_answer

        work, store, kept = self._open(message, context)
        own = kept.rows_of(work.data.names, work.fresh())
        quality = work.quality(own) if work.order.evaluate and self._share_quality else None
        answer = work.train(own)
        # First to the disk: a device that cannot keep its users' vectors does not answer for them.
        store.save(DeviceState(own, work.data.names, kept.secret, work.order.round_number + 1))
        return Message(pack_answer(work.order, replace(answer, quality=quality)), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Say how well the model serves the users of this device; their vectors stay as they are."""
        from fairfold.flower.wire import Answer, pack_answer

        work, _, kept = self._open(message, context)
        own = kept.rows_of(work.data.names, work.fresh())
        quality = work.quality(own) if self._share_quality else None
        return Message(pack_answer(work.order, Answer({}, 0.0, quality)), reply_to=message)

    def _open(self, message: Message, context: Context) -> tuple[LocalTask, DeviceStore, DeviceState]:
        from fairfold.federation.task import is_table
        from fairfold.flower.device import LocalTask
        from fairfold.flower.plan import fits, trains
        from fairfold.flower.store import DeviceStore
        from fairfold.flower.wire import unpack_order
        from fairfold.subspace import Capacity

        order, received = unpack_order(message.content)
        if not trains(self._model, order.settings):  # before its name is used for anything
            mine = "one of fairfold's" if self._model is None else self._model
            raise InvalidMessage(f"an order for model={order.settings.model!r}", mine, "Name it in make_client_app.")
        tables = [held.shape[0] for name, held in order.projections.items() if is_table(name, "item")]
        num_items = max(tables, default=0)
        data = self._load(context, num_items, ratings=order.settings.predicts_ratings)
        store = DeviceStore(self._folder(context))
        kept = store.load()
        work = LocalTask(order, received, data, order.settings.seed if self._repeatable else kept.secret)
        capacity = Capacity.parse(self._capacity(context))
        if not fits(order.projections, capacity, work.task):
            size = sum(held.size for held in order.projections.values())
            raise InvalidCapacity(f"an order of {size} numbers", f"at most {capacity}", "Ask this device first.")
        return work, store, kept

    def _load(self, context: Context, num_items: int, *, ratings: bool) -> LocalData:
        from fairfold.flower.local import LocalFile

        source: Any = self._data if self._data is not None else context.node_config.get("data")
        if source is None:
            raise InvalidData("no data", "the device's own file", "Give data=... or --node-config 'data=\"mine.csv\"'.")
        if isinstance(source, str | Path):
            test = context.node_config.get("test")
            source = LocalFile(source, test=None if test is None else str(test))
        if isinstance(source, LocalFile):
            return source.load(num_items, ratings=ratings)
        found: LocalData = source(context, num_items)
        return found

    def _capacity(self, context: Context) -> str:
        if callable(self._budget):
            return self._budget(context)
        found = self._budget if self._budget is not None else context.node_config.get("capacity")
        if found is None:
            raise InvalidSettings("no capacity", "what the device can hold", "Give budget='40MB' or --node-config.")
        return str(found)

    def _folder(self, context: Context) -> Path:
        given = self._state if self._state is not None else context.node_config.get("state")
        folder = Path.home() / ".local" / "state" / "fairfold" if given is None else Path(str(given))
        number = _number(context)
        return folder if number < 0 else folder / f"node-{number}"


def _number(context: Context) -> int:
    """A node's place in a simulation; -1 for a device of its own."""
    found = context.node_config.get("partition-id", -1)
    return found if isinstance(found, int) else -1
