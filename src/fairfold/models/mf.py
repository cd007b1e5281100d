"""Matrix factorisation: the score of a pair is the inner product of two vectors."""

import torch
from torch import Tensor, nn

from fairfold.kernels.form import Form
from fairfold.models.recommender import Recommender


class MF(Recommender):
    """A vector a user and a vector an item; the score is their inner product (Koren, Bell, Volinsky 2009).

    ``spread`` is the standard deviation of the vectors' elements before training; ``item_bias`` adds one number an item
    to its scores, 0 before training.
    """

    def __init__(
        self, num_users: int, num_items: int, factors: int = 8, spread: float = 0.01, *, item_bias: bool = False
    ) -> None:
        super().__init__(num_users, num_items)
        self.user = nn.Embedding(num_users, factors)
        self.item = nn.Embedding(num_items, factors)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=spread)
        self.item_bias = nn.Embedding(num_items, 1) if item_bias else None
        if self.item_bias is not None:
            nn.init.zeros_(self.item_bias.weight)

    @property
    def form(self) -> Form | None:
        """What its scores are made of, for training in one call; that does not know biases."""
        return None if self.item_bias is not None else Form(product=self.item.embedding_dim)

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        """Scores of embedded users with embedded items; their shapes may broadcast."""
        scores = (users[0] * items[0]).sum(-1)
        return scores if self.item_bias is None else scores + items[1].squeeze(-1)

    def score_block(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of every user with every item, [users, items]."""
        (user,), (item, *bias) = self.embed_users(users), self.embed_items(items)
        return torch.addmm(bias[0].T, user, item.T) if bias else user @ item.T
