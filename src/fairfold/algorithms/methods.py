"""Each method as a function from capacities to projections."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from fairfold.algorithms.networks import low_rank_network, narrow_network
from fairfold.errors import InvalidCapacity
from fairfold.federation.projection import Assignment, Hashed, KeptColumns, LowRank, Projection, WholeTable
from fairfold.federation.settings import Settings
from fairfold.federation.task import Shapes
from fairfold.kernels.hashing import expand_seed
from fairfold.subspace import Capacity, Subspace, nested_subspaces


def whole(shape: tuple[int, ...]) -> Hashed:
    """A tensor held as it is."""
    size = prod(shape)
    return Hashed(shape, Subspace(size, size))


def fair(compressed: Shapes, capacities: Sequence[Capacity], settings: Settings, seed: int) -> list[Assignment]:
    """FAIR-HET: nested subspaces, one a capacity. Every tensor has a hash of its own."""
    by_tensor = {
        name: _nested(shape, capacities, settings, expand_seed(seed ^ number << 56))
        for number, (name, shape) in enumerate(compressed.items())
    }
    return [
        Assignment({name: Hashed(compressed[name], subspaces[group]) for name, subspaces in by_tensor.items()})
        for group in range(len(capacities))
    ]


def _nested(shape: tuple[int, ...], capacities: Sequence[Capacity], settings: Settings, seed: int) -> list[Subspace]:
    full_size = prod(shape)
    mapping = (
        "chunk" if settings.mapping == "ranked" and len(shape) == 1 else settings.mapping
    )  # only tables have ranks
    chunk = 1 if mapping == "element" else settings.chunk
    # A tensor of which the smallest device holds less than a chunk (a bias, a first convolution) has shorter ones.
    # Least squares is about whole rows, so there a device that cannot hold them is refused.
    smallest = min(capacity.limit(full_size) for capacity in capacities) // (2 if mapping == "ranked" else 1)
    while settings.solver != "least_squares" and chunk > max(smallest, 1):
        chunk //= 2
    return nested_subspaces(
        full_size, capacities, seed=seed, mapping=mapping, chunk=chunk, sign=settings.sign, rule=settings.size_rule,
        tail_share=settings.tail_share,
    )  # fmt: skip


def fair_hom(compressed: Shapes, capacities: Sequence[Capacity], settings: Settings, seed: int) -> list[Assignment]:
    """FAIR-HOM, *model loss*: everybody at the smallest capacity."""
    full_size = sum(prod(shape) for shape in compressed.values())
    smallest = min(capacities, key=lambda capacity: capacity.limit(full_size))
    return fair(compressed, [smallest], settings, seed) * len(capacities)


def fedavg(compressed: Shapes, capacities: Sequence[Capacity], settings: Settings, seed: int) -> list[Assignment]:  # noqa: ARG001
    """FedAvg: everybody holds the full model, whatever it costs."""
    return [Assignment({name: whole(shape) for name, shape in compressed.items()})] * len(capacities)


def full_trn(compressed: Shapes, capacities: Sequence[Capacity], settings: Settings, seed: int) -> list[Assignment]:
    """FULL-TRN, *data loss*: only devices that can hold the full model take part."""
    everybody = fedavg(compressed, capacities, settings, seed)
    kept = [_holds_all(compressed, capacity) for capacity in capacities]
    if not any(kept):
        raise _cannot("full_trn", capacities[0], "no device can hold the full model")
    return [held if keep else Assignment(None) for held, keep in zip(everybody, kept, strict=True)]


def fedhm(compressed: Shapes, capacities: Sequence[Capacity], settings: Settings, seed: int) -> list[Assignment]:  # noqa: ARG001
    """FedHM: the best factors of low rank that fit.

    A table of N × d costs r·(N + d) at rank r, so a device that cannot hold N + d numbers cannot be served: compression
    stays below d. A device that can hold the table holds the table. With ``rank_rule="share"`` the small factor, r·d
    numbers, comes on top of the budget, in favour of the method. Networks: see :func:`low_rank_network`.
    """
    free = settings.rank_rule == "share"
    if settings.reads_images:
        return [low_rank_network(compressed, capacity, free_ends=free) for capacity in capacities]
    return [_tables("fedhm", LowRank, compressed, capacity, free_factor=free) for capacity in capacities]


def heterofl(compressed: Shapes, capacities: Sequence[Capacity], settings: Settings, seed: int) -> list[Assignment]:  # noqa: ARG001
    """HeteroFL: the leading columns that fit; at least one, so compression is at most d. Or a narrower network.

    Of the next layer a device holds what reads them, see :func:`assign`.
    """
    if settings.reads_images:
        return [narrow_network(compressed, capacity) for capacity in capacities]
    return [_tables("heterofl", KeptColumns, compressed, capacity) for capacity in capacities]


Method = Callable[[Shapes, Sequence[Capacity], Settings, int], list[Assignment]]
METHODS: dict[str, Method] = {
    "fair": fair,
    "fair_hom": fair_hom,
    "full_trn": full_trn,
    "fedavg": fedavg,
    "fedhm": fedhm,
    "heterofl": heterofl,
    "central": fedavg,  # all data in one place: whoever trains there holds everything
    "inconsistent": fair,  # the same subspaces, but the loop draws a seed a client
}


def assign(
    settings: Settings,
    compressed: Shapes,
    dense: Shapes,
    capacities: Sequence[Capacity],
    seed: int,
    reads: Mapping[str, tuple[str, int]] | None = None,
) -> list[Assignment]:
    """What the devices of each capacity hold of every tensor.

    Args:
        settings: Method and mapping.
        compressed: What a device holds by the method.
        dense: What it holds whole; by HeteroFL, what is left to read.
        capacities: One a group.
        seed: Of the hash.
        reads: Tensors whose columns, from a first one on, read the columns of a table; none if not given.
    """
    assignments = METHODS[settings.method](compressed, capacities, settings, seed)
    found = []
    for assignment in assignments:
        if assignment.projections is None:
            found.append(assignment)
            continue
        extra: dict[str, Projection] = {name: whole(shape) for name, shape in dense.items()}
        if settings.method == "heterofl":
            shapes = compressed | dense
            extra |= {
                name: _readers(shapes[name], first, assignment.projections[table])
                for name, (table, first) in (reads or {}).items()
            }
        found.append(Assignment(assignment.projections | extra))
    return found


def _readers(shape: tuple[int, ...], first: int, table: Projection) -> KeptColumns:
    """Of a layer, the columns that read what a device holds of a table, and those that read anything else."""
    assert isinstance(table, KeptColumns)
    runs = [(0, first + table.kept), (first + table.shape[1], shape[1])]
    return KeptColumns(shape, tuple((start, stop) for start, stop in runs if start < stop))


def _holds_all(compressed: Shapes, capacity: Capacity) -> bool:
    full_size = sum(prod(shape) for shape in compressed.values())
    return capacity.limit(full_size) >= full_size


def _tables(
    method: str,
    kind: type[LowRank] | type[KeptColumns],
    compressed: Shapes,
    capacity: Capacity,
    *,
    free_factor: bool = False,
) -> Assignment:
    """One projection a table, each within the capacity's share of it; ``free_factor``: small factors do not count."""
    projections: dict[str, Projection] = {}
    for name, shape in compressed.items():
        if len(shape) != 2:
            raise InvalidCapacity(f"method={method!r} on {name} of shape {shape}", "tables", "Use compress='tables'.")
        limit = capacity.limit(prod(shape))
        if limit >= prod(shape):
            everything = Subspace(prod(shape), prod(shape))
            projections[name] = (
                KeptColumns(shape, ((0, shape[1]),)) if kind is KeptColumns else WholeTable(shape, everything)
            )
            continue
        rank = limit // shape[0]
        projection = kind.within(shape, limit + (rank * shape[1] if free_factor else 0))
        if projection is None:
            needed = shape[0] + (shape[1] if kind is LowRank else 0)
            raise _cannot(
                method,
                capacity,
                f"{name} ({shape[0]} × {shape[1]}) needs at least {needed} numbers, it can hold {limit}",
            )
        projections[name] = projection
    return Assignment(projections)


def _cannot(method: str, capacity: Capacity, reason: str) -> InvalidCapacity:
    return InvalidCapacity(
        f"method={method!r} at {capacity}", f"a capacity it can serve (N/A: {reason})", "Use method='fair'."
    )
