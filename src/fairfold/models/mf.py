"""Matrix factorisation: the score of a pair is the inner product of two vectors."""

from torch import Tensor, nn


class MF(nn.Module):
    """A vector a user and a vector an item; the score is their inner product (Koren, Bell, Volinsky 2009).

    Args:
        num_users: Number of users.
        num_items: Size of the catalogue.
        factors: Length of the vectors.
        spread: Standard deviation of the vectors' elements before training.
    """

    def __init__(self, num_users: int, num_items: int, factors: int = 8, spread: float = 0.01) -> None:
        super().__init__()
        self.num_users, self.num_items = num_users, num_items
        self.user = nn.Embedding(num_users, factors)
        self.item = nn.Embedding(num_items, factors)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=spread)

    def lookup(self, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors a batch of pairs uses."""
        return self.user(users), self.item(items)

    def combine(self, user: Tensor, item: Tensor) -> Tensor:
        """Scores of a batch of pairs, from what :meth:`lookup` gave."""
        return (user * item).sum(-1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of pairs, [pairs]."""
        return self.combine(*self.lookup(users, items))

    def score_block(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of every user with every item, [users, items]."""
        user, item = self.lookup(users, items)
        return user @ item.T
