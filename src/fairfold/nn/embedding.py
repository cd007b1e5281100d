"""FairEmbedding: ``nn.Embedding`` in the memory a device has."""

from torch import Tensor

from fairfold.nn.table import FairTable


class FairEmbedding(FairTable):
    """Looks up rows of a table of which only the compact vector is stored; the slots are computed from the ids.

    ``FairEmbedding(num_embeddings, embedding_dim, capacity=1/16, seed=0)``; all arguments are those of
    :class:`~fairfold.nn.table.FairTable`. With ordinary gradients training takes twice the vector, as with any dense
    layer; ``sparse=True``, :meth:`activate` and :meth:`update_in_backward` take memory of the batch or the round only.

    Shape: ids of any shape (*) to (*, embedding_dim).
    """

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``."""
        rows = self.rows(ids)
        return rows if ids.dim() == 1 else rows.view(*ids.shape, self.embedding_dim)
