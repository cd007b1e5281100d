"""Co-occurrence of items: what a client uploads of its history, and how the sum over clients is stored.

*Storage.* The symmetric matrix of item pairs is packed as a triangle: the pair (i, j) with i ≤ j stands at
j(j + 1)/2 + i. So the pairs of the leading h items are the first h(h + 1)/2 numbers, and all sizes nest as prefixes.

*Weights.* A user with n items weighs each of their n² pairs n^−κ, with κ = ½ unless settings say otherwise, rounded
down to a multiple of 2⁻¹⁶. Sums of such numbers below 256 are exact in single precision, in any order; and no user's
matrix has a norm above n^(1 − κ). Under differential privacy κ is 1, and so is the norm.

*Uploads.* In plain aggregation a client sends the shorter of two: all numbers, or the nonzero ones with their
positions. Secure aggregation hides zeros: all numbers of the leading items that a client's capacity has room for, over
as many rounds as there are for it, a part in each (:mod:`.parts`).

*Length.* A triangle of up to ``MAX_DENSE`` numbers is held as it is. Of a longer one the server's sum, too, holds what
is nonzero alone. Where noise or masks need all numbers, no more are sent at once than ``MASKED_ITEMS`` items have.
"""

from collections.abc import Mapping
from math import ceil, isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence.parts import MAX_PARTS, TrianglePart, numbers_at
from fairfold.algorithms.cooccurrence.scorer import CoOccurrenceArchitecture
from fairfold.config.fleet import DifferentialPrivacy, FleetSettings
from fairfold.data import Interactions
from fairfold.errors import InvalidCapacity
from fairfold.federation.algorithm import COUNTS
from fairfold.federation.plan import Plan
from fairfold.federation.updates import (
    MAX_DENSE,
    PublicStatistics,
    nonzero_values,
    sparse_vector,
)
from fairfold.kernels import ops
from fairfold.kernels.reference import truncated_lengths
from fairfold.kernels.sparse_pairs import columns_of
from fairfold.methods.truncated import TruncatedTensors
from fairfold.subspace import Capacity, parse_scheme

UNIT = 1 << 16  # fixed-point steps per 1 of a co-occurrence weight
BLOCK = 256  # columns mirrored at a time
SUM = "sum"  # name of the co-occurrence sum, in updates and in the server's state
# Name of what is sent beside a model: share of histories to upload, candidate, share of users that report, items
REQUEST = "request"
USERS = "users"  # name of the statistic of users, items and pairs
ITEM_SHARES = "item_shares"  # name of each item's share of interactions, sent under differential privacy
MASKED_ITEMS = 8_000  # items at most where a client sends all numbers of a triangle at once
ITEMS_PER_USER = 32  # items of the head, at most, for every user
LONGEST_UPLOAD = 2_048  # items of one user of which pairs are listed: the most popular ones; two million pairs
CANDIDATE_ROUNDS = 14  # rounds that are left to candidates before uploads are cut into parts
SYNC_STATE = "sync_state"  # name of the local state: for each sample, what the server's sum holds of it


def triangle_size(items: int) -> int:
    """Number of elements of the packed triangle over some items."""
    return items * (items + 1) // 2


def triangle_items(size: int) -> int:
    """The most items whose packed triangle has at most this many elements."""
    return (isqrt(8 * size + 1) - 1) // 2


def unpack_triangle(packed: Tensor) -> Tensor:
    """The symmetric matrix of a packed triangle."""
    items = triangle_items(len(packed))
    full = packed.new_zeros(items, items)
    for column in range(items):
        full[column, : column + 1] = packed[triangle_size(column) : triangle_size(column + 1)]
    for start in range(0, items, BLOCK):  # in place: no second matrix
        rows = full[start : start + BLOCK]
        full[:start, start : start + BLOCK] = rows[:, :start].T
        corner = rows[:, start : start + BLOCK]
        corner += corner.tril(-1).T
    return full


