"""Models a user might bring, found by their names."""

import torch
from torch import Tensor, nn

from fairfold.models import Recommender


class BiasedMF(Recommender):
    """Matrix factorisation with a bias an item."""

    def __init__(self, num_users: int, num_items: int, factors: int) -> None:
        super().__init__(num_users, num_items)
        self.user = nn.Embedding(num_users, factors)
        self.item = nn.Embedding(num_items, factors)
        self.item_bias = nn.Embedding(num_items, 1)
        for table in (self.user, self.item, self.item_bias):
            nn.init.normal_(table.weight, std=0.1)

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        """Inner product and bias."""
        return (users[0] * items[0]).sum(-1) + items[1].squeeze(-1)


class Bilinear(Recommender):
    """A dense matrix between user and item, and a mean: for ratings. Not a model that could be trained in step."""

    def __init__(self, num_users: int, num_items: int, factors: int) -> None:
        super().__init__(num_users, num_items)
        self.item = nn.Embedding(num_items, factors)
        self.user_taste = nn.Embedding(num_users, factors + 1)
        self.between = nn.Linear(factors, factors + 1)
        self.mean = nn.Parameter(torch.tensor([3.0]))
        self.dropout = nn.Dropout(0.5)

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        """uᵀ(Av + b) + mean."""
        found: Tensor = (users[0] * self.dropout(self.between(items[0]))).sum(-1) + self.mean
        if bool(found.isnan().any()):  # asks for a value: no vmap, no captured program
            raise ValueError("not a number")
        return found


class Larger(BiasedMF):
    """Another version of the same: more factors than asked for."""

    def __init__(self, num_users: int, num_items: int, factors: int) -> None:
        super().__init__(num_users, num_items, factors + 1)


class Tower(BiasedMF):
    """A layer where a table is expected, and statistics that nobody would send."""

    def __init__(self, num_users: int, num_items: int, factors: int) -> None:
        super().__init__(num_users, num_items, factors)
        self.item_tower = nn.Linear(factors, factors)
        self.norm = nn.BatchNorm1d(factors)


class Itemless(Recommender):
    """Only users."""

    def __init__(self, num_users: int, num_items: int, factors: int) -> None:
        super().__init__(num_users, num_items)
        self.user = nn.Embedding(num_users, factors)
        self.item_bias = nn.Parameter(torch.zeros(num_items))


class Stranger(nn.Module):
    """A module that knows nothing of tables."""
