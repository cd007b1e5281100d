"""Layers to try, and the ordinary layer each must behave like."""

from typing import Any

import torch
from torch import nn

from fairfold.nn import FairConv2d, FairEmbedding, FairEmbeddingBag, FairLinear, FairModule
from fairfold.nn.compression import make_dense_layer

OPTIONS: list[dict[str, Any]] = [
    {"capacity": 1 / 4},
    {"capacity": "3x", "mapping": "chunk", "chunk": 4, "seed": 5},
    {"capacity": 0.5, "mapping": "ranked", "chunk": 2},
    {"capacity": 1 / 4, "sign": False},
    {"capacity": 1},
]


def layers(**options: Any) -> dict[str, FairModule]:
    """One of each kind, with shapes that no chunk divides."""
    return {
        "embedding": FairEmbedding(13, 6, **options),
        "padded": FairEmbedding(13, 6, padding_idx=-2, **options),
        "bag": FairEmbeddingBag(13, 6, mode="mean", padding_idx=1, **options),
        "linear": FairLinear(7, 10, **options),
        "conv": FairConv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, **options),
    }


def example_input(layer: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if isinstance(layer, FairEmbedding | FairEmbeddingBag):
        return torch.randint(0, 13, (5, 4), generator=generator)
    shape = (3, 7) if isinstance(layer, FairLinear) else (2, 4, 9, 8)
    return torch.randn(shape, generator=generator, dtype=dtype)


def ordinary(layer: FairModule) -> nn.Module:
    """The standard layer with the recovered weight."""
    return make_dense_layer(layer, None)
