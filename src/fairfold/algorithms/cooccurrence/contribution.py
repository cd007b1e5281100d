"""What a device's updates may add up to over a run: the contribution of as many users as it was invited with.

*One user.* A contribution is v·x xᵀ of a set of items x, with v of a history of at least so many. The diagonal alone
says which, so the server remembers the set and v, computes what the update has to be, and compares: nothing else than
some history passes, however many updates it takes.

*Several users.* No number of a change may be larger than so many users have, and their sum may be any of its norm.
The server remembers a linear sketch of it (AMS: random signs in
buckets by a hash that it draws), which gives the norm of all accepted updates together to a few percent.
"""

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence.cooccurrence import (
    UNIT,
    CoOccurrenceUpload,
    history_weights,
    triangle_items,
    triangle_size,
)
from fairfold.kernels.sparse_pairs import columns_of
from fairfold.typing import Weights

BUCKETS = 256  # of a sketch: its norm is off by 4 % (a standard deviation)
TOLERANCE = 1.25  # times the norm of all users: six standard deviations
ITEMS, VALUE, SKETCH = "items", "value", "sketch"
NO_HISTORY = "a change that leaves no user's history in the sum"
TOO_MUCH = "changes that add up to more than its users have"


def check_contribution(
    change: Tensor, held: Weights, *, users: int, most: int, exponent: float, seed: int
) -> tuple[str | None, Weights]:
    """Why a device's change is refused, or None, and what to remember of all its changes if it is accepted.

    ``held``: what was remembered before; ``most``: of how many items it may upload all pairs.
    """
    places, values = nonzero_pairs(change)
    if users == 1:
        return _check_history(places, values, held, len(change), most, exponent)
    largest = _largest_share(places, values, 2.0**-exponent)
    if largest > users * (1 + 1e-6):
        return TOO_MUCH, held
    sketch = held.get(SKETCH, torch.zeros(BUCKETS, dtype=torch.float64)) + sketch_of(places, values, seed)
    bound = users * TOLERANCE * triangle_items(len(change)) ** (1 - exponent)
    return (TOO_MUCH if float(sketch.norm()) > bound else None), {SKETCH: sketch}


def _largest_share(places: Tensor, values: Tensor, pair: float) -> float:
    """The largest number of a change against what one user may add there: 1 of an item, ``pair`` of two."""
    if not len(places):
        return 0.0
    columns = columns_of(places)
    on_diagonal = places == columns * (columns + 3) // 2
    return float((values.abs() / torch.where(on_diagonal, 1.0, pair)).max())


def nonzero_pairs(change: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in the packed triangle, ascending, and the numbers there that are not zero."""
    if change.is_sparse:
        change = change.coalesce()
        places, values = change.indices()[0], change.values()
        return places[values != 0], values[values != 0].double()
    places = change.nonzero()[:, 0]
    return places, change[places].double()


def _check_history(
    places: Tensor, values: Tensor, held: Weights, length: int, most: int, exponent: float
) -> tuple[str | None, Weights]:
    before = held.get(ITEMS, torch.empty(0, dtype=torch.int64))
    value_before = held.get(VALUE, torch.zeros(1, dtype=torch.float64))
    columns = columns_of(places)
    on_diagonal = places == columns * (columns + 3) // 2
    diagonal = torch.zeros(triangle_items(length), dtype=torch.float64)
    diagonal[before] = value_before
    diagonal[columns[on_diagonal]] += values[on_diagonal]
    items = diagonal.nonzero()[:, 0]
    value = diagonal[items[:1]] if len(items) else torch.zeros(1, dtype=torch.float64)
    if len(items) > most or not bool((diagonal[items] == value).all()):
        return NO_HISTORY, held
    largest = history_weights(torch.tensor([len(items)]), exponent).double()
    if len(items) and not 1 / UNIT <= float(value) <= float(largest):
        return NO_HISTORY, held
    allowed = _pairs(items, value, before, value_before)
    same = len(allowed[0]) == len(places) and allowed[0].equal(places) and allowed[1].equal(values)
    return (None if same else NO_HISTORY), {ITEMS: items, VALUE: value}


def _pairs(items: Tensor, value: Tensor, before: Tensor, value_before: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of some items at a value, less those of other items at theirs."""
    length = triangle_size(1 + max([-1, *items[-1:].tolist(), *before[-1:].tolist()]))
    lengths = torch.tensor([len(items), len(before)])
    ends = lengths.cumsum(0)
    weights = torch.cat([value, -value_before])
    upload = CoOccurrenceUpload(torch.cat([items, before]), ends - lengths, ends, weights)
    return nonzero_pairs(upload.shortest(triangle_items(length), torch.float64))


def sketch_of(places: Tensor, values: Tensor, seed: int) -> Tensor:
    """The sketch of a symmetric matrix by its upper half, of which pairs off the diagonal count twice in the norm."""
    columns = columns_of(places)
    scaled = torch.where(places == columns * (columns + 3) // 2, values, values * 2**0.5)
    hashed = _mixed(places ^ seed)
    signs = 1.0 - 2.0 * (hashed & 1).double()
    return torch.zeros(BUCKETS, dtype=torch.float64).index_add_(0, (hashed >> 1) % BUCKETS, signs * scaled)


def _mixed(keys: Tensor) -> Tensor:
    """Bits of 63-bit integers mixed (SplitMix64's finalizer on signed numbers)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        keys = (keys ^ ((keys >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (keys ^ ((keys >> 31) & ((1 << 33) - 1))) & ((1 << 62) - 1)
