"""Messages that need a client's data: statistics, item numbers, and tasks to train and to evaluate.

A client with several users (a family's tablet, a hospital) sends the sum of their updates: to the server that is the
same as one of each, and it reveals less. Nothing of the size of the full table is made here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, reduce
from math import prod
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context, MessageType, RecordDict
from torch import Tensor

from fairfold.backends.batched import batched
from fairfold.data import Interactions
from fairfold.errors import FairfoldError, InvalidCapacity, InvalidData, InvalidMessage, InvalidSettings, InvalidState
from fairfold.federation.aggregation import fixed_point_encoding, weighted_change
from fairfold.federation.algorithm import DeviceScoring, RemembersUpdates
from fairfold.federation.clients import Clients, ImageClients
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Purpose, generator
from fairfold.federation.training import as_input
from fairfold.federation.updates import PublicStatistics, ScheduledTask, Update
from fairfold.flower import wire
from fairfold.flower.client_store import ClientState, ClientStore, RememberedUpdate, fixed_history, merged_history
from fairfold.flower.local_data import LocalData, LocalFile, LocalImages
from fairfold.flower.messages import make_facts
from fairfold.flower.protocol import FACTS, NUMBERING, STATISTICS
from fairfold.flower.secure_aggregation import quality_encoding, quality_update, statistics_encoding
from fairfold.flower.secure_client import reply_session
from fairfold.metrics import accuracy
from fairfold.metrics.ranking import first_by_score, ndcg, user_items
from fairfold.privacy.fixed_point import MeasuredUpdate
from fairfold.privacy.ledger import STATISTICS_PURPOSE
from fairfold.privacy.secure.segments import refuse
from fairfold.subspace import Capacity
from fairfold.typing import Weights

if TYPE_CHECKING:
    from fairfold.flower.client import ClientRuntime

USERS_AT_ONCE = 16
BLOCK_ITEMS = 8_192  # items scored at a time: the full table is never made


@contextlib.contextmanager
def _task_errors() -> Iterator[None]:
    """Turn errors that nonsensical numbers in a task cause into :class:`InvalidMessage`."""
    try:
        yield
    except FairfoldError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):  # no fault of the task
            raise
        given = f"a task that cannot be carried out ({type(error).__name__})"
        raise InvalidMessage(given, "what FairStrategy sends", "See the log.") from error


class TaskRunner:
    """Runs one task on a client's data and stored state, which is reconciled with the server."""

    @_task_errors()
    def __init__(self, request: wire.TaskRequest, data: LocalData | LocalImages, state: ClientState, seed: int) -> None:
        self.request, self.task = request, request.task
        self.state, self.seed = state, seed
        self.history: Weights = {}
        self.user_names: list[str] = []
        if isinstance(data, LocalImages):
            self._open_images(data)
        elif request.image_shape is not None:
            raise InvalidMessage("a task for images", "one for interactions", "Check what both sides train.")
        else:
            self._open_interactions(data)

    def _open_images(self, data: LocalImages) -> None:
        given = self.request.image_shape
        shape = (*data.images.train.images.shape[1:], data.images.num_classes)
        if given != shape:
            raise InvalidMessage(f"a task for images of shape {given}", f"{shape}, this device's", "Check both sides.")
        wire.refuse_large_round(self.request, len(data.images.train.labels))
        self.data: LocalData | LocalImages = data
        self.plan = self._make_plan(1)
        self.clients: Clients = ImageClients(self.plan, data.images, data.partition, self.seed)
        self.users = list(range(len(data.partition)))

    def _open_interactions(self, data: LocalData) -> None:
        state = self.state
        if self.request.numbering:
            if state.numbering != self.request.numbering or not data.own_items() <= state.item_numbers.keys():
                missing = "items without their numbers in this run"
                raise InvalidState(missing, "the server's numbering", "The server sends it again.")
            data = data.renumbered(state.item_numbers)
        algorithm = self.request.settings.algorithm
        memory = RemembersUpdates.of(algorithm)
        stored = lost = None  # indices of the stored interactions, and a mask of those that are no longer current
        if memory.supports_retraction and state.history and not data.client_ids:
            data, self.history, stored, lost = merged_history(data, state)
        elif isinstance(algorithm, RemembersUpdates):
            data, self.history = fixed_history(data, state)
        largest = max((int(data.train.counts_by_user[user]) for user in data.users), default=0)
        wire.refuse_large_round(self.request, largest)
        self.data, self.users, self.user_names = data, data.users, data.names
        self.plan = self._make_plan(data.train.num_users)
        self.clients = Clients(self.plan, data.train, {}, self.seed)
        # The local state of new users is made without item tables.
        architecture = algorithm.architecture(self.request.settings, PublicStatistics(1, len(data.users)))
        _, initial = architecture.initial(generator(self.seed, Purpose.MODEL))
        if isinstance(algorithm, RemembersUpdates):
            algorithm.init_local_state(initial)
        for name, rows in state.local_state_of(data.names, initial).items():
            vectors = torch.zeros(data.train.num_users, *rows.shape[1:], dtype=rows.dtype)
            vectors[self.users] = rows
            self.clients.local_state[name] = vectors
        indices = self.clients.sample_indices(self.users) if stored is None else stored
        for name in memory.sample_state_shapes(self.plan):
            rows_before = state.acknowledged.local_state.get(name)
            if rows_before is not None and len(rows_before) == len(indices):
                self.clients.local_state[name][indices] = rows_before
        if lost is not None:
            memory.mark_lost(self.clients.local_state, lost)
            self.state = replace(state, acknowledged=replace(state.acknowledged, local_state=self._local_state()))

    def _make_plan(self, num_users: int) -> Plan:
        """Return the plan of the task; refuse other tensors than the model's, and models that are too large."""
        request, projections = self.request, self.task.projections
        plan = Plan.on_device(request.settings, request.num_items, num_users, request.image_shape, projections)
        # As matrices: methods that factor layers see a convolution as one row per filter.
        needed = {name: (shape[0], prod(shape[1:])) for name, shape in plan.architecture.shapes.items()}
        given = {name: (one.shape[0], prod(one.shape[1:])) for name, one in projections.items()}
        if needed != given:
            remedy = "Check the catalogue's size, and that both sides have the same model."
            raise InvalidMessage(f"tensors {given}", f"those of the model, {needed}", remedy)
        wire.refuse_large_model(plan.architecture)
        return plan

    def _local_state(self) -> Weights:
        by_sample = RemembersUpdates.of(self.plan.algorithm).sample_state_shapes(self.plan)
        samples = self.clients.sample_indices(self.users) if by_sample else None
        local_state = self.clients.local_state.items()
        return {name: rows[samples if name in by_sample else self.users] for name, rows in local_state}

    @_task_errors()
    def reply(self, *, train: bool, evaluate: bool) -> tuple[wire.Reply, Weights]:
        """Evaluate and train as asked; return the reply, and the local state after it."""
        quality = self.quality(before=train) if evaluate else None
        update, local_state = self.train() if train else (None, {})
        return wire.Reply(update, quality), local_state

    def train(self) -> tuple[Update, Weights]:
        """Train all users; return the sum of their updates, and their local state."""
        updates = []
        for trained in batched(self.clients, [ScheduledTask(user, self.task) for user in self.users], {}):
            self.clients.save_local_state(trained.client_ids, trained.local_state)
            updates.append(trained.update)
        if len(updates) > 1 and not all(projection.linear for projection in self.task.projections.values()):
            given = f"{len(self.users)} users on a device whose vectors cannot be added up"
            raise InvalidSettings(given, "one user per device, or another method", "Use subspace.method='fair'.")
        return reduce(add, updates), self._local_state()

    # -- evaluation ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def quality(self, *, before: bool = False) -> tuple[float, int] | None:
        """Return the sum of the metric over users with test data, and their number; ``before``: by the items' order."""
        if isinstance(self.data, LocalImages):
            return self._accuracy(self.data)
        test = self.data.test
        users = [] if test is None else [user for user in self.users if int(test.counts_by_user[user])]
        if test is None or not users:
            return None
        rated = self.request.settings.predicts_ratings
        scoring = DeviceScoring.of(self.plan.algorithm)
        known = rated or not before
        vectors = scoring.scoring_vectors(self.plan, self.task, self.clients, users) if known else {}
        if rated:
            return self._squared_error(vectors, test, users)
        total = 0.0
        k = min(self.request.settings.run.top, self.request.num_items)
        for start in range(0, len(users), USERS_AT_ONCE):
            some = users[start : start + USERS_AT_ONCE]
            best = self._best_items(
                {name: rows[start : start + USERS_AT_ONCE] for name, rows in vectors.items()}, some, k
            )
            hits = torch.stack([torch.isin(best[row], test.of(user)) for row, user in enumerate(some)])
            total += float(ndcg(hits, test.counts_by_user[some], best.shape[1]).sum())
        return total, len(users)

    def _best_items(self, vectors: Weights, users: list[int], k: int) -> Tensor:
        """Return the best k items outside users' histories, [users, k], by blocks; -1 where there are fewer."""
        scoring = DeviceScoring.of(self.plan.algorithm)  # without vectors all scores are equal
        owners, known = user_items(self.clients.train, torch.tensor(users))
        longest = int(self.clients.train.counts_by_user[users].max())
        num_candidates = scoring.num_candidates(self.plan, self.task, k + longest)
        best_scores, best = torch.empty(len(users), 0), torch.empty(len(users), 0, dtype=torch.int64)
        for start in range(0, num_candidates, BLOCK_ITEMS):
            block = torch.arange(start, min(start + BLOCK_ITEMS, num_candidates))
            zeros = torch.zeros(len(users), len(block))
            scores = scoring.block_scores(self.plan, self.task, vectors, block).float() if vectors else zeros
            if bool(scores.isnan().any()):
                raise InvalidMessage("a model whose scores are no numbers", "one that was trained well", "Train anew.")
            in_block = (known >= start) & (known <= int(block[-1]))
            scores[owners[in_block], known[in_block] - start] = -torch.inf
            # Of equal scores the lower number comes first: the best so far stand before the next block.
            items = torch.cat([best, block.expand(len(users), -1)], dim=1)
            scores = torch.cat([best_scores, scores], dim=1)
            best_scores, places = first_by_score(scores, min(k, scores.shape[1]))
            best = items.gather(1, places)
        return best.masked_fill(best_scores == -torch.inf, -1)

    def _squared_error(self, vectors: Weights, test: Interactions, users: list[int]) -> tuple[float, int]:
        scoring = DeviceScoring.of(self.plan.algorithm)
        total, num_ratings = 0.0, 0
        for row, user in enumerate(users):
            user_vectors = {name: rows[row][None] for name, rows in vectors.items()}
            predicted = scoring.block_scores(self.plan, self.task, user_vectors, test.of(user))[0]
            total += float((predicted - test.ratings_of(user)).square().sum())
            num_ratings += len(predicted)
        return total, num_ratings

    def _accuracy(self, data: LocalImages) -> tuple[float, int] | None:
        test = data.images.test
        if not len(test.labels):
            return None
        full = {name: one.recover(self.task.vectors[name]) for name, one in self.task.projections.items()}
        logits = self.plan.architecture.model_of(full, {})(as_input(test.images, self.request.settings.data))
        return float(accuracy(logits, test.labels)) * len(test.labels), len(test.labels)


