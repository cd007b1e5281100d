"""What a device computes: its users' words, together, as its algorithm and the fast backend say.

Words are summands, so a device with several users (a family's tablet, a hospital) answers with the sum of theirs: to
the server that is the same as if each had answered alone, and it sees less of each. Nothing of the size of the full
table is made here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from math import prod
from operator import add
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.backends.batched import batched
from fairfold.data import Interactions
from fairfold.errors import FairfoldError, InvalidMessage, InvalidSettings, InvalidState
from fairfold.flower import wire
from fairfold.flower.local import LocalData, LocalImages
from fairfold.flower.store import DeviceState, Word
from fairfold.metrics import accuracy
from fairfold.metrics.ranking import first_by_score, items_of
from fairfold.protocol.architecture import Architecture
from fairfold.protocol.people import ImagePeople, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.sampling import Purpose, generator
from fairfold.protocol.steps import Steps
from fairfold.protocol.words import Answer, Public, Visit
from fairfold.protocol.work import as_input
from fairfold.values import Weights

if TYPE_CHECKING:
    pass

USERS_AT_ONCE = 16
BLOCK_ITEMS = 8_192  # items scored at a time: the table itself is never made
# Numbers of a user's vectors, and of all layers of a model, beyond which a device refuses an order.
LARGEST_OWN, LARGEST_DENSE = 1 << 16, 1 << 24
LARGEST_ROUND = 1 << 24  # samples of a user's round, negatives included, beyond which a device refuses an order


@contextlib.contextmanager
def carrying_out() -> Iterator[None]:
    """Whatever an order makes of numbers that no one would send is an error with words."""
    try:
        yield
    except FairfoldError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):  # not for want of sense, but of memory
            raise
        raise InvalidMessage(
            f"an order that cannot be carried out ({type(error).__name__})", "what FairStrategy sends", "See the log."
        ) from error


class DeviceWork:
    """One order, with the data of the device it went to, and what that keeps, agreed with the server."""

    @carrying_out()
    def __init__(self, order: wire.Order, data: LocalData | LocalImages, kept: DeviceState, seed: int) -> None:
        self.order, self.sent, self.seed, self.kept = order, order.sent, seed, kept
        self.history: Weights = {}
        before: Tensor | None = None  # where samples of what was said are among those of now, and which are gone
        gone: Tensor | None = None
        if isinstance(data, LocalImages):
            mine = (*data.images.train.images.shape[1:], data.images.num_classes)
            if order.picture != mine:
                asked = f"an order for pictures {order.picture}"
                raise InvalidMessage(asked, f"{mine}, this device's", "Check both sides.")
            refuse_excess(order, len(data.images.train.labels))
        elif order.picture is not None:
            raise InvalidMessage("an order for images", "one for interactions", "Check what both sides train.")
        else:
            if order.numbering:
                if kept.numbering != order.numbering or not data.own_items() <= kept.numbers.keys():
                    lacking = "items without their numbers in this run"
                    raise InvalidState(lacking, "to be told them", "The server tells them again.")
                data = data.renumbered(kept.numbers)
            if order.settings.algorithm.follows and kept.history and not data.clients:
                data, self.history, before, gone = followed(data, kept)
            elif order.settings.algorithm.keeps == "acknowledged":  # the words of a run are about one history
                data, self.history = _as_said(data, kept)
            refuse_excess(order, max((int(data.train.counts_by_user[user]) for user in data.users), default=0))
        self.data = data
        self.names: list[str] = []
        users = 1 if isinstance(data, LocalImages) else data.train.num_users
        self.plan = Plan.on_device(order.settings, order.items, users, order.picture, self.sent.projections)
        # As matrices: methods that factor layers see a convolution as one row per filter.
        wanted = {name: (shape[0], prod(shape[1:])) for name, shape in self.plan.architecture.shapes.items()}
        given = {name: (held.shape[0], prod(held.shape[1:])) for name, held in self.sent.projections.items()}
        if wanted != given:
            remedy = "Check the catalogue's size, and that both sides have the same model."
            raise InvalidMessage(f"tensors {given}", f"those of the model, {wanted}", remedy)
        refuse_large(self.plan.architecture)
        if isinstance(data, LocalImages):
            self.people: People = ImagePeople(self.plan, data.images, data.clients, seed)
            self.users = list(range(len(data.clients)))
            return
        self.names, self.users = data.names, data.users
        self.people = People(self.plan, data.train, {}, seed)
        for name, rows in kept.rows_of(data.names, self._fresh()).items():
            vectors = torch.zeros(users, *rows.shape[1:], dtype=rows.dtype)
            vectors[self.users] = rows
            self.people.private[name] = vectors
        chosen, algorithm = self.people.chosen(self.users), self.plan.algorithm
        for name in algorithm.remembered(self.plan):
            places = chosen if before is None else before
            if name in kept.said.own and len(kept.said.own[name]) == len(places):
                self.people.private[name][places] = kept.said.own[name]
        if gone is not None:
            algorithm.follow(self.people.private, gone)
            self.kept = replace(kept, said=Word(kept.said.number, self._own()))

    def _fresh(self) -> Weights:
        """Vectors of users the device has not seen before; the item tables are not made for it."""
        assert isinstance(self.data, LocalData)
        users = Public(1, len(self.data.users))
        architecture = self.order.settings.algorithm.architecture(self.order.settings, users)
        _, own = architecture.initial(generator(self.seed, Purpose.MODEL))
        self.plan.algorithm.starts_own(self.plan, own)
        return own

    def train(self) -> tuple[Answer, Weights]:
        """Train all users: their word together, and their private tensors afterwards."""
        words = []
        for word in batched(self.people, [Visit(user, self.sent) for user in self.users], {}):
            self.people.keep(word.clients, word.own)
            words.append(word.answer)
        if len(words) > 1 and not all(held.linear for held in self.sent.projections.values()):
            given = f"{len(self.users)} users on a device whose vectors cannot be added up"
            raise InvalidSettings(given, "one user per device, or another method", "Use subspace.method='fair'.")
        return reduce(add, words), self._own()

    def _own(self) -> Weights:
        """What its users' private tensors are."""
        remembered = self.plan.algorithm.remembered(self.plan)
        return {
            name: rows[self.people.chosen(self.users)] if name in remembered else rows[self.users]
            for name, rows in self.people.private.items()
        }

    @carrying_out()
    def reply(self, *, train: bool, quality: bool) -> tuple[wire.Reply, Weights]:
        """What the device says, and what it keeps."""
        measured = self.quality() if quality else None
        if not train:
            return wire.Reply(None, measured), {}
        answer, own = self.train()
        return wire.Reply(answer, measured), own

    # -- how well the model serves the users of this device ------------------------------------------------------------

    @torch.no_grad()
    def quality(self) -> tuple[float, int] | None:
        """Sum over the users with something to guess, and their number; None where nobody has."""
        if isinstance(self.data, LocalImages):
            return self._accuracy(self.data)
        test = self.data.test
        users = [] if test is None else [user for user in self.users if int(test.counts_by_user[user])]
        if test is None or not users:
            return None
        vectors = self.plan.algorithm.own_vectors(self.plan, self.sent, self.people, users)
        if self.order.settings.predicts_ratings:
            return self._squared_error(vectors, test, users)
        total, k = 0.0, min(self.order.settings.run.top, self.order.items)
        for start in range(0, len(users), USERS_AT_ONCE):
            some = users[start : start + USERS_AT_ONCE]
            best = self._best({name: rows[start : start + USERS_AT_ONCE] for name, rows in vectors.items()}, some, k)
            total += sum(ndcg(best[place], test.of(user)) for place, user in enumerate(some))
        return total, len(users)

    def _best(self, vectors: Weights, users: list[int], k: int) -> Tensor:
        """The best k items outside users' histories, [users, k], by blocks of items; -1 where there are fewer.

        Of equal scores the lower number comes first: what is kept stands before the next block, in that order.
        """
        owner, theirs = items_of(self.people.train, torch.tensor(users))
        values, best = torch.empty(len(users), 0), torch.empty(len(users), 0, dtype=torch.int64)
        longest = int(self.people.train.counts_by_user[users].max())
        reach = self.plan.algorithm.candidates(self.plan, self.sent, k + longest)
        for first in range(0, reach, BLOCK_ITEMS):
            block = torch.arange(first, min(first + BLOCK_ITEMS, reach))
            found = self.plan.algorithm.block_scores(self.plan, self.sent, vectors, block).float()
            if bool(found.isnan().any()):
                raise InvalidMessage("a model whose scores are no numbers", "one that was trained well", "Train anew.")
            here = (theirs >= first) & (theirs <= int(block[-1]))
            found[owner[here], theirs[here] - first] = -torch.inf
            ids = torch.cat([best, block.expand(len(users), -1)], dim=1)
            found = torch.cat([values, found], dim=1)
            values, places = first_by_score(found, min(k, found.shape[1]))
            best = ids.gather(1, places)
        return best.masked_fill(values == -torch.inf, -1)

    def _squared_error(self, vectors: Weights, test: Interactions, users: list[int]) -> tuple[float, int]:
        total, many = 0.0, 0
        for place, user in enumerate(users):
            mine = {name: rows[place][None] for name, rows in vectors.items()}
            predicted = self.plan.algorithm.block_scores(self.plan, self.sent, mine, test.of(user))[0]
            total += float((predicted - test.ratings_of(user)).square().sum())
            many += len(predicted)
        return total, many

    def _accuracy(self, data: LocalImages) -> tuple[float, int] | None:
        test = data.images.test
        if not len(test.labels):
            return None
        full = {name: held.recover(self.sent.vectors[name]) for name, held in self.sent.projections.items()}
        network = self.plan.architecture.model_of(full, {})
        logits = network(as_input(test.images, self.order.settings.data))
        return float(accuracy(logits, test.labels)) * len(test.labels), len(test.labels)


