"""FedHM and HeteroFL for networks: what a device of a capacity holds of every layer.

Both keep to the same bound as FAIR: all numbers of a device together, biases among them, are at most its share of the
model's. How they spend it is stated here, so that nobody has to guess how strong the rivals were made.
"""

from collections.abc import Callable, Mapping
from math import prod

from fairfold.methods.base import cannot
from fairfold.projections import Assignment, LeadingBlock, LowRank, WholeTable, whole
from fairfold.subspace import Capacity
from fairfold.values import Shapes

SMALLEST_FACTORED = 1_024
"""Layers of fewer weights are whole under ``free_ends``: a first convolution, in practice."""

Matrices = dict[str, tuple[int, int]]
Ranks = Mapping[str, int | None]
"""The rank of every layer's factors; None for a layer held whole."""


def low_rank_network(shapes: Shapes, capacity: Capacity, *, free_ends: bool = False) -> Assignment:
    """FedHM's device: every layer's weight as two factors, a convolution's as a matrix of one row a filter.

    Biases are held whole. So is the output layer, as FedHM's authors have it, where the device can afford that; else it
    is factored as well. The other layers keep the same share of their full rank, the largest that fits, and at least
    rank 1; a layer whose factors would be no smaller than itself is held whole.

    With ``free_ends`` (``rank_rule="share"``) biases, the output layer and small layers are whole and come on top of
    the budget; each other layer has the largest rank within the device's share of that layer. It holds more than it is
    asked to, in favour of the method; where the share of a layer is less than rank 1 needs, it cannot be served.
    """
    full_size = sum(prod(shape) for shape in shapes.values())
    limit = capacity.limit(full_size)
    if limit >= full_size:
        return Assignment({name: whole(shape, WholeTable) for name, shape in shapes.items()})
    weights: Matrices = {name: (shape[0], prod(shape[1:])) for name, shape in shapes.items() if len(shape) > 1}
    output = list(weights)[-1]
    if free_ends:
        kept = {name: capacity.limit(prod(shape)) // sum(shape) for name, shape in weights.items()}
        ranks = {n: r for n, r in kept.items() if n != output and prod(weights[n]) >= SMALLEST_FACTORED}
        if not all(ranks.values()):
            name = next(name for name, rank in ranks.items() if not rank)
            needed = f"{name} needs {sum(weights[name])} numbers at rank 1"
            raise cannot("fedhm", capacity, f"{needed}, its share is {capacity.limit(prod(weights[name]))}")
        return _held(shapes, weights, ranks)
    found = _largest_ranks(shapes, weights, limit, output) or _largest_ranks(shapes, weights, limit, None)
    if found is None:
        least = _cost(shapes, weights, dict.fromkeys(weights, 1))
        raise cannot("fedhm", capacity, f"factors of rank 1 of all layers are {least} numbers, it can hold {limit}")
    return _held(shapes, weights, found)


def _held(shapes: Shapes, weights: Matrices, ranks: Ranks) -> Assignment:
    factored = {name: LowRank(weights[name], rank) for name, rank in ranks.items() if rank is not None}
    return Assignment({name: factored.get(name) or whole(shape, WholeTable) for name, shape in shapes.items()})


def narrow_network(shapes: Shapes, capacity: Capacity) -> Assignment:
    """HeteroFL's device: the leading units of every hidden layer, the same share of each, the largest that fits."""
    full_size = sum(prod(shape) for shape in shapes.values())
    limit = capacity.limit(full_size)
    widths = [shape[0] for shape in shapes.values() if len(shape) > 1]

    def kept(share: float) -> dict[str, tuple[int, ...]]:
        """Shapes at a share of the width; the input and the output keep theirs."""
        found: dict[str, tuple[int, ...]] = {}
        inputs, outputs, layer = 1.0, 1, 0
        for name, shape in shapes.items():
            if len(shape) > 1:
                last = layer == len(widths) - 1
                outputs = shape[0] if last else max(int(share * shape[0]), 1)
                # What comes in is what the layer before gives out: a unit, or all places of a channel.
                side = round(inputs * shape[1])
                found[name] = (outputs, side, *shape[2:])
                inputs, layer = outputs / shape[0], layer + 1
            else:
                found[name] = (outputs,)
        return found

    share = _largest(lambda one: sum(prod(shape) for shape in kept(one).values()) <= limit, max(widths))
    if share is None:
        least = sum(prod(shape) for shape in kept(0.0).values())
        raise cannot("heterofl", capacity, f"a network one unit wide is {least} numbers, it can hold {limit}")
    return Assignment({name: LeadingBlock(shapes[name], shape) for name, shape in kept(share).items()})


def _largest_ranks(shapes: Shapes, weights: Matrices, limit: int, kept: str | None) -> Ranks | None:
    """The ranks at the largest share of the full rank that fits, one layer being kept whole; None if nothing does."""

    def ranks(share: float) -> Ranks:
        found: dict[str, int | None] = {}
        for name, (rows, columns) in weights.items():
            rank = max(int(share * min(rows, columns)), 1)
            found[name] = None if name == kept or rank * (rows + columns) >= rows * columns else rank
        return found

    largest = max(min(shape) for shape in weights.values())
    share = _largest(lambda one: _cost(shapes, weights, ranks(one)) <= limit, largest)
    return None if share is None else ranks(share)


def _largest(fits: Callable[[float], bool], steps: int) -> float | None:
    """The largest of 0, 1/steps, …, 1 that fits; None if 0 does not. What is asked only ever grows with the share."""
    if not fits(0.0):
        return None
    low, high = 0, steps
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle / steps) else (low, middle - 1)
    return low / steps


def _cost(shapes: Shapes, weights: Matrices, ranks: Ranks) -> int:
    return sum(held.size for held in (_held(shapes, weights, ranks).projections or {}).values())
