"""Hashes: a new one every round where that is asked for, and independent ones for different seeds."""

from typing import Any

import torch

from fairfold.config import Settings
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import hash_seed
from fairfold.federation.updates import PublicStatistics
from fairfold.subspace import Subspace
from fairfold.subspace.projection import Hashed
from tests.support.federations import tiny_settings


def chosen(**changes: Any) -> Settings:
    return tiny_settings(**{"mapping": "element", "capacities": "1x-2x-4x"} | changes)


def spaces(plan: Plan, round_number: int, client: int | None = None) -> list[Subspace]:
    found = []
    for held in plan.assignments(round_number, client):
        projection = (held.projections or {})["item.weight"]
        assert isinstance(projection, Hashed)
        found.append(projection.subspace)
    return found


def test_rehash_hashes_anew_every_round_and_alike_within_one() -> None:
    plan, again = (Plan.of(chosen(rehash=True), PublicStatistics(40)) for _ in range(2))
    rounds = [spaces(plan, number) for number in range(5)]
    for number, (_, half, quarter) in enumerate(rounds):
        assert spaces(again, number)[1:] == [half, quarter]
        assert half.seed == quarter.seed  # so they nest
        assert quarter.nests_in(half)
    assert len({of[1].seed for of in rounds}) == 5
    full = torch.randn(120, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(rounds[0][2].reduce(full), rounds[1][2].reduce(full))
    first = rounds[0][2].slots(0, 120)[0]
    assert float((rounds[1][2].slots(0, 120)[0] == first).float().mean()) < 0.2  # 30 slots: 1 in 30 by chance


def test_without_rehash_there_is_one_hash() -> None:
    plan = Plan.of(chosen(), PublicStatistics(40))
    assert spaces(plan, 0) == spaces(plan, 7)
    assert spaces(plan, 0)[1].seed != spaces(Plan.of(chosen(seed=1), PublicStatistics(40)), 0)[1].seed


def test_runs_of_different_seeds_share_no_hash() -> None:
    """With ``seed ^ round`` the first 100 rounds of seeds 0, 1 and 2 would have 98 hashes in common."""
    seen = [hash_seed(chosen(seed=seed, rehash=True), number) for seed in range(3) for number in range(100)]
    seen += [hash_seed(chosen(seed=seed), 0) for seed in range(3)]
    assert len(set(seen)) == 303


def test_clients_of_inconsistent_subspaces_share_none() -> None:
    plan = Plan.of(chosen(method="inconsistent"), PublicStatistics(40))
    seeds = {spaces(plan, 0, client)[1].seed for client in range(50)} | {spaces(plan, 0)[1].seed}
    assert len(seeds) == 51


def test_tensors_of_a_model_have_hashes_of_their_own() -> None:
    plan = Plan.of(chosen(model="neumf", factors=8, compress="all"), PublicStatistics(40))
    quarter = plan.assignments(0)[2].projections or {}
    seeds = [of.subspace.seed for of in quarter.values() if isinstance(of, Hashed) and not of.subspace.is_full]
    assert len(seeds) > 2
    assert len(set(seeds)) == len(seeds)
