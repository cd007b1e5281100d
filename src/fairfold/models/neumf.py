"""NeuMF: matrix factorisation and a small network side by side, as in the paper's ranking task."""

import torch
from torch import Tensor, nn

from fairfold.errors import InvalidSettings
from fairfold.kernels.form import Form
from fairfold.models.affine import weight_and_bias
from fairfold.models.recommender import Recommender


class NeuMF(Recommender):
    """Neural matrix factorisation (He et al. 2017): two tables a side, one for each branch.

    The *product* branch multiplies a user's and an item's vector element by element. The *network* branch puts two
    other vectors through layers that halve the width each time, ending at ``factors``. One linear layer turns both
    results into a score. The paper uses 8 factors, 1 layer and no dropout.

    Args:
        num_users: Number of users.
        num_items: Size of the catalogue.
        factors: Width of the product branch, and of the network's last layer.
        layers: Number of the network's layers; its tables have factors·2^(layers-1) columns.
        dropout: Share of each layer's inputs that is dropped in training.
    """

    def __init__(self, num_users: int, num_items: int, factors: int = 8, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__(num_users, num_items)
        if layers < 1:
            raise InvalidSettings(f"layers = {layers}", "at least 1", "Use MF for a model without a network.")
        self.factors = factors
        width = factors * 2 ** (layers - 1)
        self.user_product = nn.Embedding(num_users, factors)
        self.item_product = nn.Embedding(num_items, factors)
        self.user_network = nn.Embedding(num_users, width)
        self.item_network = nn.Embedding(num_items, width)
        steps: list[nn.Module] = []
        for layer in range(layers):
            inputs = 2 * width // 2**layer
            steps += [nn.Dropout(dropout), nn.Linear(inputs, inputs // 2), nn.ReLU()]
        self.network = nn.Sequential(*steps)
        self.output = nn.Linear(2 * factors, 1)
        self._start()

    @property
    def form(self) -> Form:
        """What its scores are made of, for training in one call."""
        layers = [step for step in self.network if isinstance(step, nn.Linear)]
        width = self.item_network.embedding_dim
        units = tuple(layer.out_features for layer in layers)
        return Form(product=self.factors, user=width, item=width, layers=units, output=True)

    def _start(self) -> None:
        """Start as He et al.'s published code does."""
        for table in (self.user_product, self.item_product, self.user_network, self.item_network):
            nn.init.normal_(table.weight, std=0.01)
        for step in self.network:
            if isinstance(step, nn.Linear):
                nn.init.xavier_uniform_(step.weight)
                nn.init.zeros_(step.bias)
        nn.init.kaiming_uniform_(self.output.weight, a=1, nonlinearity="sigmoid")
        nn.init.zeros_(self.output.bias)

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        """Scores of embedded users with embedded items; their shapes may broadcast."""
        product = users[0] * items[0]
        pair: list[Tensor] = torch.broadcast_tensors(users[1], items[1])  # type: ignore[no-untyped-call]
        network = self.network(torch.cat(pair, dim=-1))
        scores: Tensor = self.output(torch.cat([product, network], dim=-1))
        return scores.squeeze(-1)

    @torch.no_grad()
    def score_block(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of every user with every item, [users, items], without gradients.

        The same numbers as :meth:`forward` on all pairs, up to rounding. The product branch is a matrix product
        with the output's weights put on the user's side; the network's first layer is affine, so its user and item
        halves are computed once each and added.
        """
        user_product, user_network = self.embed_users(users)
        item_product, item_network = self.embed_items(items)
        weight, bias = weight_and_bias(self.output, 2 * self.factors)
        scores = torch.addmm(bias, user_product * weight[0, : self.factors], item_product.T)
        width = user_network.shape[1]
        first, first_bias = weight_and_bias(self.network[1], 2 * width)
        from_users = user_network @ first[:, :width].T + first_bias
        from_items = first[:, width:] @ item_network.T  # a unit's numbers side by side
        if len(self.network) > 3:
            hidden = self.network[3:]((from_users[:, None] + from_items.T).relu_())
            return torch.add(scores, hidden @ weight[0, self.factors :])
        # One layer: unit by unit, so that no more than the result itself is held.
        part = torch.empty_like(scores)
        for unit, counts in enumerate(weight[0, self.factors :].tolist()):
            torch.add(from_users[:, unit, None], from_items[unit], out=part)
            scores.add_(part.relu_(), alpha=counts)
        return scores
