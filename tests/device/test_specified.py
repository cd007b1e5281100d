"""What docs/protocol.md and docs/export.md say in formulas, computed from their words alone, against the worker."""

import math
from typing import Any

import numpy
import pytest
import torch

from fairfold.federation.updates import ClientTask
from tests.support.federations import make_federation, tiny_data, tiny_settings
from tests.support.strategies import vector

FACTORS, WORD, LONG = 3, 2**32 - 1, 2**64 - 1


def mixed(word: int, key: int) -> int:
    """M(x, k) of the page."""
    word = (word ^ word >> 16) * 0x7FEB352D + key & WORD
    word = (word ^ word >> 15) * 0x846CA68B & WORD
    return word ^ word >> 16


def place(held: dict[str, Any], weight: int) -> tuple[int, int]:
    """Where a weight stands, and its sign."""
    if weight < held["head"] or held["size"] == held["full_size"]:
        return weight, 1
    key = held["seed"] + 0x9E3779B97F4A7C15 & LONG
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & LONG
    key = (key ^ key >> 27) * 0x94D049BB133111EB & LONG
    key ^= key >> 31
    block, rest = divmod(weight, held["chunk"])
    high, low = divmod(block, 2**32)
    hashed = mixed(low ^ mixed(high ^ key & WORD, 0), mixed(high + (key >> 32) & WORD, 0))
    blocks = (held["size"] - held["head"]) // held["chunk"]
    bit = mixed(hashed + 0x9E3779B9 * (1 + rest // 32) & WORD, 0) >> rest % 32 & 1
    return held["head"] + hashed * blocks // 2**32 * held["chunk"] + rest, 1 - 2 * bit if held["sign"] else 1


@pytest.mark.parametrize("mapping", ["element", "ranked", "chunk"])
@pytest.mark.parametrize("weighting", ["data", "equal", 0.5])
def test_the_update_of_the_closed_form(mapping: str, weighting: str | float) -> None:
    keys: dict[str, Any] = {"mapping": mapping, "weighting": weighting} | ({"chunk": 3} if mapping == "chunk" else {})
    chosen = tiny_settings(
        algorithm="closed_form", capacities="4x", unobserved_weight=0.3, ridge=0.2, aggregation="delta",
        server_optimizer="newton", sign=mapping == "element", **keys,
    )  # fmt: skip
    federation, _ = make_federation(tiny_data(3, items=40), chosen)
    projections = federation.plan.assignments(0)[0].projections
    assert projections is not None
    projection, items = projections["item.weight"], 40
    held, compact = projection.description(), vector(projection.size, 5).float()
    places = [place(held, weight) for weight in range(items * FACTORS)]
    assert len({at for at, _ in places}) < len(places)
    rows = numpy.array([float(compact[at]) * sign for at, sign in places]).reshape(items, FACTORS)
    assert numpy.allclose(rows.ravel(), projection.recover(compact).numpy())
    for client in range(6):
        task = ClientTask(0, 0, projections, {"item.weight": compact})
        found, _ = chosen.algorithm.client_update(federation.plan, task, federation.clients.client(client, 0))
        own = federation.clients.train.of(client).tolist()
        matrix = 0.7 * rows[own].T @ rows[own] + 0.3 * rows.T @ rows + 0.2 * numpy.eye(FACTORS)
        user = numpy.linalg.solve(matrix, rows[own].sum(0))
        slopes = 0.3 * numpy.outer(rows @ user, user)
        slopes[own] += numpy.outer(0.7 * rows[own] @ user - 1, user)
        lists: list[list[float]] = [[] for _ in range(projection.size)]
        for (at, sign), slope in zip(places, slopes.ravel(), strict=True):
            lists[at].append(sign * slope)
        change = [-0.1 * math.fsum(of) / max(len(of), 1) for of in lists]
        weight = len(own) ** {"data": 1.0, "equal": 0.0}.get(str(weighting), 0.5)
        assert found.weight == pytest.approx(weight)
        expected = {"item.weight": change, "user_gram": numpy.outer(user, user).ravel()}
        assert found.sums.keys() == expected.keys()
        for name, numbers in expected.items():
            total = weight * torch.tensor(numpy.array(numbers)).float()
            torch.testing.assert_close(found.sums[name], total, rtol=1e-3, atol=1e-5)
