"""NeuMF-MLP: a network on a user's and an item's vector, as in the paper's rating task."""

import torch
from torch import Tensor, nn

from fairfold.kernels.form import Form
from fairfold.models.recommender import Recommender


class NeuMFMLP(Recommender):
    """One table a side; user and item vector side by side go through layers of 10, 10 and 1 units.

    Args:
        num_users: Number of users.
        num_items: Size of the catalogue.
        factors: Length of the vectors.
        hidden: Units of the hidden layers.
        start: The rating predicted before training, e.g. the mean; it saves the steps that would learn it.
    """

    def __init__(
        self,
        num_users: int,
        num_items: int,
        factors: int = 32,
        hidden: tuple[int, ...] = (10, 10),
        start: float = 0.0,
    ) -> None:
        super().__init__(num_users, num_items)
        self.user = nn.Embedding(num_users, factors)
        self.item = nn.Embedding(num_items, factors)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.01)
        steps: list[nn.Module] = []
        inputs = 2 * factors
        for units in hidden:
            steps += [nn.Linear(inputs, units), nn.ReLU()]
            inputs = units
        self.network = nn.Sequential(*steps)
        self.output = nn.Linear(inputs, 1)
        for module in self.network:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.constant_(self.output.bias, start)

    @property
    def form(self) -> Form:
        """What its ratings are made of, for training in one call."""
        units = tuple(step.out_features for step in self.network if isinstance(step, nn.Linear))
        width = self.item.embedding_dim
        return Form(user=width, item=width, layers=units, output=True)

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        """Ratings of embedded items by embedded users; their shapes may broadcast."""
        pair: list[Tensor] = torch.broadcast_tensors(users[0], items[0])  # type: ignore[no-untyped-call]
        ratings: Tensor = self.output(self.network(torch.cat(pair, dim=-1)))
        return ratings.squeeze(-1)
