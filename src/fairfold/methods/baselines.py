"""Baseline methods: FedAvg, FULL-TRN, FedHM and HeteroFL; of networks, too, a client holds its share of all numbers."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import ClassVar, Literal

from fairfold.errors import InvalidCapacity
from fairfold.methods.base import Method, Tensors, unsupported_capacity
from fairfold.methods.fair import Fair
from fairfold.subspace import Capacity
from fairfold.subspace.blocks import KeptColumns, LowRank, WholeTable
from fairfold.subspace.projection import Assignment, LeadingBlock, Projection, whole
from fairfold.typing import Shapes


class FedHM(Method):
    """FedHM: low-rank factors of tables and layers; a table of N × d costs r·(N + d) at rank r.

    A client that cannot hold N + d numbers cannot be served: compression stays below d. One that can hold the table
    holds the table. Networks: see :func:`low_rank_network`.

    Attributes:
        method: Its name.
        rank_rule: The rank at a capacity: ``"budget"``, the largest whose two factors fit, or ``"share"``, that share
            of the columns, which goes over the budget by the small factor, r·d numbers, in favour of the method.
    """

    DEFAULTS: ClassVar = {"algorithm": {"aggregation": "paper"}, "fleet": {"capacities": "1x-4x"}}
    min_compressed: ClassVar[int] = 0
    additive: ClassVar[bool] = False

    method: Literal["fedhm"] = "fedhm"
    rank_rule: Literal["budget", "share"] = "budget"

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        free = self.rank_rule == "share"
        if tensors.network:
            return [low_rank_network(compressed, capacity, free_ends=free) for capacity in capacities]
        return [Assignment(self._factored_tables(compressed, capacity, free)) for capacity in capacities]

    def _factored_tables(self, compressed: Shapes, capacity: Capacity, free: bool) -> dict[str, Projection]:
        found: dict[str, Projection] = {}
        for name, shape in compressed.items():
            if len(shape) != 2:
                raise InvalidCapacity(f"method='fedhm' on {name} of shape {shape}", "tables", "Use method='fair'.")
            limit = capacity.limit(prod(shape))
            if limit >= prod(shape):
                found[name] = whole(shape, WholeTable)
                continue
            held = LowRank.within(shape, limit + (limit // shape[0] * shape[1] if free else 0))
            if held is None:
                needed = f"{name} ({shape[0]} × {shape[1]}) needs at least {sum(shape)} numbers, it can hold {limit}"
                raise unsupported_capacity("fedhm", capacity, needed, prod(shape) // sum(shape))
            found[name] = held
        return found


class HeteroFL(Method):
    """HeteroFL: leading columns of tables, at least one, and what reads them next; or a narrower network."""

    DEFAULTS: ClassVar = {"fleet": {"capacities": "1x-4x"}}
    min_compressed: ClassVar[int] = 0

    method: Literal["heterofl"] = "heterofl"

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        if tensors.network:
            return [narrow_network(compressed, capacity) for capacity in capacities]
        shapes = compressed.items()
        return [Assignment({name: self.columns(name, shape, one) for name, shape in shapes}) for one in capacities]

    def columns(self, name: str, shape: tuple[int, ...], capacity: Capacity) -> KeptColumns:
        """The leading columns of a table that fit a capacity."""
        limit = capacity.limit(prod(shape))
        held = KeptColumns.within(shape, limit)
        if held is None:
            needed = f"{name} ({shape[0]} × {shape[1]}) needs at least {shape[0]} numbers, it can hold {limit}"
            raise unsupported_capacity(self.method, capacity, needed, shape[1])
        return held

    def others(self, tensors: Tensors, held: Assignment) -> dict[str, Projection]:
        tables, readers = held.projections or {}, tensors.readers.items()
        columns = {
            name: _reading_columns(tensors.shapes[name], first, tables[table]) for name, (table, first) in readers
        }
        return super().others(tensors, held) | columns


def _reading_columns(shape: tuple[int, ...], first: int, table: Projection) -> KeptColumns:
    """Columns of a layer that read what a client holds of a table, or anything else."""
    assert isinstance(table, KeptColumns)
    runs = [(0, first), *((first + start, first + stop) for start, stop in table.runs)]
    runs = [(start, stop) for start, stop in [*runs, (first + table.shape[1], shape[1])] if start < stop]
    found: list[tuple[int, int]] = []
    for start, stop in runs:  # adjacent ones are one run
        joined = found.pop()[0] if found and found[-1][1] == start else start
        found.append((joined, stop))
    return KeptColumns(shape, tuple(found))


SMALLEST_FACTORED = 1_024  # layers of fewer weights are whole under ``free_ends``: a first convolution, in practice

Matrices = dict[str, tuple[int, int]]
Ranks = Mapping[str, int | None]  # the rank of every layer's factors; None for a layer held whole


def low_rank_network(shapes: Shapes, capacity: Capacity, *, free_ends: bool = False) -> Assignment:
    """What a FedHM client holds of a network: two factors per layer, of a convolution as a matrix of filters.

    Biases are held whole. So is the output layer, as FedHM's authors have it, where the client can afford that. The
    other layers keep the same share of their full rank, the largest that fits, and at least rank 1; a layer whose
    factors would be no smaller than itself is held whole.

    With ``free_ends`` (``rank_rule="share"``) biases, the output layer and small layers are whole and come on top of
    the budget, in favour of the method; each other layer has the largest rank within the client's share of that layer.
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
            share = capacity.limit(prod(weights[name]))
            needed = f"{name} needs {sum(weights[name])} numbers at rank 1, its share is {share}"
            raise unsupported_capacity("fedhm", capacity, needed)
        return _factored_assignment(shapes, weights, ranks)
    found = _largest_ranks(shapes, weights, limit, output) or _largest_ranks(shapes, weights, limit, None)
    if found is None:
        least = _num_held(shapes, weights, dict.fromkeys(weights, 1))
        needed = f"factors of rank 1 of all layers are {least} numbers, it can hold {limit}"
        raise unsupported_capacity("fedhm", capacity, needed)
    return _factored_assignment(shapes, weights, found)


