"""The synthetic world: interactions drawn from planted tastes, so that the best possible ranking is known."""

import math
import os
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.seeds import generator
from fairfold.errors import InvalidSettings

# Random numbers drawn at a time, eight bytes each: what bounds the memory of a draw.
BLOCK_ELEMENTS = 1 << 22

MOST_TITLES = 1 << 16
"""Items of a larger catalogue have numbers alone."""

GENRES = (
    "mystery", "romance", "travel", "history", "science", "poetry", "cooking", "fantasy", "gardening", "music", "sport",
    "crime", "nature", "comedy", "sailing", "philosophy",
)  # fmt: skip
FIRST = (
    "Quiet", "Golden", "Hidden", "Last", "Broken", "Distant", "Silver", "Winter", "Crooked", "Early", "Burning",
    "Empty", "Gentle", "Hollow", "Iron", "Narrow", "Open", "Painted", "Restless", "Salt", "Second", "Slow",
    "Small", "Stolen", "Summer", "Third", "Upper", "Velvet", "Wandering", "White", "Wooden", "Yellow",
)  # fmt: skip
SECOND = (
    "Harbour", "Garden", "Letter", "Bridge", "Window", "River", "Lantern", "Orchard", "Tower", "Mirror", "Forest",
    "Road", "Island", "Kitchen", "Market", "Shadow", "Station", "Stone", "Story", "Summer", "Table", "Theatre",
    "Tide", "Train", "Valley", "Voice", "Voyage", "Wall", "Watch", "Well", "Wheel", "Whistle", "Anchor", "Attic",
    "Ballad", "Basin", "Beacon", "Bell", "Bird", "Boat", "Book", "Candle", "Castle", "Chapel", "City", "Clock",
    "Cloud", "Coast", "Corner", "Court", "Crown", "Dance", "Door", "Dream", "Engine", "Feather", "Field", "Fire",
    "Flag", "Flute", "Gate", "Glass", "Hill", "Horse",
)  # fmt: skip


