"""Where the weights of image devices stand when a cohort is trained as one program, whatever their method."""

from math import gcd, prod

import torch
from torch import Tensor

from fairfold.backends.stacked_layers import LEFT, RIGHT
from fairfold.kernels.reference_stacked import SlotTables
from fairfold.projections import Hashed, LeadingBlock, LowRank, Projection
from fairfold.protocol.architecture import WHOLE_MODEL, ImageArchitecture
from fairfold.protocol.plan import Plan
from fairfold.values import Shapes

PIECE = 8
"""Coordinates moved as one, where hashes keep so many together."""


class Lines:
    """Where everything stands in a client's line of weights, and in its line of slots.

    A *section* is what one vector of the client stands for: a tensor, its factors, or all tensors. Sections start at
    whole pieces. A hashed section has the slots of its hash; of any other the slots are its weights themselves, those
    that the client does not hold with sign 0.
    """

    parts: dict[str, tuple[int, tuple[int, ...]]]  # every matrix or vector of the stacked network: start and shape
    coordinates: int  # length of a line of weights
    slots: int  # length of a line of slots
    width: int  # coordinates a piece

    def __init__(self, plan: Plan) -> None:
        architecture = plan.architecture
        assert isinstance(architecture, ImageArchitecture)
        held = [one.projections for one in plan.assignments(0) if one.projections is not None]
        self.parts, self._starts = {}, dict[str, int]()
        self._layers = architecture.layers
        at = 0
        for name in held[0]:
            mine = [projections[name] for projections in held]
            for section, parts in _sections(name, mine, architecture.layers).items():
                self._starts[section] = at
                for part, shape in parts.items():
                    self.parts[part] = (at, shape)
                    at += prod(shape)
                at = _whole_pieces(at)
        self.coordinates = at
        every = [one for projections in held for one in projections.values()]
        self._hashed = all(isinstance(one, Hashed) for one in every)
        of_hashes = max(sum(_whole_pieces(one.size) for one in projections.values()) for projections in held)
        self.slots = of_hashes if self._hashed else self.coordinates
        layouts = [one.subspace.layout for one in every if isinstance(one, Hashed) and not one.subspace.is_full]
        self.width = gcd(PIECE, *(number for layout in layouts for number in (layout.chunk, layout.head)))

    def positions(self, projections: dict[str, Projection]) -> Tensor:
        """Where the numbers of a client's vectors, one after the other, stand in its line of slots."""
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
        """The table of one client, on a device."""
        if self._hashed:
            slots, signs = self._hash(projections, device)
        else:
            slots = torch.arange(self.coordinates, device=device)
            signs = torch.zeros(self.coordinates, dtype=torch.int8, device=device)
            signs[self.positions(projections).to(device)] = 1
        of_piece = slots.view(-1, self.width)[:, 0] // self.width
        return SlotTables.of_client(of_piece, signs, self.slots // self.width)

    def _hash(self, projections: dict[str, Projection], device: torch.device) -> tuple[Tensor, Tensor]:
        """Slot and sign of every coordinate; what fills up a section's last piece has sign 0."""
        slots = torch.zeros(self.coordinates, dtype=torch.int64, device=device)
        signs = torch.zeros(self.coordinates, dtype=torch.int8, device=device)
        at = 0
        for name, projection in projections.items():
            assert isinstance(projection, Hashed)
            size, first = prod(projection.shape), self._starts[name]
            everything = torch.arange(size, device=device)
            slots[first : first + size], signs[first : first + size] = projection.places(everything)
            filled = torch.arange(size, _whole_pieces(size), device=device)
            if len(filled):  # in the last piece's lanes, where that piece is cut; else in a piece of their own
                lanes = filled % self.width
                last = slots[first + size - 1] // self.width * self.width
                slots[first + filled] = last + lanes
            slots[first : first + _whole_pieces(size)] += at
            at += _whole_pieces(projection.size)
        return slots, signs


def _whole_pieces(size: int) -> int:
    return -(-size // PIECE) * PIECE


def _sections(name: str, held: list[Projection], layers: Shapes) -> dict[str, Shapes]:
    """The sections of one vector of the clients, and the parts of each, weights as matrices."""
    if name == WHOLE_MODEL:
        return {name: {layer: _matrix(shape) for layer, shape in layers.items()}}
    found: dict[str, Shapes] = {}
    factored = [one for one in held if isinstance(one, LowRank)]
    if len(factored) < len(held):
        found[name] = {name: _matrix(layers[name])}
    if factored:
        rank, (rows, columns) = max(one.rank for one in factored), factored[0].shape
        found[name + LEFT] = {name + LEFT: (rows, rank)}
        found[name + RIGHT] = {name + RIGHT: (rank, columns)}
    return found


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else shape