def _factored_assignment(shapes: Shapes, weights: Matrices, ranks: Ranks) -> Assignment:
    factored = {name: LowRank(weights[name], rank) for name, rank in ranks.items() if rank is not None}
    return Assignment({name: factored.get(name) or whole(shape, WholeTable) for name, shape in shapes.items()})


def narrow_network(shapes: Shapes, capacity: Capacity) -> Assignment:
    """What a HeteroFL client holds of a network: the largest equal share of the units of every hidden layer."""
    limit = capacity.limit(sum(prod(shape) for shape in shapes.values()))
    widths = [shape[0] for shape in shapes.values() if len(shape) > 1]

    def kept(share: float) -> dict[str, tuple[int, ...]]:
        """Shapes at a share of the width; input and output stay whole."""
        found: dict[str, tuple[int, ...]] = {}
        inputs, outputs, layer = 1.0, 1, 0
        for name, shape in shapes.items():
            if len(shape) > 1:
                last = layer == len(widths) - 1
                outputs = shape[0] if last else max(int(share * shape[0]), 1)
                # What comes in is what the layer before gives out: a unit, or all places of a channel.
                found[name] = (outputs, round(inputs * shape[1]), *shape[2:])
                inputs, layer = outputs / shape[0], layer + 1
            else:
                found[name] = (outputs,)
        return found

    share = _largest_share(lambda one: sum(prod(shape) for shape in kept(one).values()) <= limit, max(widths))
    if share is None:
        least = sum(prod(shape) for shape in kept(0.0).values())
        needed = f"a network one unit wide is {least} numbers, it can hold {limit}"
        raise unsupported_capacity("heterofl", capacity, needed)
    return Assignment({name: LeadingBlock(shapes[name], shape) for name, shape in kept(share).items()})


def _largest_ranks(shapes: Shapes, weights: Matrices, limit: int, kept: str | None) -> Ranks | None:
    """Ranks at the largest share of the full rank that fits, with one layer whole; None if nothing does."""

    def ranks(share: float) -> Ranks:
        found: dict[str, int | None] = {}
        for name, (rows, columns) in weights.items():
            rank = max(int(share * min(rows, columns)), 1)
            found[name] = None if name == kept or rank * (rows + columns) >= rows * columns else rank
        return found

    largest = max(min(shape) for shape in weights.values())
    share = _largest_share(lambda one: _num_held(shapes, weights, ranks(one)) <= limit, largest)
    return None if share is None else ranks(share)


def _largest_share(fits: Callable[[float], bool], steps: int) -> float | None:
    """The largest of 0, 1/steps, …, 1 that fits, by bisection; None if 0 does not."""
    if not fits(0.0):
        return None
    low, high = 0, steps
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle / steps) else (low, middle - 1)
    return low / steps


def _num_held(shapes: Shapes, weights: Matrices, ranks: Ranks) -> int:
    return sum(held.size for held in (_factored_assignment(shapes, weights, ranks).projections or {}).values())


class FedAvg(Method):
    """FedAvg: every client holds the full model, whatever it costs."""

    method: Literal["fedavg"] = "fedavg"

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        return [Assignment({name: whole(shape) for name, shape in compressed.items()})] * len(capacities)

    def assignment_for(
        self, tensors: Tensors, capacity: Capacity, known: list[Assignment], seed: int
    ) -> tuple[Assignment, bool]:
        folded = Fair(compress="all", mapping="chunk") if tensors.network else Fair()
        if tensors.whole_rows:
            folded = Fair(chunk=next(iter(tensors.tables.values()))[1], sign=False)
        return folded.assignment_for(tensors, capacity, known, seed)


class FullTrn(FedAvg):
    """FULL-TRN, *data loss*: only clients that can hold the full model take part."""

    method: Literal["full_trn"] = "full_trn"  # type: ignore[assignment]

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        full_size = sum(prod(shape) for shape in compressed.values())
        kept = [capacity.limit(full_size) >= full_size for capacity in capacities]
        if not any(kept):
            raise unsupported_capacity("full_trn", capacities[0], "no device can hold the full model")
        everybody = super().divide(tensors, compressed, capacities, seed, round_number)
        return [held if keep else Assignment(None) for held, keep in zip(everybody, kept, strict=True)]
