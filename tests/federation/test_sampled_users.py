"""Of very many users a sample is evaluated, the same in every run and for every baseline, and the run says so."""

import pytest
import torch

from fairfold import simulate
from fairfold.data.synthetic import SyntheticDataset
from fairfold.metrics import evaluate_ranking
from fairfold.metrics.ranking import sampled_users, users_with_tests
from fairfold.metrics.ranking_baselines import Popularity
from fairfold.metrics.tuned_baselines import STRONG_BASELINES, tuned_strong_baselines
from tests.support.settings import make_settings

DATA = SyntheticDataset(users=60, items=50, interactions_per_user=12).dataset()
SETTINGS = make_settings(
    clients_per_round=8, rounds=2, factors=3, capacities="1x-3x-9x", algorithm="closed_form", chunk=3
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty of sixty users, of whom each takes fifty scores."""
    monkeypatch.setattr("fairfold.metrics.ranking.LEAST_SAMPLED", 5)
    monkeypatch.setattr("fairfold.metrics.ranking.MOST_SCORES", 1000)


@pytest.mark.usefixtures("few")
def test_models_and_baselines_are_evaluated_for_the_same_sample() -> None:
    chosen = sampled_users(DATA.test)
    assert len(chosen) == 20
    assert chosen.equal(sampled_users(DATA.test))
    assert bool((chosen.diff() > 0).all())
    assert not chosen.equal(users_with_tests(DATA.test)[:20])  # not those who came first
    beside = dict(tuned_strong_baselines(DATA, 20, kinds=STRONG_BASELINES[:1]))
    result = simulate(SETTINGS, data=DATA, evaluated_baselines=beside)
    (ease,) = beside
    assert len(beside[ease].users) == 20
    assert len(next(iter(result.by_user.values()))) == 20
    floor = evaluate_ranking(Popularity(DATA.train), DATA.train, DATA.test, users=chosen).ndcg
    assert result.baselines["popularity"] == pytest.approx(floor)
    assert result.differences[ease][0] == pytest.approx(result.quality - result.baselines[ease])
    (note,) = [note for note in result.notes if note.startswith("evaluated")]
    assert "20 of 60 users" in note
    assert sum(group.users for group in result.groups) == result.users == 60
    members = torch.tensor([group.quality is not None for group in result.groups])
    assert members.all()


@pytest.mark.usefixtures("few")
def test_at_least_so_many_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairfold.metrics.ranking.MOST_SCORES", 1)
    assert len(sampled_users(DATA.test)) == 5


def test_few_users_are_all_evaluated() -> None:
    assert sampled_users(DATA.test).equal(users_with_tests(DATA.test))
    result = simulate(SETTINGS, data=DATA)
    assert not [note for note in result.notes if note.startswith("evaluated")]
    assert len(next(iter(result.by_user.values()))) == 60
