"""What clients of the default algorithm upload, and what a device's uploads may add up to over a run.

Clients send statistics and the co-occurrences of their histories. In plain runs the server bounds what all changes of a
device add up to: the contribution of as many users as it was invited with.

*One user.* A contribution is v·x xᵀ of a set of items x, with v of a history of at least so many. The diagonal alone
says which, so the server remembers the set and v, computes what the update has to be, and compares: nothing else than
some history passes, however many updates it takes.

*Several users.* No number of a change may be larger than so many users have, and their sum may be any of its norm.
The server remembers a linear sketch of it (AMS: random signs in buckets by a hash that it draws), which gives the norm
of all accepted updates together to a few percent.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence import tuning
from fairfold.algorithms.cooccurrence.cooccurrence import (
    ITEM_SHARES,
    LONGEST_UPLOAD,
    REQUEST,
    SUM,
    SYNC_STATE,
    UNIT,
    USERS,
    CoOccurrenceUpload,
    frobenius_norm,
    history_weights,
    is_private,
    max_items,
    max_uploaded_items,
    model_of,
    num_parts,
    num_uploaded_items,
    triangle_items,
    triangle_size,
    user_totals,
)
from fairfold.algorithms.cooccurrence.parts import TrianglePart, is_dropped, sync_states, uploaded_parts
from fairfold.algorithms.cooccurrence.scorer import ROWS
from fairfold.algorithms.incremental import IncrementalAlgorithm
from fairfold.data import Interactions
from fairfold.errors import InvalidMessage
from fairfold.federation.algorithm import COUNTS, CombinesGroups, NumbersItems, SparseUpdates, Statistic, count_of
from fairfold.federation.bounds import BoundsContributions
from fairfold.federation.plan import Plan
from fairfold.federation.updates import MAX_DENSE, ClientTask, Update
from fairfold.kernels.sparse_pairs import columns_of
from fairfold.privacy import gram
from fairfold.subspace.projection import LeadingBlock
from fairfold.typing import FLOAT_BYTES, Weights

BUCKETS = 256  # of a sketch: its norm is off by 4 % (a standard deviation)
TOLERANCE = 1.25  # times the norm of all users: six standard deviations
ITEMS, VALUE, SKETCH = "items", "value", "sketch"
NO_HISTORY = "a change that leaves no user's history in the sum"
TOO_MUCH = "changes that add up to more than its users have"


class CoOccurrenceUploads(IncrementalAlgorithm, NumbersItems, SparseUpdates, BoundsContributions, CombinesGroups):
    """The statistics and uploads of clients: one half of the algorithm."""

    supports_retraction: ClassVar[bool] = True
    sparse_sums: ClassVar = frozenset({SUM})
    history_exponent: float

    def statistics(self, settings: Any) -> dict[str, Statistic]:
        return {COUNTS: Statistic(True, UNIT if is_private(settings) else 1), USERS: Statistic(False, 1, True)}

    def client_statistics(self, settings: Any, histories: Interactions, items: range) -> Update:
        private = is_private(settings)
        sums = {COUNTS: count_of(histories, items, gram.count_weights(histories) if private else None)}
        if items.start == 0:
            plain = not settings.privacy.uses_secure_aggregation
            sums[USERS] = user_totals(histories, lengths=not private, pairs=plain)
        return Update(sums, float(histories.num_users))

    def numbering(self, plan: Plan) -> Tensor | None:
        counts = plan.public.statistics[COUNTS]
        ordered = bool((counts[:-1] >= counts[1:]).all())
        return None if ordered else counts.argsort(descending=True, stable=True).argsort()

    def upload_projection(self, plan: Plan, size: int, part: int = 0) -> LeadingBlock:
        """The prefix of the co-occurrence sum that clients of a size upload, or a part of it."""
        model = model_of(plan)
        private = is_private(plan.settings)  # as much as a client would of all items
        most = max_items(plan.settings, plan.public) if private else model.whole
        items = num_uploaded_items(plan.settings, plan.public, plan.capacities[size], most)
        block = LeadingBlock((triangle_size(model.head),), (triangle_size(min(model.head, items)),))
        parts = num_parts(plan.settings, plan.public)
        return block if parts == 1 else TrianglePart(block.shape, block.kept, part, parts)

    def max_update_bytes(self, plan: Plan, size: int) -> int:
        """Bytes of all numbers: no list of pairs is longer. Where they are too many, of one user's longest list."""
        whole = self.upload_projection(plan, size).size
        listed = 3 * triangle_size(min(LONGEST_UPLOAD, model_of(plan).head))  # a position may take twice a value
        return min(whole, max(MAX_DENSE, listed)) * FLOAT_BYTES

    def max_items_of(self, plan: Plan, size: int) -> int:
        """The most items of which clients of a size can upload all pairs."""
        return max_uploaded_items(plan.settings, plan.public, plan.capacities[size], model_of(plan).whole)

    def upload(
        self, plan: Plan, task: ClientTask, items: Tensor, lengths: Tensor, states: Tensor, wanted: Tensor
    ) -> tuple[Update, Weights]:
        """The change of the co-occurrences of some histories, or of the wanted part, and the sync states afterwards."""
        held = uploaded_parts(states)
        dropped = is_dropped(states)
        block = task.context[SUM]
        assert isinstance(block, LeadingBlock)
        part = block.part if isinstance(block, TrianglePart) else 0
        uploaded, now = (held >> part & 1).bool(), ~dropped & ((held > 0) | wanted)
        leading = triangle_items(block.kept[0])
        dtype = task.vectors[ROWS].dtype
        if is_private(plan.settings):
            shares = task.vectors.get(ITEM_SHARES)
            if shares is None or shares.shape != (task.projections[ROWS].shape[0],):
                raise InvalidMessage("a task without shares of items", "a share for each item", "Check both sides.")
            sums = gram.private_sum(items, lengths, shares, leading).to(dtype)
        else:
            secure = plan.settings.privacy.uses_secure_aggregation
            known = items < task.projections[ROWS].shape[0]
            limit = len(items) if secure else int(task.vectors[REQUEST][3])
            parts = (now & known, uploaded & known)
            upload = CoOccurrenceUpload.changes(items, lengths, *parts, limit, self.history_exponent)
            if isinstance(block, TrianglePart):
                sums = upload.part(block, dtype)
            else:
                sums = upload.dense(leading, dtype) if secure else upload.shortest(leading, dtype)
        held = held & ~(1 << part) | now.long() << part
        return Update({SUM: sums}, float(len(lengths))), {SYNC_STATE: sync_states(held, dropped)[:, None]}

    def norm_problem(self, task: ClientTask, update: Update) -> str | None:
        """Why a sum cannot be that of so many users, or None."""
        block = task.context[SUM]
        assert isinstance(block, LeadingBlock)
        most = update.weight * (1 + 1e-5) * triangle_items(block.kept[0]) ** (1 - self.history_exponent)
        most *= 2 if task.round_number else 1  # a later update retracts an earlier one: twice the norm at most
        diagonal = block.diagonal if isinstance(block, TrianglePart) else None
        return "a norm above that of its users" if frobenius_norm(update.sums[SUM], diagonal) > most else None

    def upload_notes(self, plan: Plan, *, listed: bool) -> list[str]:
        """Sentences on what clients did not send at once, or at all; ``listed``: the sum has the pairs that occur."""
        parts, masked = num_parts(plan.settings, plan.public), plan.settings.privacy.uses_secure_aggregation
        if parts > 1:
            return [f"Pairs are uploaded in {parts} parts, one in a round: together {parts} times what is sent in one."]
        if masked or not listed:
            return []
        most = max(self.max_items_of(plan, size) for size in range(len(plan.capacities)))
        return [f"Of a user with over {most:,} items the pairs of the {most:,} most popular are uploaded."]

    def sample_state_shapes(self, plan: Plan) -> dict[str, int]:
        return {SYNC_STATE: 1}

    def mark_lost(self, local_state: Weights, lost: Tensor) -> None:
        local_state[SYNC_STATE] = sync_states(uploaded_parts(local_state[SYNC_STATE]), lost[:, None])

    def check_contribution(
        self, plan: Plan, task: ClientTask, update: Update, held: Weights, users: int, seed: int
    ) -> tuple[str | None, Weights]:
        if SUM not in update.sums:
            return None, held
        most, exponent = self.max_items_of(plan, task.size), self.history_exponent
        return check_contribution(update.sums[SUM], held, users=users, most=most, exponent=exponent, seed=seed)

    def sum_problem(self, update: Update, users: int) -> str | None:
        return tuning.problem(update.sums[tuning.QUALITY], users) if tuning.QUALITY in update.sums else None


