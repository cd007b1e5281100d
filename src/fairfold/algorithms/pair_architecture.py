"""The tensors of a model of pairs: rows of the leading items, lists of pairs and neighbours, a curve of popularity."""

from copy import copy
from typing import TYPE_CHECKING

import torch

from fairfold.methods import Tensors
from fairfold.methods.base import Shape
from fairfold.methods.leading import CURVE, NEIGHBOURS
from fairfold.privacy.ledger import USUAL_COHORT
from fairfold.projections.coded import FACTORS
from fairfold.protocol.architecture import Architecture
from fairfold.protocol.storage import Storage
from fairfold.settings.privacy import PrivatePrivacy, SecurePrivacy
from fairfold.values import Weights

if TYPE_CHECKING:
    from fairfold.settings import Settings

ROWS, LISTED, NEAR, POPULAR = "rows", "pairs", "near", "popular"
"""Names of the model's tensors: (a, b, W) of every item, pairs, every item's neighbours, and how popular items are."""

JUDGED = "judged"
"""Name of what a user keeps: 1 + their quality under the first trial."""

LIST_PER_ITEM = 16
"""Pairs in the server's list, by item."""


class PairArchitecture(Architecture):
    """Tensors with a row for each item of the head.

    Args:
        items: Of the catalogue.
        users: Whose private numbers are held here.
        head: Items that are correlated.
        factors: Columns at the most.
        known_users: How many the survey has found.
        length: Of their histories within the head, in the mean.
        near: Whether there is a list of neighbours.
        whole: Items that a device of full size would speak of; the head is those of them that anybody does.
    """

    def __init__(
        self, items: int, users: int, head: int, factors: int, known_users: int = 1, length: float = 1.0,
        near: bool = True, whole: int = 0,
    ) -> None:  # fmt: skip
        self.items, self.users, self.head, self.known_users, self.length = items, users, head, known_users, length
        self.whole = whole or head
        self.tables = {ROWS: (head, min(factors, head) + FACTORS)}
        self.dense = {LISTED: (LIST_PER_ITEM * head, 3)}
        if near:
            self.dense[NEAR] = (NEIGHBOURS * head, 3)
        self.dense[POPULAR] = (CURVE // FACTORS, FACTORS)
        self.user_tables, self.own = {}, {JUDGED: 1}
        self.settled: dict[int, Shape] = {}

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        """Before anybody has spoken there is nothing."""
        full = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in self.shapes.items()}
        return full, {JUDGED: torch.zeros(self.users, 1)}

    @property
    def columns(self) -> int:
        """Of W."""
        return self.tables[ROWS][1] - FACTORS

    @property
    def neighbours(self) -> int:
        """Of every item, in the server's list."""
        return self.dense.get(NEAR, (0, 3))[0] // self.head

    @property
    def tensors(self) -> Tensors:
        """See the base class."""
        known = self.items, self.known_users, self.settled, self.whole
        return Tensors(self.tables, self.dense, catalogue=known[0], users=known[1], settled=known[2], whole=known[3])

    def settled_on(self, shapes: dict[int, Shape]) -> "PairArchitecture":
        """The same where devices of some bytes hold these shapes."""
        other = copy(self)
        other.settled = shapes
        return other


def crowd_of(crowd: int, settings: "Settings", users: int) -> float:
    """How many of so many users have to have an item, for ``crowd`` of them to be expected in one secure sum.

    An item that one device of a sum has alone shows all that goes with it, and what few have shows much. In proportion
    less where fewer than usual are in a sum. 0 where sums have noise, or answers are seen as they are.
    """
    chosen = settings.privacy
    if not isinstance(chosen, SecurePrivacy) or isinstance(chosen, PrivatePrivacy):
        return 0.0
    drawn = max(1, min(settings.fleet.clients_per_round or users, users))
    return crowd * min(1.0, drawn / USUAL_COHORT) * users / drawn
