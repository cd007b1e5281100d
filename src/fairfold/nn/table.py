"""FairEmbedding, and what it has in common with the bag: rows looked up by id, trained whole or the active ones."""

from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairfold.errors import InvalidRow, InvalidSettings, InvalidVector
from fairfold.kernels import traced
from fairfold.nn.base import FairModule
from fairfold.nn.fused import FusedSGD
from fairfold.nn.lookup import check_ids, lookup
from fairfold.nn.placement import Placement
from fairfold.subspace.checks import whole_number

if TYPE_CHECKING:
    from fairfold.nn.active import ActiveRows

NO_ZERO = 1e-7
"""Added to the length of a row before something is divided by it, as torch does."""


class FairTable(FairModule):
    """A table of ``num_embeddings`` rows of ``embedding_dim`` numbers, of which only the compact vector is stored.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        padding_idx: A row that reads as zeros and is not trained. (Its slots are shared with other rows, so unlike in
            torch's table the zeros are not stored.)
        sparse: Gradients of the touched slots only; for torch's optimisers that take sparse ones.
        max_norm: Rows longer than this read as rows of this length. (Slots are shared, so unlike in torch's table the
            stored numbers stay as they are.)
        norm_type: The norm by which rows are measured; 2 is the Euclidean one.
        device: Where the vector lives.
        dtype: Type of its numbers.
        placement: See :class:`~fairfold.nn.placement.Placement`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        **placement: Unpack[Placement],
    ) -> None:
        rows = whole_number("num_embeddings", num_embeddings)
        columns = whole_number("embedding_dim", embedding_dim)
        super().__init__((rows, columns), device, dtype, placement)
        self.num_embeddings = rows
        self.embedding_dim = columns
        self.padding_idx = _row_of_padding(padding_idx, rows)
        self.sparse = sparse
        self.max_norm, self.norm_type = max_norm, norm_type
        self.__dict__["_active"] = None  # not submodules: neither is part of the table's state
        self.__dict__["_update"] = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Standard normal, as torch's table: every row is made of slots, so slots are drawn like entries."""
        if self.compact is not None:
            nn.init.normal_(self.compact)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, **options: Any
    ) -> Self:
        """The compact form of a table that there is: every slot the mean of the weights that share it.

        Args:
            embeddings: The whole table, [rows, columns].
            freeze: Whether its numbers stay as they are.
            padding_idx: See the class.
            **options: The others of the class; one of size, capacity and budget must be among them.
        """
        if embeddings.dim() != 2:
            given, remedy = f"embeddings of shape {tuple(embeddings.shape)}", "Give one row per id."
            raise InvalidVector(given, "a table of two dimensions", remedy)
        usual: dict[str, Any] = {"dtype": embeddings.dtype, "device": embeddings.device, "padding_idx": padding_idx}
        table = cls(*embeddings.shape, **usual | options)
        assert table.compact is not None
        with torch.no_grad():
            table.compact.copy_(table.subspace.reduce(embeddings.detach().reshape(-1)))
        table.compact.requires_grad_(not freeze)
        return table

    @property
    def weight(self) -> Tensor:
        """See the base class; rows as they are looked up, padding and longest length among them."""
        every = torch.arange(self.num_embeddings, device=self.memory.device)
        return self.as_read(every, super().weight)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``, one line each: shape (ids.numel(), embedding_dim)."""
        active: ActiveRows | None = self.__dict__["_active"]
        return active.rows(ids) if active is not None else self.as_read(ids, self._rows(ids))

    def as_read(self, ids: Tensor, found: Tensor) -> Tensor:
        """Rows no longer than they may be, zeros where ``ids`` is the padding; gradients are those of the rows."""
        if self.max_norm is not None:
            lengths = found.detach().norm(p=self.norm_type, dim=1, keepdim=True)
            too_long = (self.max_norm / (lengths + NO_ZERO)).clamp(max=1)
            # As in torch, which writes shorter rows and hands their gradient on as it is.
            found = found + found.detach() * (too_long - 1)
        return self.without_padding(ids, found)

    def _rows(self, ids: Tensor) -> Tensor:
        memory = self.memory
        many = isinstance(ids, Tensor) and not traced.needed(memory) and ids.numel() > self.num_embeddings
        check_ids(ids, self.num_embeddings, memory, kernel_checks=not many and not self.is_shared)
        flat = ids if ids.dim() == 1 else ids.reshape(-1)
        if many:
            # Every row is asked for more than once on average: each is recovered once, in less memory than the answer.
            every = self._lookup(memory, torch.arange(self.num_embeddings, device=flat.device))
            return functional.embedding(flat, every)
        return self._lookup(memory, flat)

    def without_padding(self, ids: Tensor, found: Tensor) -> Tensor:
        """``found`` with zeros where ``ids`` is the padding; so is its gradient."""
        if self.padding_idx is None:
            return found
        return found.masked_fill((ids.reshape(-1) == self.padding_idx)[:, None], 0)

    def update_in_backward(self, update: FusedSGD | None) -> None:
        """Let the backward apply ``update`` at once instead of making a gradient; None goes back to gradients."""
        self._refuse_shared("update_in_backward")
        self.__dict__["_update"] = update

    def activate(self, ids: Tensor) -> "ActiveRows":
        """The part of the table that a round touches, as a small module of its own; see :class:`ActiveRows`."""
        from fairfold.nn.active import ActiveRows  # built on this class

        self._refuse_shared("activate")
        return ActiveRows(self, ids)

    def _lookup(self, memory: Tensor, rows: Tensor) -> Tensor:
        # A shared memory places every table at a multiple of its row size.
        rows = rows + self.offset // self.embedding_dim if self.offset else rows
        update: FusedSGD | None = self.__dict__["_update"]
        return lookup(memory, self.subspace.layout, rows, self.embedding_dim, sparse=self.sparse, update=update)

    def _refuse_shared(self, what: str) -> None:
        if self.is_shared:
            raise InvalidSettings(
                f"{what} on a table in a shared memory",
                "a table with a memory of its own, since other layers read the same slots",
                "Compress with shared=False, or train with ordinary gradients.",
            )

    def extra_repr(self) -> str:
        """Sizes, as torch's modules show them."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        sparse = ", sparse=True" if self.sparse else ""
        sparse += "" if self.max_norm is None else f", max_norm={self.max_norm}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{sparse}, {self._placement_repr()}"


