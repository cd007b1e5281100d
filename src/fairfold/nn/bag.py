"""FairEmbeddingBag: sums, means and maxima of rows, ``nn.EmbeddingBag`` in the memory a device has."""

from typing import Unpack

import torch
from torch import Tensor

from fairfold.errors import InvalidDtype, InvalidSettings, InvalidVector
from fairfold.kernels import traced
from fairfold.nn.base import check_same_device
from fairfold.nn.placement import Placement
from fairfold.nn.table import FairTable

MODES = ("sum", "mean", "max")


class FairEmbeddingBag(FairTable):
    """Adds up (or averages) the rows of each bag of ids, of a table of which only the compact vector is stored.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        mode: ``"sum"``, ``"mean"`` or ``"max"``. A mean divides by the ids that are not the padding.
        padding_idx: A row that counts for nothing.
        max_norm: See :class:`FairTable`.
        norm_type: See :class:`FairTable`.
        sparse: Gradients of the touched slots only.
        include_last_offset: Whether ``offsets`` ends with the number of ids.
        device: Where the vector lives.
        dtype: Type of its numbers.
        placement: See :class:`~fairfold.nn.placement.Placement`.

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
        **placement: Unpack[Placement],
    ) -> None:
        if mode not in MODES:
            raise InvalidSettings(f"mode={mode!r}", f"one of {', '.join(MODES)}", "Check the spelling.")
        given = num_embeddings, embedding_dim, padding_idx, sparse, device, dtype, max_norm, norm_type
        super().__init__(*given, **placement)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One line per bag: bags are the lines of 2-D ``ids``, or begin at ``offsets`` in 1-D ``ids``."""
        rows = self.rows(ids)
        if per_sample_weights is not None:
            rows = rows * self._checked_weights(per_sample_weights, ids).reshape(-1, 1)
        counted = None if self.padding_idx is None else ids.reshape(-1) != self.padding_idx
        if self.mode == "max" and counted is not None:
            rows = rows.masked_fill(~counted[:, None], -torch.inf)
        if ids.dim() == 2 and offsets is None:
            return self._of_lines(rows, counted, ids.shape[0], ids.shape[1])
        bag, bags = self._bags(ids, offsets)
        if self.mode == "max":
            lowest = rows.new_full((bags, self.embedding_dim), -torch.inf)
            found = lowest.scatter_reduce(0, bag[:, None].expand(-1, self.embedding_dim), rows, "amax")
            return found.masked_fill(found == -torch.inf, 0)
        sums = rows.new_zeros(bags, self.embedding_dim).index_add(0, bag, rows)
        if self.mode == "sum":
            return sums
        ones = torch.ones_like(bag) if counted is None else counted.long()
        counts = torch.zeros(bags, dtype=torch.int64, device=bag.device).index_add(0, bag, ones)
        return sums / counts.clamp(min=1)[:, None].to(sums.dtype)

    def _of_lines(self, rows: Tensor, counted: Tensor | None, bags: int, each: int) -> Tensor:
        """Bags of one length, one after another."""
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

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
        """The bag of every id, and how many bags there are."""
        if ids.dim() != 1 or offsets is None or offsets.dim() != 1:
            raise InvalidVector(
                f"ids of shape {tuple(ids.shape)} "
                + ("without offsets" if offsets is None else f"with offsets of shape {tuple(offsets.shape)}"),
                "2-D ids, or 1-D ids with 1-D offsets",
                "Give where each bag begins as offsets.",
            )
        check_same_device("offsets", offsets, ids)
        ends_given = self.include_last_offset
        boundaries = offsets if ends_given else torch.cat([offsets, offsets.new_full((1,), ids.shape[0])])
        lengths = boundaries.diff()
        if not traced.needed(ids) and (
            offsets.dtype not in (torch.int64, torch.int32)
            or boundaries.numel() == 0
            or int(boundaries[0]) != 0
            or int(boundaries[-1]) != ids.numel()
            or bool((lengths < 0).any())
        ):
            raise InvalidVector(
                f"offsets {offsets[:8].tolist()}{'...' if len(offsets) > 8 else ''} ({offsets.dtype})",
                f"whole numbers from 0 to at most {ids.numel()}, the number of ids, in order"
                + (", the last being that number" if ends_given else ""),
                "Offsets are where each bag begins.",
            )
        bags = lengths.shape[0]
        numbers = torch.arange(bags, device=ids.device)
        return numbers.repeat_interleave(lengths, output_size=ids.shape[0]), bags

    def _checked_weights(self, weights: Tensor, ids: Tensor) -> Tensor:
        if self.mode != "sum":
            raise InvalidSettings(
                f"per_sample_weights with mode={self.mode!r}", "mode='sum'", "Divide the weights instead."
            )
        if weights.shape != ids.shape:
            raise InvalidVector(
                f"per_sample_weights of shape {tuple(weights.shape)}",
                f"shape {tuple(ids.shape)}",
                "Give one weight per id.",
            )
        check_same_device("per_sample_weights", weights, self.memory)
        if weights.dtype != self.memory.dtype:
            raise InvalidDtype(
                f"per_sample_weights of dtype {weights.dtype}", f"{self.memory.dtype}, the table's", "Convert them."
            )
        return weights

    def extra_repr(self) -> str:
        """Sizes, as torch's modules show them."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
