"""Updates of :mod:`fairfold.algorithms.ratings`: windows of rows, fixed-point encoding, statistics of ratings.

In secure aggregation all numbers of a vector have one step and one bound. So a client rounds its update, and sends a
part where it is too large; and it stores what it *sent*. The rest is in its next change: errors do not add up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.incremental import rows_of
from fairfold.algorithms.rating_model import ROWS, USERS, RatingHyperparameters
from fairfold.data import Interactions
from fairfold.errors import InvalidSettings
from fairfold.federation.algorithm import COUNTS
from fairfold.federation.bounds import impossible
from fairfold.federation.clients import Clients
from fairfold.federation.plan import Plan
from fairfold.federation.updates import ClientTask, Update
from fairfold.subspace import Subspace
from fairfold.typing import Weights

RATING_UNIT = 2.0**-8  # of a rating in sums over a user's ratings, then of the size of others; exact
FEATURE_UNITS = (1.0, 2.0**-2, 2.0**4)  # of a user's features: 1, the log of the number of ratings, the mean row
RATING_TOTALS = "rating_totals"  # name of the statistic of all ratings: their number, sum, and sum of squares
RATING_OFFSETS = "rating_offsets"  # name of the statistic, per item, of ratings less the means of their users
MAX_RATING = 100.0  # largest absolute rating of a fleet
MAX_SQUARES = 2.0**15  # of a user's ratings in the statistics; users with more count with fewer ratings
OFFSET_STEPS = 2**8  # fixed-point steps per 1 of a rating's offset from its user's mean


class Window:
    """The rows that updates of a size are about in a round: of the largest clients' table, or of the server's."""

    def __init__(self, largest: Subspace, subspace: Subspace, round_number: int, factors: int) -> None:
        self._largest, self._factors = largest, factors
        self._num_rows, self.size = largest.size // factors, subspace.size // factors
        self._start = round_number * self.size % self._num_rows

    @property
    def rows(self) -> Tensor:
        """Row numbers, in the order in which they are sent."""
        return (self._start + torch.arange(self.size)) % self._num_rows

    def places(self, items: Tensor) -> Tensor:
        """Position of each item's row in the window; −1 outside."""
        place = (rows_of(self._largest, items, self._factors) - self._start) % self._num_rows
        return torch.where(place < self.size, place, -1)

    def sums(self, places: Tensor, values: Tensor) -> Tensor:
        """Sums of values by row of the window, flat."""
        inside = places >= 0
        total = torch.zeros(self.size, self._factors, dtype=values.dtype)
        return total.index_add_(0, places[inside], values[inside]).view(-1)


@dataclass(frozen=True)
class RatingUpdate:
    """Updates of some users before they are added up."""

    window: Window
    places: Tensor  # of each rating's item in the window; −1 outside
    owners: Tensor  # user of each rating
    row_changes: Tensor  # by rating, of its item's row
    user_changes: Tensor  # by user, of their other sums
    sample_state: Weights  # local state of each rating, once acknowledged
    user_state: Weights  # local state of each user, once acknowledged

    def bounds(self) -> Tensor:
        """The largest absolute number that each user's update can have."""
        rows = torch.zeros(len(self.user_changes), self.row_changes.shape[1], dtype=self.row_changes.dtype)
        rows.index_add_(0, self.owners, self.row_changes.abs())
        return torch.maximum(rows.amax(1), self.user_changes.abs().amax(1))

    def summed(self, valid: Tensor) -> tuple[Update, Weights]:
        """The update and new local state of those users whose changes are valid."""
        mine = valid[self.owners]
        rows = self.window.sums(self.places[mine], self.row_changes[mine])
        local_state = {name: of[mine] for name, of in self.sample_state.items()}
        local_state |= {name: of[valid] for name, of in self.user_state.items()}
        return Update({ROWS: rows, USERS: self.user_changes[valid].sum(0)}, float(valid.sum())), local_state


