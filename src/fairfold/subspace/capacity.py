"""Capacities as people write them: ``16x``, ``0.0625``, ``1/16``, ``40MB``; and schemes of several, ``1x-4x-16x``."""

import re
from dataclasses import dataclass
from fractions import Fraction

from fairfold.errors import InvalidCapacity

BYTE_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BYTE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_FORMS = 'a compression such as "16x", a share such as 0.0625 or "1/16", or a budget such as "40MB"'
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_COMPRESSION = re.compile(_NUMBER + r"\s*[x×]", re.IGNORECASE)
_BUDGET = re.compile(_NUMBER + r"\s*([kmgt]?i?b)", re.IGNORECASE)
_SHARE = re.compile(_NUMBER + r"(?:\s*/\s*" + _NUMBER + ")?")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a device can hold: a share of the full vector (α in the paper), or a number of bytes.

    Exactly one of the two is set.

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

    def beside(self, taken: int) -> "Capacity":
        """What is left to the vector where a device holds ``taken`` bytes beside it; a share is one of the vector."""
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
        raise InvalidCapacity(
            f"scheme {text!r}",
            'capacities joined by hyphens, e.g. "1x-4x-16x"',
            "Write a capacity between every two hyphens.",
        )
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
    """What three dots stand for: halvings of the share, strictly between two capacities."""
    found: list[Capacity] = []
    if before and after and before.share and after.share:
        share = before.share / 2
        while share > after.share:
            found.append(Capacity(share=share))
            share /= 2
        if share == after.share:
            return found
    needed = "three dots between two compressions a power of two apart"
    raise InvalidCapacity(f"scheme {text!r}", needed, 'Write e.g. "1x-...-64x".')