@dataclass(frozen=True)
class SyntheticWorld:
    """Users with planted tastes, who choose from a catalogue whose popularity follows a power law.

    The score of user u for item i is
    ``-popularity_exponent * log(i + 1) + taste_strength * <taste_u, trait_i>``, with tastes and traits normal
    and scaled so that the inner product has unit variance. Each user's items are drawn one after another
    without replacement, an item with probability proportional to exp(score); 70 % of them, chosen by chance,
    are for training and the rest for the test.

    Every user has the same number of test items, and among a user's unseen items the chance to be one of them
    rises with the score. Ranking by :meth:`best_scores` therefore has the highest expected NDCG of any
    ranking: no model can be better except by luck. Ranking by item number is what popularity alone achieves.

    Attributes:
        users: Number of users.
        items: Size of the catalogue; items are numbered by falling planted popularity.
        factors: Dimensions of tastes and traits.
        interactions_per_user: Items each user draws, training and test together.
        popularity_exponent: 0 makes all items alike; about 1 is what catalogues show.
        taste_strength: Standard deviation of the taste term; 0 leaves popularity alone.
        seed: The same parameters and seed give the same world.

    Example:
        >>> world = SyntheticWorld(users=20, items=50, interactions_per_user=10)
        >>> data = world.dataset()
        >>> data.num_users, data.num_items, len(data.train.of(0)), len(data.test.of(0))
        (20, 50, 7, 3)
    """

    users: int = 200
    items: int = 2_000
    factors: int = 8
    interactions_per_user: int = 60
    popularity_exponent: float = 0.8
    taste_strength: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "items", "factors"):
            if not 1 <= getattr(self, name) < 1 << 32:
                raise InvalidSettings(f"{name} = {getattr(self, name)}", "from 1 to 2^32 - 1", f"Change {name}.")
        if not 2 <= self.interactions_per_user < self.items:
            raise InvalidSettings(
                f"interactions_per_user = {self.interactions_per_user} of {self.items} items",
                f"from 2 to {self.items - 1}: one to train on, one to test, one to rank against",
                "Change interactions_per_user or items.",
            )
        for name in ("popularity_exponent", "taste_strength", "seed"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidSettings(f"{name} = {value}", "a finite number, 0 or more", f"Change {name}.")

    def _check_memory(self) -> None:
        """Refuse a world larger than memory before any of it is taken: tables, and the draws three times over."""
        tables = 4 * (self.users + self.items) * self.factors
        needed = tables + 16 * self.items + 24 * self.users * self.interactions_per_user
        try:
            there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # the system does not tell
            return
        if needed > there:
            raise InvalidSettings(
                f"the synthetic world of about {needed / 1e9:,.1f} GB",
                f"at most the {there / 1e9:,.1f} GB of memory of this machine",
                "Ask for fewer users, items, factors or interactions.",
            )

    @cached_property
    def tastes(self) -> Tensor:
        """float32 [users, factors]."""
        return self._normal(self.users, stream=0)

    @cached_property
    def traits(self) -> Tensor:
        """float32 [items, factors], scaled so that the inner product with a taste has unit variance."""
        return self._normal(self.items, stream=1) / math.sqrt(self.factors)

    @cached_property
    def log_popularity(self) -> Tensor:
        """float32 [items], falling."""
        ranks = torch.arange(1, self.items + 1, dtype=torch.float64)
        return (-self.popularity_exponent * ranks.log()).to(torch.float32)

    def best_scores(self, users: Tensor) -> Tensor:
        """The true scores of all items for some users, float32 [len(users), items]: the known best answer."""
        return torch.addmm(self.log_popularity, self.tastes[users], self.traits.T, alpha=self.taste_strength)

    def dataset(self) -> Dataset:
        """Draw the world's interactions, in memory proportional to their number."""
        self._check_memory()
        test_count = min(self.interactions_per_user - 1, max(1, round(0.3 * self.interactions_per_user)))
        noise = generator(self.seed, 2)
        step = max(1, BLOCK_ELEMENTS // self.items)
        everyone = torch.arange(self.users)
        blocks = [everyone[start : start + step] for start in range(0, self.users, step)]
        chosen = torch.cat([self._draw(block, noise) for block in blocks])
        # Gumbel noise puts the likely items first, so which of them are for the test is left to chance.
        order = torch.rand(chosen.shape, generator=generator(self.seed, 3), dtype=torch.float64).argsort(1)
        shuffled = chosen.gather(1, order)
        return Dataset(
            name=f"synthetic-{self.users}x{self.items}",
            train=self._interactions(shuffled[:, test_count:]),
            test=self._interactions(shuffled[:, :test_count]),
            titles=self.titles() if self.items <= MOST_TITLES else None,
        )

    def titles(self) -> list[str]:
        """A name for every item, with the genre that is its strongest trait: what a user likes can be read."""
        strongest = self.traits.abs().argmax(1)
        sign = self.traits.gather(1, strongest[:, None])[:, 0] < 0
        genres = ((2 * strongest + sign) % len(GENRES)).tolist()
        many, found, names = [0] * len(GENRES), [], len(FIRST) * len(SECOND)
        for genre in genres:
            volume, number = divmod(many[genre], names)
            turn, place = divmod((number + 131 * genre) % names, len(FIRST))  # genres do not begin with the same name
            words = f"{FIRST[place]} {SECOND[(33 * turn + place) % len(SECOND)]}"
            found.append(f"{words}{f' {volume + 1}' if volume else ''} ({GENRES[genre]})")
            many[genre] += 1
        return found

    def _draw(self, users: Tensor, source: torch.Generator) -> Tensor:
        """Items of some users, drawn without replacement: the largest scores after adding Gumbel noise."""
        # 53 random bits, since with 24 the top of a large catalogue would be full of ties.
        noise = torch.rand(len(users), self.items, generator=source, dtype=torch.float64)
        noise.log_().neg_().log_().neg_().add_(self.best_scores(users))
        return noise.topk(self.interactions_per_user, dim=1).indices

    def _interactions(self, items: Tensor) -> Interactions:
        per_user = items.shape[1]
        offsets = torch.arange(self.users + 1, dtype=torch.int64) * per_user
        return Interactions(self.users, self.items, offsets, items.sort(1).values.flatten())

    def _normal(self, rows: int, stream: int) -> Tensor:
        # One stream a purpose, so that tastes do not change when the catalogue grows.
        return torch.randn(rows, self.factors, generator=generator(self.seed, stream))
