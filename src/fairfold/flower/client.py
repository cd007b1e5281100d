"""``make_client_app``: what a device runs. Light to import: torch comes in only when there is something to train.

Flower starts a new process for every message, so whatever is imported here is paid for each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fairfold.errors import InvalidCapacity, InvalidData, InvalidMessage, InvalidSettings, InvalidState
from fairfold.files import make_private, write_atomically
from fairfold.flower.protocol import CAPACITY, DIGITS, FACTS, NUMBERING, SURVEY, VERSION, new_word

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
    for kind, work in {CAPACITY: node.capacity, SURVEY: node.survey, NUMBERING: node.numbering}.items():
        app.query(kind.partition(".")[2])(partial(_discreetly, work))
    app.train()(partial(_discreetly, node.train))
    app.evaluate()(partial(_discreetly, node.evaluate))
    return app


def _discreetly(work: Callable[[Message, Context], RecordDict], message: Message, context: Context) -> Message:
    """What goes wrong is told in full in the device's own log; the server learns its kind alone.

    Flower sends an exception's text to the server, and ours quote what was given: names of items, users, files.
    """
    try:
        return Message(work(message, context), reply_to=message)
    except Exception as error:
        log.exception("this device cannot answer")
        raise InvalidState(
            f"{type(error).__name__} on the device", "a device that can answer", "Its own log says more."
        ) from None


@dataclass(frozen=True)
class _Device:
    """What a device does."""

    source: DataSource | None
    model: str | None
    budget: str | Callable[[Context], str] | None
    state: str | Path | None
    share_quality: bool
    repeatable: bool

    def capacity(self, _message: Message, context: Context) -> RecordDict:
        """Say what this device can hold, which model it trains, and its name."""
        facts: dict[str, Any] = {
            "version": VERSION,
            "capacity": self._capacity(context),
            "number": _number(context),
            "name": f"{name_of(self._folder(context)):x}",
        }
        if self.model is not None:
            facts["model"] = self.model
        return RecordDict({FACTS: ConfigRecord(facts)})

    def survey(self, message: Message, context: Context) -> RecordDict:
        """Give this device's part of the sums before the first round, for some items."""
        from fairfold.flower.wire import asked_in, pack_survey

        settings, items, window = asked_in(message.content)
        mine = self._interactions(context, items, ratings=settings.predicts_ratings).of_its_users()
        return pack_survey(settings.algorithm.survey(settings, mine, window))

    def numbering(self, message: Message, context: Context) -> RecordDict:
        """Note the numbers that some items have in this run: those of this device's own items alone."""
        from fairfold.flower.wire import told_in

        told = told_in(message.content)
        data = self._interactions(context, told.items, ratings=told.ratings)
        store = self._store(context)
        kept = store.load()
        known = dict(kept.numbers) if kept.numbering == told.numbering else {}
        first = told.window.start
        known |= {item: int(told.places[item - first]) for item in data.own_items() if item in told.window}
        store.save(replace(kept, numbering=told.numbering, numbers=known))
        return RecordDict({FACTS: ConfigRecord({"version": VERSION})})

    def train(self, message: Message, context: Context) -> RecordDict:
        """Train, and answer with a summand. What the device would remember of it is on its disk before it is sent."""
        from fairfold.flower.store import Word
        from fairfold.flower.wire import pack_reply

        work, store, kept = self._open(message, context)
        order, algorithm = work.order, work.plan.algorithm
        reply, own = work.reply(train=True, quality=order.evaluate and self.share_quality)
        kept, word = replace(kept, names=work.names, history=work.history), Word(order.word, own)
        if algorithm.keeps == "acknowledged":
            store.save(replace(kept, pending=word))
        else:
            store.save(replace(kept, said=word, pending=None))
        return pack_reply(order, reply, values=algorithm.values)

    def evaluate(self, message: Message, context: Context) -> RecordDict:
        """Say how well the model serves the users of this device; what it keeps stays as it is."""
        from fairfold.flower.wire import pack_reply

        work, _, _ = self._open(message, context)
        reply, _ = work.reply(train=False, quality=self.share_quality)
        return pack_reply(work.order, reply)

    def _open(self, message: Message, context: Context) -> tuple[DeviceWork, DeviceStore, DeviceState]:
        from fairfold.flower.device import DeviceWork
        from fairfold.flower.nodes import trains
        from fairfold.flower.wire import unpack_order
        from fairfold.subspace import Capacity

        order = unpack_order(message.content)
        settings = order.settings
        if not trains(self.model, settings):  # before its name is used for anything
            mine = "one of fairfold's" if self.model is None else self.model
            raise InvalidMessage(
                f"an order for model.kind={settings.model.kind!r}", mine, "Name it in make_client_app."
            )
        store = self._store(context)
        kept = store.load()
        if settings.algorithm.keeps == "acknowledged":
            kept = kept.agreed(order.run, order.holds)
        data: LocalData | LocalImages
        if order.picture is not None:
            data = self._images(context)
        else:
            data = self._interactions(context, order.items, ratings=settings.predicts_ratings)
        work = DeviceWork(order, data, kept, settings.run.seed if self.repeatable else kept.secret)
        capacity = Capacity.parse(self._capacity(context))
        if not work.plan.method.fits(work.plan.architecture.tensors, order.sent.projections, capacity):
            size = sum(held.size for held in order.sent.projections.values())
            raise InvalidCapacity(f"an order of {size} numbers", f"at most {capacity}", "Ask this device first.")
        return work, store, kept

    def _interactions(self, context: Context, num_items: int, *, ratings: bool) -> LocalData:
        from fairfold.flower.local import LocalData, LocalFile

        source: Any = self.source if self.source is not None else context.node_config.get("data")
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

        found = self.source(context, 0) if callable(self.source) else None
        if not isinstance(found, LocalImages):
            needed = "data=... a function that returns LocalImages"
            raise InvalidData("no images", needed, "Give it to make_client_app.")
        return found

    def _capacity(self, context: Context) -> str:
        if callable(self.budget):
            return self.budget(context)
        found = self.budget if self.budget is not None else context.node_config.get("capacity")
        if found is None:
            raise InvalidSettings("no capacity", "what the device can hold", "Give budget='40MB' or --node-config.")
        return str(found)

    def _store(self, context: Context) -> DeviceStore:
        from fairfold.flower.store import DeviceStore

        return DeviceStore(self._folder(context))

    def _folder(self, context: Context) -> Path:
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
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        name = new_word()
        make_private(folder)
        write_atomically(path, f"{name:x}\n".encode())
        return name
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidState(f"{path}: {error}", "the device's name", "Remove the file: it gets a new one.") from None
    if not DIGITS.fullmatch(text):
        raise InvalidState(f"{path}: {text[:64]!r}", "the device's name", "Remove the file: it gets a new one.")
    return int(text, 16)
