"""From what devices can hold to sizes on one nested chain.

Sizes nest when each divides the next. The paper takes powers of two, which leaves up to half of a device's memory
unused. Any ``base · 2^k`` nests as well, so the base can be fitted to the devices.
"""

from collections.abc import Iterable, Sequence

import numpy
import torch
from torch import Tensor

from fairfold.errors import InvalidCapacity
from fairfold.subspace.capacity import Capacity
from fairfold.subspace.nesting import require_nested
from fairfold.subspace.subspace import Subspace


def fit_sizes(limits: Sequence[int], full_size: int, *, unit: int = 1) -> list[int]:
    """The size each device gets: ``base · 2^k``, the largest within its limit.

    The base is the one that uses most of the devices' memory, each counted alike. A device that can hold all of the n
    coordinates gets the full space; every smaller size is a multiple of ``unit`` (the chunk; twice the chunk for
    ranked subspaces).

    Example:
        >>> fit_sizes([1_000, 300, 70], 1_000)
        [1000, 280, 70]
    """
    _check_smallest(min(limits, default=unit), unit, "the smallest part that is hashed as one")
    partial = [limit for limit in limits if limit < full_size]
    base = _fitted_base(partial, unit) if partial else full_size
    return [full_size if limit >= full_size else _largest(base, limit) for limit in limits]


def _check_smallest(smallest: int, needed: int, why: str) -> None:
    if smallest < needed:
        given = f"a device that can hold {smallest} coordinates"
        raise InvalidCapacity(given, f"at least {needed}, {why}", "Leave this device out, or use a shorter chunk.")


def _largest(base: int, limit: int) -> int:
    """The largest base · 2^k that is at most ``limit``."""
    return base << ((limit // base).bit_length() - 1)


def _fitted_base(limits: list[int], unit: int) -> int:
    """The base in (smallest / 2, smallest] that fills the devices best.

    A chain is fixed by where its sizes fall within an octave. Scale every limit l by a power of two into
    (smallest / 2, smallest]. A device with l >= base uses base / l of its memory, one with l < base only half of
    base / l. Raising the base until the next scaled limit only gains, so the best base is one of those limits; sorted,
    with running sums of 1 / l, all of them are compared in one pass.
    """
    smallest = min(limits)
    exact = torch.tensor(limits, dtype=torch.float64, device="cpu")  # also where new tensors are on meta
    scaled = exact / 2 ** torch.floor(torch.log2(exact / smallest))  # in [smallest, 2 · smallest)
    scaled = torch.where(scaled > smallest, scaled / 2, scaled).sort().values
    cumulative = torch.cumsum(1 / scaled, 0)
    before = torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), cumulative[:-1]])
    used = scaled * ((cumulative[-1] - before) + before / 2)
    best = int(scaled[int(used.argmax())])
    return max(best // unit, 1) * unit


def nested_subspaces(
    full_size: int,
    capacities: Iterable[str | float | Capacity],
    *,
    seed: int = 0,
    mapping: str = "element",
    chunk: int = 1,
    sign: bool = True,
    tail_share: float | None = None,
) -> list[Subspace]:
    """One subspace per capacity, all on one chain.

    Args:
        full_size: n, the number of coordinates of the full vector.
        capacities: What each device (or group of devices) can hold, as :meth:`Capacity.parse` reads it.
        seed: Seed of the hash that all of them share.
        mapping: See :class:`Subspace`.
        chunk: Z, how many neighbours share one hash.
        sign: Whether coordinates have random signs.
        tail_share: For ranked subspaces: all hash into one tail of the same length, this share of the smallest of
            them, and own all other slots. They then nest whatever their sizes are, and no memory is left unused.
            None: each owns and hashes half of its size.

    Example:
        >>> full, quarter, small = nested_subspaces(1_024, ["1x", "4x", "16x"])
        >>> full.is_full, quarter.size, small.size, small.nests_in(quarter)
        (True, 256, 64, True)
    """
    limits = [Capacity.parse(capacity).limit(full_size) for capacity in capacities]
    if mapping == "ranked" and tail_share is not None:
        sizes = _one_tail(limits, full_size, chunk, tail_share)
    else:
        unit = 2 * chunk if mapping == "ranked" else chunk
        sizes = [(size, 0) for size in fit_sizes(limits, full_size, unit=unit)]
    subspaces = [Subspace(full_size, size, seed, mapping, chunk, head, sign=sign) for size, head in sizes]
    require_nested(subspaces)
    return subspaces


def _one_tail(limits: Sequence[int], full_size: int, chunk: int, tail_share: float) -> list[tuple[int, int]]:
    """Size and head of every device, in whole chunks; the tail has one chunk at least, and so has each head."""
    smallest = min(limits, default=full_size)
    _check_smallest(smallest, 2 * chunk, "a part of its own and one that is shared")
    tail = max(int(smallest * tail_share) // chunk, 1) * chunk
    found = []
    for limit in limits:
        head = (limit - tail) // chunk * chunk
        found.append((full_size, 0) if limit >= full_size else (head + tail, head))
    return found


def assign_groups(
    num_devices: int,
    groups: int,
    shares: Sequence[float] | None = None,
    seed: int | None = None,
    draw: str = "torch",
) -> Tensor:
    """The group of every device: runs in the order of the ids, as the paper's schemes say.

    ``shares`` are the sizes of the groups, in any unit, each at least one device; near-equal if not given. With a
    ``seed`` devices are put into a random order first, as in the paper's data-loss table: by torch's generator, or with
    ``draw = "numpy"`` by ``RandomState(seed).shuffle``, as in its authors' code.

    Example:
        >>> assign_groups(7, 3).tolist()
        [0, 0, 0, 1, 1, 2, 2]
    """
    if groups < 1 or num_devices < groups:
        given = f"{groups} capacities for {num_devices} devices"
        raise InvalidCapacity(given, "at least one device per capacity", "Name fewer capacities.")
    group = torch.arange(num_devices) * groups // num_devices
    if shares is not None:
        ends = torch.tensor(shares, dtype=torch.float64).cumsum(0)
        ends = (ends / ends[-1] * num_devices).round().long()
        for number in range(groups):  # at least one device each, without taking the last one of those behind
            first = int(ends[number - 1]) if number else 0
            ends[number] = min(max(int(ends[number]), first + 1), num_devices - (groups - 1 - number))
        group = torch.bucketize(torch.arange(num_devices), ends, right=True)
    if seed is None:
        return group
    if draw == "numpy":
        drawn = group.numpy().copy()
        numpy.random.RandomState(seed).shuffle(drawn)
        return torch.from_numpy(drawn)
    order = torch.randperm(num_devices, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(group).scatter_(0, order, group)
