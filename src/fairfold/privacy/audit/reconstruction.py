"""Reconstruction from one update or a sum: numbers and scores by item, and users' vectors.

*Items.* Updates with tables have a row for each item, through the projection that the server itself has drawn;
co-occurrence sums have a diagonal, ratings a window. For updates of another form, plug-ins among them, the attacker
observes where simulated clients that have one item each change the update.

*Vectors.* A user's vector that is not sent can be solved for. Closed form: every row of an update is a multiple of u;
rows that the user does not have are −η·w·(v·u)u, which gives |u|², and the others give its sign. Ratings: the sums over
users hold (bᵤ, u) times 1. Gradient steps of matrix factorization: rows change along u, which gives its direction.

*Histories.* An item that only one member of a cohort has reveals that member's whole history in exact sums: all numbers
of its co-occurrence row are the same n^−κ (1/√n by default). What was decoded is subtracted, and reveals the next. Over
several rounds, histories name users.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairfold.algorithms.closed_form import ClosedForm
from fairfold.algorithms.cooccurrence import cooccurrence
from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.cooccurrence import SUM, triangle_items, triangle_size, unpack_triangle
from fairfold.algorithms.gradient import Gradient
from fairfold.algorithms.rating_model import ROWS, USERS
from fairfold.algorithms.rating_updates import statistic_units
from fairfold.algorithms.ratings import BayesianRatings
from fairfold.config.fleet import DifferentialPrivacy
from fairfold.data import Interactions
from fairfold.federation.algorithm import mean_change
from fairfold.federation.plan import Plan
from fairfold.privacy.audit.replay import Observation, ReplayedClients
from fairfold.subspace.projection import Hashed
from fairfold.typing import Weights

MAX_SIMULATED = 2_000  # most items for which one-item clients are simulated
MAX_COLUMNS = 64  # rows of more numbers are not scored column by column
MAX_ITEMS = 3_000  # items of a co-occurrence sum that are decoded
MIN_NOISY_ITEMS, NOISY_TOLERANCE = 6, 0.2  # fewest items, and relative tolerance, of a history from inexact numbers
MAX_HISTORY = 20_000
MIN_HISTORY = 3  # fewest items of a decoded history: shorter ones would match by chance


@dataclass
class UpdateReader:
    """Scores items by an observation."""

    replay: ReplayedClients
    places: dict[int, Tensor] = field(default_factory=dict)  # where one-item clients of each size change an update

    def rows(self, seen: Observation) -> Tensor:
        """Numbers by item, [items, numbers]: the change of one client, or the mean change of several."""
        plan, task, update = self.replay.sampler.plan, seen.task, seen.update
        algorithm, items = plan.algorithm, torch.arange(plan.public.num_items)
        if isinstance(algorithm, CoOccurrence):
            return _diagonal(update.sums[SUM], len(items)) if SUM in update.sums else torch.zeros(len(items), 1)
        if isinstance(algorithm, BayesianRatings):
            place = algorithm.window(plan, task).places(items)
            rows = update.sums[ROWS].view(-1, plan.settings.model.factors)
            return torch.where((place >= 0)[:, None], rows[place.clamp(min=0)], 0.0)
        tables = [name for name in plan.architecture.tables if name in update.sums and name in task.projections]
        if not tables:
            return self._simulated(seen, items)
        found = []
        for name in tables:
            held, before = task.projections[name], task.vectors[name]
            change = mean_change(algorithm, task, name, update.sums[name], update.weight)
            if len(change) != len(before) and len(change) % len(items) == 0:  # rows of other lengths than the table's
                found.append(change.view(len(items), -1))
            elif not held.linear:
                found.append(held.rows(before + change, items) - held.rows(before, items))
            else:
                found.append(held.rows(change, items))
        return torch.cat(found, dim=1)

    def scores(self, seen: Observation) -> dict[str, Tensor]:
        """Several scores of the items, [items] each; the best one is selected on synthetic clients."""
        rows = self.rows(seen).double()
        columns = rows.T if rows.shape[1] <= MAX_COLUMNS else ()
        found = {f"column {place}": column for place, column in enumerate(columns)}
        if rows.shape[1] == 1:
            return found
        found["length"] = rows.norm(dim=1)
        found["direction"] = self._along(rows)
        if (background := self._background(seen, rows)) is not None:
            found["length beyond all"] = (rows - background).norm(dim=1)
            found["direction beyond all"] = self._along(rows - background)
        return found

    def _along(self, rows: Tensor) -> Tensor:
        """Scores along the direction that explains most, the user's own; popular items are on its positive side."""
        _, vectors = torch.linalg.eigh(rows.T @ rows)
        scores = rows @ vectors[:, -1]
        popularity = self.replay.clients.train.counts_by_item.double()
        signed: Tensor = scores * (-1.0 if float((scores * (popularity - popularity.mean())).sum()) < 0 else 1.0)
        return signed

    def _background(self, seen: Observation, rows: Tensor) -> Tensor | None:
        """Rows of items that no user has, where they are linear in the table: V·A, fitted to most rows."""
        plan = self.replay.sampler.plan
        tables = list(plan.architecture.tables)
        held = seen.task.projections.get(tables[0]) if len(tables) == 1 else None
        if held is None or not held.linear or isinstance(plan.algorithm, BayesianRatings):
            return None
        table = held.rows(seen.task.vectors[tables[0]], torch.arange(len(rows))).double()
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

    def _simulated(self, seen: Observation, items: Tensor) -> Tensor:
        """How much of an update lies where clients with that item alone change it, [items, 1]."""
        flat = torch.cat([vector.double().reshape(-1) for _, vector in sorted(seen.update.sums.items())]).abs()
        size, train = seen.task.size, self.replay.clients.train
        if size not in self.places:
            some = train.counts_by_item.argsort(descending=True, stable=True)[:MAX_SIMULATED]
            clients, participants = torch.arange(len(some)), self.replay.sampler.participants
            like = participants[self.replay.sampler.size[participants] == size]
            ratings = None if train.ratings is None else torch.full((len(some),), float(train.ratings.mean()))
            alone = Interactions.from_pairs(clients, some, len(some), train.num_items, ratings)
            others = self.replay.with_histories(alone, like[clients % len(like)])
            found = torch.zeros(len(items), len(flat))
            for item, own in zip(some.tolist(), others.updates(list(range(len(some)))), strict=True):
                changed = torch.cat([vector.reshape(-1) for _, vector in sorted(own.update.sums.items())]).abs()
                found[item] = changed / changed.norm().clamp(min=1e-30)
            self.places[size] = found
        return (self.places[size].double() @ flat)[:, None]