class FairEmbedding(FairTable):
    """Looks up rows of a table of which only the compact vector is stored; the slots are computed from the ids.

    ``FairEmbedding(num_embeddings, embedding_dim, capacity=1/16, seed=0)``; all arguments are those of
    :class:`FairTable`. With ordinary gradients training takes twice the vector, as with any dense
    layer; ``sparse=True``, :meth:`activate` and :meth:`update_in_backward` take memory of the batch or the round only.

    Shape: ids of any shape ``(*)`` to ``(*, embedding_dim)``.

    Example:
        >>> table = FairEmbedding(1_000_000, 64, capacity=1 / 64)
        >>> table(torch.tensor([3, 999_999])).shape, table.compact.numel()
        (torch.Size([2, 64]), 1000000)
    """

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``."""
        rows = self.rows(ids)
        return rows if ids.dim() == 1 else rows.view(*ids.shape, self.embedding_dim)


def _row_of_padding(padding_idx: int | None, rows: int) -> int | None:
    """Negative numbers count from the end, as in torch."""
    if padding_idx is None:
        return None
    row = whole_number("padding_idx", padding_idx)
    if not -rows <= row < rows:
        raise InvalidRow(f"padding_idx={row}", f"from {-rows} to {rows - 1}", "Name one of the table's rows.")
    return row % rows
