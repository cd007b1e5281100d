"""What a device answers to each kind of message: as it is, or under the masks of a secure sum."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, MessageType, RecordDict

from fairfold.errors import InvalidCapacity, InvalidData, InvalidMessage
from fairfold.flower import wire
from fairfold.flower.device import DeviceWork
from fairfold.flower.local import LocalData, LocalFile, LocalImages
from fairfold.flower.protocol import FACTS, NUMBERING, SURVEY, VERSION
from fairfold.flower.secure_device import speaking, usable
from fairfold.flower.secure_sums import judged, judging, surveying
from fairfold.flower.store import DeviceStore, Word
from fairfold.privacy.encoding import Heard
from fairfold.protocol.hearing import as_change, encoding_of
from fairfold.secure.keys import refuse
from fairfold.subspace import Capacity

if TYPE_CHECKING:
    from fairfold.flower.client import Device


def survey(device: Device, content: RecordDict, context: Context) -> RecordDict:
    """This device's part of the sums before the first round, for some items."""
    settings, items, window = wire.asked_in(content)
    with speaking(device, content, context, settings, "survey", window.start, None) as say:
        mine = _interactions(device, context, items, ratings=settings.predicts_ratings).of_its_users()
        answer = settings.algorithm.survey(settings, mine, window)
        if say is None:
            return wire.pack_survey(answer)
        return say(lambda devices: surveying(settings, window, devices), Heard(answer), 0)


def note_numbers(device: Device, content: RecordDict, context: Context) -> RecordDict:
    """Note the numbers that some items have in this run: those of this device's own items alone."""
    told = wire.told_in(content)
    data = _interactions(device, context, told.items, ratings=told.ratings)
    store = DeviceStore(device.folder(context))
    kept = store.load()
    known = dict(kept.numbers) if kept.numbering == told.numbering else {}
    first = told.window.start
    known |= {item: int(told.places[item - first]) for item in data.own_items() if item in told.window}
    store.save(replace(kept, numbering=told.numbering, numbers=known))
    return RecordDict({FACTS: ConfigRecord({"version": VERSION})})


def train(device: Device, content: RecordDict, context: Context) -> RecordDict:
    """Train, and answer with a summand. What the device would remember of it is on its disk before it is sent."""
    work, store = _open(device, content, context)
    order, algorithm = work.order, work.plan.algorithm
    with speaking(device, content, context, order.settings, "train", order.sent.round_number, order.run) as say:
        judges = order.evaluate and device.share_quality and order.settings.privacy.tells_quality
        reply, own = work.reply(train=True, quality=judges)
        kept, word = replace(work.kept, names=work.names, history=work.history), Word(order.word, own)
        if algorithm.keeps == "acknowledged":
            store.save(replace(kept, pending=word))
        else:
            store.save(replace(kept, said=word, pending=None))
        if say is None:
            return wire.pack_reply(order, reply, values=algorithm.values)
        assert reply.answer is not None
        usable(algorithm.problem(work.plan, order.sent, reply.answer))
        said = replace(judged(reply.quality), answer=as_change(work.plan, order.sent, reply.answer))
        return say(partial(encoding_of, work.plan, {order.sent.size: order.sent}), said, order.sent.size)


def evaluate(device: Device, content: RecordDict, context: Context) -> RecordDict:
    """Say how well the model serves the users of this device; what it keeps stays as it is."""
    work, _ = _open(device, content, context)
    order = work.order
    if not order.settings.privacy.tells_quality:
        raise refuse("a question for qualities where sums have noise", "what the budget is spent on")
    with speaking(device, content, context, order.settings, "evaluate", order.sent.round_number, order.run) as say:
        reply = work.reply(train=False, quality=device.share_quality)[0]
        return wire.pack_reply(order, reply) if say is None else say(judging, judged(reply.quality), 0)


WORK = {SURVEY: survey, NUMBERING: note_numbers, MessageType.TRAIN: train, MessageType.EVALUATE: evaluate}


def _open(device: Device, content: RecordDict, context: Context) -> tuple[DeviceWork, DeviceStore]:
    order = wire.unpack_order(content)
    settings = order.settings
    if not wire.trains(device.model, settings):  # before its name is used for anything
        mine = "one of fairfold's" if device.model is None else device.model
        raise InvalidMessage(f"an order for model.kind={settings.model.kind!r}", mine, "Name it in make_client_app.")
    store = DeviceStore(device.folder(context))
    kept = store.load()
    if settings.algorithm.keeps == "acknowledged":
        kept = kept.agreed(order.run, order.holds)
    data: LocalData | LocalImages
    if order.picture is not None:
        data = _images(device, context)
    else:
        data = _interactions(device, context, order.items, ratings=settings.predicts_ratings)
    work = DeviceWork(order, data, kept, settings.run.seed if device.repeatable else kept.secret)
    capacity = Capacity.parse(device.capacity(context))
    if not work.plan.method.fits(work.plan.architecture.tensors, order.sent.projections, capacity):
        size = sum(held.size for held in order.sent.projections.values())
        raise InvalidCapacity(f"an order of {size} numbers", f"at most {capacity}", "Ask this device first.")
    return work, store


def _interactions(device: Device, context: Context, num_items: int, *, ratings: bool) -> LocalData:
    source: Any = device.source if device.source is not None else context.node_config.get("data")
    if source is None:
        raise InvalidData("no data", "the device's own file", "Give data=... or --node-config 'data=\"mine.csv\"'.")
    if isinstance(source, str | Path):
        test = context.node_config.get("test")
        source = LocalFile(source, test=None if test is None else str(test))
    found = source.load(num_items, ratings=ratings) if isinstance(source, LocalFile) else source(context, num_items)
    if not isinstance(found, LocalData):
        raise InvalidData(f"{type(found).__name__} for a recommender", "LocalData", "Give interactions.")
    return found


def _images(device: Device, context: Context) -> LocalImages:
    found = device.source(context, 0) if callable(device.source) else None
    if not isinstance(found, LocalImages):
        needed = "data=... a function that returns LocalImages"
        raise InvalidData("no images", needed, "Give it to make_client_app.")
    return found