def ndcg(best: Tensor, wanted: Tensor) -> float:
    """NDCG of one user's best items, best first, against those wanted."""
    discount = 1 / torch.arange(2, len(best) + 2, dtype=torch.float64).log2()
    hits = torch.isin(best, wanted).double()
    return min(float(hits @ discount) / float(discount[: len(wanted)].sum()), 1.0)


def refuse_excess(order: wire.Order, samples: int) -> None:
    """Refuse an order by which a user's round would ask for more memory than any honest one does."""
    algorithm: object = order.settings.algorithm
    if isinstance(algorithm, Steps):
        drawn = samples * algorithm.local_epochs * (1 + getattr(algorithm, "negatives", 0))
        if drawn > LARGEST_ROUND:
            raise InvalidMessage(f"a round of {drawn} draws for one user", f"at most {LARGEST_ROUND}", "Ask for less.")


def refuse_large(architecture: Architecture) -> None:
    """Refuse a model of which a device would make more than it was sent: users' vectors and layers are used whole."""
    own, dense = sum(architecture.own.values()), sum(prod(shape) for shape in architecture.dense.values())
    if own > LARGEST_OWN or dense > LARGEST_DENSE:
        asked = f"a model with {own} numbers a user and {dense} in its layers"
        raise InvalidMessage(asked, f"at most {LARGEST_OWN} and {LARGEST_DENSE}", "Use a smaller one.")


