"""Co-occurrence under differential privacy: norms of residuals, public constants, and noise where it has to be."""

from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.algorithms.cooccurrence.cooccurrence import SUM
from fairfold.algorithms.cooccurrence.solver import settings_under_noise
from fairfold.backends.batched import batched
from fairfold.config import Settings, read_settings
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidSettings
from fairfold.federation.algorithm import COUNTS
from fairfold.federation.federation import Federation, collect_statistics, number_items, sum_statistics
from fairfold.federation.noise import actual_noise_std, required_noise_std
from fairfold.federation.plan import privacy_report
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round
from fairfold.federation.simulation import simulate
from fairfold.privacy.accounting import composed_sigma, epsilon_of
from fairfold.privacy.gram import clipped_residuals, count_weights, denoise, num_items_under_noise, private_sum

HISTORIES = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=30), min_size=1, max_size=5)


def private(epsilon: float = 8.0, **keys: Any) -> Settings:
    fleet = {"capacities": "1x-2x"}
    return Settings(privacy={"level": "private", "epsilon": epsilon, "min_cohort": 20, **keys}, fleet=fleet)


@given(HISTORIES, st.integers(0, 2**31), st.integers(1, 25))
@settings(max_examples=100, deadline=None)
def test_no_residual_exceeds_the_norm_that_noise_is_sized_for(histories: list[list[int]], seed: int, head: int) -> None:
    lengths = torch.tensor([len(one) for one in histories])
    items = torch.tensor([item for one in histories for item in sorted(one)], dtype=torch.int64)
    usual = torch.rand(head, generator=torch.Generator().manual_seed(seed)) ** 4
    rows = clipped_residuals(items, lengths, usual / usual.sum())
    assert ((rows * 256) == (rows * 256).round()).all()
    for row in rows:
        assert float(torch.outer(row, row)[tuple(torch.tril_indices(head, head))].norm()) <= sqrt(0.5)
    together_ = private_sum(items, lengths, usual / usual.sum(), head)
    assert torch.equal(together_, (rows.T @ rows)[tuple(torch.tril_indices(head, head))])


def test_residuals_use_the_norm_that_noise_is_sized_for() -> None:
    (row,) = clipped_residuals(torch.arange(0, 200, 3), torch.tensor([67]), torch.full((400,), 1 / 400))
    assert float(torch.outer(row, row)[tuple(torch.tril_indices(400, 400))].norm()) > 0.69


def test_no_user_has_a_norm_above_one_in_the_counts() -> None:
    train = SyntheticDataset(users=50, items=200, seed=1).dataset().train
    weights = count_weights(train)
    assert bool((weights.square() * train.counts_by_user <= 1).all())
    assert bool((weights.square() * train.counts_by_user > 0.99).all())


def test_noise_alone_leaves_nothing_and_a_strong_direction_stays() -> None:
    source, items, noise = torch.Generator().manual_seed(0), 300, 0.5
    drawn = torch.randn(items, items, generator=source) * noise
    drawn = drawn.triu() + drawn.triu(1).T
    assert denoise(drawn, noise).norm() < 0.2 * drawn.norm()
    direction = torch.randn(items, generator=source).double()
    direction = direction / direction.norm()
    found = denoise(drawn + (60 * torch.outer(direction, direction)).float(), noise)
    assert float(direction @ found @ direction) == pytest.approx(60, rel=0.1)


def test_the_rule_follows_users_and_noise() -> None:
    assert num_items_under_noise(6040, 0.534, 3706) == 744
    assert num_items_under_noise(6040, 0.534, 500) == 500
    assert num_items_under_noise(24160, 0.534, 3706) == 2 * 744 + 1  # four times the users, twice the items
    assert num_items_under_noise(3, 50.0, 3706) == 16
    assert settings_under_noise(400, 4, 0.5).ridge == 40


def test_releases_cost_the_requested_epsilon() -> None:
    chosen = private(4.0)
    facts = privacy_report(chosen)
    assert facts["epsilon"] == pytest.approx(4.0)
    assert set(facts["releases"]) == {COUNTS, SUM}
    norms = {COUNTS: 1.0, SUM: sqrt(0.5)}
    sigmas = [required_noise_std(chosen, name) / norm for name, norm in norms.items()]
    assert epsilon_of(composed_sigma(sigmas), 1e-5) == pytest.approx(4.0)
    assert actual_noise_std(chosen, SUM, 100) == pytest.approx(required_noise_std(chosen, SUM) / sqrt(0.7))
    assert actual_noise_std(private(4.0, noise="server"), SUM, 100) == required_noise_std(private(4.0), SUM)