# -- handlers of messages ----------------------------------------------------------------------------------------------


def send_statistics(runtime: ClientRuntime, content: RecordDict, context: Context) -> RecordDict:
    """Reply with this client's statistics of a window of items, before the first round."""
    settings, num_items, window = wire.unpack_statistics_request(content)
    key = (STATISTICS_PURPOSE, window.start, None)
    with reply_session(runtime, content, context, settings, key) as masked_reply:
        interactions = load_interactions(runtime, context, num_items, ratings=settings.predicts_ratings)
        statistics = settings.algorithm.client_statistics(settings, interactions.local_interactions(), window)
        if masked_reply is None:
            return wire.pack_statistics(statistics)
        return masked_reply(partial(statistics_encoding, settings, window), MeasuredUpdate(statistics), 0)


def save_numbering(runtime: ClientRuntime, content: RecordDict, context: Context) -> RecordDict:
    """Store the numbers that this client's own items of a window have in the run."""
    given = wire.unpack_numbering(content)
    data = load_interactions(runtime, context, given.num_items, ratings=given.ratings)
    store = ClientStore(runtime.folder(context))
    state = store.load()
    numbers = dict(state.item_numbers) if state.numbering == given.numbering else {}
    own = [item for item in data.own_items() if item in given.window]
    numbers |= {item: int(given.numbers[given.window.index(item)]) for item in own}
    store.save(replace(state, numbering=given.numbering, item_numbers=numbers))
    return RecordDict({FACTS: make_facts()})


