"""What so many users can have sent: bounds of statistics, evaluations and sums under masks that devices add up to."""

from typing import TYPE_CHECKING

from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy
from fairfold.errors import InvalidMessage
from fairfold.federation.algorithm import COUNTS, Capability, FixedPointUpdates, TrainsImages, WeighsUsers
from fairfold.federation.plan import Plan
from fairfold.federation.updates import ClientTask, Update
from fairfold.privacy.fixed_point import FRACTION_STEPS
from fairfold.typing import Weights

if TYPE_CHECKING:
    from fairfold.config import Settings

MAX_PER_USER = 1e12  # the largest number of a user in statistics, of however small a catalogue
MAX_USER_IMAGES = 100_000  # images of one user, at most


class BoundsStatistics(Capability):
    """Bounds statistics by what it knows of them: :func:`checked_statistics` would let one user outweigh others."""

    def bounded_statistics(self, settings: "Settings", statistics: Update, num_items: int) -> Update:
        """Statistics of devices, bounded or refused."""
        return statistics


class BoundsContributions(Capability):
    """Knows what a client's updates may add up to, however many it sends."""

    def check_contribution(
        self, plan: Plan, task: ClientTask, update: Update, held: Weights, users: int, seed: int
    ) -> tuple[str | None, Weights]:
        """Why an update of so many users is refused, or None, and what to remember; ``seed`` is secret."""
        return None, held

    def sum_problem(self, update: Update, users: int) -> str | None:
        """Reason why so many users cannot have sent such a sum, though each number is in range; None if they can."""
        return None


def impossible(given: str, needed: str) -> InvalidMessage:
    """Sums that no users can have sent."""
    return InvalidMessage(given, needed, "They are left out.")


def checked_statistics(settings: "Settings", statistics: Update, num_items: int) -> Update:
    """Statistics that so many users (the weight) can have, of one client or summed; refuses others."""
    weight, sums = statistics.weight, statistics.sums
    counts = sums.get(COUNTS)
    if counts is not None and not bool(((counts >= 0) & (counts <= weight)).all()):
        raise impossible("counts out of range", "at most one per user")
    for name, statistic in settings.algorithm.statistics(settings).items():
        if statistic.counts_users and name in sums and not 0 <= float(sums[name][0]) <= weight:
            raise impossible("a number of users out of range", "at most its weight")
    most = weight * max(float(num_items) ** 2, MAX_PER_USER)  # pairs of items are the most that a user has
    if any(not float(vector.abs().max()) <= most for vector in sums.values()):
        raise impossible("statistics out of range", f"at most {most:g}")
    return BoundsStatistics.of(settings.algorithm).bounded_statistics(settings, statistics, num_items)


def max_evaluated(settings: "Settings", num_items: int, users: int) -> int:
    """How many so many users count for in an evaluation at most: one each, or their ratings or images."""
    if isinstance(settings.algorithm, TrainsImages):
        return users * MAX_USER_IMAGES
    return users * (num_items if settings.predicts_ratings else 1)


def sum_problem(plan: Plan, update: Update, users: int, clients: int) -> str | None:
    """Why no honest clients, who act for so many users, can have made a sum under masks; None if they can.

    A masked number is any of 32 bits: what honest clients send is known, and what a hostile one adds is not bounded by
    the encoding. So the server bounds the sum. With noise in it only the weight is known.
    """
    privacy = plan.settings.privacy
    assert isinstance(privacy, SecurePrivacy)
    rounding = clients / FRACTION_STEPS
    most = users * WeighsUsers.of(plan.algorithm).max_user_weight(plan)
    if not 0 <= update.weight <= most + rounding:
        return f"a weight of {update.weight:g}, with {users} users"
    if isinstance(privacy, DifferentialPrivacy):
        return None
    exact = FixedPointUpdates.of(plan.algorithm)
    for name, total in update.sums.items():
        bound = clients * privacy.clip
        if name in exact.fixed_point:
            bound = users * exact.value_bounds.get(name, 1.0)
        largest = float(total.abs().max()) if len(total) else 0.0
        if largest > bound * (1 + 1e-6):
            return f"numbers of up to {largest:g}, with {users} users"
    return BoundsContributions.of(plan.algorithm).sum_problem(update, users)
