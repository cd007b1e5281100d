"""Attacks by devices, on a small world: what they reach, and what the rules leave of it."""

import pytest
import torch

from fairfold.config import Settings
from fairfold.data import Dataset, Interactions
from fairfold.data.partition import hold_out
from fairfold.privacy.audit.fleet import (
    fleet_findings,
    promotion,
    quality_under_attack,
    recommended_share,
    some_users,
    with_profiles,
)
from tests.support.audit import audited_settings, clients
from tests.support.settings import make_settings


def default_settings() -> Settings:
    algorithm = {"kind": "co_occurrence", "support": 1, "tune": False}
    return make_settings(rounds=1, capacities="1x", clients_per_round=None, evaluate_every=1, algorithm=algorithm)


def test_profiles_are_further_users() -> None:
    train = Interactions.from_pairs(torch.tensor([0, 1]), torch.tensor([2, 3]), 2, 5)
    more = with_profiles(train, [[1, 4], [0]])
    assert [more.of(user).tolist() for user in range(4)] == [[2], [3], [1, 4], [0]]


def test_a_majority_promotes_an_item_and_nobody_else() -> None:
    data = clients(users=20)
    rare = int(data.train.counts_by_item.argsort()[0])
    (without,) = recommended_share(default_settings(), data.train, [rare], 20)
    share, beside = promotion(default_settings(), data.train, [rare], hostile=20)
    assert without < 0.2 < share <= 1
    assert beside in (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(("rule", "least"), [("multi-krum", 0.8), ("delta", 0.0)])
def test_an_attack_is_replayed(rule: str, least: float) -> None:
    settings = make_settings(
        rounds=3, capacities="1x", clients_per_round=None, evaluate_every=3, factors=4,
        algorithm={"kind": "gradient", "aggregation": rule},
    )  # fmt: skip
    data = Dataset("people", *hold_out(clients(users=20).train, 0.3, 1))
    honest = quality_under_attack(settings, data, 10, 0)
    poisoned = quality_under_attack(settings, data, 10, 1, "at the bound")
    assert poisoned != honest
    assert poisoned >= least * honest


def test_findings_say_how_many_devices_it_takes() -> None:
    few = some_users(clients(), 12, seed=3)
    assert few.num_users == 12
    assert few.train.counts_by_user.min() > 0
    plain = fleet_findings(default_settings(), clients(), users=12, seed=0)
    assert any("promote a rare item" in sentence or "No item is so rare" in sentence for sentence in plain)
    assert plain[-1] == "A lying server reads every user by itself: updates are plain."
    masked = fleet_findings(audited_settings("co_occurrence", "secure"), clients(), users=12, seed=0)
    assert "Under masks no update is checked" in masked[0]
    assert "a user without a roster" in masked[1]
