"""The binary user-item matrix X of the training set, and its products with dense matrices."""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fairfold.data.interactions import Interactions
from fairfold.metrics.ranking import items_of


class BinaryMatrix:
    """X[u, i] = 1 when user u interacted with item i.

    Products sum rows of the dense factor ("bags" of an embedding), which is the fastest sparse product torch
    has on the CPU and needs neither its sparse layouts, which warn that they are unfinished, nor values that
    are all 1.
    """

    def __init__(self, train: Interactions) -> None:
        self.train = train
        # The same pairs grouped by item; the stable sort keeps users ascending within an item.
        self._users_by_item = train.users[train.items.argsort(stable=True)]
        self._item_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), train.counts_by_item.cumsum(0)])

    def times(self, dense: Tensor) -> Tensor:
        """X @ dense, for dense [items, columns]."""
        return _bags(self.train.items, dense, self.train.offsets)

    def transposed_times(self, dense: Tensor) -> Tensor:
        """Xᵀ @ dense, for dense [users, columns]."""
        return _bags(self._users_by_item, dense, self._item_offsets)

    def rows(self, users: Tensor) -> Tensor:
        """Dense rows X[users], float32 [users, items]."""
        dense = torch.zeros(len(users), self.train.num_items)
        dense[items_of(self.train, users)] = 1
        return dense

    def columns(self, items: Tensor) -> Tensor:
        """Dense columns, transposed: X[:, items]ᵀ, float32 [items, users]."""
        dense = torch.zeros(len(items), self.train.num_users)
        for row, item in enumerate(items.tolist()):
            dense[row, self._users_by_item[self._item_offsets[item] : self._item_offsets[item + 1]]] = 1
        return dense

    def gram(self, of_users: bool, block: int = 512) -> Tensor:
        """X Xᵀ (users) or Xᵀ X (items), built a block of rows at a time: its memory is that of the result."""
        count = self.train.num_users if of_users else self.train.num_items
        result = torch.empty(count, count)
        for start in range(0, count, block):
            part = torch.arange(start, min(start + block, count))
            if of_users:
                result[part] = self.times(self.rows(part).T).T
            else:
                result[part] = self.transposed_times(self.columns(part).T).T
        return result


def _bags(members: Tensor, dense: Tensor, offsets: Tensor) -> Tensor:
    if not len(members):
        return torch.zeros(len(offsets) - 1, dense.shape[1])
    return embedding_bag(members, dense.contiguous(), offsets, mode="sum", include_last_offset=True)