def check_contribution(
    change: Tensor, held: Weights, *, users: int, most: int, exponent: float, seed: int
) -> tuple[str | None, Weights]:
    """Why a device's change is refused, or None, and what to remember of all its changes if it is accepted.

    ``held``: what was remembered before; ``most``: of how many items it may upload all pairs.
    """
    places, values = nonzero_pairs(change)
    if users == 1:
        return _check_history(places, values, held, len(change), most, exponent)
    largest = _largest_share(places, values, 2.0**-exponent)
    if largest > users * (1 + 1e-6):
        return TOO_MUCH, held
    sketch = held.get(SKETCH, torch.zeros(BUCKETS, dtype=torch.float64)) + sketch_of(places, values, seed)
    bound = users * TOLERANCE * triangle_items(len(change)) ** (1 - exponent)
    return (TOO_MUCH if float(sketch.norm()) > bound else None), {SKETCH: sketch}


def _largest_share(places: Tensor, values: Tensor, pair: float) -> float:
    """The largest number of a change against what one user may add there: 1 of an item, ``pair`` of two."""
    if not len(places):
        return 0.0
    columns = columns_of(places)
    on_diagonal = places == columns * (columns + 3) // 2
    return float((values.abs() / torch.where(on_diagonal, 1.0, pair)).max())


