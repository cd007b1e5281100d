"""A model of one's own: found by its name, checked when it is made, trained like the built-in ones."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold.backends.batched import supports_batched_training
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidSettings
from fairfold.federation.federation import Federation
from fairfold.models import MF, NeuMF, NeuMFMLP, Recommender, scorer
from fairfold.models.recommender import load_recommender
from tests.support.federations import tiny_data, tiny_settings
from tests.support.parity import RUNNERS, SEQUENTIAL
from tests.support.settings import make_settings

OWN = "tests.support.own_models:BiasedMF"


def documented(num_users: int, num_items: int, factors: int) -> Recommender:
    """The class that docs/deployment.md shows."""
    text = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    (shown,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class BiasedMF" in block]
    found: dict[str, Any] = {}
    exec(shown, found)
    model: Recommender = found["BiasedMF"](num_users, num_items, factors)
    return model


@pytest.mark.parametrize("make", [partial(load_recommender, OWN), documented])
def test_it_scores_with_combine_alone(make: Callable[[int, int, int], Recommender]) -> None:
    model = make(4, 7, 3)
    users, items = torch.arange(4), torch.arange(7)
    held = {name: tensor.detach() for name, tensor in model.named_parameters()}
    expected = held["user.weight"] @ held["item.weight"].T + held["item_bias.weight"][:, 0]
    torch.testing.assert_close(scorer(model)(users), expected)
    torch.testing.assert_close(model(users, items[:4]).detach(), expected.diagonal())


@pytest.mark.parametrize("kind", [MF, NeuMF, NeuMFMLP])
def test_the_built_in_ones_score_blocks_as_pairs(kind: type[Recommender]) -> None:
    model = kind(5, 9)
    users, items = torch.arange(5), torch.arange(9)
    torch.testing.assert_close(scorer(model)(users), model(users[:, None], items).detach())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.support.own_models:Absent", "Absent"),
        ("no_such_package.models:Mine", "no_such_package"),
        ("tests.support.own_models:Stranger", "subclass of fairfold.models.Recommender"),
        ("tests.support.own_models:torch", "subclass of fairfold.models.Recommender"),
        ("tests.support.own_models:Tower", "item_tower is not an nn.Embedding"),
        ("tests.support.own_models:Tower", "norm.running_mean is a buffer"),
        ("tests.support.own_models:Itemless", "no table named item"),
        ("tests.support.own_models:Itemless", "item_bias is no table"),
    ],
)
def test_what_cannot_take_part_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        load_recommender(name, 4, 7, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "biased"}, "package.module:Class"),
        ({"model": "a b:c"}, "package.module:Class"),
        ({"model": "os.path:"}, "package.module:Class"),
        ({"model": OWN, "method": "heterofl"}, "built-in model"),
        ({"model": OWN, "algorithm": "closed_form"}, "model.kind='mf'"),
        ({"model": "neumf", "ratings": True}, "inactive key 'model.ratings' with model.kind='neumf'"),
        ({"model": OWN, "support": 3}, "model.kind='mf' or 'neumf'"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        make_settings(**{"algorithm": "gradient"} | changes)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (OWN, {"capacities": "1x-2x-4x"}),
        (OWN, {"method": "inconsistent", "capacities": "1x-2x"}),
        (OWN, {"user_vectors": "uploaded", "compress": "all"}),
        ("tests.support.own_models:Bilinear", {"ratings": True}),
    ],
)
def test_the_fast_backend_leaves_it_to_the_loop(model: str, changes: dict[str, Any]) -> None:
    settings = tiny_settings(model=model, clients_per_round=None, **changes)
    data = tiny_data(1, 6, 24, settings.predicts_ratings)
    assert not supports_batched_training(Federation.of(settings, data).plan)
    found = [runner.run(settings, data, 2) for runner in (SEQUENTIAL, RUNNERS["batched"])]
    ends = [outcome.state.full | outcome.local_state for outcome in found]
    assert set(ends[0]) == set(ends[1])
    assert all(torch.equal(ends[0][name], vector) for name, vector in ends[1].items())


def test_it_learns_in_a_simulation() -> None:
    from fairfold import simulate

    settings = tiny_settings(
        model=OWN, rounds=12, clients_per_round=None, evaluate_every=1, capacities="1x-2x", batch_size=64,
        aggregation="delta", server_lr=0.1,
    )  # fmt: skip
    data = SyntheticDataset(users=80, items=200, interactions_per_user=40).dataset()
    result = simulate(settings, data=data)
    first = result.history[0].quality
    assert first is not None
    assert result.quality > first.server * 1.2
