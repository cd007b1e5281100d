"""The private model: no user's part is too long, the rule follows public facts, and noise is where it has to be."""

from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.algorithms.correlations import SUM
from fairfold.algorithms.private_pairs import denoised, head_for, private_sum, ridge_for, shared_among, unusual
from fairfold.backends.batched import batched
from fairfold.data.synthetic import SyntheticWorld
from fairfold.errors import InvalidSettings
from fairfold.privacy.accounting import epsilon_of, together
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.faults import Rejections
from fairfold.protocol.noising import needed_in, noise_in, privacy_facts
from fairfold.protocol.round import run_round
from fairfold.settings import Settings, read_settings
from fairfold.simulate import simulate
from fairfold.simulate.numbering import numbered, public_of, surveyed
from fairfold.simulate.world import World

HISTORIES = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=30), min_size=1, max_size=5)


def private(epsilon: float = 8.0, **keys: Any) -> Settings:
    fleet = {"capacities": "1x-2x"}
    return Settings(privacy={"level": "private", "epsilon": epsilon, "smallest_cohort": 20, **keys}, fleet=fleet)


@given(HISTORIES, st.integers(0, 2**31), st.integers(1, 25))
@settings(max_examples=100, deadline=None)
def test_nobody_says_more_than_the_noise_is_made_for(histories: list[list[int]], seed: int, head: int) -> None:
    lengths = torch.tensor([len(one) for one in histories])
    items = torch.tensor([item for one in histories for item in sorted(one)], dtype=torch.int64)
    usual = torch.rand(head, generator=torch.Generator().manual_seed(seed)) ** 4
    rows = unusual(items, lengths, usual / usual.sum())
    assert ((rows * 256) == (rows * 256).round()).all()
    for row in rows:
        assert float(torch.outer(row, row)[tuple(torch.tril_indices(head, head))].norm()) <= sqrt(0.5)
    together_ = private_sum(items, lengths, usual / usual.sum(), head)
    assert torch.equal(together_, (rows.T @ rows)[tuple(torch.tril_indices(head, head))])


def test_what_noise_is_made_for_is_used() -> None:
    (row,) = unusual(torch.arange(0, 200, 3), torch.tensor([67]), torch.full((400,), 1 / 400))
    assert float(torch.outer(row, row)[tuple(torch.tril_indices(400, 400))].norm()) > 0.69


def test_nobody_counts_more_than_one_in_all() -> None:
    train = SyntheticWorld(users=50, items=200, seed=1).dataset().train
    weights = shared_among(train)
    assert bool((weights.square() * train.counts_by_user <= 1).all())
    assert bool((weights.square() * train.counts_by_user > 0.99).all())


def test_noise_alone_leaves_nothing_and_a_strong_direction_stays() -> None:
    source, items, noise = torch.Generator().manual_seed(0), 300, 0.5
    drawn = torch.randn(items, items, generator=source) * noise
    drawn = drawn.triu() + drawn.triu(1).T
    assert denoised(drawn, noise).norm() < 0.2 * drawn.norm()
    direction = torch.randn(items, generator=source).double()
    direction = direction / direction.norm()
    found = denoised(drawn + (60 * torch.outer(direction, direction)).float(), noise)
    assert float(direction @ found @ direction) == pytest.approx(60, rel=0.1)


def test_the_rule_follows_users_and_noise() -> None:
    assert head_for(6040, 0.534, 3706) == 744
    assert head_for(6040, 0.534, 500) == 500
    assert head_for(24160, 0.534, 3706) == 2 * 744 + 1  # four times the users, twice the items
    assert head_for(3, 50.0, 3706) == 16
    assert ridge_for(400, 0.5) == 40


def test_all_that_is_let_out_costs_what_was_asked_for() -> None:
    chosen = private(4.0)
    facts = privacy_facts(chosen)
    assert facts["epsilon"] == pytest.approx(4.0)
    assert set(facts["releases"]) == {COUNTS, SUM}
    norms = {COUNTS: 1.0, SUM: sqrt(0.5)}
    sigmas = [needed_in(chosen, name) / norm for name, norm in norms.items()]
    assert epsilon_of(together(sigmas), 1e-5) == pytest.approx(4.0)
    assert noise_in(chosen, SUM, 100) == pytest.approx(needed_in(chosen, SUM) / sqrt(0.7))
    assert noise_in(private(4.0, noise="server"), SUM, 100) == needed_in(private(4.0), SUM)