@pytest.mark.parametrize("noise", ["devices", "server"])
def test_the_noise_of_a_run_is_what_was_asked_for(noise: str) -> None:
    chosen, data = private(3.0, noise=noise), SyntheticDataset(users=60, items=300, interactions_per_user=30).dataset()
    exact = chosen.algorithm.client_statistics(chosen, data.train, range(300)).sums[COUNTS]
    apart = sum_statistics(data, chosen)[COUNTS] - exact
    assert float(apart.std()) == pytest.approx(actual_noise_std(chosen, COUNTS, 60), rel=0.15)
    assert torch.equal(sum_statistics(data, chosen)[COUNTS] - exact, apart)  # the same for the same seed


@pytest.mark.parametrize("noise", ["devices", "server"])
def test_the_noise_of_pairs_is_what_was_asked_for(noise: str) -> None:
    chosen = private(3.0, noise=noise)
    world = Federation.of(chosen, SyntheticDataset(users=60, items=300, interactions_per_user=30).dataset())
    state, train = world.initial(), world.clients.train
    (task,) = chosen.algorithm.tasks(world.plan, state, [0])
    exact = private_sum(
        train.items, train.counts_by_user, task.vectors["item_shares"], task.projections["rows"].shape[0]
    )
    after = run_round(state, world.sampler, world.clients, Rejections(), batched)
    apart = after.algorithm_state[SUM][SUM] - exact
    assert float(apart.std()) == pytest.approx(actual_noise_std(chosen, SUM, 60), rel=0.1)
    assert float(apart.mean()) == pytest.approx(0, abs=5 * float(apart.std()) / sqrt(len(apart)))


def test_too_many_dropouts_leave_too_little_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    world, rejections = Federation.of(private(), SyntheticDataset(users=60, items=300).dataset()), Rejections()
    monkeypatch.setattr(type(world.sampler), "faults", lambda *_: dict.fromkeys(range(19), "drop"))
    after = run_round(world.initial(), world.sampler, world.clients, rejections, batched)
    assert not after.algorithm_state[SUM][SUM].any()
    assert rejections.counts["too few clients for their noise"] == 41


def test_a_run_ends_with_its_epsilon_and_beats_popularity() -> None:
    data = SyntheticDataset(users=400, items=300, interactions_per_user=60, seed=2).dataset()
    result = simulate(private(8.0), data=data)
    assert result.state.round_number == 1
    assert result.privacy["epsilon"] == pytest.approx(8.0)
    assert any("ε = 8, δ = 1e-05 for one user's whole history" in line for line in result.notes)
    assert result.quality > result.baselines["popularity"]
    sums = result.state.algorithm_state[SUM][SUM]
    world = Federation.of(private(8.0), number_items(data, private(8.0)))
    assert len(sums) == world.plan.architecture.tables["rows"][0] * (world.plan.architecture.tables["rows"][0] + 1) // 2


def test_what_was_counted_once_is_not_counted_again() -> None:
    chosen, data = private(2.0), SyntheticDataset(users=60, items=300, interactions_per_user=30).dataset()
    shuffled = data.renumbered(torch.randperm(300, generator=torch.Generator().manual_seed(0)))
    counted = collect_statistics(number_items(shuffled, chosen), chosen).statistics[COUNTS]
    assert bool((counted[:-1] >= counted[1:]).all())
    assert torch.equal(counted, sum_statistics(shuffled, chosen)[COUNTS].sort(descending=True).values)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"algorithm": "gradient"}, "what can be private is 'co_occurrence'"),
        ({"algorithm": {"kind": "co_occurrence", "ridge": 2.0}}, "inactive key 'algorithm.ridge'"),
        ({"run": {"rounds": 5}}, "inactive key 'run.rounds'"),
        ({"privacy": {"level": "secure", "epsilon": 2.0}}, "unknown key 'privacy.epsilon'"),
    ],
)
def test_what_cannot_be_private_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        read_settings({"privacy": "private", "fleet": {"clients_per_round": "none"}} | tables)
