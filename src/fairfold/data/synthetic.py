"""Synthetic interactions drawn from planted tastes, so that the best possible ranking is known."""

import math
import os
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.sampling import generator
from fairfold.errors import InvalidSettings

BLOCK_ELEMENTS = 1 << 22  # random numbers, of eight bytes each, that are drawn at a time
MAX_TITLES = 1 << 16  # items of larger catalogs have no titles
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
class SyntheticDataset:
    """Users with planted tastes, who choose from a catalog whose popularity follows a power law.

    The score of user u for item i is ``-popularity_exponent * log(i + 1) + taste_strength * <taste_u, trait_i>``, with
    tastes and traits normal and scaled so that the inner product has unit variance. Each user's items are drawn one
    after another without replacement, with probability proportional to exp(score); a random 70 % are for training.

    Every user has the same number of test items, and an unseen item's probability to be one of them rises with its
    score. Ranking by :meth:`best_scores` therefore has the highest expected NDCG; ranking by item number is what
    popularity alone achieves.

    Example:
        >>> synthetic = SyntheticDataset(users=20, items=50, interactions_per_user=10)
        >>> data = synthetic.dataset()
        >>> data.num_users, data.num_items, len(data.train.of(0)), len(data.test.of(0))
        (20, 50, 7, 3)
    """

    users: int = 200
    items: int = 2_000  # numbered by falling planted popularity
    factors: int = 8  # dimensions of tastes and traits
    interactions_per_user: int = 60  # training and test together
    popularity_exponent: float = 0.8  # 0 makes all items equally popular; real catalogs have about 1
    taste_strength: float = 2.0  # standard deviation of the taste term; 0 leaves popularity alone
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "items", "factors"):
            if not 1 <= getattr(self, name) < 1 << 32:
                raise InvalidSettings(f"{name} = {getattr(self, name)}", "from 1 to 2^32 - 1", f"Change {name}.")
        if not 2 <= self.interactions_per_user < self.items:
            given = f"interactions_per_user = {self.interactions_per_user} of {self.items} items"
            needed = f"from 2 to {self.items - 1}: one to train on, one to test, one to rank against"
            raise InvalidSettings(given, needed, "Change interactions_per_user or items.")
        for name in ("popularity_exponent", "taste_strength", "seed"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidSettings(f"{name} = {value}", "a finite number, 0 or more", f"Change {name}.")

    def _check_memory(self) -> None:
        """Refuse a data set larger than memory before any of it is allocated."""
        tables = 4 * (self.users + self.items) * self.factors
        needed = tables + 16 * self.items + 24 * self.users * self.interactions_per_user  # draws count three times
        try:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # not known on this system
            return
        if needed > memory:
            given = f"synthetic data of about {needed / 1e9:,.1f} GB"
            limit = f"at most the {memory / 1e9:,.1f} GB of memory of this machine"
            raise InvalidSettings(given, limit, "Ask for fewer users, items, factors or interactions.")

    @cached_property
    def tastes(self) -> Tensor:
        """Tastes of users, float32 [users, factors]."""
        return self._normal_table(self.users, stream=0)

    @cached_property
    def traits(self) -> Tensor:
        """Traits of items, float32 [items, factors]; the inner product with a taste has unit variance."""
        return self._normal_table(self.items, stream=1) / math.sqrt(self.factors)

    @cached_property
    def log_popularity(self) -> Tensor:
        """Logarithm of the items' popularity, float32 [items], falling."""
        ranks = torch.arange(1, self.items + 1, dtype=torch.float64)
        return (-self.popularity_exponent * ranks.log()).to(torch.float32)

    def best_scores(self, users: Tensor) -> Tensor:
        """True scores of all items for some users, float32 [len(users), items]: the best possible ranking."""
        return torch.addmm(self.log_popularity, self.tastes[users], self.traits.T, alpha=self.taste_strength)

    def dataset(self) -> Dataset:
        """Draw the interactions, in memory proportional to their number."""
        self._check_memory()
        test_count = min(self.interactions_per_user - 1, max(1, round(0.3 * self.interactions_per_user)))
        noise = generator(self.seed, 2)
        blocks = torch.split(torch.arange(self.users), max(1, BLOCK_ELEMENTS // self.items))
        chosen = torch.cat([self._draw(block, noise) for block in blocks])
        # Gumbel noise puts the likely items first, so the test items are drawn at random.
        order = torch.rand(chosen.shape, generator=generator(self.seed, 3), dtype=torch.float64).argsort(1)
        shuffled = chosen.gather(1, order)
        return Dataset(
            name=f"synthetic-{self.users}x{self.items}",
            train=self._interactions(shuffled[:, test_count:]),
            test=self._interactions(shuffled[:, :test_count]),
            titles=self.titles() if self.items <= MAX_TITLES else None,
        )

    def titles(self) -> list[str]:
        """Make a title for every item, with the genre of its strongest trait."""
        strongest = self.traits.abs().argmax(1)
        sign = self.traits.gather(1, strongest[:, None])[:, 0] < 0
        genres = ((2 * strongest + sign) % len(GENRES)).tolist()
        counts = [0] * len(GENRES)
        num_names = len(FIRST) * len(SECOND)
        titles = []
        for genre in genres:
            volume, number = divmod(counts[genre], num_names)
            cycle, place = divmod((number + 131 * genre) % num_names, len(FIRST))  # genres begin with different names
            name = f"{FIRST[place]} {SECOND[(33 * cycle + place) % len(SECOND)]}"
            titles.append(f"{name}{f' {volume + 1}' if volume else ''} ({GENRES[genre]})")
            counts[genre] += 1
        return titles

    def _draw(self, users: Tensor, source: torch.Generator) -> Tensor:
        """Draw items of some users without replacement: the largest scores after adding Gumbel noise."""
        # 53 random bits, since with 24 large catalogs would have ties.
        noise = torch.rand(len(users), self.items, generator=source, dtype=torch.float64)
        noise.log_().neg_().log_().neg_().add_(self.best_scores(users))
        return noise.topk(self.interactions_per_user, dim=1).indices

    def _interactions(self, items: Tensor) -> Interactions:
        offsets = torch.arange(self.users + 1, dtype=torch.int64) * items.shape[1]
        return Interactions(self.users, self.items, offsets, items.sort(1).values.flatten())

    def _normal_table(self, rows: int, stream: int) -> Tensor:
        # One stream per purpose, so that tastes do not change when the catalog grows.
        return torch.randn(rows, self.factors, generator=generator(self.seed, stream))
