"""A synthetic world written straight to disk: planted tastes, power-law popularity, any size in bounded memory."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import polars
from numpy.typing import NDArray

from fairfold.data.capacity import check_memory
from fairfold.data.files import atomic_folder
from fairfold.data.prepare import Prepared
from fairfold.data.progress import Stages, silent
from fairfold.data.split import generator, train_mask
from fairfold.data.store import write_manifest, write_part
from fairfold.errors import InvalidData

# Interactions drawn at a time; what is held at once is a small multiple of it.
CHUNK = 1 << 21
BYTES_A_USER = 40


@dataclass(frozen=True)
class World:
    """A world of users with one taste each, in which items have a taste and a popularity.

    Every user draws distinct items. With probability ``loyalty`` an item comes from the user's own taste (item i has
    taste i mod ``tastes``), otherwise from all; either way the one ranked r is drawn with a chance that falls as
    (r + 1)^(-exponent). Items are therefore numbered by planted popularity.

    Attributes:
        users: Number of users.
        items: Size of the catalogue.
        interactions: Number of interactions in all, train and test together.
        tastes: Number of tastes.
        loyalty: Share of a user's draws that come from the own taste.
        exponent: How steeply popularity falls.
        activity: Spread of the users' activity: standard deviation of the logarithm of their numbers of interactions.
        split: Share of every user's interactions to train on.
        seed: Seed of everything.
    """

    users: int
    items: int
    interactions: int
    tastes: int = 16
    loyalty: float = 0.8
    exponent: float = 0.9
    activity: float = 1.0
    split: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("users", 1 <= self.users < 1 << 32, "from 1 to 2^32 - 1"),
            ("items", 2 <= self.items < 1 << 32, "from 2 to 2^32 - 1"),
            ("interactions", self.users <= self.interactions <= 10**10, "from one a user to 10^10"),
            ("tastes", 1 <= self.tastes <= self.items // 2, "from 1 to half the number of items"),
            ("loyalty", 0 <= self.loyalty <= 1, "from 0 to 1"),
            ("exponent", 0 <= self.exponent <= 20, "from 0 to 20"),
            ("activity", 0 <= self.activity <= 20, "from 0 to 20"),
            ("split", 0 < self.split <= 1, "above 0 and at most 1"),
            ("seed", self.seed >= 0, "at least 0"),
        )
        for name, good, needed in checks:
            if not good:
                raise InvalidData(f"{name} = {getattr(self, name)}", needed, f"Change --{name}.")
        if self.interactions > self.users * self.most:
            raise InvalidData(
                f"{self.interactions:,} interactions for {self.users:,} users and {self.items:,} items",
                f"at most {self.most:,} a user, half the catalogue",
                "Ask for more users or items, or for fewer interactions.",
            )

    @property
    def most(self) -> int:
        """The most interactions a user may have: half the catalogue, so that distinct items are found quickly."""
        return max(1, self.items // 2)


def make(world: World, folder: str | Path, *, stages: Stages = silent, chunk: int = CHUNK) -> Prepared:
    """Write a world as a prepared data set, which :func:`fairfold.data.load` reads.

    Args:
        world: What to write.
        folder: The folder to make; it appears when it is whole.
        stages: Where progress is shown.
        chunk: Interactions drawn at a time.
    """
    final = Path(folder).expanduser()
    check_memory("a world", BYTES_A_USER * world.users + world.items)
    with atomic_folder(final) as partial:
        in_train = numpy.zeros(world.users, dtype=numpy.uint32)
        counts = _activity(world)
        touched = numpy.zeros(world.items, dtype=bool)
        totals = {"train": 0, "test": 0}
        with stages("writing the world", world.interactions) as advance:
            for part, (first, stop) in enumerate(_user_chunks(counts, chunk)):
                random = generator(world.seed, 1, part)
                users, items = _draw(world, first, counts[first:stop], random)
                mask = train_mask(users, stop - first, world.split, random)
                in_train[first:stop] = numpy.bincount(users[mask], minlength=stop - first)
                touched[items[mask]] = True
                for name, rows in (("train", mask), ("test", ~mask)):
                    frame = {
                        "user": (users[rows] + first).astype(numpy.uint32),
                        "item": items[rows].astype(numpy.uint32),
                    }
                    write_part(partial, name, part, polars.DataFrame(frame))
                    totals[name] += int(rows.sum())
                advance(len(users))
        per_user = {
            "train": in_train,
            "valid": numpy.zeros_like(in_train),
            "test": counts.astype(numpy.uint32) - in_train,
        }
        polars.DataFrame(per_user).write_parquet(partial / "users.parquet")
        manifest = write_manifest(
            partial,
            {
                "name": final.name,
                "kind": "interactions",
                "source": [],
                "generator": {
                    "name": "fairfold.data.make",
                    "items_are_ordered_by": "planted popularity",
                    **asdict(world),
                },
                "split": f"{world.split:g} of every user's interactions to train on, seed {world.seed}",
                "options": {},
                "source_counts": {"users": world.users, "items": world.items, "interactions": world.interactions},
                "counts": {
                    "users": world.users,
                    "items": world.items,
                    "valid": 0,
                    **totals,
                    "items_in_train": int(touched.sum()),
                },
                "repairs": {},
            },
        )
    return Prepared(final, manifest, "written now")


def _activity(world: World) -> NDArray[numpy.int64]:
    """Interactions of every user: log-normal, from one to half the catalogue, with the exact sum asked for."""
    weights = numpy.exp(world.activity * generator(world.seed, 0).standard_normal(world.users))
    counts: NDArray[numpy.int64] = numpy.clip(
        numpy.floor(weights / weights.sum() * world.interactions), 1, world.most
    ).astype(numpy.int64)
    while missing := world.interactions - int(counts.sum()):
        # Spread what rounding and the limits took, one at a time over the users that can still take or give.
        able = numpy.flatnonzero(counts < world.most if missing > 0 else counts > 1)
        each = max(1, abs(missing) // len(able))
        chosen = able[: abs(missing) // each]
        change = numpy.minimum(each, (world.most - counts if missing > 0 else counts - 1)[chosen])
        counts[chosen] += change if missing > 0 else -change
    return counts


def _user_chunks(counts: NDArray[numpy.int64], chunk: int) -> Iterator[tuple[int, int]]:
    """Ranges of users with about ``chunk`` interactions each; a single user may have more."""
    ends = numpy.cumsum(counts)
    first = 0
    while first < len(counts):
        before = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(numpy.searchsorted(ends, before + chunk, side="right")))
        yield first, stop
        first = stop


def _draw(
    world: World, first: int, counts: NDArray[numpy.int64], random: numpy.random.Generator
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Distinct items for a range of users: (user within the range, item), ascending."""
    pairs = numpy.empty(0, dtype=numpy.int64)
    missing = counts
    rounds = 0
    while missing.any():
        users = numpy.repeat(numpy.arange(len(counts)), missing + missing // 4 + 1)
        if rounds < 8:
            items = _ranked_items(world, first + users, random)
        else:  # a user who has all popular items by now takes any other
            items = random.integers(0, world.items, len(users))
        drawn = _first_new(pairs, users * world.items + items, missing, world.items)
        pairs = numpy.sort(numpy.concatenate([pairs, drawn]))
        missing = counts - numpy.bincount(pairs // world.items, minlength=len(counts))
        rounds += 1
    return pairs // world.items, pairs % world.items


def _first_new(known: NDArray[Any], drawn: NDArray[Any], missing: NDArray[Any], num_items: int) -> NDArray[Any]:
    """Of the pairs drawn, those not known yet, each once, in the order drawn, no more a user than are missing."""
    _, first = numpy.unique(drawn, return_index=True)
    drawn = drawn[numpy.sort(first)]
    if len(known):
        at = numpy.minimum(numpy.searchsorted(known, drawn), len(known) - 1)
        drawn = drawn[known[at] != drawn]
    users = drawn // num_items
    counts = numpy.bincount(users, minlength=len(missing))
    ranks = numpy.arange(len(drawn)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
    chosen: NDArray[Any] = drawn[ranks < missing[users]]
    return chosen


def _ranked_items(world: World, users: NDArray[Any], random: numpy.random.Generator) -> NDArray[Any]:
    own = random.random(len(users)) < world.loyalty
    tastes = users % world.tastes
    # Items of taste t are t, t + tastes, t + 2·tastes, …: rank r of a taste is item r·tastes + t.
    own_sizes = (world.items - 1 - tastes) // world.tastes + 1
    ranks = _power_law(random.random(len(users)), numpy.where(own, own_sizes, world.items), world.exponent)
    return numpy.where(own, ranks * world.tastes + tastes, ranks)


def _power_law(uniform: NDArray[Any], sizes: NDArray[Any], exponent: float) -> NDArray[numpy.int64]:
    """Ranks 0 … size - 1 with a density that falls as (rank + 1)^(-exponent), by inverting its integral."""
    if abs(exponent - 1) < 1e-9:
        values = numpy.exp(uniform * numpy.log(sizes + 1.0))
    else:
        power = 1 - exponent
        values = (uniform * ((sizes + 1.0) ** power - 1) + 1) ** (1 / power)
    ranks: NDArray[numpy.int64] = numpy.minimum(values.astype(numpy.int64) - 1, sizes - 1)
    return ranks
