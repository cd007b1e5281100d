"""From what a user writes (a size, a share, a budget) to the subspace a layer's weights live in."""

from fractions import Fraction
from typing import TypedDict

from fairfold.errors import InvalidCapacity
from fairfold.subspace import Capacity, Subspace, fit_sizes

DEFAULT_CHUNK = 1
"""Coordinates hashed together unless said otherwise. Plain hashing loses quality with longer chunks, ranked tables do
not up to 8 (docs/decisions/chunk.md): say ``mapping="ranked", chunk=8`` where items come in order of popularity."""


class Placement(TypedDict, total=False):
    """The keywords every compact layer takes; one of size, capacity and budget must be there.

    Attributes:
        size: m, the number of slots, as it is.
        capacity: A share of the full weights (``1/16``), a compression (``"16x"``) or a budget (``"40MB"``).
        budget: Bytes, as a number or as text (``"40MB"``).
        seed: Seed of the hash; layers (devices) nest only if they share it.
        mapping: ``"element"``, ``"chunk"`` or ``"ranked"``; left out, what ``chunk`` and ``head`` imply.
        chunk: How many neighbouring weights share one hash.
        head: For ``"ranked"``: how many leading weights own their slot; 0 picks half of the size.
        sign: Whether weights have random signs.
    """

    size: int | None
    capacity: str | float | Fraction | Capacity | None
    budget: str | int | None
    seed: int
    mapping: str | None
    chunk: int
    head: int
    sign: bool


def place(
    full_size: int,
    itemsize: int = 4,
    *,
    size: int | None = None,
    capacity: str | float | Fraction | Capacity | None = None,
    budget: str | int | None = None,
    seed: int = 0,
    mapping: str | None = None,
    chunk: int = DEFAULT_CHUNK,
    head: int = 0,
    sign: bool = True,
) -> Subspace:
    """The subspace of ``full_size`` coordinates that a :class:`Placement` asks for.

    A capacity or a budget gives the largest size within it that is a whole number of chunks; a size is taken as it is.
    """
    if mapping is None:
        mapping = "ranked" if head else "element" if chunk == 1 else "chunk"
    given = [name for name, value in (("size", size), ("capacity", capacity), ("budget", budget)) if value is not None]
    if len(given) != 1:
        named = " and ".join(given) if given else "no size, capacity or budget"
        raise InvalidCapacity(named, "exactly one of them", "Write e.g. capacity=1/16.")
    if size is None:
        limit = _capacity(capacity, budget).limit(full_size, itemsize)
        size = _largest_size(limit, full_size, mapping, chunk, head)
    return Subspace(full_size, size, seed, mapping, chunk, head, sign)


def _capacity(capacity: str | float | Fraction | Capacity | None, budget: str | int | None) -> Capacity:
    if capacity is not None:
        return Capacity.parse(capacity)
    parsed = Capacity.parse(budget if isinstance(budget, str) else f"{budget}B")
    if parsed.budget is None:
        raise InvalidCapacity(f"budget={budget!r}", 'bytes, such as "40MB"', "Give a share as capacity=.")
    return parsed


def _largest_size(limit: int, full_size: int, mapping: str, chunk: int, head: int) -> int:
    """The largest size of whole chunks that is at most ``limit``."""
    if head == 0 or limit >= full_size:
        unit = 2 * chunk if mapping == "ranked" else chunk
        return fit_sizes([limit], full_size, unit=max(unit, 1))[0]
    if limit < head + chunk:
        raise InvalidCapacity(
            f"head={head} in a memory of {limit} slots",
            f"at least {head + chunk}, the head and one hashed chunk",
            "Use a smaller head or a larger capacity.",
        )
    return head + (limit - head) // chunk * chunk
