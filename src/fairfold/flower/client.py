"""``make_client_app``: what a device runs. Light to import: torch comes in only when there is something to train.

Flower starts a new process for every message, so whatever is imported here is paid for each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fairfold.errors import InvalidCapacity, InvalidData, InvalidMessage, InvalidSettings, InvalidState
from fairfold.flower.identity import name_of
from fairfold.flower.protocol import CAPACITY, FACTS, NUMBERING, SURVEY, VERSION

if TYPE_CHECKING:
    from fairfold.flower.device import DeviceWork
    from fairfold.flower.local import LocalData, LocalFile, LocalImages
    from fairfold.flower.store import DeviceState, DeviceStore

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
        state: Folder for what the device keeps (its name, its users' vectors, its last words); with a
            ``partition-id``, a folder of its own in it.
        share_quality: Answer when the server asks how well the model serves this device's users.
        repeatable: Draw by the run's seed instead of the device's secret one: for simulations, to be repeated.
        mods: Flower's, wrapped around every call.
    """
    app = ClientApp(mods=mods)
    node = _Device(data, model, budget, state, share_quality, repeatable)

    asked = {CAPACITY: node.capacity, SURVEY: node.survey, NUMBERING: node.numbering}
    for kind, work in asked.items():
        app.query(kind.partition(".")[2])(partial(_discreetly, work))
    app.train()(partial(_discreetly, node.train))
    app.evaluate()(partial(_discreetly, node.evaluate))
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
    """What a device does."""

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
        """Say what this device can hold, which model it trains, and its name."""
        facts: dict[str, Any] = {
            "version": VERSION,
            "capacity": self._capacity(context),
            "number": _number(context),
            "name": f"{name_of(self._folder(context)):x}",
        }
        if self._model is not None:
            facts["model"] = self._model
        return Message(RecordDict({FACTS: ConfigRecord(facts)}), reply_to=message)

    def survey(self, message: Message, context: Context) -> Message:
        """Give this device's part of the sums before the first round, for some items."""
        from fairfold.flower.surveys import asked_in, pack_survey

        settings, items, window = asked_in(message.content)
        data = self._interactions(context, items, ratings=settings.predicts_ratings)
        mine = data.of_its_users()
        answer = settings.algorithm.survey(settings, mine, window)
        return Message(pack_survey(answer), reply_to=message)

    def numbering(self, message: Message, context: Context) -> Message:
        """Note the numbers that some items have in this run: those of this device's own items alone."""
        from fairfold.flower.surveys import told_in

        told = told_in(message.content)
        data = self._interactions(context, told.items, ratings=told.ratings)
        store = self._store(context)
        kept = store.load()
        known = dict(kept.numbers) if kept.numbering == told.numbering else {}
        first = told.window.start
        known |= {item: int(told.places[item - first]) for item in data.own_items() if item in told.window}
        store.save(replace(kept, numbering=told.numbering, numbers=known))
        return Message(RecordDict({FACTS: ConfigRecord({"version": VERSION})}), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Train, and answer with a summand. What the device would remember of it is on its disk before it is sent."""
        from fairfold.flower.store import Word
        from fairfold.flower.wire import pack_reply

        work, store, kept = self._open(message, context)
        order, algorithm = work.order, work.plan.algorithm
        reply, own = work.reply(train=True, quality=order.evaluate and self._share_quality)
        word = Word(order.word, own)
        names = [] if work.names is None else work.names
        kept = replace(kept, names=names, history=work.history)
        if algorithm.keeps == "acknowledged":
            kept = replace(kept, pending=word)
        else:
            kept = replace(kept, said=word, pending=None)
        store.save(kept)
        return Message(pack_reply(order, reply, values=algorithm.values), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Say how well the model serves the users of this device; what it keeps stays as it is."""
        from fairfold.flower.wire import pack_reply

        work, _, _ = self._open(message, context)
        reply, _ = work.reply(train=False, quality=self._share_quality)
        return Message(pack_reply(work.order, reply), reply_to=message)

    def _open(self, message: Message, context: Context) -> tuple[DeviceWork, DeviceStore, DeviceState]:
        from fairfold.flower.device import DeviceWork
        from fairfold.flower.nodes import trains
        from fairfold.flower.wire import unpack_order
        from fairfold.subspace import Capacity

        order = unpack_order(message.content)
        if not trains(self._model, order.settings):  # before its name is used for anything
            mine = "one of fairfold's" if self._model is None else self._model
            kind = order.settings.model.kind
            raise InvalidMessage(f"an order for model.kind={kind!r}", mine, "Name it in make_client_app.")
        store = self._store(context)
        kept = store.load()
        if order.settings.algorithm.keeps == "acknowledged":
            kept = kept.agreed(order.run, order.holds)
        data: LocalData | LocalImages = (
            self._images(context)
            if order.picture is not None
            else self._interactions(context, order.items, ratings=order.settings.predicts_ratings)
        )
        seed = order.settings.run.seed if self._repeatable else kept.secret
        work = DeviceWork(order, data, kept, seed)
        capacity = Capacity.parse(self._capacity(context))
        if not work.plan.method.fits(work.plan.architecture.tensors, order.sent.projections, capacity):
            size = sum(held.size for held in order.sent.projections.values())
            raise InvalidCapacity(f"an order of {size} numbers", f"at most {capacity}", "Ask this device first.")
        return work, store, kept

    def _interactions(self, context: Context, num_items: int, *, ratings: bool) -> LocalData:
        from fairfold.flower.local import LocalData, LocalFile

        source: Any = self._data if self._data is not None else context.node_config.get("data")
        if source is None:
            raise InvalidData("no data", "the device's own file", "Give data=... or --node-config 'data=\"mine.csv\"'.")
        if isinstance(source, str | Path):
            test = context.node_config.get("test")
            source = LocalFile(source, test=None if test is None else str(test))
        found = source.load(num_items, ratings=ratings) if isinstance(source, LocalFile) else source(context, num_items)
        if not isinstance(found, LocalData):
            raise InvalidData(f"{type(found).__name__} for a recommender", "LocalData", "Give interactions.")
        return found

    def _images(self, context: Context) -> LocalImages:
        from fairfold.flower.local import LocalImages

        found = self._data(context, 0) if callable(self._data) else None
        if not isinstance(found, LocalImages):
            raise InvalidData(
                "no images", "data=... a function that returns LocalImages", "Give it to make_client_app."
            )
        return found

    def _capacity(self, context: Context) -> str:
        if callable(self._budget):
            return self._budget(context)
        found = self._budget if self._budget is not None else context.node_config.get("capacity")
        if found is None:
            raise InvalidSettings("no capacity", "what the device can hold", "Give budget='40MB' or --node-config.")
        return str(found)

    def _store(self, context: Context) -> DeviceStore:
        from fairfold.flower.store import DeviceStore

        return DeviceStore(self._folder(context))

    def _folder(self, context: Context) -> Path:
        given = self._state if self._state is not None else context.node_config.get("state")
        folder = Path.home() / ".local" / "state" / "fairfold" if given is None else Path(str(given))
        number = _number(context)
        return folder if number < 0 else folder / f"node-{number}"


def _number(context: Context) -> int:
    """A node's place in a simulation; -1 for a device of its own."""
    found = context.node_config.get("partition-id", -1)
    return found if isinstance(found, int) else -1