def _as_said(data: LocalData, kept: DeviceState) -> tuple[LocalData, Weights]:
    """The history that this device's words of the run are about: that of its first one, as long as the run goes.

    What is said is a change of what was said before; of another history it would be none. What users did since joins
    with the next run.
    """
    if not kept.history:
        mine = data.of_its_users()
        history = {"offsets": mine.offsets, "items": mine.items}
        return data, history | ({} if mine.ratings is None else {"ratings": mine.ratings})
    if data.clients:  # a simulation's numbering of users, whose data does not change
        return data, kept.history
    many, ratings = len(kept.history["offsets"]) - 1, kept.history.get("ratings")
    train = Interactions(many, data.train.num_items, kept.history["offsets"], kept.history["items"], ratings)
    test = data.test if data.test is not None and data.names == kept.names else None
    return LocalData(train, test, user_ids=kept.names), kept.history


def followed(data: LocalData, kept: DeviceState) -> tuple[LocalData, Weights, Tensor, Tensor]:
    """What its users have or had when they last spoke, and as a history; where that is in it; what they have no more.

    Users who are no longer on the device have nothing, and are still there to take back what they said.
    """
    mine, items = data.of_its_users(), data.train.num_items
    names = list(dict.fromkeys([*kept.names, *data.names]))
    place = torch.tensor([names.index(name) for name in data.names], dtype=torch.int64)
    many = kept.history["offsets"].diff()
    then = torch.repeat_interleave(torch.arange(len(many)), many) * items + kept.history["items"]
    now = place[mine.users] * items + mine.items
    either = torch.cat([then, now])
    train = Interactions.from_pairs(either // items, either % items, len(names), items)
    both = train.users * items + train.items
    test = data.test
    if test is not None:
        test = Interactions.from_pairs(place[test.users], test.items, len(names), items)
    history = {"offsets": train.offsets, "items": train.items}
    return LocalData(train, test, user_ids=names), history, torch.searchsorted(both, then), ~torch.isin(both, now)
