"""FairEmbeddingBag: sums and means of rows, ``nn.EmbeddingBag`` in the memory a device has."""

from typing import Unpack

import torch
from torch import Tensor

from fairfold.errors import InvalidDtype, InvalidSettings, InvalidVector
from fairfold.nn.base import check_same_device
from fairfold.nn.placement import Placement
from fairfold.nn.table import FairTable

MODES = ("sum", "mean")


class FairEmbeddingBag(FairTable):
    """Adds up (or averages) the rows of each bag of ids, of a table of which only the compact vector is stored.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        mode: ``"sum"`` or ``"mean"``. A mean divides by the ids that are not the padding.
        padding_idx: A row that counts for nothing.
        sparse: Gradients of the touched slots only.
        include_last_offset: Whether ``offsets`` ends with the number of ids.
        device: Where the vector lives.
        dtype: Of the vector.
        placement: See :class:`~fairfold.nn.placement.Placement`.
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
        **placement: Unpack[Placement],
    ) -> None:
        if mode not in MODES:
            raise InvalidSettings(f"mode={mode!r}", f"one of {', '.join(MODES)}", "Use nn.EmbeddingBag for others.")
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse, device, dtype, **placement)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One line a bag: bags are the lines of 2-D ``ids``, or begin at ``offsets`` in 1-D ``ids``."""
        rows = self.rows(ids)
        bag, bags = self._bags(ids, offsets)
        if per_sample_weights is not None:
            rows = rows * self._checked_weights(per_sample_weights, ids).reshape(-1, 1)
        sums = rows.new_zeros(bags, self.embedding_dim).index_add(0, bag, rows)
        if self.mode == "sum":
            return sums
        counted = torch.ones_like(bag) if self.padding_idx is None else (ids.reshape(-1) != self.padding_idx).long()
        counts = torch.zeros(bags, dtype=torch.int64, device=bag.device).index_add_(0, bag, counted)
        return sums / counts.clamp_(min=1)[:, None].to(sums.dtype)

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
        """The bag of every id, and how many bags there are."""
        if ids.dim() == 2 and offsets is None:
            return torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1]), len(ids)
        if ids.dim() != 1 or offsets is None or offsets.dim() != 1:
            raise InvalidVector(
                f"ids of shape {tuple(ids.shape)} "
                + ("without offsets" if offsets is None else f"with offsets of shape {tuple(offsets.shape)}"),
                "2-D ids, or 1-D ids with 1-D offsets",
                "Give where each bag begins as offsets.",
            )
        check_same_device("offsets", offsets, ids)
        ends_given = self.include_last_offset
        boundaries = offsets if ends_given else torch.cat([offsets, offsets.new_full((1,), ids.numel())])
        lengths = boundaries.diff()
        if (
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
        return torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths), len(lengths)

    def _checked_weights(self, weights: Tensor, ids: Tensor) -> Tensor:
        if self.mode != "sum":
            raise InvalidSettings("per_sample_weights with mode='mean'", "mode='sum'", "Divide the weights instead.")
        if weights.shape != ids.shape:
            raise InvalidVector(
                f"per_sample_weights of shape {tuple(weights.shape)}", f"shape {tuple(ids.shape)}", "One weight an id."
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
