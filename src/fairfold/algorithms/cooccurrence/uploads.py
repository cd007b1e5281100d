"""What clients of the default algorithm send: the statistics and the co-occurrences of their histories."""

from typing import Any, ClassVar

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
from fairfold.privacy import gram
from fairfold.subspace.projection import LeadingBlock
from fairfold.typing import FLOAT_BYTES, Weights


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
        from fairfold.algorithms.cooccurrence.contribution import check_contribution  # of fleets alone

        most, exponent = self.max_items_of(plan, task.size), self.history_exponent
        return check_contribution(update.sums[SUM], held, users=users, most=most, exponent=exponent, seed=seed)

    def sum_problem(self, update: Update, users: int) -> str | None:
        return tuning.problem(update.sums[tuning.QUALITY], users) if tuning.QUALITY in update.sums else None
