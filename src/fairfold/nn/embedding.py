"""FairEmbedding and FairEmbeddingBag: torch's tables and bags in the memory of their compact vector."""

from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairfold.errors import InvalidDtype, InvalidRow, InvalidSettings, InvalidVector
from fairfold.kernels import traced
from fairfold.nn.base import FairModule, SubspaceOptions, check_same_device
from fairfold.nn.lookup import ActiveRows, FusedSGD, check_ids, lookup
from fairfold.subspace.checks import whole_number

NORM_EPSILON = 1e-7  # added to the length of a row before something is divided by it, as torch does


class FairTable(FairModule):
    """A table of ``num_embeddings`` rows of ``embedding_dim`` numbers, of which only the compact vector is stored.

    Arguments are those of torch's table and :class:`~fairfold.nn.base.SubspaceOptions`. Slots are shared between rows,
    so unlike in torch's table the row ``padding_idx`` only *reads* as zeros, and rows longer than ``max_norm`` only
    *read* as rows of that length. ``sparse`` gives gradients of the touched slots only.
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
        **options: Unpack[SubspaceOptions],
    ) -> None:
        rows, columns = whole_number("num_embeddings", num_embeddings), whole_number("embedding_dim", embedding_dim)
        super().__init__((rows, columns), device, dtype, options)
        self.num_embeddings, self.embedding_dim = rows, columns
        self.padding_idx, self.sparse = _padding_row(padding_idx, rows), sparse
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
        """The compact form of an existing table: every slot the mean of the weights that share it.

        ``options`` are the others of the class; one of size, capacity and budget must be among them.
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
        """The whole table, recovered and differentiable: rows as they are looked up."""
        return self.constrain_rows(torch.arange(self.num_embeddings, device=self.memory.device), super().weight)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``, one line each: shape (ids.numel(), embedding_dim)."""
        active: ActiveRows | None = self.__dict__["_active"]
        return active.rows(ids) if active is not None else self.constrain_rows(ids, self._stored_rows(ids))

    def constrain_rows(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Apply ``max_norm`` to rows, and zero those where ``ids`` is the padding; gradients are those of the rows."""
        if self.max_norm is not None:
            norms = rows.detach().norm(p=self.norm_type, dim=1, keepdim=True)
            scale = (self.max_norm / (norms + NORM_EPSILON)).clamp(max=1)
            # As in torch, which writes shorter rows and hands their gradient on as it is.
            rows = rows + rows.detach() * (scale - 1)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((ids.reshape(-1) == self.padding_idx)[:, None], 0)

    def _stored_rows(self, ids: Tensor) -> Tensor:
        memory = self.memory
        repeated = isinstance(ids, Tensor) and not traced.is_tracing(memory) and ids.numel() > self.num_embeddings
        check_ids(ids, self.num_embeddings, memory, kernel_checks=not repeated and not self.is_shared)
        flat = ids if ids.dim() == 1 else ids.reshape(-1)
        if repeated:
            # Every row is asked for more than once on average: each is recovered once, in less memory than the result.
            every = self._lookup_rows(memory, torch.arange(self.num_embeddings, device=flat.device))
            return functional.embedding(flat, every)
        return self._lookup_rows(memory, flat)

    def update_in_backward(self, update: FusedSGD | None) -> None:
        """Let the backward apply ``update`` at once instead of making a gradient; None goes back to gradients."""
        self._refuse_shared("update_in_backward")
        self.__dict__["_update"] = update

    def activate(self, ids: Tensor) -> ActiveRows:
        """The part of the table that a round touches, as a small module of its own; see :class:`ActiveRows`."""
        self._refuse_shared("activate")
        return ActiveRows(self, ids)

    def _lookup_rows(self, memory: Tensor, rows: Tensor) -> Tensor:
        # A shared memory places every table at a multiple of its row size.
        rows = rows + self.offset // self.embedding_dim if self.offset else rows
        update: FusedSGD | None = self.__dict__["_update"]
        return lookup(memory, self.subspace.layout, rows, self.embedding_dim, sparse=self.sparse, update=update)

    def _refuse_shared(self, what: str) -> None:
        if self.is_shared:
            needed = "a table with a memory of its own, since other layers read the same slots"
            remedy = "Compress with shared=False, or train with ordinary gradients."
            raise InvalidSettings(f"{what} on a table in a shared memory", needed, remedy)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        sparse = ", sparse=True" if self.sparse else ""
        norm = "" if self.max_norm is None else f", max_norm={self.max_norm}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{sparse}{norm}, {self._subspace_repr()}"


class FairEmbedding(FairTable):
    """Looks up rows of a table of which only the compact vector is stored: ids ``(*)`` to ``(*, embedding_dim)``.

    ``FairEmbedding(num_embeddings, embedding_dim, capacity=1/16, seed=0)``; all arguments are those of
    :class:`FairTable`. With ordinary gradients training takes twice the vector, as with any dense
    layer; ``sparse=True``, :meth:`activate` and :meth:`update_in_backward` take memory of the batch or the round only.

    Example:
        >>> table = FairEmbedding(1_000_000, 64, capacity=1 / 64)
        >>> table(torch.tensor([3, 999_999])).shape, table.compact.numel()
        (torch.Size([2, 64]), 1000000)
    """

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        return rows if ids.dim() == 1 else rows.view(*ids.shape, self.embedding_dim)