def train(runtime: ClientRuntime, content: RecordDict, context: Context) -> RecordDict:
    """Train, and return an update. What the client would remember of it is stored before it is sent."""
    runner, store = _open_task(runtime, content, context)
    request, task, algorithm = runner.request, runner.task, runner.plan.algorithm
    key = ("train", task.round_number, request.run)
    with reply_session(runtime, content, context, request.settings, key) as masked_reply:
        evaluate = request.evaluate and runtime.share_quality and request.settings.privacy.reports_quality
        reply, local_state = runner.reply(train=True, evaluate=evaluate)
        update = RememberedUpdate(request.update_id, local_state)
        state = replace(runner.state, user_names=runner.user_names, history=runner.history)
        if isinstance(algorithm, RemembersUpdates):
            store.save(replace(state, pending=update))
        else:
            store.save(replace(state, acknowledged=update, pending=None))
        if masked_reply is None:
            return wire.pack_reply(request, reply, sends_weights=algorithm.sends_weights)
        assert reply.update is not None
        problem = algorithm.validate_update(runner.plan, task, reply.update)
        if problem is not None:  # masked, the server cannot validate it
            raise InvalidState(f"an update with {problem}", "a valid one", "Nothing was sent.")
        change = weighted_change(runner.plan, task, reply.update)
        encoding = partial(fixed_point_encoding, runner.plan, {task.size: task})
        return masked_reply(encoding, replace(quality_update(reply.quality), update=change), task.size)


