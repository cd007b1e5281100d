"""Attacks by devices, on a small world: what they reach, and what the rules leave of it."""

import pytest
import torch

from fairfold.config import Settings
from fairfold.data import Dataset, Interactions
from fairfold.data.partition import hold_out
from fairfold.privacy.audit.fleet import (
    promotion,
    quality_under_attack,
    quality_with_profiles,
    recommended_share,
    with_profiles,
)
from fairfold.privacy.audit.fleet_report import fleet_findings, read_share, some_users
from fairfold.privacy.audit.groups import NOTHING, promotion_in_groups, share_of_attack
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
    assert "sums alone are bounded" in masked[0]
    assert any("1 hostile that claims 12 users" in sentence for sentence in masked)
    assert "of a user's items without a roster from a sum of 5" in masked[-1]


def test_one_device_under_masks_promotes_what_as_many_as_its_cohort_would() -> None:
    rare = int(clients(users=20).train.counts_by_item.argsort()[0])
    many, _ = promotion(default_settings(), clients(users=20).train, [rare], hostile=20)
    one, _ = promotion(default_settings(), clients(users=20).train, [rare], hostile=1, users_each=20)
    assert one == many > 0.2


def test_a_lying_server_reads_a_user_from_a_sum_with_devices_it_invented() -> None:
    """All but items that too few users have: these are not uploaded."""
    everybody = {"fleet.clients_per_round": None}
    assert read_share(audited_settings("co_occurrence", "secure", **everybody), clients(users=12)) > 0.8
    all_items = everybody | {"algorithm.min_item_users": 0}
    assert read_share(audited_settings("co_occurrence", "secure", **all_items), clients(users=12)) > 0.95


def test_histories_at_random_cost_quality() -> None:
    data = Dataset("people", *hold_out(clients(users=30).train, 0.3, 1))
    honest, one, many = (quality_with_profiles(default_settings(), data, number) for number in (0, 1, 300))
    assert many < honest
    assert abs(one - honest) < abs(many - honest)


@pytest.mark.parametrize("kind", ["ratings", "closed_form"])
def test_destruction_is_played_with_every_algorithm_that_sends_changes(kind: str) -> None:
    data = clients(ratings=kind == "ratings")
    found = fleet_findings(audited_settings(kind), data, users=12, seed=0)
    assert found[0].startswith(f"Without hostile devices the {'error' if kind == 'ratings' else 'quality'} is ")
    assert any("hostile of 12 devices leave" in sentence for sentence in found)


def test_one_device_of_a_group_promotes_less_than_one_of_all() -> None:
    """Its claims are held to what other groups say; the audit plays it, and says so."""
    data = clients(users=40)
    masked = {"fleet.clients_per_round": None, "run.rounds": 1, "fleet.secure_groups": 4, "algorithm.min_item_users": 0}
    settings = audited_settings("co_occurrence", "secure", **masked)
    (target, *_) = data.train.counts_by_item.argsort(stable=True).tolist()
    share, attack = promotion_in_groups(settings, data.train, [target])
    of_all, _ = promotion(default_settings(), data.train, [target], hostile=1, users_each=40)
    assert share < of_all / 2
    assert share_of_attack(settings, data.train, [target], NOTHING) <= share <= 1
    assert share_of_attack(settings, data.train, [target], attack) == share
    found = fleet_findings(settings, data, users=40, seed=0)
    assert any("sums of 4 groups" in sentence for sentence in found)
    assert any("promotes a rare item" in sentence or "No item is so rare" in sentence for sentence in found)
