"""Test vectors of ratings and of the rows that they are about, from the worker's code in double precision."""

import random
from typing import Any

import torch

from fairfold.algorithms import rating_model, rating_updates
from fairfold.data import Interactions
from fairfold.kernels import hashing

KNOWN = 3  # numbers of a user's row: a bias, and two tastes
LAYOUTS = ((400, 400, 0, 4, 7, False), (400, 0, 120, 4, 2**63 + 5, False), (4_000, 80, 40, 4, 12_345, False),
           (1_000, 0, 90, 3, 99, True))  # fmt: skip


def layouts() -> list[dict[str, Any]]:
    """Where coordinates stand in compact tensors."""
    found = []
    for full_size, head, tail, chunk, seed, signed in LAYOUTS:
        layout = hashing.Layout(full_size, head, tail, chunk, hashing.expand_seed(seed), signed)
        coordinates = torch.arange(0, full_size, 17)
        slots, signs = hashing.slots_and_signs(layout, coordinates)
        facts = {"full_size": full_size, "head": head, "tail": tail, "chunk": chunk, "seed": f"{seed:x}"}
        key = {"key": f"{layout.key:x}", "signed": signed, "coordinates": coordinates.tolist()}
        found.append(facts | key | {"slots": slots.tolist(), "signs": signs.tolist()})
    return found


def users() -> list[dict[str, Any]]:
    """Users' ratings, and all that follows of them in one task."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * 4).round().double() / 4

    root = normal(KNOWN, KNOWN)
    variances, regression = torch.tensor([[0.5, 1, 1], [0.25, 0.5, 0.125]]).double(), normal(KNOWN, KNOWN + 2)
    center = torch.tensor([3.5, 1.25, 0.75]).double()
    known = rating_model.RatingHyperparameters(center, root @ root.T + torch.eye(KNOWN), variances, regression)
    found = []
    for count in (1, 4, 9):
        rows = normal(count, KNOWN + 1)
        ratings = torch.randint(1, 6, (count,), generator=draw).double()
        owners, targets = torch.zeros(count, dtype=torch.int64), known.centered(ratings)
        posterior = rating_model.UserPosteriors.of(rows, targets, owners, 1, known)
        row_sums, squares = posterior.row_sums(rows, targets, owners)
        sums = posterior.sums(squares)
        units = rating_updates.statistic_units(KNOWN).double()
        found.append({
            **{name: of.tolist() for name, of in vars(known).items()},
            "rows": rows.tolist(), "ratings": ratings.tolist(), "user_row": posterior.rows[0].tolist(),
            "row_sums": row_sums.tolist(), "user_sums": sums[0].tolist(), "units": units.tolist(),
            "secure_row_steps": (rating_updates.ITEM_FIXED_POINT.quantize(row_sums, owners) * 2**7).tolist(),
            "secure_user_steps": (rating_updates.USER_FIXED_POINT.quantize(sums * units, owners[:1]) * 2**11).tolist(),
            "predicted": known.predicted(posterior.rows, rows).tolist(),
        })  # fmt: skip
    return found


def statistics() -> list[dict[str, Any]]:
    """Sums of ratings before the first round, in plain and under masks."""
    draw = random.Random(4)
    histories = [{item: draw.randint(1, 10) / 2 for item in sorted(draw.sample(range(12), 5))} for _ in range(3)]
    histories.append({0: 100.0, 1: 99.5, 2: 100.0, 3: 100.0})  # more than a sum under masks has room for
    pairs = [(user, item, rating) for user, items in enumerate(histories) for item, rating in items.items()]
    owners, items, ratings = (torch.tensor(column) for column in zip(*pairs, strict=True))
    data = Interactions.from_pairs(owners.long(), items.long(), len(histories), 12, ratings)
    found = []
    for secure in (False, True):
        sums = {
            "counts": data.counts_by_item.double(),
            "rating_offsets": rating_updates.rating_offsets(data, range(12), secure=secure),
            "rating_totals": rating_updates.rating_totals(data, secure=secure),
        }
        users = [[list(pair) for pair in items.items()] for items in histories]
        found.append({"secure": secure, "users": users, "sums": {name: of.tolist() for name, of in sums.items()}})
    return found


def windows() -> list[dict[str, Any]]:
    """The rows that an update of a size is about, by round."""
    full, head, tail, chunk, seed, _ = LAYOUTS[2]
    largest = {"full_size": full, "head": head, "tail": tail, "chunk": chunk, "seed": f"{seed:x}"}
    layout = hashing.Layout(full, head, tail, chunk, hashing.expand_seed(seed), signed=False)
    items = torch.arange(0, full // chunk, 29)
    rows = torch.div(hashing.slots_and_signs(layout, items * chunk)[0], chunk, rounding_mode="floor")
    found = []
    for round_number, size in ((0, 30), (1, 12), (7, 12)):
        place = (rows - round_number * size) % (layout.size // chunk)
        places = torch.where(place < size, place, -1).tolist()
        found.append({"largest": largest, "round": round_number, "rows": size, "items": items.tolist(), "at": places})
    return found


def rating_vectors() -> dict[str, Any]:
    """All of them."""
    return {"layouts": layouts(), "users": users(), "statistics": statistics(), "windows": windows()}