def evaluate(runtime: ClientRuntime, content: RecordDict, context: Context) -> RecordDict:
    """Evaluate the model on the users of this client; its stored state stays as it is."""
    runner, _ = _open_task(runtime, content, context)
    request = runner.request
    if not request.settings.privacy.reports_quality:
        raise refuse("a request for qualities where sums have noise", "what the budget is spent on")
    key = ("evaluate", request.task.round_number, request.run)
    with reply_session(runtime, content, context, request.settings, key) as masked_reply:
        reply, _ = runner.reply(train=False, evaluate=runtime.share_quality)
        if masked_reply is None:
            return wire.pack_reply(request, reply)
        return masked_reply(quality_encoding, quality_update(reply.quality), 0)


def _open_task(runtime: ClientRuntime, content: RecordDict, context: Context) -> tuple[TaskRunner, ClientStore]:
    """Read a task, the client's data and its state; refuse tasks that do not fit."""
    request = wire.unpack_request(content)
    settings = request.settings
    if not wire.can_train(runtime.model, settings):  # before its name is used for anything
        trained = "one of fairfold's" if runtime.model is None else runtime.model
        raise InvalidMessage(f"a task for model.kind={settings.model.kind!r}", trained, "Name it in make_client_app.")
    store = ClientStore(runtime.folder(context))
    state = store.load()
    if isinstance(settings.algorithm, RemembersUpdates):
        state = state.reconcile(request.run, request.acknowledged_id)
    data: LocalData | LocalImages
    if request.image_shape is not None:
        data = _load_images(runtime, context)
    else:
        data = load_interactions(runtime, context, request.num_items, ratings=settings.predicts_ratings)
    runner = TaskRunner(request, data, state, settings.run.seed if runtime.repeatable else state.secret)
    capacity, projections = Capacity.parse(runtime.capacity(context)), request.task.projections
    if not runner.plan.method.fits(runner.plan.architecture.tensors, projections, capacity):
        size = sum(projection.size for projection in projections.values())
        raise InvalidCapacity(f"a task of {size} numbers", f"at most {capacity}", "Ask this device first.")
    return runner, store


def load_interactions(runtime: ClientRuntime, context: Context, num_items: int, *, ratings: bool) -> LocalData:
    """The interactions of a client, from its file or its own function."""
    source: Any = runtime.source if runtime.source is not None else context.node_config.get("data")
    if source is None:
        raise InvalidData("no data", "the device's own file", "Give data=... or --node-config 'data=\"mine.csv\"'.")
    if isinstance(source, str | Path):
        source = LocalFile(source, test=str(test) if (test := context.node_config.get("test")) is not None else None)
    data = source.load(num_items, ratings=ratings) if isinstance(source, LocalFile) else source(context, num_items)
    if not isinstance(data, LocalData):
        raise InvalidData(f"{type(data).__name__} for a recommender", "LocalData", "Give interactions.")
    return data


def _load_images(runtime: ClientRuntime, context: Context) -> LocalImages:
    data = runtime.source(context, 0) if callable(runtime.source) else None
    if not isinstance(data, LocalImages):
        raise InvalidData("no images", "data=... a function that returns LocalImages", "Give it to make_client_app.")
    return data


TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE
HANDLERS = {STATISTICS: send_statistics, NUMBERING: save_numbering, TRAIN: train, EVALUATE: evaluate}