def ratings_of(known: RatingHyperparameters, clients: Clients, users: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """All ratings of some users: their indices, owners, and centered values."""
    ratings = clients.train.ratings
    assert ratings is not None
    chosen = clients.sample_indices(users)
    counts = torch.tensor([clients.num_samples(user) for user in users])
    owners = torch.repeat_interleave(torch.arange(len(users)), counts)
    return chosen, owners, known.centered(ratings[chosen])


def compact_rows(plan: Plan, task: ClientTask, items: Tensor) -> Tensor:
    """Rows of some items from a client's compact table."""
    factors = plan.settings.model.factors
    return task.vectors[ROWS].view(-1, factors)[rows_of(subspace_of(task.projections[ROWS]), items, factors)]


def update_cache(cache: Tensor, places: Tensor, streamed: Tensor) -> Tensor:
    """A client's cache of full rows of its items, with those that are streamed now."""
    inside = places >= 0
    rows = streamed.view(-1, cache.shape[1] - 1)[places[inside]]
    updated = cache.clone()
    updated[inside] = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
    return updated


def best_known_rows(cache: Tensor, compact: Tensor) -> Tensor:
    """Rows of a client's items: from its cache where they have been streamed, else from its compact table."""
    return torch.where(cache[:, -1:] > 0, cache[:, :-1], compact)


def statistic_units(size: int) -> Tensor:
    """Factors of each user's sums (:meth:`.rating_model.UserPosteriors.sums`) in an update."""
    units = torch.tensor([1.0] * size + [*FEATURE_UNITS[:2]] + [FEATURE_UNITS[2]] * size)
    rating_unit = torch.tensor([RATING_UNIT])
    return torch.cat([rating_unit.expand(size**2), (units[:, None] * units).flatten(), rating_unit])


@dataclass(frozen=True)
class FixedPoint:
    """A fixed-point encoding: steps per 1, and a client's largest number, half of it for what rounding adds."""

    steps: int
    bound: float

    def quantize(self, changes: Tensor, groups: Tensor) -> Tensor:
        """Changes, one per row, rounded and scaled down; rows of a group are added to the same numbers."""
        unique, groups = torch.unique(groups, return_inverse=True)
        totals = changes.new_zeros(len(unique), changes.shape[1]).index_add_(0, groups, changes.abs())
        scales = (self.bound / 2 / totals.amax(1)).clamp(max=1)
        return (changes * scales[groups, None] * self.steps).round() / self.steps


ITEM_FIXED_POINT = FixedPoint(2**7, 2.0**9)
USER_FIXED_POINT = FixedPoint(2**11, 2.0**5)


def rating_totals(histories: Interactions, *, secure: bool) -> Tensor:
    """Number of ratings, their sum, and the sum of their squares."""
    assert histories.ratings is not None
    ratings = histories.ratings.double()
    moments = torch.stack([torch.ones_like(ratings), ratings, ratings.square()], dim=1)
    by_user = torch.zeros(histories.num_users, 3).double().index_add_(0, histories.users, moments)
    if secure:
        by_user = (by_user * (MAX_SQUARES / by_user[:, 2:]).clamp(max=1)).round()
    return by_user.sum(0)


def rating_offsets(histories: Interactions, items: range, *, secure: bool) -> Tensor:
    """Sums, for a range of items, of ratings less the means of their users."""
    assert histories.ratings is not None
    ratings = histories.ratings.double()
    counts = histories.counts_by_user.clamp(min=1)
    means = torch.zeros(histories.num_users).double().index_add_(0, histories.users, ratings) / counts
    offsets = ratings - means[histories.users]
    if secure:
        offsets = (offsets * OFFSET_STEPS).round() / OFFSET_STEPS
    here = (histories.items >= items.start) & (histories.items < items.stop)
    return torch.zeros(len(items)).double().index_add_(0, histories.items[here] - items.start, offsets[here])


def bounded_rating_sums(sums: Weights, users: float, num_items: int, *, secure: bool) -> Weights:
    """Sums that the ratings of so many users can have; without masks no user counts for more than with them."""
    found = dict(sums)
    if RATING_TOTALS in sums:
        number, total, squares = sums[RATING_TOTALS].tolist()
        rounded = users / 2 if secure else 1e-6 * number  # what rounding may add
        possible = total**2 <= (number + rounded) * (squares + rounded) + rounded * (2 * abs(total) + rounded)
        small = squares <= MAX_RATING**2 * number + rounded and abs(total) <= MAX_RATING * number + rounded
        if not (0 <= number <= users * num_items and squares >= 0 and possible and small):
            raise impossible("sums that no ratings have", f"ratings from {-MAX_RATING:g} to {MAX_RATING:g}")
        if secure and squares > users * (MAX_SQUARES + 0.5):
            raise impossible("squares of ratings out of range", f"at most {MAX_SQUARES:g} per user")
        found[RATING_TOTALS] = sums[RATING_TOTALS] * min(1.0, users * MAX_SQUARES / max(squares, 1e-300))
    if RATING_OFFSETS in sums:
        most = (2 * MAX_RATING + 1 / OFFSET_STEPS) * sums[COUNTS]
        if not bool((sums[RATING_OFFSETS].abs() <= most).all()):
            raise impossible("offsets of ratings out of range", f"at most {2 * MAX_RATING:g} per rating")
    return found


def require_ratings(histories: Interactions, *, secure: bool) -> None:
    """Refuse data without ratings, and in secure aggregation ratings that are too large."""
    if histories.ratings is None:
        lacking = "data without ratings for algorithm.kind='ratings'"
        raise InvalidSettings(lacking, "ratings", "Use other data (such as --data ml-1m), or another recipe.")
    largest = float(histories.ratings.abs().max()) if len(histories) else 0.0
    if secure and not largest <= MAX_RATING:
        given = f"a rating of {largest:g} (or its negative) with privacy.level='secure'"
        needed = f"ratings from {-MAX_RATING:g} to {MAX_RATING:g}: the fixed-point encoding has room for no others"
        remedy = "Give all ratings in other units (divide them all by one number), or use privacy.level='plain'."
        raise InvalidSettings(given, needed, remedy)
