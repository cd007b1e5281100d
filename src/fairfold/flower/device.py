"""What a device computes: the solvers of ``federation.train`` for its own users, as one change and its weight.

Updates are linear, so a device with several users (a family's tablet, a hospital) answers with the weighted mean of
their changes: to the server that is the same as if each had answered alone, and it sees less of each. Nothing of the
size of the full table is made here.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fairfold.data import Dataset
from fairfold.errors import InvalidMessage
from fairfold.federation.aggregate import ServerState
from fairfold.federation.projection import Hashed, Projection
from fairfold.federation.replies import Rejections
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.settings import Settings
from fairfold.federation.task import Task, Weights
from fairfold.federation.train import BLOCK_ITEMS, SOLVERS, Device, gram, item_blocks, solve_user
from fairfold.flower.local import LocalData
from fairfold.flower.plan import task_of
from fairfold.flower.wire import Answer, Order
from fairfold.kernels.native import loader
from fairfold.metrics import evaluate_ranking
from fairfold.simulate.active import Active, Held, gather
from fairfold.simulate.batched import Changes, batches_well, train_at_once
from fairfold.simulate.federation import Federation
from fairfold.subspace import Capacity

USERS_AT_ONCE = 16


class LocalTask:
    """One order, with the data of the device it went to.

    Args:
        order: What is asked.
        received: The vectors that came with it.
        data: What the device has.
        seed: Of its random draws.
    """

    def __init__(self, order: Order, received: Weights, data: LocalData, seed: int) -> None:
        self.order, self.received, self.data = order, received, data
        self.settings: Settings = order.settings.model_copy(update={"seed": seed})
        test = data.train if data.test is None else data.test
        self.task = Task(Dataset("local", data.train, test), self.settings)
        wanted = {name: tuple(shape) for name, shape in self.task.shapes.items()}
        given = {name: tuple(held.shape) for name, held in order.projections.items()}
        if wanted != given:
            raise InvalidMessage(
                f"tensors {given}",
                f"those of the model, {wanted}",
                "Check the catalogue's size, and that both sides have the same model.",
            )

    def fresh(self) -> Weights:
        """Vectors of users the device has not seen before; the item tables are not made for it."""
        alone = task_of(1, self.settings, users=len(self.data.users))
        _, own = alone.initial(generator(self.settings, Purpose.MODEL))
        return own

    def train(self, own: Weights) -> Answer:
        """Train all users; ``own`` holds a row for each and is written to."""
        weights = self._weights()
        if self.settings.solver == "closed_form":
            change = self._closed_form(own, weights)
        elif batches_well(self.settings):
            change = self._batched(own)
        else:
            change = self._one_by_one(own, weights)
        return Answer(change, sum(weights))

    def _weights(self) -> list[float]:
        return [self.settings.weight(self.task.samples(user)) for user in self.data.users]

    def _closed_form(self, own: Weights, weights: list[float]) -> Weights:
        """All users in two walks over the items: Σ w·V u uᵀ = w·V·(Σ u uᵀ), as in ``simulate.closed_form``."""
        (name, compact), (own_name,) = next(iter(self.received.items())), self.task.own
        subspace, settings = _hashed(self.order.projections[name]).subspace, self.settings
        unobserved, factors = settings.unobserved_weight, settings.factors
        gram_matrix, total = gram(compact, subspace, factors), sum(weights)
        outer, items, steps = torch.zeros(factors, factors, dtype=compact.dtype), [], []
        for place, user in enumerate(self.data.users):
            mine = self.data.train.of(user)
            rows = subspace.recover_rows(compact, mine, factors)
            vector = solve_user(rows, gram_matrix, settings)
            own[own_name][place] = vector
            outer.addr_(vector, vector, alpha=weights[place] / total)
            items.append(mine)
            steps.append(weights[place] / total * ((1 - unobserved) * (rows @ vector) - 1)[:, None] * vector)
        touched, order = torch.cat(items).sort()
        moved, stream = torch.cat(steps)[order], subspace.stream(compact.dtype)
        for first, block in item_blocks(compact, subspace, factors):
            slope = unobserved * (block @ outer)
            low, high = torch.searchsorted(touched, torch.tensor([first, first + len(block)])).tolist()
            slope.index_add_(0, touched[low:high] - first, moved[low:high])
            stream.add(first * factors, slope.view(-1))
        return {name: stream.finish().mul_(-settings.local_step)}

    def _batched(self, own: Weights) -> Weights:
        """Gradient steps on the slots that are touched, sixteen users at a time: ``simulate.batched``'s program."""
        users, number = self.data.users, self.order.round_number
        group = torch.zeros(self.task.num_clients, dtype=torch.long)
        everybody = torch.arange(self.task.num_clients)
        federation = Federation(self.settings, self.task, [Capacity.parse("1x")], group, everybody)
        held = Held(self.order.projections, self.received)
        changes = Changes(ServerState(self.received, number), federation, Rejections())
        places = {user: place for place, user in enumerate(users)}
        private = {name: rows.new_zeros(self.task.num_clients, rows.shape[1]) for name, rows in own.items()}
        for name, rows in own.items():
            private[name][users] = rows

        def gathered(user: int) -> Active:
            return gather(user, self.task, held, private, number)

        with ThreadPoolExecutor(loader.workers(), initializer=loader.work_alone) as workers:
            for start in range(0, len(users), USERS_AT_ONCE):
                for trained in train_at_once(users[start : start + USERS_AT_ONCE], gathered, self.task, workers):
                    changes.take(trained)
                    for name in own:
                        own[name][places[trained.client]] = trained.values[trained.parts[name]]
        return changes.means(held)

    def _one_by_one(self, own: Weights, weights: list[float]) -> Weights:
        """Any model, a user after another."""
        total = sum(weights)
        change = {name: torch.zeros_like(vector) for name, vector in self.received.items()}
        for place, user in enumerate(self.data.users):
            source = generator(self.settings, Purpose.TRAINING, self.order.round_number, user)
            vectors = {name: rows[place] for name, rows in own.items()}
            device = Device(user, self.task, self.order.projections, vectors, source)
            trained = SOLVERS[self.settings.solver](self.received, device, self.settings)
            for name, vector in trained.compacts.items():
                change[name].add_(vector - self.received[name], alpha=weights[place] / total)
            for name, vector in trained.own.items():
                own[name][place] = vector
        return change

    # -- how well the model serves the users of this device ------------------------------------------------------------

    @torch.no_grad()
    def quality(self, own: Weights) -> tuple[float, int] | None:
        """Sum over the users with something to guess, and their number; None where nobody has."""
        test = self.data.test
        if test is None or not len(test):
            return None
        users = torch.tensor([user for user in self.data.users if int(test.counts_by_user[user])])
        if not len(users):
            return None
        places = {user: place for place, user in enumerate(self.data.users)}
        if self.task.ratings:
            return self._squared_error(own, users, places), len(test)
        if self.settings.solver == "closed_form":
            vectors = self._solved(users)
        else:
            chosen = [places[user] for user in users.tolist()]
            vectors = {name: rows[chosen] for name, rows in own.items()}
        at = {user: place for place, user in enumerate(users.tolist())}
        result = evaluate_ranking(
            lambda asked: self._scores({name: rows[[at[user] for user in asked.tolist()]]
                                        for name, rows in vectors.items()}),
            self.data.train, test, self.settings.top, users=users, users_per_batch=USERS_AT_ONCE,
        )  # fmt: skip
        return float(result.ndcg_by_user.sum()), len(result.users)

    def _solved(self, users: Tensor) -> Weights:
        """Closed form: a user's vector follows from the model and their own history."""
        (name, compact), (own_name,) = next(iter(self.received.items())), self.task.own
        subspace, factors = _hashed(self.order.projections[name]).subspace, self.settings.factors
        gram_matrix = gram(compact, subspace, factors)
        rows = [subspace.recover_rows(compact, self.data.train.of(user), factors) for user in users.tolist()]
        return {own_name: torch.stack([solve_user(mine, gram_matrix, self.settings) for mine in rows])}

    def _scores(self, vectors: Weights) -> Tensor:
        """Of all items for some users, a block of items at a time: [users, items] is all that is kept."""
        num_items, projections = self.data.train.num_items, self.order.projections
        dense = {name: projections[name].whole(self.received[name]) for name in self.task.dense}
        users = [vectors[name][:, None, :] for name in self.task.own]
        scores = torch.empty(len(users[0]), num_items)
        for first in range(0, num_items, BLOCK_ITEMS):
            last = min(first + BLOCK_ITEMS, num_items)
            items = [self._rows(name, first, last)[None] for name in self.task.tables]
            scores[:, first:last] = self.task.scores(dense, users, items)
        return scores

    def _rows(self, name: str, first: int, last: int) -> Tensor:
        """Neighbouring rows of a table."""
        held, compact = _hashed(self.order.projections[name]), self.received[name]
        width = held.shape[1]
        return held.subspace.recover_range(compact, first * width, last * width).view(-1, width)

    def _squared_error(self, own: Weights, users: Tensor, places: dict[int, int]) -> float:
        assert self.data.test is not None
        dense = {name: self.order.projections[name].whole(self.received[name]) for name in self.task.dense}
        total = 0.0
        for user in users.tolist():
            ids = self.data.test.of(user)
            items = [self.order.projections[name].rows(self.received[name], ids)[None] for name in self.task.tables]
            vectors = [own[name][places[user]][None, None] for name in self.task.own]
            predicted = self.task.scores(dense, vectors, items)[0]
            total += float((predicted - self.data.test.ratings_of(user)).square().sum())
        return total


def _hashed(projection: Projection) -> Hashed:
    assert isinstance(projection, Hashed)
    return projection
