"""What a word says of every item: numbers by item, and scores made of them.

A word of any algorithm that answers in its tables has a row for each item, through the projection that the server
itself has drawn. Sums of pairs have a diagonal, ratings a window. For words of another form, plug-ins among them, the
attacker simulates devices that have one item each, and looks where these move the word.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairfold.algorithms.correlations import SUM, Correlations
from fairfold.algorithms.pairs import items_of
from fairfold.algorithms.rating_rows import ROWS
from fairfold.algorithms.ratings import RatingSquares
from fairfold.audit.devices import Devices, Seen
from fairfold.data import Interactions
from fairfold.protocol.plan import Plan

SIMULATED = 2_000
"""The most items for which devices are simulated one by one."""

COLUMNS = 64
"""Rows of more numbers are not looked at column by column."""


@dataclass
class Reader:
    """Reads words of a run, item by item.

    Attributes:
        devices: Of the run.
        places: Where one-item devices of each size move a word, where no other way is known.
    """

    devices: Devices
    places: dict[int, Tensor] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """Of the run."""
        return self.devices.fleet.plan

    def rows(self, seen: Seen) -> Tensor:
        """Numbers by item, [items, numbers]: of a device its change, of several their mean change."""
        plan, sent, answer = self.plan, seen.sent, seen.answer
        algorithm, items = plan.algorithm, torch.arange(plan.public.items)
        if isinstance(algorithm, Correlations):
            return _diagonal(answer.sums[SUM], len(items)) if SUM in answer.sums else torch.zeros(len(items), 1)
        if isinstance(algorithm, RatingSquares):
            return _in_window(algorithm, plan, seen, items)
        tables = [name for name in plan.architecture.tables if name in answer.sums and name in sent.projections]
        if not tables:
            return self._simulated(seen, items)
        found = []
        for name in tables:
            held, before = sent.projections[name], sent.vectors[name]
            change = algorithm.change(sent, name, answer.sums[name], answer.weight)
            if len(change) != len(before) and len(change) % len(items) == 0:  # rows of other lengths than the table's
                found.append(change.view(len(items), -1))
            elif not held.linear:
                found.append(held.rows(before + change, items) - held.rows(before, items))
            else:
                found.append(held.rows(change, items))
        return torch.cat(found, dim=1)

    def scores(self, seen: Seen) -> dict[str, Tensor]:
        """Ways to rank the items by a word, [items] each; which one serves is tried on made-up devices."""
        rows = self.rows(seen).double()
        found = {f"column {place}": column for place, column in enumerate(rows.T)} if rows.shape[1] <= COLUMNS else {}
        if rows.shape[1] == 1:
            return found
        found["length"] = rows.norm(dim=1)
        found["direction"] = self._along(rows)
        background = self._background(seen, rows)
        if background is not None:
            found["length beyond all"] = (rows - background).norm(dim=1)
            found["direction beyond all"] = self._along(rows - background)
        return found

    def _along(self, rows: Tensor) -> Tensor:
        """Along the one direction that explains most: a user's own. Popular items are on its positive side."""
        _, vectors = torch.linalg.eigh(rows.T @ rows)
        scores = rows @ vectors[:, -1]
        popularity = self.devices.people.train.counts_by_item.double()
        turned: Tensor = scores * (-1.0 if float((scores * (popularity - popularity.mean())).sum()) < 0 else 1.0)
        return turned

    def _background(self, seen: Seen, rows: Tensor) -> Tensor | None:
        """What a word says of items that nobody has, where that is linear in the table: V·A, fitted to most rows."""
        held = [seen.sent.projections.get(name) for name in self.plan.architecture.tables]
        if len(held) != 1 or held[0] is None or not held[0].linear or isinstance(self.plan.algorithm, RatingSquares):
            return None
        (name,) = self.plan.architecture.tables
        table = held[0].rows(seen.sent.vectors[name], torch.arange(len(rows))).double()
        if table.shape[1] != rows.shape[1]:
            return None
        chosen = torch.ones(len(rows), dtype=torch.bool)
        matrix = torch.zeros(table.shape[1], rows.shape[1], dtype=rows.dtype)
        for _ in range(6):
            some = table[chosen]
            level = float(some.square().sum()) / max(some.numel(), 1)
            system = some.T @ some + 1e-9 * (level or 1.0) * torch.eye(table.shape[1], dtype=rows.dtype)
            matrix = torch.linalg.solve(system, some.T @ rows[chosen])
            off = (rows - table @ matrix).norm(dim=1)
            chosen = off <= off.median()
        return table @ matrix

    def _simulated(self, seen: Seen, items: Tensor) -> Tensor:
        """How much of a word lies where devices with one item alone move it, [items, 1]."""
        flat = torch.cat([vector.double().reshape(-1) for _, vector in sorted(seen.answer.sums.items())]).abs()
        size, train = seen.sent.size, self.devices.people.train
        if size not in self.places:
            some = train.counts_by_item.argsort(descending=True, stable=True)[:SIMULATED]
            like = self.devices.fleet.taking_part[self.devices.fleet.size[self.devices.fleet.taking_part] == size]
            ratings = None if train.ratings is None else torch.full((len(some),), float(train.ratings.mean()))
            alone = Interactions.from_pairs(torch.arange(len(some)), some, len(some), train.num_items, ratings)
            others = self.devices.with_histories(alone, like[torch.arange(len(some)) % len(like)])
            found = torch.zeros(len(items), len(flat))
            for item, word in zip(some.tolist(), others.words(list(range(len(some)))), strict=True):
                moved = torch.cat([vector.reshape(-1) for _, vector in sorted(word.answer.sums.items())]).abs()
                found[item] = moved / moved.norm().clamp(min=1e-30)
            self.places[size] = found
        return (self.places[size].double() @ flat)[:, None]


def _diagonal(packed: Tensor, items: int) -> Tensor:
    known = torch.arange(min(items_of(len(packed)), items))
    found = torch.zeros(items, 1, dtype=packed.dtype)
    found[: len(known), 0] = packed[torch.div(known * (known + 3), 2, rounding_mode="floor")]
    return found


def _in_window(algorithm: RatingSquares, plan: Plan, seen: Seen, items: Tensor) -> Tensor:
    place = algorithm.window(plan, seen.sent).places(items)
    rows = seen.answer.sums[ROWS].view(-1, plan.settings.model.factors)
    return torch.where((place >= 0)[:, None], rows[place.clamp(min=0)], 0.0)
