"""FAIR: nested subspaces by a hash, one per capacity; with FAIR-HOM (*model loss*) and inconsistent subspaces."""

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fairfold.kernels.hashing import expand_seed
from fairfold.methods.base import Method, Tensors
from fairfold.subspace import Capacity, Subspace, nested_subspaces
from fairfold.subspace.projection import Assignment, Hashed, Projection
from fairfold.typing import FLOAT_BYTES, Shapes


class Fair(Method):
    """FAIR-HET: nested subspaces, one per capacity, with a hash of its own for every tensor.

    Attributes:
        method: Its name.
        mapping: How coordinates are mapped to slots: ``"element"``, ``"chunk"`` or ``"ranked"`` (docs/concepts.md).
        chunk: Z, how many neighboring coordinates share one hash (docs/decisions/chunk.md).
        sign: Whether coordinates have random signs.
        rehash: A new hash every round, as in the paper's Algorithm 1, or one for the whole run.
        compress: ``"tables"``: item tables; ``"all"``: every tensor of the model, each in a subspace of its own;
            ``"model"``: all tensors as one vector, whose weights share slots across layers (images only).
        popularity: Source of the order of ``"ranked"``: ``"catalogue"``, its numbers are a public order; ``"counts"``,
            clients count before the first round (docs/default-recommender.md); ``"none"``, there is no order, and
            ``"ranked"`` falls back to ``"element"``, or to ``"chunk"`` where rows are whole.
        tail_share: The tail that unpopular items share has one length for all clients, this share of the smallest
            size; all else is owned by popular items. None: each size is half owned, half shared.
        support: An item owns slots only if at least this many users have it; no client holds more than that needs
            (0: no limit).
        reference_factors: Capacities are shares of a table of this many factors instead of the model's, so that longer
            rows fit the same bytes; None: of the table itself.
        start: Where a hashed network of images starts: ``"full"``, at random in the full space, so that the smallest
            client, which gets means of many such numbers, starts close to zero; or ``"subspace"``, at random in the
            subspace of the smallest client, so that every size starts with numbers of the right magnitude.
    """

    ACTIVE_WHEN: ClassVar = {
        "chunk": ("mapping", ("chunk", "ranked")),
        "popularity": ("mapping", ("ranked",)),
        "tail_share": ("mapping", ("ranked",)),
        "support": ("mapping", ("ranked",)),
        "start": ("compress", ("all", "model")),
    }

    method: Literal["fair"] = "fair"
    mapping: Literal["element", "chunk", "ranked"] = "ranked"
    chunk: int = Field(8, ge=1, lt=2**31)
    sign: bool = True
    rehash: bool = False
    compress: Literal["tables", "all", "model"] = "tables"
    popularity: Literal["catalogue", "counts", "none"] = "catalogue"
    tail_share: float | None = Field(None, gt=0, lt=1)
    support: int = Field(0, ge=0, lt=2**62)
    reference_factors: int | None = Field(None, ge=1, lt=2**31)
    start: Literal["full", "subspace"] = "full"

    def is_inactive(self, key: str) -> bool:
        unordered = key in ("chunk", "tail_share", "support") and self.popularity == "none"
        return unordered or super().is_inactive(key)

    def why_inactive(self, key: str) -> str:
        return super().why_inactive(key) if self.mapping != "ranked" else f" with popularity={self.popularity!r}"

    @property
    def ranked(self) -> bool:
        """Whether popular items own their slots."""
        return self.mapping == "ranked" and self.popularity != "none"

    @property
    def rehashes(self) -> bool:
        return self.rehash

    @property
    def min_support(self) -> int:
        return self.support

    @property
    def counts_items(self) -> bool:
        return self.ranked and self.popularity == "counts"

    @property
    def needs_counts(self) -> bool:
        return self.counts_items or (self.ranked and self.support > 0)

    def compressed(self, tensors: Tensors) -> Shapes:
        if self.compress == "tables":
            return tensors.tables
        shapes = tensors.tables | tensors.others
        return {name: shape for name, shape in shapes.items() if prod(shape) >= self.min_compressed}

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        sizes: list[dict[str, Projection]] = [{} for _ in capacities]
        for number, (name, shape) in enumerate(compressed.items()):
            subspaces = self._nested_subspaces(shape, capacities, expand_seed(seed ^ number << 56), tensors.whole_rows)
            for held, subspace in zip(sizes, subspaces, strict=True):
                held[name] = Hashed(shape, subspace)
        return [Assignment(held) for held in sizes]

    def _nested_subspaces(
        self, shape: tuple[int, ...], capacities: Sequence[Capacity], seed: int, whole_rows: bool
    ) -> list[Subspace]:
        mapping: str = self.mapping
        if mapping == "ranked" and not self.ranked:
            mapping = "chunk" if whole_rows else "element"
        elif mapping == "ranked" and len(shape) == 1:  # only tables have ranks
            mapping = "chunk"
        full_size = prod(shape)
        chunk = 1 if mapping == "element" else self.chunk
        # A tensor of which the smallest client holds less than a chunk (a bias, a first convolution) has shorter ones.
        smallest = min(capacity.limit(full_size) for capacity in capacities) // (2 if mapping == "ranked" else 1)
        while not whole_rows and chunk > max(smallest, 1):
            chunk //= 2
        sign, tail = self.sign, self.tail_share
        return nested_subspaces(
            full_size, capacities, seed=seed, mapping=mapping, chunk=chunk, sign=sign, tail_share=tail
        )

    def remaining_capacity(
        self, tensors: Tensors, capacity: Capacity, capacities: Sequence[Capacity], counts: Tensor | None
    ) -> Capacity:
        """At most what items with enough users need, counted in rows of the reference."""
        left = super().remaining_capacity(tensors, capacity, capacities, counts)
        supported = self.ranked and self.support and counts is not None
        if not tensors.tables or (not supported and self.reference_factors is None):
            return left
        items, factors = next(iter(tensors.tables.values()))
        reference = items * (self.reference_factors or factors)
        limit = left.limit(reference)
        if supported and counts is not None:
            every = [super(Fair, self).remaining_capacity(tensors, known, capacities, None) for known in capacities]
            smallest = min(known.limit(reference) for known in [*every, left])
            limit = min(limit, self._supported(items, factors, smallest, counts))
        return Capacity.parse("1x") if limit >= items * factors else Capacity(budget=limit * FLOAT_BYTES)

    def reference(self, compressed: Shapes) -> int:
        if self.reference_factors is None:
            return super().reference(compressed)
        return sum(shape[0] * self.reference_factors for shape in compressed.values())

    def _supported(self, items: int, factors: int, smallest: int, counts: Tensor) -> int:
        """Numbers that suffice for items of at least ``support`` users to own a row, and for the tail."""
        owned = max(1, int((counts >= self.support).sum()))
        if self.tail_share is None:  # half of every size
            return min(items, 2 * owned) * factors
        share = self.tail_share
        shared = int(min(smallest // factors * share, owned * share / (1 - share)))
        return min(items, owned + max(shared, 1)) * factors

    def assignment_for(
        self, tensors: Tensors, capacity: Capacity, known: list[Assignment], seed: int
    ) -> tuple[Assignment, bool]:
        """A subspace that nests with the known ones, to train along; else the largest that fits, not to train."""
        alone = Fair.model_construct(**dict(self) | {"method": "fair"}).within(tensors, [capacity], seed)[0]
        projections, joins = dict(alone.projections or {}), True
        one_tail = self.ranked and self.tail_share is not None
        for name, shape in self.compressed(tensors).items():
            held = [of.projections[name] for of in known if of.projections is not None]
            chain = [of.subspace for of in held if isinstance(of, Hashed) and not of.subspace.is_full]
            found = _largest_on_chain(chain, capacity, one_tail) if chain else None
            if found is not None:
                projections[name] = Hashed(shape, found)
            joins = joins and (found is not None or not chain)
        return Assignment(projections), joins


class FairHom(Fair):
    """FAIR-HOM, *model loss*: everybody at the smallest capacity. Keys as of :class:`Fair`."""

    method: Literal["fair_hom"] = "fair_hom"  # type: ignore[assignment]

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        full_size = sum(prod(shape) for shape in compressed.values())
        smallest = min(capacities, key=lambda capacity: capacity.limit(full_size))
        return super().divide(tensors, compressed, [smallest], seed, round_number) * len(capacities)


class Inconsistent(Fair):
    """FAIR's subspaces with an independent hash per client, to measure what consistency is worth."""

    per_client: ClassVar[bool] = True
    additive: ClassVar[bool] = False
    method: Literal["inconsistent"] = "inconsistent"  # type: ignore[assignment]


def _largest_on_chain(chain: list[Subspace], capacity: Capacity, one_tail: bool) -> Subspace | None:
    """The largest subspace within a capacity that nests with a chain; None if all of them are too large."""
    known = min(chain, key=lambda subspace: subspace.size)
    limit = capacity.limit(known.full_size)
    if limit >= known.full_size:
        return Subspace(known.full_size, known.full_size)
    size, head = known.size, 0
    if one_tail:
        head = (limit - known.layout.tail) // known.chunk * known.chunk
        if head <= 0:
            return None
        size = head + known.layout.tail
    else:
        unit = known.chunk * (2 if known.mapping == "ranked" else 1)
        while 2 * size <= limit:
            size *= 2
        while size > limit and size % (2 * unit) == 0:
            size //= 2
        if size > limit:
            return None
    return Subspace(known.full_size, size, known.seed, known.mapping, known.chunk, head, sign=known.sign)
