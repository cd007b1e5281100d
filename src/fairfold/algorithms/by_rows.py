"""Scores from a user's history and rows of items: what all models of pairs have in common once they are made."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairfold.algorithms.pair_architecture import LISTED, NEAR, POPULAR, ROWS
from fairfold.algorithms.remembering import Remembering
from fairfold.algorithms.served import Served
from fairfold.errors import InvalidMessage
from fairfold.metrics.ranking import Scorer
from fairfold.privacy.ledger import USUAL_COHORT
from fairfold.projections import Projection
from fairfold.projections.coded import FACTORS
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Sent
from fairfold.values import Weights

CROWD = 10
"""Users of a secure sum that are expected to have an item, for it to be spoken of (docs/privacy.md)."""


class ByRows(Remembering):
    """Scoring by rows, popularity, neighbours, and a list of pairs, of which each counts ``pair_weight``."""

    pair_weight: float
    crowd: int

    def shows(self, settings: Any) -> str | None:
        """See the base class: an item that one of a sum has alone shows all that goes with it."""
        usual = "" if self.crowd >= CROWD else f" ({CROWD} are usual)"
        few = f"Items that fewer than {self.crowd} users of a sum of {USUAL_COHORT} or more are expected to have{usual}"
        return f"{few} are not spoken of, and of smaller sums in proportion, since they would show who has them"

    def tells_apart(self, plan: Plan, held: Sequence[Any], items: Tensor) -> Tensor:
        """Those with a row on some of the devices."""
        known: int = max(one.projections[ROWS].kept[0] for one in held if one.projections is not None)
        return items < known

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """From everybody's history."""
        rows = full[ROWS].view(plan.architecture.tables[ROWS])
        rows = rows[: int((rows[:, 1] > 0).sum())]  # zero beyond what a device holds
        coded = bool((rows[:, FACTORS:] == rows[:, FACTORS:].round()).all())  # the server's own rows need no list
        listed, near = full[LISTED].view(-1, 3)[: None if coded else 0], full.get(NEAR)
        return self._scorer(Served(rows, listed, self.pair_weight, _rows_of(near), full.get(POPULAR)), plan, people)

    def stored_scorer(self, plan: Plan, held: Mapping[str, Projection], stored: Weights, people: People) -> Scorer:
        """See the base class: numbers are never made of all the bytes of the table."""
        return self._scorer(stored_model(held, stored, self.pair_weight), plan, people)

    def _scorer(self, served: Served, plan: Plan, people: People) -> Scorer:
        everything, of = torch.arange(plan.public.items), people.train.of
        return lambda users: served.scores(served.histories([of(user) for user in users.tolist()]), everything)

    def own_vectors(self, plan: Plan, sent: Sent, people: People, users: list[int]) -> Weights:
        """See the base class: histories as the model sees them."""
        return self._served(sent).histories([people.train.of(user) for user in users])

    def block_scores(self, plan: Plan, sent: Sent, vectors: Weights, items: Tensor) -> Tensor:
        """See the base class."""
        return self._served(sent).scores(vectors, items)

    def candidates(self, plan: Plan, sent: Sent, many: int) -> int:
        """See the base class: a catalogue may be far larger than what a model tells apart."""
        return min(plan.public.items, self._served(sent).reach + many)

    def _served(self, sent: Sent) -> Served:
        rows = sent.vectors[ROWS].view(sent.projections[ROWS].kept)  # type: ignore[attr-defined]
        listed, near = sent.vectors[LISTED].view(-1, 3), _rows_of(sent.vectors.get(NEAR))
        head = sent.projections[ROWS].shape[0]
        for pairs in (listed, near):
            if pairs is not None and not bool(((pairs[:, :2] >= 0) & (pairs[:, :2] < head)).all()):
                raise InvalidMessage("a list of pairs of items that are none", f"items below {head}", "Train anew.")
        return Served(rows[rows[:, 1] > 0], listed, self.pair_weight, near, sent.vectors.get(POPULAR))


def stored_model(held: Mapping[str, Projection], stored: Weights, pair_weight: float) -> Served:
    """What a device does with its tensors as they are stored."""
    listed = held[LISTED].unpacked(stored[LISTED]).view(-1, 3)
    rows = held[ROWS].table(stored[ROWS])  # type: ignore[attr-defined]
    near = held[NEAR].unpacked(stored[NEAR]) if NEAR in held else None
    popular = held[POPULAR].unpacked(stored[POPULAR]) if POPULAR in held else None
    return Served(rows, listed, pair_weight, _rows_of(near), popular)


def _rows_of(near: Tensor | None) -> Tensor | None:
    return None if near is None else near.view(-1, 3)