@pytest.mark.parametrize("noise", ["devices", "server"])
def test_the_noise_of_a_run_is_what_was_asked_for(noise: str) -> None:
    chosen, data = private(3.0, noise=noise), SyntheticWorld(users=60, items=300, interactions_per_user=30).dataset()
    exact = chosen.algorithm.survey(chosen, data.train, range(300)).sums[COUNTS]
    apart = surveyed(data, chosen)[COUNTS] - exact
    assert float(apart.std()) == pytest.approx(noise_in(chosen, COUNTS, 60), rel=0.15)
    assert torch.equal(surveyed(data, chosen)[COUNTS] - exact, apart)  # the same for the same seed


@pytest.mark.parametrize("noise", ["devices", "server"])
def test_the_noise_of_pairs_is_what_was_asked_for(noise: str) -> None:
    chosen = private(3.0, noise=noise)
    world = World.of(chosen, SyntheticWorld(users=60, items=300, interactions_per_user=30).dataset())
    state, train = world.initial(), world.people.train
    (sent,) = chosen.algorithm.send(world.plan, state, [0])
    exact = private_sum(train.items, train.counts_by_user, sent.vectors["usual"], sent.projections["rows"].shape[0])
    after = run_round(state, world.fleet, world.people, Rejections(), batched)
    apart = after.moments[SUM][SUM] - exact
    assert float(apart.std()) == pytest.approx(noise_in(chosen, SUM, 60), rel=0.1)
    assert float(apart.mean()) == pytest.approx(0, abs=5 * float(apart.std()) / sqrt(len(apart)))


def test_too_many_who_leave_leave_too_little_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    world, rejections = World.of(private(), SyntheticWorld(users=60, items=300).dataset()), Rejections()
    monkeypatch.setattr(type(world.fleet), "faults", lambda *_: dict.fromkeys(range(19), "drop"))
    after = run_round(world.initial(), world.fleet, world.people, rejections, batched)
    assert not after.moments[SUM][SUM].any()
    assert rejections.counts["too few devices for their noise"] == 41


def test_a_run_ends_with_its_epsilon_and_beats_popularity() -> None:
    data = SyntheticWorld(users=400, items=300, interactions_per_user=60, seed=2).dataset()
    result = simulate(private(8.0), data=data)
    assert result.state.round_number == 1
    assert result.privacy["epsilon"] == pytest.approx(8.0)
    assert any("ε = 8, δ = 1e-05 for one user's whole history" in line for line in result.told)
    assert result.quality > result.references["popularity"]
    sums = result.state.moments[SUM][SUM]
    world = World.of(private(8.0), numbered(data, private(8.0)))
    assert len(sums) == world.plan.architecture.tables["rows"][0] * (world.plan.architecture.tables["rows"][0] + 1) // 2


def test_what_was_counted_once_is_not_counted_again() -> None:
    chosen, data = private(2.0), SyntheticWorld(users=60, items=300, interactions_per_user=30).dataset()
    shuffled = data.renumbered(torch.randperm(300, generator=torch.Generator().manual_seed(0)))
    counted = public_of(numbered(shuffled, chosen), chosen).survey[COUNTS]
    assert bool((counted[:-1] >= counted[1:]).all())
    assert torch.equal(counted, surveyed(shuffled, chosen)[COUNTS].sort(descending=True).values)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"algorithm": "gradient"}, "what can be private is 'correlations'"),
        ({"algorithm": {"kind": "correlations", "ridge": 2.0}}, "unknown key 'algorithm.ridge'"),
        ({"run": {"rounds": 5}}, "unknown key 'run.rounds'"),
        ({"privacy": {"level": "secure", "epsilon": 2.0}}, "unknown key 'privacy.epsilon'"),
    ],
)
def test_what_cannot_be_private_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        read_settings({"privacy": "private", "fleet": {"clients_per_round": "none"}} | tables)