def frobenius_norm(packed: Tensor, places: Tensor | None = None) -> float:
    """Frobenius norm of the symmetric matrix of a packed triangle, dense or sparse, or of a part of it.

    ``places``: where a part has elements of the diagonal.
    """
    packed = packed.coalesce() if packed.is_sparse else packed
    values = nonzero_values(packed)
    if places is not None:
        diagonal = values[places].double()
    elif packed.is_sparse and len(values) < triangle_items(len(packed)):
        listed = packed.indices()[0]
        columns = columns_of(listed)
        diagonal = values[listed == columns * (columns + 3) // 2].double()
    else:
        items = torch.arange(triangle_items(len(packed)))
        diagonal = numbers_at(packed, torch.div(items * (items + 3), 2, rounding_mode="floor")).double()
    squares = 2 * float(torch.dot(values, values)) - float(diagonal.square().sum())
    return float(max(squares, 0.0) ** 0.5)


def history_weights(lengths: Tensor, exponent: float = 1.0) -> Tensor:
    """Weight of a pair in histories of these lengths: n^−exponent, as a multiple of the unit."""
    steps = (UNIT / lengths.clamp(min=1).double() ** exponent).floor().clamp(min=1)
    return steps.to(torch.get_default_dtype()) / UNIT


def owners_of(lengths: Tensor) -> Tensor:
    """The user of each item in concatenated histories of these lengths."""
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def select_items(items: Tensor, lengths: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The items of concatenated histories that a mask selects, and the lengths that remain."""
    return items[mask], torch.bincount(owners_of(lengths)[mask], minlength=len(lengths))


def num_supported(counts: Tensor, support: float) -> int:
    """Number of leading items up to the last one with at least ``support`` users; 1 at least."""
    enough = (counts >= support).nonzero()
    return int(enough[-1]) + 1 if len(enough) else 1


def least_support(settings: Any, public: PublicStatistics) -> int:
    """How many users an item of the head has: more than settings say where few users have very many items.

    What a pair of items says that three of a hundred users have is hardly more than who these users are.
    """
    least: int = settings.algorithm.support
    users = int(public.statistics.get(USERS, [public.num_users])[0])
    beyond = public.statistics.get(COUNTS, torch.empty(0))[int(ITEMS_PER_USER * users) :]
    return max(least, int(beyond.max()) + 1) if len(beyond) else least


def user_totals(histories: "Interactions", *, lengths: bool, pairs: bool) -> Tensor:
    """Numbers of users, items and pairs in some histories; items and pairs are 0 where they may not be known."""
    counts = histories.counts_by_user.double()
    totals = torch.stack([counts.sum(), (counts * (counts + 1)).sum() / 2])
    return torch.cat([totals.new_tensor([histories.num_users]), totals * torch.tensor([lengths, pairs])])


def max_items(settings: Any, public: PublicStatistics) -> int:
    """How many items a model may have."""
    least: int = min(public.num_items, settings.algorithm.max_items)
    if not settings.privacy.uses_secure_aggregation:
        return least
    return min(least, triangle_items(triangle_size(MASKED_ITEMS) * most_parts(settings)))


def share_of(settings: Any, public: PublicStatistics, capacity: Capacity) -> float:
    """The part of all numbers that a client may upload in a round."""
    share: float = settings.subspace.share(TruncatedTensors({}, {}, catalogue=public.num_items), capacity)
    return share


def most_parts(settings: Any) -> int:
    """The most rounds over which clients can upload all numbers.

    More than one where all of them take part in every round, and all numbers are sent: under masks without noise.
    """
    everybody = settings.fleet.clients_per_round is None and settings.fleet.asynchronous.is_synchronous
    if not everybody or not settings.privacy.uses_secure_aggregation or is_private(settings):
        return 1
    rounds: int = settings.run.rounds
    free = (rounds - CANDIDATE_ROUNDS) // 2 if settings.algorithm.tune else rounds
    return max(1, min(free, MAX_PARTS))


def num_parts(settings: Any, public: PublicStatistics) -> int:
    """Rounds over which clients upload all numbers: as many as the smallest size and a large catalogue need."""
    least = min(share_of(settings, public, capacity) for capacity in parse_scheme(settings.fleet.capacities))
    items, counts = max_items(settings, public), public.statistics.get(COUNTS)
    if counts is not None:
        items = num_supported(counts[:items], least_support(settings, public))
    large = triangle_size(items) / triangle_size(MASKED_ITEMS)
    return min(ceil(max(1 / least, large) - 1e-9), most_parts(settings))


def default_rounds(given: Mapping[str, Any]) -> int:
    """Rounds for all candidates, and for the parts that the smallest size needs, of settings that were given."""
    tables = [keys if isinstance(keys, Mapping) else {} for keys in (given["privacy"], given["fleet"])]
    parts, (privacy, fleet) = 1, tables
    if privacy.get("level") == "secure" and fleet.get("clients_per_round") in (None, "none"):
        try:
            scheme = parse_scheme(fleet.get("capacities", FleetSettings.model_fields["capacities"].default))
        except InvalidCapacity:  # which is refused elsewhere
            scheme = []
        needed = [MAX_PARTS if one.share is None else ceil(1 / one.share) for one in scheme]
        parts = max(1, min(MAX_PARTS, max(needed, default=1)))
    return CANDIDATE_ROUNDS + 2 * parts


def max_uploaded_items(settings: Any, public: PublicStatistics, capacity: Capacity, whole: int) -> int:
    """The most items of which a client can upload all pairs: in the plain of its history, value and position each."""
    share = min(1.0, share_of(settings, public, capacity) * num_parts(settings, public))
    plain = not settings.privacy.uses_secure_aggregation
    per_pair = 2 if share < 1 and plain else 1
    most = min(whole, LONGEST_UPLOAD) if plain and triangle_size(whole) > MAX_DENSE else whole
    return min(most, max(1, triangle_items(int(share * triangle_size(whole)) // per_pair)))


def num_uploaded_items(settings: Any, public: PublicStatistics, capacity: Capacity, whole: int) -> int:
    """The number of leading items whose pairs a client uploads: all, unless secure aggregation needs room."""
    return max_uploaded_items(settings, public, capacity, whole) if settings.privacy.uses_secure_aggregation else whole


def covered_items(settings: Any, public: PublicStatistics, whole: int, counts: Tensor | None, support: float) -> int:
    """Leading items that enough users have and upload, users being equally among the sizes; any, without counts."""
    scheme = parse_scheme(settings.fleet.capacities)
    uploaded = [num_uploaded_items(settings, public, capacity, whole) for capacity in scheme]
    if counts is None:
        return max(uploaded)
    share_of_users = (torch.tensor(uploaded)[:, None] > torch.arange(whole)).double().mean(0)
    return num_supported(counts[:whole].double() * share_of_users, support)


def expected_upload_size(totals: Tensor, length: float, most: int, whole: int, *, news: bool) -> int:
    """Numbers in a typical upload: all, or where pairs were counted two per new pair, by the head's ``length``."""
    users, items, pairs = totals.tolist()
    if not pairs:
        return whole
    typical = pairs / users * (length * users / items) ** 2
    return min(whole, 2 * int(min(typical, triangle_size(most))) * news)


class CoOccurrenceUpload(NamedTuple):
    """Histories whose pairs are uploaded, concatenated; a negative weight retracts what was uploaded before."""

    items: Tensor  # each history ascends
    begins: Tensor  # of each history
    ends: Tensor  # of what is uploaded of it
    weights: Tensor  # of its pairs

    @classmethod
    def of(cls, items: Tensor, lengths: Tensor, most: int, exponent: float = 1.0) -> "CoOccurrenceUpload":
        """Pairs of each user's first ``most`` items, weighted by the length of the whole history."""
        begins = lengths.cumsum(0) - lengths
        return cls(items, begins, begins + lengths.clamp(max=most), history_weights(lengths, exponent))

    @classmethod
    def changes(
        cls, items: Tensor, lengths: Tensor, now: Tensor, before: Tensor, most: int, exponent: float = 1.0
    ) -> "CoOccurrenceUpload":
        """The difference between two selections of the same histories; empty for users with the same in both."""
        user = owners_of(lengths)
        changed = torch.zeros(len(lengths), dtype=torch.bool)
        changed[user[now != before]] = True
        mine = changed[user]
        upload = cls.of(*select_items(items, lengths, mine & now), most, exponent)
        if not bool((mine & before).any()):
            return upload
        return upload.minus(cls.of(*select_items(items, lengths, mine & before), most, exponent))

    def minus(self, other: "CoOccurrenceUpload") -> "CoOccurrenceUpload":
        """This upload, and the retraction of another."""
        offset = len(self.items)
        retracted = (other.items, other.begins + offset, other.ends + offset, -other.weights)
        return CoOccurrenceUpload(*(torch.cat(both) for both in zip(self, retracted, strict=True)))

    def dense(self, leading: int, dtype: torch.dtype) -> Tensor:
        """The packed sum over the leading items."""
        return ops.pair_sums(self.items, self.begins, self.ends, self.weights.to(dtype), leading)

    def part(self, wanted: TrianglePart, dtype: torch.dtype) -> Tensor:
        """A part of the packed sum over the leading items."""
        return wanted.sum(self.items, self.begins, self.ends, self.weights.double()).to(dtype)

    def shortest(self, leading: int, dtype: torch.dtype) -> Tensor:
        """The packed sum, sparse where that takes fewer bytes; nothing of its full size is then allocated."""
        lengths, size = truncated_lengths(self.items, self.begins, self.ends, leading), triangle_size(leading)
        pairs = lengths * (lengths + 1) // 2
        if 2 * int(pairs.sum()) >= size and size <= MAX_DENSE:
            return self.dense(leading, dtype)
        places, sums = ops.listed_pair_sums(self.items, self.begins, self.ends, self.weights.to(dtype), leading)
        return sparse_vector(places, sums, size)


def is_private(settings: Any) -> bool:
    """Whether sums are released with noise."""
    return isinstance(settings.privacy, DifferentialPrivacy)


def model_of(plan: Plan) -> CoOccurrenceArchitecture:
    """The architecture of a plan of this algorithm."""
    assert isinstance(plan.architecture, CoOccurrenceArchitecture)
    return plan.architecture