def _diagonal(packed: Tensor, items: int) -> Tensor:
    """The diagonal of a packed triangle: how many users have each item; zero for items beyond it."""
    known = torch.arange(min(triangle_items(len(packed)), items))
    found = torch.zeros(items, 1, dtype=packed.dtype)
    found[: len(known), 0] = packed[torch.div(known * (known + 3), 2, rounding_mode="floor")]
    return found


def vector_error(plan: Plan, seen: Observation, secret: Weights) -> float | None:
    """Relative error of the user's vector that an update reveals; None where there is no way to solve for it."""
    algorithm, found = plan.algorithm, None
    if isinstance(algorithm, BayesianRatings):
        size = plan.settings.model.factors - 1
        found = _user_row(seen.update.sums[USERS] / statistic_units(size), size)
        true = _user_row(secret[USERS].view(-1), size)
    elif isinstance(algorithm, ClosedForm | Gradient) and len(plan.architecture.tables) == 1:
        if next(iter(plan.architecture.user_vectors.values()), 0) != next(iter(plan.architecture.tables.values()))[1]:
            return None
        found = _direction(plan, seen)
        true = secret[next(iter(plan.architecture.user_vectors))]
        if found is not None and isinstance(algorithm, Gradient):  # only the direction is known: the sine of the angle
            cosine = torch.nn.functional.cosine_similarity(found, true.double().view(-1), dim=0)
            return float((1 - cosine.square()).clamp(min=0).sqrt())
    else:
        return None
    true = true.double().view(-1)
    length = float(true.norm())
    return None if found is None or not length else float((found - true).norm()) / length


def _user_row(sums: Tensor, size: int) -> Tensor:
    """(bᵤ, u), which stands beside the user's constant 1."""
    return sums.double()[size**2 : -1].view(2 * size + 2, -1)[:size, size]


def _direction(plan: Plan, seen: Observation) -> Tensor | None:
    """The user's vector for the closed form; a multiple of it for gradient steps."""
    (name,) = plan.architecture.tables
    algorithm = plan.algorithm
    task = seen.task
    held = seen.task.projections[name]
    items = torch.arange(plan.public.num_items)
    change = mean_change(algorithm, task, name, seen.update.sums[name], seen.update.weight)
    rows = held.rows(change, items).double()
    table = held.rows(task.vectors[name], items).double()
    alone = held.rows(torch.ones_like(task.vectors[name]), items).abs().amax(1) > 0  # held at all
    if isinstance(held, Hashed) and held.subspace.head:
        alone &= items < held.subspace.head // plan.settings.model.factors  # what shares a slot is a mixture
    rows, table = rows[alone], table[alone]
    if len(rows) < 2 or not bool(rows.any()):
        return None
    unit: Tensor = torch.linalg.eigh(rows.T @ rows)[1][:, -1]
    if not isinstance(algorithm, ClosedForm):
        return unit
    along, expected = rows @ unit, table @ unit
    ratio = (along / expected)[expected.abs() > expected.abs().median() / 10].median()
    square = -float(ratio) / (algorithm.local_lr * algorithm.others)
    if square <= 0:
        return None
    beyond = along - ratio * expected
    sign = 1.0 if float(beyond[beyond.abs() > beyond.abs().max() / 2].sum()) > 0 else -1.0
    return unit.mul(sign * square**0.5)


def can_decode(plan: Plan) -> bool:
    """Whether a decoder is implemented for the algorithm."""
    return isinstance(plan.algorithm, CoOccurrence)


