"""Nothing of the size of the table on a device; never the replies of a whole round on the server."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import numpy
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fairfold.flower.grid import FETCHED_AT_ONCE, InProcessGrid, PendingReplies, StreamingGrid

DEVICE = """
import json, resource, sys, tempfile, torch
from pathlib import Path
from fairfold.data import Interactions
from fairfold.flower.client_tasks import TaskRunner
from fairfold.flower.local_data import LocalData
from fairfold.flower.client_store import ClientState
from fairfold.flower.wire import TaskRequest, pack_request, pack_reply, unpack_request
from fairfold.federation.plan import Plan
from fairfold.federation.updates import PublicStatistics, ClientTask
from tests.support.settings import make_settings

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def work(items, changes):
    settings = make_settings(**{"factors": 64, "capacities": "64x"} | changes)
    public = PublicStatistics(items, statistics={"counts": torch.full((items,), 20.0)})
    (held,) = Plan.of(settings, public).assignments(0)
    vectors = {name: torch.randn(one.size) for name, one in held.projections.items()}
    if "gram" in vectors:
        vectors["gram"] = torch.eye(64).view(-1)
    if "centre" in vectors:
        vectors["centre"] = torch.tensor([3.0, 1.0, 0.0])
    context = {name: one for name, one in held.projections.items() if name.startswith("item")}
    order = TaskRequest(ClientTask(0, 0, held.projections, vectors, context), settings, items, 1, 2, evaluate=True)
    order = unpack_request(pack_request(order)[0])
    mine = torch.arange(0, items, items // 100)
    stars = lambda part: torch.ones(len(part)) if settings.predicts_ratings else None
    pairs = lambda part: Interactions.from_pairs(torch.zeros(len(part), dtype=torch.long), part, 1, items, stars(part))
    device = TaskRunner(order, LocalData(pairs(mine[::2]), pairs(mine[1::2])), ClientState(run=1), 1)
    reply, _ = device.reply(train=True, evaluate=True)
    assert reply.quality is not None
    pack_reply(order, reply)

changes = json.loads(sys.argv[1])
work(20_000, changes)  # everything is loaded and warm
before = peak()
work(400_000, changes)
print(peak() - before)
"""


def device_peak(changes: dict[str, Any]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", DEVICE, json.dumps(changes)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "closed_form", "chunk": 8}, {"algorithm": "gradient", "chunk": 8, "local_optimizer": "adam"},
        {"algorithm": "ratings", "reference_factors": 64},
    ],
)  # fmt: skip
def test_a_device_trains_and_evaluates_a_table_it_could_not_hold(changes: dict[str, Any]) -> None:
    """A table of 102 MB at 64x: 1.6 MB held, and a few copies of it at work; items are scored in blocks."""
    assert device_peak(changes) < 34e6


class LazyGrid(InProcessGrid):
    """Makes every reply when it is fetched, and counts how many are alive."""

    def __init__(self, nodes: int) -> None:
        super().__init__(None, [{}] * nodes)  # type: ignore[arg-type]
        self.alive: weakref.WeakSet[Message] = weakref.WeakSet()
        self.asked: dict[str, Message] = {}
        self.most = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{number}"
            self.asked[f"m{number}"] = message
        return list(self.asked)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = [Message(RecordDict({"a": ArrayRecord()}), reply_to=self.asked.pop(name)) for name in message_ids]
        for reply in replies:
            self.alive.add(reply)
        gc.collect()
        self.most = max(self.most, len(self.alive))
        return replies


def test_replies_are_handed_on_and_forgotten() -> None:
    grid = LazyGrid(40)
    messages = [Message(RecordDict({"f": ConfigRecord()}), node, "train") for node in grid.get_node_ids()]
    seen = 0
    for reply in StreamingGrid(grid, 1000).send_and_receive(messages, timeout=5):
        seen += reply.has_content()
        del reply
    assert seen == 40
    assert grid.most <= 2 * FETCHED_AT_ONCE


class Pieces:
    """Flower's way to the SuperLink, which holds one reply in pieces of about 1,000 bytes."""

    def __init__(self, reply: Message) -> None:
        self.fetched = 0
        self.contents = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        self._tree = get_object_tree(reply)
        self._proto = message_to_proto(remove_content_from_message(reply))

    def PullMessages(self, _request: object) -> PullAppMessagesResponse:  # noqa: N802 - Flower's name
        return PullAppMessagesResponse(messages_list=[self._proto], message_object_trees=[self._tree])

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        self.fetched += len(self.contents[request.object_id])
        return PullObjectResponse(
            object_found=True, object_available=True, object_content=self.contents[request.object_id]
        )

    def ConfirmMessageReceived(self, _request: object) -> None:  # noqa: N802
        pass


@pytest.mark.parametrize("allowed", [True, False])
def test_a_reply_of_too_many_bytes_is_not_fetched_to_its_end(allowed: bool) -> None:
    arrays = ArrayRecord({f"a{number}": Array(numpy.full(250, number, numpy.float32)) for number in range(400)})
    InProcessGrid(None, [{}])  # type: ignore[arg-type]  # messages belong to a run, which this one names
    asked = Message(RecordDict({"f": ConfigRecord()}), 7, "train")
    asked.metadata.__dict__.update(_message_id="asked", _run_id=1)
    reply = Message(RecordDict({"a": arrays}), reply_to=asked)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    link = Pieces(reply)
    grid = HttpGrid(token="none")
    grid._run, grid._client = Run.create_empty(1), link  # type: ignore[assignment]
    watched = StreamingGrid(grid, 200_000 if allowed else 10_000)
    (found,) = watched.exchange([], PendingReplies({"asked": 7}), 5)
    assert found.has_content() == allowed
    assert (link.fetched > 400 * 1_000) == allowed
    if not allowed:
        assert "more bytes than a reply can have" in str(found.error.reason)
        assert link.fetched < 150_000, "what a few threads had already asked for, not the rest"


class Dribble(Pieces):
    """The last piece never comes."""

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        if request.object_id == max(self.contents):
            return PullObjectResponse(object_found=True, object_available=False)
        return super().PullObject(request)


def test_an_incomplete_reply_is_given_up_at_the_deadline() -> None:
    """Flower alone would wait two hours for it; replies that are there are still fetched."""
    InProcessGrid(None, [{}])  # type: ignore[arg-type]
    asked = Message(RecordDict({"f": ConfigRecord()}), 7, "train")
    asked.metadata.__dict__.update(_message_id="asked", _run_id=1)
    reply = Message(RecordDict({"a": ArrayRecord({"a": Array(numpy.ones(9, numpy.float32))})}), reply_to=asked)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    for link, good in ((Dribble(reply), False), (Pieces(reply), True)):
        grid = HttpGrid(token="none")
        grid._run, grid._client = Run.create_empty(1), link  # type: ignore[assignment]
        (found,) = StreamingGrid(grid, 1000).exchange([], PendingReplies({"asked": 7}), 0.0)
        assert found.has_content() == good
        assert good or "did not come in time" in str(found.error.reason)
