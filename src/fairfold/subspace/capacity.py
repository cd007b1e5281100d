"""Capacities (``16x``, ``0.0625``, ``1/16``, ``40MB``), schemes of several (``1x-4x-16x``), and their nested sizes.

Sizes nest when each divides the next. The paper takes powers of two, which leaves up to half of a client's memory
unused. Any ``base · 2^k`` nests as well, so the base can be fitted to the clients.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy
import torch
from torch import Tensor

from fairfold.errors import InvalidCapacity
from fairfold.subspace.nesting import require_nested
from fairfold.subspace.subspace import Subspace

BYTE_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BYTE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_FORMS = 'a compression such as "16x", a share such as 0.0625 or "1/16", or a budget such as "40MB"'
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_COMPRESSION = re.compile(_NUMBER + r"\s*[x×]", re.IGNORECASE)
_BUDGET = re.compile(_NUMBER + r"\s*([kmgt]?i?b)", re.IGNORECASE)
_SHARE = re.compile(_NUMBER + r"(?:\s*/\s*" + _NUMBER + ")?")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a client can hold: a share of the full vector (α in the paper), or else a number of bytes.

    Example:
        >>> Capacity.parse("16x").share
        Fraction(1, 16)
        >>> Capacity.parse("40MB").budget
        40000000
    """

    share: Fraction | None = None
    budget: int | None = None

    @classmethod
    def parse(cls, value: "str | float | Fraction | Capacity") -> "Capacity":
        """Read a capacity in any of the accepted forms."""
        if isinstance(value, Capacity):
            return value
        if isinstance(value, str):
            return cls._parse_text(value)
        if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
            raise InvalidCapacity(f"capacity {value!r}", _FORMS, "Write it as text.")
        if value != value or value in (float("inf"), float("-inf")):
            raise InvalidCapacity(f"capacity {value!r}", _FORMS, "Give a finite share.")
        return cls._of_share(Fraction(value).limit_denominator(10**12), str(value))

    @classmethod
    def _parse_text(cls, text: str) -> "Capacity":
        stripped = text.strip()
        if match := _COMPRESSION.fullmatch(stripped):
            ratio = Fraction(match[1])
            if ratio < 1:
                raise InvalidCapacity(f"compression {text!r}", "1x or more", "1x is the full model, 16x a sixteenth.")
            return cls(share=1 / ratio)
        if match := _BUDGET.fullmatch(stripped):
            budget = int(Fraction(match[1]) * BYTE_UNITS[match[2].lower()])
            if budget < 1:
                raise InvalidCapacity(f"budget {text!r}", "at least one byte", 'Write e.g. "40MB".')
            return cls(budget=budget)
        if match := _SHARE.fullmatch(stripped):
            denominator = Fraction(match[2]) if match[2] else Fraction(1)
            if denominator:
                return cls._of_share(Fraction(match[1]) / denominator, text)
        raise InvalidCapacity(f"capacity {text!r}", _FORMS, "Check the spelling.")

    @classmethod
    def _of_share(cls, share: Fraction, text: str) -> "Capacity":
        if not 0 < share <= 1:
            remedy = 'Write "16x" for a sixteenth, or a unit ("40MB") for bytes.'
            raise InvalidCapacity(f"capacity {text}", "a share above 0 and at most 1", remedy)
        return cls(share=share)

    def limit(self, full_size: int, itemsize: int = 4) -> int:
        """The most coordinates of ``itemsize`` bytes this capacity can hold, at most the full vector's."""
        if self.share is not None:
            return int(self.share * full_size)
        assert self.budget is not None  # one of the two is set
        return min(self.budget // itemsize, full_size)

    def minus(self, taken: int) -> "Capacity":
        """The capacity without ``taken`` bytes that are held beside the vector; a share is one of the vector alone."""
        if self.budget is None or not taken:
            return self
        if self.budget <= taken:
            needed = f"more than the {taken:,} bytes held beside the table"
            raise InvalidCapacity(f"a budget of {self}", needed, "Give a larger budget.")
        return Capacity(budget=self.budget - taken)

    def __str__(self) -> str:
        if self.share is not None:
            ratio = 1 / self.share
            return f"{ratio.numerator}x" if ratio.denominator == 1 else f"{float(ratio):.4g}x"
        assert self.budget is not None
        for unit, label in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
            if self.budget >= unit:
                return f"{self.budget / unit:.6g}{label}"
        return f"{self.budget}B"


def parse_scheme(text: str) -> list[Capacity]:
    """Read a capacity scheme: capacities joined by hyphens, ``1x-4x-16x``.

    Three dots double from the capacity before them to the one after: ``1x-2x-...-64x``, or ``1x-...-64x``.

    Example:
        >>> [str(capacity) for capacity in parse_scheme("1x-...-8x")]
        ['1x', '2x', '4x', '8x']
    """
    words = [word.strip() for word in re.split(r"[-–]", text)]
    if not text.strip() or not all(words):
        needed = 'capacities joined by hyphens, e.g. "1x-4x-16x"'
        raise InvalidCapacity(f"scheme {text!r}", needed, "Write a capacity between every two hyphens.")
    capacities: list[Capacity] = []
    for position, word in enumerate(words):
        if word in ("...", "…"):
            after = Capacity.parse(words[position + 1]) if position + 1 < len(words) else None
            capacities.extend(_between(capacities[-1] if capacities else None, after, text))
        else:
            capacities.append(Capacity.parse(word))
    if len(set(capacities)) < len(capacities):
        raise InvalidCapacity(f"scheme {text!r}", "every capacity once", "Remove the repeated one.")
    return capacities


def _between(before: Capacity | None, after: Capacity | None, text: str) -> list[Capacity]:
    """The capacities that three dots stand for: halvings of the share, strictly between two."""
    if before and after and before.share and after.share:
        shares = [before.share / 2]
        while shares[-1] > after.share:
            shares.append(shares[-1] / 2)
        if shares[-1] == after.share:
            return [Capacity(share=share) for share in shares[:-1]]
    needed = "three dots between two compressions a power of two apart"
    raise InvalidCapacity(f"scheme {text!r}", needed, 'Write e.g. "1x-...-64x".')


def fit_sizes(limits: Sequence[int], full_size: int, *, unit: int = 1) -> list[int]:
    """The size of each client: ``base · 2^k``, the largest within its limit.

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
    return [full_size if limit >= full_size else base << ((limit // base).bit_length() - 1) for limit in limits]


def _check_smallest(smallest: int, needed: int, why: str) -> None:
    if smallest < needed:
        given = f"a device that can hold {smallest} coordinates"
        raise InvalidCapacity(given, f"at least {needed}, {why}", "Leave this device out, or use a shorter chunk.")


def _fitted_base(limits: list[int], unit: int) -> int:
    """The base in (smallest / 2, smallest] that fills the devices best.

    Scale every limit l by a power of two into that range. A device with l >= base uses base / l of its memory, one with
    l < base half of that. Raising the base until the next scaled limit only gains, so the best is one of those limits:
    sorted, with running sums of 1 / l, all of them are compared in one pass.
    """
    smallest = min(limits)
    exact = torch.tensor(limits, dtype=torch.float64, device="cpu")  # also where new tensors are on meta
    scaled = exact / 2 ** torch.floor(torch.log2(exact / smallest))  # in [smallest, 2 · smallest)
    scaled = torch.where(scaled > smallest, scaled / 2, scaled).sort().values
    cumulative = torch.cumsum(1 / scaled, 0)
    before = torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), cumulative[:-1]])
    used = scaled * ((cumulative[-1] - before) + before / 2)
    return max(int(scaled[int(used.argmax())]) // unit, 1) * unit


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
    """One subspace per capacity, as :meth:`Capacity.parse` reads it, all on one chain; keys as of :class:`Subspace`.

    With ``tail_share`` ranked subspaces hash into one tail of the same length, this share of the smallest of them, and
    own all other slots: they nest whatever their sizes are, and no memory is unused. Else each owns half of its size.

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
    """Size and head of every client, in whole chunks; the tail and each head have one chunk at least."""
    smallest = min(limits, default=full_size)
    _check_smallest(smallest, 2 * chunk, "a part of its own and one that is shared")
    tail = max(int(smallest * tail_share) // chunk, 1) * chunk
    found = []
    for limit in limits:
        head = (limit - tail) // chunk * chunk
        found.append((full_size, 0) if limit >= full_size else (head + tail, head))
    return found


def assign_groups(
    num_devices: int, groups: int, shares: Sequence[float] | None = None, seed: int | None = None, draw: str = "torch"
) -> Tensor:
    """Assign clients to groups: runs in the order of their ids, as in the paper's schemes.

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
