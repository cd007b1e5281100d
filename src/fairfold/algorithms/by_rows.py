"""Scores from a user's history and rows of items: what all models of pairs have in common once they are made."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairfold.algorithms.least_squares import Remembering
from fairfold.algorithms.pair_architecture import LISTED, ROWS
from fairfold.algorithms.served import Served
from fairfold.algorithms.spectrum import Precision, strongest
from fairfold.metrics.ranking import Scorer
from fairfold.projections import Projection
from fairfold.projections.coded import FACTORS
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Sent
from fairfold.settings.privacy import USUAL_COHORT
from fairfold.values import Weights

CROWD = 15
"""Users of a secure sum that are expected to have an item, for it to be spoken of (docs/privacy.md)."""


def rows_and_pairs(precision: Precision, counts: Tensor, columns: int, width: int, pairs: int) -> Weights:
    """The model that follows from partial correlations: columns, in a table of a width, and pairs. It uses them up."""
    values, vectors = precision.spectrum(columns)
    rows, into, out = vectors * values.clamp(min=0).sqrt(), precision.scales * precision.roots, 1 / precision.roots
    listed = strongest(precision.correlations(), rows, counts, pairs)
    rarer, other = listed[:, :2].long().T
    listed[:, 2] *= out[rarer] * into[other]
    table = torch.zeros(len(rows), width, dtype=rows.dtype)
    table[:, : FACTORS + rows.shape[1]] = torch.cat([into[:, None], out[:, None], rows], dim=1)
    return {ROWS: table, LISTED: listed}


class ByRows(Remembering):
    """Scoring by rows and a list of pairs, of which each counts ``pair_weight``."""

    pair_weight: float
    crowd: int

    def shows(self, settings: Any) -> str | None:
        """See the base class: an item that one of a sum has alone shows all that goes with it."""
        least = self.crowd * min(1.0, settings.privacy.smallest_cohort / USUAL_COHORT)
        usual = "" if least >= CROWD else f" ({CROWD} are usual)"
        few = f"Items that fewer than {least:g} users of a sum are expected to have{usual} are not spoken of"
        return f"{few}, since they would show who has them"

    def tells_apart(self, plan: Plan, held: Sequence[Any], items: Tensor) -> Tensor:
        """Those with a row on some of the devices."""
        known: int = max(one.projections[ROWS].kept[0] for one in held if one.projections is not None)
        return items < known

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """From everybody's history."""
        rows = full[ROWS].view(plan.architecture.tables[ROWS])
        rows = rows[: int((rows[:, 1] > 0).sum())]  # zero beyond what a device holds
        coded = bool((rows[:, FACTORS:] == rows[:, FACTORS:].round()).all())  # the server's own rows need no list
        listed = full[LISTED].view(-1, 3)[: None if coded else 0]
        return self._scorer(Served(rows, listed, self.pair_weight), plan, people)

    def stored_scorer(self, plan: Plan, held: Mapping[str, Projection], stored: Weights, people: People) -> Scorer:
        """See the base class: numbers are never made of all the bytes of the table."""
        listed = held[LISTED].unpacked(stored[LISTED]).view(-1, 3)
        rows = held[ROWS].table(stored[ROWS])  # type: ignore[attr-defined]
        return self._scorer(Served(rows, listed, self.pair_weight), plan, people)

    def _scorer(self, served: Served, plan: Plan, people: People) -> Scorer:
        everything, of = torch.arange(plan.public.items), people.train.of
        return lambda users: served.scores(served.histories([of(user) for user in users.tolist()]), everything)

    def own_vectors(self, plan: Plan, sent: Sent, people: People, users: list[int]) -> Weights:
        """See the base class: histories as the model sees them."""
        return self._served(sent).histories([people.train.of(user) for user in users])

    def block_scores(self, plan: Plan, sent: Sent, vectors: Weights, items: Tensor) -> Tensor:
        """See the base class."""
        return self._served(sent).scores(vectors, items)

    def _served(self, sent: Sent) -> Served:
        rows = sent.vectors[ROWS].view(sent.projections[ROWS].kept)  # type: ignore[attr-defined]
        return Served(rows[rows[:, 1] > 0], sent.vectors[LISTED].view(-1, 3), self.pair_weight)
