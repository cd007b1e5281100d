"""Matrix factorisation: the score of a pair is the inner product of two vectors."""

import torch
from torch import Tensor, nn

from fairfold.kernels.training import ModelForm
from fairfold.models.recommender import Recommender


class MF(Recommender):
    """A vector a user and an item; the score is their product (Koren, Bell, Volinsky 2009), plus an optional bias."""

    def __init__(
        self, num_users: int, num_items: int, factors: int = 8, spread: float = 0.01, *, item_bias: bool = False
    ) -> None:
        super().__init__(num_users, num_items)
        self.user, self.item = nn.Embedding(num_users, factors), nn.Embedding(num_items, factors)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=spread)
        self.item_bias = nn.Embedding(num_items, 1) if item_bias else None
        if self.item_bias is not None:
            nn.init.zeros_(self.item_bias.weight)

    @property
    def form(self) -> ModelForm | None:
        """The form of the scores, for native training, which does not know biases."""
        return None if self.item_bias is not None else ModelForm(product=self.item.embedding_dim)

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        """Scores of embedded users with embedded items; their shapes may broadcast."""
        scores = (users[0] * items[0]).sum(-1)
        return scores if self.item_bias is None else scores + items[1].squeeze(-1)

    def score_block(self, users: Tensor, items: Tensor) -> Tensor:
        (user,), (item, *bias) = self.embed_users(users), self.embed_items(items)
        return torch.addmm(bias[0].T, user, item.T) if bias else user @ item.T


# -- NeuMF: matrix factorisation and a small network side by side, as in the paper's ranking task.


class NeuMF(Recommender):
    """Neural matrix factorisation (He et al. 2017): two tables a side, one for each branch.

    The *product* branch multiplies a user's and an item's vector element by element. The *network* branch puts two
    other vectors through ``depth`` layers, each half as wide as what it reads, the last one of ``factors`` units. One
    linear layer turns both results into a score. The paper has one layer and no dropout.
    """

    def __init__(self, num_users: int, num_items: int, factors: int = 8, depth: int = 1, dropout: float = 0.0) -> None:
        super().__init__(num_users, num_items)
        self.factors, self.depth = factors, depth
        wide = factors << (depth - 1)
        self.user_product, self.item_product = nn.Embedding(num_users, factors), nn.Embedding(num_items, factors)
        self.user_network, self.item_network = nn.Embedding(num_users, wide), nn.Embedding(num_items, wide)
        # Three steps per layer, as in He et al.'s published code, so that weights have the names that theirs have
        widths = [wide >> layer for layer in range(depth)]
        steps = [(nn.Dropout(dropout), nn.Linear(2 * width, width), nn.ReLU()) for width in widths]
        self.network = nn.Sequential(*(step for layer in steps for step in layer))
        self.output = nn.Linear(2 * factors, 1)
        self._start()

    @property
    def form(self) -> ModelForm:
        """The form of the scores, for native training."""
        wide = self.item_network.embedding_dim
        layers = tuple(wide >> layer for layer in range(self.depth))
        return ModelForm(product=self.factors, user=wide, item=wide, layers=layers, output=True)

    def _start(self) -> None:
        """Initialize as He et al.'s published code does."""
        for table in (self.user_product, self.item_product, self.user_network, self.item_network):
            nn.init.normal_(table.weight, std=0.01)
        init_layers(self.network)
        nn.init.kaiming_uniform_(self.output.weight, a=1, nonlinearity="sigmoid")
        nn.init.zeros_(self.output.bias)

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        product = users[0] * items[0]
        pair: list[Tensor] = torch.broadcast_tensors(users[1], items[1])  # type: ignore[no-untyped-call]
        network = self.network(torch.cat(pair, dim=-1))
        scores: Tensor = self.output(torch.cat([product, network], dim=-1))
        return scores.squeeze(-1)

    @torch.no_grad()
    def score_block(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of every user with every item, [users, items], without gradients.

        The product branch is a matrix product with the output's weights on the user's side; a single layer of the
        network is affine, so its halves are computed once each and added, unit by unit: no more than the result itself
        is held.
        """
        if self.depth > 1:
            return super().score_block(users, items)
        user_product, user_network = self.embed_users(users)
        item_product, item_network = self.embed_items(items)
        weight, bias = weight_and_bias(self.output, 2 * self.factors)
        scores = torch.addmm(bias, user_product * weight[0, : self.factors], item_product.T)
        first, first_bias = weight_and_bias(self.network[1], 2 * self.factors)
        from_users = user_network @ first[:, : self.factors].T + first_bias
        from_items = first[:, self.factors :] @ item_network.T  # a unit's numbers side by side
        part = torch.empty_like(scores)
        for unit, counts in enumerate(weight[0, self.factors :].tolist()):
            torch.add(from_users[:, unit, None], from_items[unit], out=part)
            scores.add_(part.relu_(), alpha=counts)
        return scores


class NeuMFMLP(Recommender):
    """The paper's rating task: user and item vector side by side go through layers of 10, 10 and 1 units."""

    def __init__(self, num_users: int, num_items: int, factors: int = 32) -> None:
        super().__init__(num_users, num_items)
        self.user, self.item = nn.Embedding(num_users, factors), nn.Embedding(num_items, factors)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.01)
        self.network = nn.Sequential(nn.Linear(2 * factors, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU())
        self.output = nn.Linear(10, 1)
        init_layers(self.network)
        nn.init.zeros_(self.output.bias)

    @property
    def form(self) -> ModelForm:
        width = self.item.embedding_dim
        return ModelForm(user=width, item=width, layers=(10, 10), output=True)

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        pair: list[Tensor] = torch.broadcast_tensors(users[0], items[0])  # type: ignore[no-untyped-call]
        ratings: Tensor = self.output(self.network(torch.cat(pair, dim=-1)))
        return ratings.squeeze(-1)


def init_layers(network: nn.Sequential) -> None:
    """Draw a network's first weights (Glorot and Bengio 2010), without biases."""
    for step in network:
        if isinstance(step, nn.Linear):
            nn.init.xavier_uniform_(step.weight)
            nn.init.zeros_(step.bias)


def weight_and_bias(layer: nn.Module, inputs: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer x @ weightᵀ + bias, by calling it: a compressed layer has no ``weight``."""
    example = next(layer.parameters())
    units = torch.eye(inputs, device=example.device, dtype=example.dtype)
    bias: Tensor = layer(torch.zeros_like(units[0]))
    weight: Tensor = (layer(units) - bias).T
    return weight, bias
