"""The random part of a split: which of a user's interactions are trained on."""

from typing import Any

import numpy
from numpy.typing import NDArray


def generator(*seeds: int) -> numpy.random.Generator:
    """A stream of random numbers of its own for every combination of seeds, the same on every machine."""
    return numpy.random.Generator(numpy.random.Philox(numpy.random.SeedSequence(list(seeds))))


def train_mask(
    users: NDArray[Any], num_users: int, share: float, random: numpy.random.Generator
) -> NDArray[numpy.bool_]:
    """A random ``share`` of every user's rows, rounded, at least one; ``users`` ascends."""
    counts = numpy.bincount(users, minlength=num_users)
    wanted = numpy.maximum(1, numpy.floor(share * counts + 0.5)).astype(numpy.int64)
    # One key, user above random number, sorts faster than two; stable, so that ties fall alike on every machine.
    draws = random.integers(0, 1 << 32, len(users), dtype=numpy.uint64)
    order = numpy.argsort((users.astype(numpy.uint64) << numpy.uint64(32)) | draws, kind="stable")
    starts = numpy.cumsum(counts) - counts
    ranks = numpy.arange(len(users)) - numpy.repeat(starts, counts)
    mask = numpy.empty(len(users), dtype=bool)
    mask[order] = ranks < numpy.repeat(wanted, counts)
    return mask