def _padding_row(padding_idx: int | None, rows: int) -> int | None:
    """Negative numbers count from the end, as in torch."""
    if padding_idx is None:
        return None
    row = whole_number("padding_idx", padding_idx)
    if not -rows <= row < rows:
        raise InvalidRow(f"padding_idx={row}", f"from {-rows} to {rows - 1}", "Name one of the table's rows.")
    return row % rows


MODES = ("sum", "mean", "max")


class FairEmbeddingBag(FairTable):
    """Adds up (or averages) the rows of each bag of ids, of a table of which only the compact vector is stored.

    Arguments are those of torch's bags and of :class:`FairTable`. The row ``padding_idx`` counts for nothing: a mean
    divides by the other ids.

    Example:
        >>> bags = FairEmbeddingBag(1_000, 8, mode="sum", capacity=1 / 4)
        >>> bags(torch.tensor([[1, 2, 3], [4, 5, 6]])).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        padding_idx: int | None = None,
        sparse: bool = False,
        include_last_offset: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        **options: Unpack[SubspaceOptions],
    ) -> None:
        if mode not in MODES:
            raise InvalidSettings(f"mode={mode!r}", f"one of {', '.join(MODES)}", "Check the spelling.")
        given = num_embeddings, embedding_dim, padding_idx, sparse, device, dtype, max_norm, norm_type
        super().__init__(*given, **options)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One line per bag: bags are the lines of 2-D ``ids``, or begin at ``offsets`` in 1-D ``ids``."""
        rows = self.rows(ids)
        if per_sample_weights is not None:
            rows = rows * self._checked_weights(per_sample_weights, ids).reshape(-1, 1)
        is_counted = None if self.padding_idx is None else ids.reshape(-1) != self.padding_idx
        if self.mode == "max" and is_counted is not None:
            rows = rows.masked_fill(~is_counted[:, None], -torch.inf)
        if ids.dim() == 2 and offsets is None:
            return self._equal_bags(rows, is_counted, ids.shape[0], ids.shape[1])
        bag, bags = self._bag_of_ids(ids, offsets)
        if self.mode == "max":
            lowest = rows.new_full((bags, self.embedding_dim), -torch.inf)
            found = lowest.scatter_reduce(0, bag[:, None].expand(-1, self.embedding_dim), rows, "amax")
            return found.masked_fill(found == -torch.inf, 0)
        sums = rows.new_zeros(bags, self.embedding_dim).index_add(0, bag, rows)
        if self.mode == "sum":
            return sums
        ones = torch.ones_like(bag) if is_counted is None else is_counted.long()
        counts = torch.zeros(bags, dtype=torch.int64, device=bag.device).index_add(0, bag, ones)
        return sums / counts.clamp(min=1)[:, None].to(sums.dtype)

    def _equal_bags(self, rows: Tensor, counted: Tensor | None, bags: int, each: int) -> Tensor:
        rows = rows.view(bags, each, self.embedding_dim)
        if self.mode == "max":
            if each == 0:
                return rows.new_zeros(bags, self.embedding_dim)
            found = rows.amax(1)
            return found if counted is None else found.masked_fill(found == -torch.inf, 0)
        sums = rows.sum(1)
        if self.mode == "sum":
            return sums
        if counted is None:
            return sums / max(each, 1)
        return sums / counted.view(bags, each).sum(1).clamp(min=1)[:, None].to(sums.dtype)

    def _bag_of_ids(self, ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
        """The bag of every id, and how many bags there are."""
        if ids.dim() != 1 or offsets is None or offsets.dim() != 1:
            given = "without offsets" if offsets is None else f"with offsets of shape {tuple(offsets.shape)}"
            needed, remedy = "2-D ids, or 1-D ids with 1-D offsets", "Give where each bag begins as offsets."
            raise InvalidVector(f"ids of shape {tuple(ids.shape)} {given}", needed, remedy)
        check_same_device("offsets", offsets, ids)
        ends_given = self.include_last_offset
        boundaries = offsets if ends_given else torch.cat([offsets, offsets.new_full((1,), ids.shape[0])])
        lengths = boundaries.diff()
        if not traced.is_tracing(ids) and (
            offsets.dtype not in (torch.int64, torch.int32)
            or boundaries.numel() == 0
            or int(boundaries[0]) != 0
            or int(boundaries[-1]) != ids.numel()
            or bool((lengths < 0).any())
        ):
            given = f"offsets {offsets[:8].tolist()}{'...' if len(offsets) > 8 else ''} ({offsets.dtype})"
            needed = f"whole numbers from 0 to at most {ids.numel()}, the number of ids, in order"
            needed += ", the last being that number" if ends_given else ""
            raise InvalidVector(given, needed, "Offsets are where each bag begins.")
        bags = torch.arange(lengths.shape[0], device=ids.device)
        return bags.repeat_interleave(lengths, output_size=ids.shape[0]), lengths.shape[0]

    def _checked_weights(self, weights: Tensor, ids: Tensor) -> Tensor:
        if self.mode != "sum":
            given = f"per_sample_weights with mode={self.mode!r}"
            raise InvalidSettings(given, "mode='sum'", "Divide the weights instead.")
        if weights.shape != ids.shape:
            given = f"per_sample_weights of shape {tuple(weights.shape)}"
            raise InvalidVector(given, f"shape {tuple(ids.shape)}", "Give one weight per id.")
        check_same_device("per_sample_weights", weights, self.memory)
        if weights.dtype != self.memory.dtype:
            given = f"per_sample_weights of dtype {weights.dtype}"
            raise InvalidDtype(given, f"{self.memory.dtype}, the table's", "Convert them.")
        return weights

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
