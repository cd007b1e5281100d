"""Going on from a model with interactions that are new: what it has learned stays where it still has a meaning.

Items and users are found by their ids, so that both may be numbered anew. Tables with a row per item, networks and the
users' own vectors go over; what is new starts as it would. Sums that remember begin empty, and everybody says anew what
they have: an algorithm that is one sum over devices thereby gives the model of old and new interactions together.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings
from fairfold.fitting.model import Model
from fairfold.fitting.tables import Taken
from fairfold.protocol.faults import Rejections
from fairfold.simulate.run import Progress
from fairfold.simulate.world import World


def joined(start: Model, new: Taken) -> Taken:
    """Old and new interactions as one data set; of what is in both parts, train counts."""
    old, added = start.kept, new.data
    if (old.train.ratings is None) != (added.train.ratings is None):
        given = "interactions with ratings and without" if new.data.train.ratings is None else "ratings and none before"
        raise InvalidSettings(given, "the same of old and new ones", "Give both with ratings, or both without.")
    users, user_place = _joined_ids(old.user_ids, old.num_users, added.user_ids, added.num_users)
    items, item_place = _joined_ids(old.item_ids, old.num_items, added.item_ids, added.num_items)
    size = len(users), len(items)
    train = _together(old.train, added.train, user_place, item_place, size)
    test = _together(old.test, added.test, user_place, item_place, size)
    known = train.users * size[1] + train.items
    test = test.where(~torch.isin(test.users * size[1] + test.items, known))
    titles = None
    if old.titles is not None or added.titles is not None:
        named = dict(zip(items, old.titles or [], strict=False))
        mine = added.titles or [""] * added.num_items
        named |= {items[place]: title for place, title in zip(item_place.tolist(), mine, strict=True) if title}
        titles = [named.get(item, "") for item in items]
    both = (start.numbers[0] and new.numbers[0], start.numbers[1] and new.numbers[1])
    return replace(new, data=Dataset(old.name, train, test, None, users, items, titles), numbers=both)


def _joined_ids(old: list[str] | None, many: int, new: list[str] | None, added: int) -> tuple[list[str], Tensor]:
    """Ids with the new ones behind the old, and the place of each of the new data's own."""
    ids = [str(number) for number in range(many)] if old is None else list(old)
    place = {word: number for number, word in enumerate(ids)}
    given = [str(number) for number in range(added)] if new is None else new
    places = [place.setdefault(word, len(place)) for word in given]
    return list(place), torch.tensor(places, dtype=torch.int64)


def _together(
    old: Interactions, new: Interactions, user_place: Tensor, item_place: Tensor, size: tuple[int, int]
) -> Interactions:
    users = torch.cat([old.users, user_place[new.users]])
    items = torch.cat([old.items, item_place[new.items]])
    ratings = [part.ratings for part in (old, new) if part.ratings is not None]  # an empty part has none
    return Interactions.from_pairs(users, items, *size, torch.cat(ratings) if ratings else None)


def going_on(start: Model, world: World) -> Progress:
    """Where a federation begins that goes on from a model."""
    state, now, before = world.initial(), world.interactions, start.data
    items = _places(before.item_ids, before.num_items, now.item_ids, now.num_items)
    users = _places(before.user_ids, before.num_users, now.user_ids, now.num_users)
    learned, tables = start.opened.progress.state.full, world.plan.architecture.tables
    for name, vector in state.full.items():
        old = learned.get(name)
        if old is None or (old.numel() != vector.numel() and name not in tables):
            continue
        rows, width = tables.get(name, (0, 0))[:2] if len(tables.get(name, ())) == 2 else (0, 0)
        if rows == now.num_items and old.numel() == before.num_items * width:
            vector.view(rows, width)[items] = old.view(-1, width).to(vector.dtype)
        elif name not in tables and old.shape == vector.shape:
            vector.copy_(old)
    own = {name for name in world.plan.architecture.own if name in start.opened.progress.private}
    if start.opened.plan.algorithm.kind == world.plan.algorithm.kind and not world.plan.algorithm.from_history:
        for name in own:
            world.people.private[name][users] = start.opened.progress.private[name].to(world.people.private[name].dtype)
    return Progress(state, world.people.private, [], Rejections())


def _places(old: list[str] | None, many: int, new: list[str] | None, added: int) -> Tensor:
    """Where each of the old ids stands among the new."""
    known = {word: number for number, word in enumerate(new or map(str, range(added)))}
    return torch.tensor([known[word] for word in (old or map(str, range(many)))], dtype=torch.int64)