def decode_histories(plan: Plan, seen: Observation, blur: float = 0.0) -> list[Tensor]:
    """Histories, as ascending items, that the sum of a cohort reveals; its numbers may be off by ``blur``."""
    if not isinstance(plan.algorithm, CoOccurrence) or SUM not in seen.update.sums:
        return []
    read = _from_products if isinstance(plan.settings.privacy, DifferentialPrivacy) else _from_pairs
    return read(seen.update.sums[SUM], blur, plan.algorithm.history_exponent)


def _from_pairs(packed: Tensor, blur: float, exponent: float) -> list[Tensor]:
    items = min(triangle_items(len(packed)), MAX_ITEMS)
    weights = cooccurrence.history_weights(torch.arange(1, MAX_HISTORY), exponent)
    left = unpack_triangle(packed[: triangle_size(items)].float())
    slack = 0.25 / cooccurrence.UNIT + blur
    found, tried = list[Tensor](), torch.zeros(items, dtype=torch.bool)
    while True:
        worn = left > slack
        many, most = worn.sum(1), left.max(1).values
        # All numbers of the row alike: as their sum and the largest of them say.
        alike = (left.where(worn, most[:, None]) >= most[:, None] - 2 * slack).all(1)
        open_rows = (alike & (many >= MIN_HISTORY) & ~tried).nonzero().flatten()
        if not len(open_rows):
            return found
        for row in open_rows.tolist():
            tried[row] = True
            mine, weight = (left[row] > slack).nonzero().flatten(), float(left[row, row])
            if len(mine) < MIN_HISTORY or not bool(((weights[len(mine) - 1 :] - weight).abs() <= slack).any()):
                continue
            block = left[mine[:, None], mine]
            if bool((block >= weight - 2 * slack).all()) and float(left[row, mine].max()) <= weight + 2 * slack:
                left[mine[:, None], mine] = (block - weight).clamp(min=0)
                found.append(mine)


def _from_products(packed: Tensor, blur: float, _: float) -> list[Tensor]:
    """Decode sums of v vᵀ: the row of an item that only one member has is a multiple of v."""
    items, found = min(triangle_items(len(packed)), MAX_ITEMS), list[Tensor]()
    left = unpack_triangle(packed[: triangle_size(items)].double())
    for row in left.diagonal().argsort(descending=True).tolist():
        if float(left[row, row]) <= blur:
            continue
        vector = left[row] / left[row, row].sqrt()
        mine = (vector > vector.max() / 2).nonzero().flatten()
        outer = torch.outer(vector[mine], vector[mine])
        fits = ((left[mine[:, None], mine] - outer).abs() <= NOISY_TOLERANCE * outer).all()
        if len(mine) >= MIN_NOISY_ITEMS and bool(fits):
            left -= torch.outer(vector, vector)
            found.append(mine)
    return found


@dataclass(frozen=True)
class DecodingScore:
    """Decoded histories compared with the truth: share of every history, wrong pairs, and the user of each."""

    shares: dict[int, float]
    wrong: int
    users: dict[int, int]


def score_decoding(found: list[Tensor], histories: dict[int, Tensor]) -> DecodingScore:
    """Assign each decoded history to the user whom it fits best; one that fits no user by half is wrong."""
    shares = dict.fromkeys(histories, 0.0)
    users = dict[int, int]()
    wrong = 0
    for place, items in sorted(enumerate(found), key=lambda one: -len(one[1])):
        free = [user for user in histories if user not in users.values()]
        hits = {user: int(torch.isin(items, histories[user]).sum()) for user in free}
        best = max(hits, key=lambda user: hits[user], default=None)
        if best is None or 2 * hits[best] < len(items):
            wrong += len(items)
            continue
        users[place] = best
        wrong += len(items) - hits[best]
        shares[best] = hits[best] / max(len(histories[best]), 1)
    return DecodingScore(shares, wrong, users)


class HistoryTracks:
    """Links histories decoded in several rounds: the client present in every cohort of a history is its user."""

    def __init__(self) -> None:
        self._tracks: list[tuple[set[int], set[int], set[int]]] = []

    def add(self, found: list[Tensor], cohort: list[int], users: dict[int, int]) -> None:
        """Add a round with its known cohort; ``users`` is the truth, for evaluation only."""
        for place, items in enumerate(found):
            mine = set(items.tolist())
            jaccard = [len(mine & known) / len(mine | known) for known, _, _ in self._tracks]
            true = {users[place]} if place in users else set[int]()
            if max(jaccard, default=0.0) > 0.5:
                best = jaccard.index(max(jaccard))
                known, candidates, owners = self._tracks[best]
                self._tracks[best] = (known | mine, candidates & set(cohort), owners | true)
            else:
                self._tracks.append((mine, set(cohort), true))

    def named(self) -> tuple[int, int]:
        """Numbers of users named correctly, and of wrong names."""
        names = [(candidates, owners) for _, candidates, owners in self._tracks if len(candidates) == 1]
        right = {next(iter(candidates)) for candidates, owners in names if candidates == owners}
        return len(right), sum(candidates != owners for candidates, owners in names)
