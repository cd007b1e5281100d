"""The weights of an affine layer, read through its calls."""

import torch
from torch import Tensor, nn


def weight_and_bias(layer: nn.Module, inputs: int) -> tuple[Tensor, Tensor]:
    """Weight [outputs, inputs] and bias [outputs] of a layer that computes x @ weightᵀ + bias.

    Read by calling the layer on 0 and on the unit vectors, because a layer that stores its weights compressed has
    no ``weight`` to look at. Only for layers with few inputs.
    """
    example = next(layer.parameters())
    units = torch.eye(inputs, device=example.device, dtype=example.dtype)
    bias: Tensor = layer(torch.zeros_like(units[0]))
    weight: Tensor = (layer(units) - bias).T
    return weight, bias
