"""The networks of a cohort as one: the same modules, whose layers hold the weights of all clients side by side.

Layers fold the clients into the batch, so a network's own code runs unchanged. A convolution is a linear layer of
patches. A layer's weight may be whole, a product of two factors, or the sum of both: clients that do not have a part
hold zeros there (see :class:`StackedLayout`), so one program serves whole and factored layers, of any rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairfold.federation.architecture import WHOLE_MODEL, ImageArchitecture
from fairfold.federation.plan import Plan
from fairfold.kernels.training import SlotTables
from fairfold.subspace.blocks import LowRank
from fairfold.subspace.projection import Hashed, LeadingBlock, Projection
from fairfold.typing import Shapes

LEFT, RIGHT = "/left", "/right"
MANY_ROWS, PIECES = 4096, 64


@dataclass(frozen=True)
class StackedTensor:
    """A tensor of all clients and its gradient, both [clients, ...]."""

    values: Tensor
    gradient: Tensor


class _Affine(torch.autograd.Function):
    """x @ weightᵀ + bias for every client; the gradients of weight and bias are written where they belong."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, weight_part: StackedTensor, bias: StackedTensor | None
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.parts = weight_part, bias
        if bias is None:
            return torch.bmm(inputs, weight.transpose(1, 2))
        return torch.baddbmm(bias.values[:, None], inputs, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (inputs, weight), (weight_part, bias) = gradients, ctx.saved_tensors, ctx.parts
        _write_products(gradient, inputs, weight_part.gradient)
        if bias is not None:
            torch.sum(gradient, 1, out=bias.gradient)
        return torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None, None, None, None


def _write_products(gradient: Tensor, inputs: Tensor, out: Tensor) -> None:
    """Write gradientᵀ @ inputs of every client; over many rows (image patches) in pieces, side by side on a GPU."""
    clients, rows = gradient.shape[:2]
    pieces = gcd(rows, PIECES) if rows >= MANY_ROWS else 1
    if pieces == 1:
        torch.bmm(gradient.transpose(1, 2), inputs, out=out)
        return
    left, right = (tensor.reshape(clients * pieces, rows // pieces, tensor.shape[2]) for tensor in (gradient, inputs))
    torch.sum(torch.bmm(left.transpose(1, 2), right).view(clients, pieces, *out.shape[1:]), 1, out=out)


def _affine(inputs: Tensor, weight: StackedTensor, bias: StackedTensor | None) -> Tensor:
    # Followed by autograd although its gradient is not asked for: else a first layer would have no backward.
    result: Tensor = _Affine.apply(inputs, weight.values.detach().requires_grad_(), weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Stacked(nn.Module):
    """A linear layer or a convolution of every client."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, name: str, parts: Mapping[str, StackedTensor]) -> None:
        super().__init__()
        self._convolution = layer if isinstance(layer, nn.Conv2d) else None
        weight = f"{name}.weight"
        self._whole, self._bias = parts.get(weight), parts.get(f"{name}.bias")
        self._factors = (parts[weight + LEFT], parts[weight + RIGHT]) if weight + LEFT in parts else None
        self._clients = len(next(iter(parts.values())).values)

    def forward(self, inputs: Tensor) -> Tensor:
        if self._convolution is None:
            return self._product(inputs.view(self._clients, -1, inputs.shape[-1])).view(len(inputs), -1)
        height, width = self._convolution.kernel_size
        padding = self._convolution.padding
        assert not isinstance(padding, str)
        padded = functional.pad(inputs, (padding[1], padding[1], padding[0], padding[0]))
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [images, channels, rows, columns, height, width]
        images, _, rows, columns = windows.shape[:4]
        patches = windows.permute(0, 2, 3, 1, 4, 5).reshape(self._clients, images // self._clients * rows * columns, -1)
        return self._product(patches).view(images, rows, columns, -1).permute(0, 3, 1, 2).contiguous()

    def _product(self, inputs: Tensor) -> Tensor:
        """The layer's outputs for [clients, rows, inputs]."""
        outputs = None if self._whole is None else _affine(inputs, self._whole, self._bias)
        if self._factors is None:
            assert outputs is not None
            return outputs
        left, right = self._factors
        factored = _affine(_affine(inputs, right, None), left, self._bias if outputs is None else None)
        return factored if outputs is None else outputs + factored


def stacked_network(network: nn.Module, parts: Mapping[str, StackedTensor]) -> nn.Module:
    """Replace the linear layers and convolutions of a network, in place, by those of the cohort.

    ``parts`` are by name, factors by the name and :data:`LEFT` or :data:`RIGHT`; every weight is a matrix.
    """
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            parent, _, last = name.rpartition(".")
            setattr(network.get_submodule(parent), last, _Stacked(layer, name, parts))
    return network


PIECE = 8  # coordinates moved as one, where hashes keep so many together


class StackedLayout:
    """The positions of a classifier's weights and slots in a client's row, whatever the method.

    A *section* is what one vector of the client stands for: a tensor, its factors, or all tensors. Sections start at
    whole pieces. A hashed section has the slots of its hash; of any other the slots are its weights themselves, those
    that the client does not hold with sign 0.
    """

    parts: dict[str, tuple[int, tuple[int, ...]]]  # every matrix or vector of the stacked network: start and shape
    coordinates: int  # length of a row of weights
    slots: int  # length of a row of slots
    width: int  # coordinates per piece

    def __init__(self, plan: Plan) -> None:
        architecture = plan.architecture
        assert isinstance(architecture, ImageArchitecture)
        sizes = [each.projections for each in plan.assignments(0) if each.projections is not None]
        self.parts, end = {}, 0
        self._starts: dict[str, int] = {}
        for name in sizes[0]:
            of_sizes = [projections[name] for projections in sizes]
            for section, parts in _sections(name, of_sizes, architecture.layers).items():
                self._starts[section] = end
                for part, shape in parts.items():
                    self.parts[part] = (end, shape)
                    end += prod(shape)
                end = _whole_pieces(end)
        self.coordinates = end
        all_projections = [projection for projections in sizes for projection in projections.values()]
        self._hashed = all(isinstance(projection, Hashed) for projection in all_projections)
        hashed_slots = max(sum(_whole_pieces(each.size) for each in projections.values()) for projections in sizes)
        self.slots = hashed_slots if self._hashed else self.coordinates
        subspaces = [projection.subspace for projection in all_projections if isinstance(projection, Hashed)]
        layouts = [subspace.layout for subspace in subspaces if not subspace.is_full]
        self.width = gcd(PIECE, *(number for layout in layouts for number in (layout.chunk, layout.head)))

    def positions(self, projections: dict[str, Projection]) -> Tensor:
        """Positions of a client's vectors, one after the other, in its row of slots."""
        found, at = [], 0
        for name, projection in projections.items():
            start = at if self._hashed else self._starts[name if name in self._starts else name + LEFT]
            if isinstance(projection, LowRank):
                rank = self.parts[name + LEFT][1][1]
                left = torch.arange(projection.shape[0])[:, None] * rank + torch.arange(projection.rank)
                right = torch.arange(projection.rank * projection.shape[1])
                found += [self._starts[name + LEFT] + left.view(-1), self._starts[name + RIGHT] + right]
            elif isinstance(projection, LeadingBlock):
                everything = torch.arange(prod(projection.shape)).view(projection.shape)
                found.append(start + everything[tuple(slice(side) for side in projection.kept)].reshape(-1))
            else:
                found.append(start + torch.arange(projection.size))
            at += _whole_pieces(projection.size)
        return torch.cat(found)

    def table(self, projections: dict[str, Projection], device: torch.device) -> SlotTables:
        """The slot table of one client, on a device."""
        if self._hashed:
            slots, signs = self._hash(projections, device)
        else:
            slots = torch.arange(self.coordinates, device=device)
            signs = torch.zeros(self.coordinates, dtype=torch.int8, device=device)
            signs[self.positions(projections).to(device)] = 1
        slot_of_piece = slots.view(-1, self.width)[:, 0] // self.width
        return SlotTables.of_client(slot_of_piece, signs, self.slots // self.width)

    def _hash(self, projections: dict[str, Projection], device: torch.device) -> tuple[Tensor, Tensor]:
        """Slot and sign of every coordinate; padding of a section's last piece has sign 0."""
        slots = torch.zeros(self.coordinates, dtype=torch.int64, device=device)
        signs = torch.zeros(self.coordinates, dtype=torch.int8, device=device)
        at = 0
        for name, projection in projections.items():
            assert isinstance(projection, Hashed)
            size, first = prod(projection.shape), self._starts[name]
            section = slice(first, first + size)
            slots[section], signs[section] = projection.places(torch.arange(size, device=device))
            padding = torch.arange(size, _whole_pieces(size), device=device)
            if len(padding):  # in the last piece's lanes, where that piece is cut; else in a piece of their own
                last = slots[first + size - 1] // self.width * self.width
                slots[first + padding] = last + padding % self.width
            slots[first : first + _whole_pieces(size)] += at
            at += _whole_pieces(projection.size)
        return slots, signs


def _whole_pieces(size: int) -> int:
    return -(-size // PIECE) * PIECE


def _sections(name: str, projections: list[Projection], layers: Shapes) -> dict[str, Shapes]:
    """The sections of one vector over all sizes, and the parts of each, weights as matrices."""
    if name == WHOLE_MODEL:
        return {name: {layer: _matrix_shape(shape) for layer, shape in layers.items()}}
    sections: dict[str, Shapes] = {}
    factored = [projection for projection in projections if isinstance(projection, LowRank)]
    if len(factored) < len(projections):
        sections[name] = {name: _matrix_shape(layers[name])}
    if factored:
        rank, (rows, columns) = max(projection.rank for projection in factored), factored[0].shape
        sections[name + LEFT] = {name + LEFT: (rows, rank)}
        sections[name + RIGHT] = {name + RIGHT: (rank, columns)}
    return sections


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else shape
