"""The tensors of a co-occurrence model, and scores of items from a user's history alone."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence import streaming
from fairfold.algorithms.cooccurrence.streaming import encoding_table
from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy
from fairfold.errors import InvalidMessage
from fairfold.federation.algorithm import CompactScoring
from fairfold.federation.architecture import Architecture, Storage
from fairfold.federation.clients import Clients
from fairfold.federation.plan import Plan
from fairfold.federation.updates import MAX_DENSE, ClientTask
from fairfold.kernels import ops
from fairfold.kernels.reference import PackedRows
from fairfold.methods.truncated import CURVE, NEIGHBORS_PER_ITEM, BudgetSplit, TruncatedTensors
from fairfold.metrics.ranking import Scorer, first_by_score, ndcg
from fairfold.privacy.ledger import DEFAULT_MIN_COHORT
from fairfold.subspace.packed import FACTORS, factors_of
from fairfold.subspace.projection import Projection
from fairfold.typing import Weights

if TYPE_CHECKING:
    from fairfold.algorithms.cooccurrence.tuning import Tuning
    from fairfold.config import Settings

# Names of the model's tensors: (a, b, W) of each item, strongest pairs, neighbors of each item, popularity curve
ROWS, PAIRS, NEIGHBORS, POPULARITY = streaming.ROWS, "pairs", "neighbors", "popularity"
DEFAULT_QUALITY = "default_quality"  # local state: 1 + the quality of the first tuning candidate, 0 if not measured
# Pairs in the server's list, per item; of a large catalogue, where pairs alone may be the model, and in all
PAIRS_PER_ITEM, PAIRS_PER_ITEM_OF_MANY, LISTED_PAIRS = 16, 64, 1 << 24
# Names of the vectors that items are scored with: the sum of a history's rows, and the history as 0 and 1
HISTORY_SUM, HISTORY = "history_sum", "history"
BLOCK = 1024  # rows unpacked at a time
MIN_POPULARITY = 1e-30  # stands for 0 where the popularity curve is interpolated as a logarithm
SCORES_AT_ONCE = 1 << 22  # scores held at a time in validation
PAIRS_AT_ONCE = 1 << 20  # pairs of histories' items that are added up together
DEFAULT_MIN_ITEM_USERS = 10  # users of a secure sum expected to have an item that is uploaded (docs/privacy.md)


class CoOccurrenceArchitecture(Architecture):
    """Tensors with a row for each of the ``head`` leading items, of at most ``factors`` columns.

    There is local state of ``users``; the statistics counted ``num_known_users``, with histories of mean ``length``
    within the head, which has ``whole`` items if all clients have full size.
    """

    def __init__(
        self,
        items: int,
        users: int,
        head: int,
        factors: int,
        num_known_users: int = 1,
        length: float = 1.0,
        neighbors: bool = True,
        whole: int = 0,
    ) -> None:
        self.items, self.users, self.head = items, users, head
        self.num_known_users, self.length = num_known_users, length
        self.whole = whole or head
        self.tables = {ROWS: (head, min(factors, head) + FACTORS)}
        self.dense = {PAIRS: (num_listed_pairs(head), 3)}
        if neighbors:
            self.dense[NEIGHBORS] = (NEIGHBORS_PER_ITEM * head, 3)
        self.dense[POPULARITY] = (CURVE // FACTORS, FACTORS)
        self.user_tables, self.user_vectors = {}, {DEFAULT_QUALITY: 1}
        self.splits: dict[int, BudgetSplit] = {}
        self.streamed = False  # whether rows of all items pass by
        self.tuning: Tuning | None = None  # built once
        self.catalogue: Any = None  # what the solver keeps of the last sum of a large catalogue

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        full = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in self.shapes.items()}
        return full, {DEFAULT_QUALITY: torch.zeros(self.users, 1)}

    @property
    def columns(self) -> int:
        """Number of columns of the item table, without the two factors of a row."""
        return self.tables[ROWS][1] - FACTORS

    @property
    def neighbors(self) -> int:
        """Neighbors of each item in the server's list."""
        return self.dense.get(NEIGHBORS, (0, 3))[0] // self.head

    @property
    def tensors(self) -> TruncatedTensors:
        tensors = TruncatedTensors(self.tables, self.dense, catalogue=self.items, users=self.num_known_users)
        return replace(tensors, splits=self.splits, whole=self.whole, streamed=self.streamed)

    def with_splits(self, splits: dict[int, BudgetSplit]) -> Self:
        other = copy(self)
        other.splits = splits
        return other