def nonzero_pairs(change: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in the packed triangle, ascending, and the numbers there that are not zero."""
    if change.is_sparse:
        change = change.coalesce()
        places, values = change.indices()[0], change.values()
        return places[values != 0], values[values != 0].double()
    places = change.nonzero()[:, 0]
    return places, change[places].double()


def _check_history(
    places: Tensor, values: Tensor, held: Weights, length: int, most: int, exponent: float
) -> tuple[str | None, Weights]:
    before = held.get(ITEMS, torch.empty(0, dtype=torch.int64))
    value_before = held.get(VALUE, torch.zeros(1, dtype=torch.float64))
    columns = columns_of(places)
    on_diagonal = places == columns * (columns + 3) // 2
    diagonal = torch.zeros(triangle_items(length), dtype=torch.float64)
    diagonal[before] = value_before
    diagonal[columns[on_diagonal]] += values[on_diagonal]
    items = diagonal.nonzero()[:, 0]
    value = diagonal[items[:1]] if len(items) else torch.zeros(1, dtype=torch.float64)
    if len(items) > most or not bool((diagonal[items] == value).all()):
        return NO_HISTORY, held
    largest = history_weights(torch.tensor([len(items)]), exponent).double()
    if len(items) and not 1 / UNIT <= float(value) <= float(largest):
        return NO_HISTORY, held
    allowed = _pairs(items, value, before, value_before)
    same = len(allowed[0]) == len(places) and allowed[0].equal(places) and allowed[1].equal(values)
    return (None if same else NO_HISTORY), {ITEMS: items, VALUE: value}


def _pairs(items: Tensor, value: Tensor, before: Tensor, value_before: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of some items at a value, less those of other items at theirs."""
    length = triangle_size(1 + max([-1, *items[-1:].tolist(), *before[-1:].tolist()]))
    lengths = torch.tensor([len(items), len(before)])
    ends = lengths.cumsum(0)
    weights = torch.cat([value, -value_before])
    upload = CoOccurrenceUpload(torch.cat([items, before]), ends - lengths, ends, weights)
    return nonzero_pairs(upload.shortest(triangle_items(length), torch.float64))


def sketch_of(places: Tensor, values: Tensor, seed: int) -> Tensor:
    """The sketch of a symmetric matrix by its upper half, of which pairs off the diagonal count twice in the norm."""
    columns = columns_of(places)
    scaled = torch.where(places == columns * (columns + 3) // 2, values, values * 2**0.5)
    hashed = _mixed(places ^ seed)
    signs = 1.0 - 2.0 * (hashed & 1).double()
    return torch.zeros(BUCKETS, dtype=torch.float64).index_add_(0, (hashed >> 1) % BUCKETS, signs * scaled)


def _mixed(keys: Tensor) -> Tensor:
    """Bits of 63-bit integers mixed (SplitMix64's finalizer on signed numbers)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        keys = (keys ^ ((keys >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (keys ^ ((keys >> 31) & ((1 << 33) - 1))) & ((1 << 62) - 1)