def num_listed_pairs(head: int) -> int:
    """Pairs in the server's list for so many items."""
    of_many = min(PAIRS_PER_ITEM_OF_MANY, LISTED_PAIRS // head) if head * (head + 1) // 2 > MAX_DENSE else 0
    return max(PAIRS_PER_ITEM, of_many) * head


class CoOccurrenceScorer:
    """Scores of items from histories, by the tensors that a client or the server holds.

    The score of item j is b_j ⟨w_j, Σ a_i w_i⟩ over the history, by ``rows`` (a, b, w), which may be packed. A pair
    (j, i, t) adds to the score of j, for a user who has i, what the rows miss of t: t − b_j ⟨w_j, w_i⟩ a_i, times
    ``pair_weight``; and to the score of i that times (a_j b_i) / (a_i b_j). A neighbor (j, i, v) adds v to the score of
    j and nothing to that of i. Pairs of an item with itself are ignored. ``popularity``, given at the items 0, 1, 3, 7,
    … and a power of the item's number between them, adds its (1 + n)-th part to every item with a score, for a user
    with n items of the table: like one more item that everybody has, which alone serves those who have none. With
    ``encoding``, rows (a, b, w) of all items, the sum over a history is of these (:mod:`.streaming`).
    """

    def __init__(
        self,
        rows: Tensor | PackedRows,
        pairs: Tensor,
        pair_weight: float,
        neighbors: Tensor | None = None,
        popularity: Tensor | None = None,
        encoding: Tensor | None = None,
    ) -> None:
        self._encoding = encoding
        if isinstance(rows, Tensor):
            factors = rows[:, :FACTORS]
            self.rows: Tensor | PackedRows = rows[:, FACTORS:]
        else:
            factors = factors_of(rows.row_headers)
            self.rows = rows
        self.known = len(rows)
        self.into, self.out = factors.T
        self._index_pairs(pairs, pair_weight, neighbors)
        blocks = (torch.arange(at, min(at + BLOCK, self.known)) for at in range(0, self.known, BLOCK))
        norms = (float((self.rows[block].norm(dim=1) * self.out[block]).max()) for block in blocks)
        self._largest_norm = max(norms, default=0.0)
        self._log_popularity: Tensor | None = None
        if popularity is not None and bool(popularity.any()):
            self._log_popularity = popularity.flatten().clamp(min=MIN_POPULARITY).log()
        last = [int(of.max()) for of in (self._scored, self._source) if len(of)]
        self.reach = 1 + max([self.known - 1, *last])

    def _index_pairs(self, pairs: Tensor, pair_weight: float, neighbors: Tensor | None) -> None:
        """Pairs in both directions and neighbors in one, sorted by the item of a history."""
        ids, values = pairs[:, :2].long(), pairs[:, 2]
        real = ids[:, 0] != ids[:, 1]
        ids, values = ids[real], values[real].to(self.into.dtype)
        back = torch.ones_like(values)
        both = (ids < self.known).all(1)
        rarer, other = ids[both].T
        a, b = self.into, self.out
        values[both] = values[both] - b[rarer] * self._products(rarer, other) * a[other]
        back[both] = a[rarer] * b[other] / (a[other] * b[rarer]).clamp(min=1e-30)
        values *= pair_weight
        one_way = pairs.new_empty(0, 3) if neighbors is None else neighbors.view(-1, 3)
        one_way = one_way[one_way[:, 0] != one_way[:, 1]]
        scored, source = one_way[:, :2].long().T
        sources = torch.cat([ids[:, 1], ids[:, 0], source])
        targets = torch.cat([ids[:, 0], ids[:, 1], scored])
        added = torch.cat([values, values * back, one_way[:, 2].to(self.into.dtype)])
        order = sources.argsort(stable=True)
        self._source, self._scored, self._added = sources[order], targets[order], added[order]

    def _products(self, rarer: Tensor, other: Tensor) -> Tensor:
        """Of the rows of some pairs of items."""
        found = torch.zeros(len(rarer), dtype=self.into.dtype)
        for at in range(0, len(rarer), BLOCK):
            found[at : at + BLOCK] = (self.rows[rarer[at : at + BLOCK]] * self.rows[other[at : at + BLOCK]]).sum(1)
        return found

    def histories(self, histories: list[Tensor]) -> Weights:
        """The vectors that items are scored with, for users with these histories."""
        worn = self.into.new_zeros(len(histories), self.reach)
        worn[_positions(histories, self.reach)] = 1
        if self._encoding is not None:
            return {HISTORY_SUM: streaming.encode(histories, streaming.row_blocks(self._encoding)), HISTORY: worn}
        if isinstance(self.rows, PackedRows):
            known = [history[history < self.known] for history in histories]
            sums = [ops.packed_sum(self.rows, items, self.into[items]) for items in known]
            return {HISTORY_SUM: torch.stack(sums) if sums else worn.new_zeros(0, self.rows.columns), HISTORY: worn}
        own = worn[:, : self.known] * self.into if self.rows.shape[1] else worn[:, : self.known]
        return {HISTORY_SUM: own @ self.rows, HISTORY: worn}

    def scores(self, vectors: Weights, items: Tensor) -> Tensor:
        """Scores [users, items] of consecutive items; those without a score come last, in their order."""
        sums, history = vectors[HISTORY_SUM], vectors[HISTORY]
        least = self._lower_bound(sums, history)
        behind = 1 - 1 / (items + 2).to(history.dtype)  # the same in every block of items
        found = least[:, None] - behind * (1 + least.abs()[:, None])
        known, rows = items[items < self.known], self.rows
        mine, beyond = found[:, : len(known)], found[:, len(known) :]  # in place: there may be gigabytes of scores
        own = ops.packed_products(rows, known, sums) if isinstance(rows, PackedRows) else sums @ rows[known].T
        torch.mul(own, self.out[known], out=mine)
        scored = torch.zeros_like(beyond, dtype=torch.bool)
        if len(self._source):
            added = self._pair_scores(history, items)
            mine += added[:, : len(known)]
            scored = added[:, len(known) :] != 0
            beyond[scored] = added[:, len(known) :][scored]
        if self._log_popularity is not None:
            each = 1 + history[:, : self.known].sum(1, keepdim=True)
            mine += self.popularity(known) / each
            beyond += torch.where(scored, self.popularity(items[len(known) :]) / each, 0)
        return found

    def _pair_scores(self, history: Tensor, items: Tensor) -> Tensor:
        """What pairs and neighbors add to the scores of consecutive items: of many, a history's items have few."""
        found = history.new_zeros(len(history), len(items))
        user, source = history.nonzero(as_tuple=True)
        first = torch.searchsorted(self._source, source)
        counts = torch.searchsorted(self._source, source, right=True) - first
        together = torch.unique_consecutive((counts.cumsum(0) - counts) // PAIRS_AT_ONCE, return_counts=True)[1]
        for part in torch.split(torch.arange(len(source)), together.tolist()):
            many = counts[part]
            place = torch.arange(int(many.sum())) + torch.repeat_interleave(first[part] - many.cumsum(0) + many, many)
            target, owner = self._scored[place] - items[:1], torch.repeat_interleave(user[part], many)
            here = (target >= 0) & (target < len(items))
            found.view(-1).index_add_(0, (owner * len(items) + target)[here], self._added[place[here]])
        return found

    def popularity(self, items: Tensor) -> Tensor:
        """What popularity adds to the scores of a user without a history."""
        if self._log_popularity is None:
            return torch.zeros(len(items))
        place = (items.double() + 1).log2().clamp(max=len(self._log_popularity) - 1)
        first = place.floor().long().clamp(max=len(self._log_popularity) - 2)
        low, high = (self._log_popularity[at].double() for at in (first, first + 1))
        return torch.lerp(low, high, place - first).exp().to(self.into.dtype)

    def _lower_bound(self, sums: Tensor, history: Tensor) -> Tensor:
        """A number that no score of a user is below."""
        if not self.known:
            return sums.new_zeros(len(sums))
        by_pairs = history.sum(1) * (self._added.abs().max() if len(self._added) else 0.0)
        return torch.neg(sums.norm(dim=1) * self._largest_norm + by_pairs)

    def held_out_ndcg(self, given: list[Tensor], held_out: list[Tensor], catalogue: int, top: int) -> Tensor:
        """NDCG@top of every user's held-out items, ranked by their other items."""
        longest = max((len(history) for history in given), default=0)
        items = torch.arange(min(catalogue, self.reach + top + longest))
        step = max(1, SCORES_AT_ONCE // len(items))
        found = torch.zeros(len(given), dtype=torch.float64)
        for start in range(0, len(given), step):
            known, wanted = given[start : start + step], held_out[start : start + step]
            scores = self.scores(self.histories(known), items).float()  # ties do not depend on the batch
            scores[_positions(known, len(items))] = -torch.inf
            best = first_by_score(scores, min(top, len(items)))[1]
            relevant = torch.zeros_like(scores, dtype=torch.bool)
            relevant[_positions(wanted, len(items))] = True
            found[start : start + step] = ndcg(relevant.gather(1, best), torch.tensor(list(map(len, wanted))), top)
        return found


def _positions(histories: list[Tensor], items: int) -> tuple[Tensor, Tensor]:
    rows = torch.repeat_interleave(torch.arange(len(histories)), torch.tensor([len(one) for one in histories]))
    columns = torch.cat(histories)
    here = columns < items
    return rows[here], columns[here]


class HistoryScoring(streaming.StreamedEncoding, CompactScoring):
    """Scores by rows, popularity, neighbors and pairs, from histories: what co-occurrence models have in common."""

    pair_weight: float
    min_item_users: int

    def disclosure(self, settings: Any) -> str | None:
        least = self.min_item_users
        usual = "" if least >= DEFAULT_MIN_ITEM_USERS else f" ({DEFAULT_MIN_ITEM_USERS} are usual)"
        sums = f"a sum of {DEFAULT_MIN_COHORT} or more"
        few = f"Items that fewer than {least} users of {sums} are expected to have{usual}"
        return f"{few} are not uploaded, and of smaller sums in proportion, since they would show who has them"

    def distinguishable_items(self, plan: Plan, held: Sequence[Any], items: Tensor) -> Tensor:
        sizes = [one.projections for one in held if one.projections is not None]
        shown = [part for of in sizes for part in (of[ROWS], *self.stream_packing(of).values())]
        known: int = max(part.kept[0] for part in shown)
        return items < known

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Scorer:
        table = full[ROWS].view(plan.architecture.tables[ROWS])
        rows = table[: int((table[:, 1] > 0).sum())]  # zero beyond what a client holds
        quantized = bool((rows[:, FACTORS:] == rows[:, FACTORS:].round()).all())
        pairs = full[PAIRS].view(-1, 3)
        many = len(pairs) > PAIRS_PER_ITEM * len(table)  # otherwise the server's own rows need no pairs
        pairs = pairs[: None if quantized or many else 0]
        encoding = encoding_table(full, len(table))
        width = encoding.shape[1] if encoding is not None else rows.shape[1] if rows[:, FACTORS:].any() else FACTORS
        extra = (full.get(NEIGHBORS), full.get(POPULARITY), encoding)
        return _score_all(CoOccurrenceScorer(rows[:, :width], pairs, self.pair_weight, *extra), plan, clients)

    def compact_scorer(self, plan: Plan, held: Mapping[str, Projection], stored: Weights, clients: Clients) -> Scorer:
        encoding = encoding_table(stored, held[ROWS].shape[0])
        return _score_all(stored_scorer(held, stored, self.pair_weight, encoding), plan, clients)

    def scoring_vectors(self, plan: Plan, task: ClientTask, clients: Clients, users: list[int]) -> Weights:
        return self.task_scorer(task).histories([clients.train.of(user) for user in users])

    def block_scores(self, plan: Plan, task: ClientTask, vectors: Weights, items: Tensor) -> Tensor:
        return self.task_scorer(task).scores(vectors, items)

    def num_candidates(self, plan: Plan, task: ClientTask, top: int) -> int:
        return min(plan.public.num_items, self.task_scorer(task).reach + top)

    def task_scorer(self, task: ClientTask) -> CoOccurrenceScorer:
        """The scorer of a model as a client received it."""
        rows = task.vectors[ROWS].view(task.projections[ROWS].kept)  # type: ignore[attr-defined]
        head = task.projections[ROWS].shape[0]
        for name in (PAIRS, NEIGHBORS):
            ids = task.vectors[name].view(-1, 3)[:, :2] if name in task.vectors else torch.empty(0, 2)
            if not bool(((ids >= 0) & (ids < head)).all()):
                raise InvalidMessage("a list of pairs of unknown items", f"items below {head}", "Train anew.")
        self.require_stream(task)
        pairs = task.vectors[PAIRS].view(-1, 3)
        extra = (task.vectors.get(NEIGHBORS), task.vectors.get(POPULARITY), encoding_table(task.vectors, head))
        return CoOccurrenceScorer(rows[rows[:, 1] > 0], pairs, self.pair_weight, *extra)


def _score_all(model: CoOccurrenceScorer, plan: Plan, clients: Clients) -> Scorer:
    catalogue = torch.arange(plan.public.num_items)
    return lambda users: model.scores(model.histories([clients.train.of(user) for user in users.tolist()]), catalogue)


def stored_scorer(
    held: Mapping[str, Projection], stored: Weights, pair_weight: float, encoding: Tensor | None = None
) -> CoOccurrenceScorer:
    """The scorer of a client's model as it is stored: rows stay packed."""
    pairs = held[PAIRS].unpacked(stored[PAIRS]).view(-1, 3)
    rows = held[ROWS].table(stored[ROWS])  # type: ignore[attr-defined]
    near, popularity = (held[name].unpacked(stored[name]) if name in held else None for name in (NEIGHBORS, POPULARITY))
    return CoOccurrenceScorer(rows, pairs, pair_weight, near, popularity, encoding)


def required_item_users(min_item_users: int, settings: "Settings", users: int) -> float:
    """How many users must have an item so that ``min_item_users`` of them are expected in one secure sum.

    In proportion less where fewer than usual are in a sum; 0 where sums have noise, or updates are seen as they are.
    """
    privacy = settings.privacy
    if not isinstance(privacy, SecurePrivacy) or isinstance(privacy, DifferentialPrivacy):
        return 0.0
    drawn = max(1, min(settings.fleet.clients_per_round or users, users) // settings.fleet.secure_groups)
    return min_item_users * min(1.0, drawn / DEFAULT_MIN_COHORT) * users / drawn
