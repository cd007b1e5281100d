"""Whole runs: they learn, repeat themselves, take every setting and survive clients that fail."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold import Settings, simulate
from fairfold.data import Dataset
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidCapacity, InvalidSettings
from fairfold.federation.clients import Clients
from fairfold.federation.federation import Federation, load_data
from fairfold.metrics import RankingResult, evaluate_ranking
from fairfold.models import NeuMF, sampled_bpr
from tests.support.federations import after_rounds, cloned
from tests.support.settings import make_settings

SMALL: dict[str, Any] = {
    "data": {"users": 60, "items": 300, "interactions_per_user": 30},
    "clients_per_round": 30,
    "rounds": 25,
    "evaluate_every": 25,
}
CLOSED: dict[str, Any] = {"algorithm": "closed_form", "chunk": 1, "factors": 8}
GRADIENT: dict[str, Any] = {
    "algorithm": "gradient",
    "local_optimizer": "adam",
    "local_lr": 0.01,
    "aggregation": "paper",
}


def small(**changes: object) -> Settings:
    return make_settings(**(SMALL | ({} if "algorithm" in changes or "method" in changes else CLOSED) | changes))


def learning(**changes: object) -> Settings:
    world = {"users": 200, "items": 1_500, "interactions_per_user": 60}
    return small(data=world, clients_per_round=40, rounds=40, evaluate_every=40, server_lr=0.1, **changes)


def test_every_size_of_device_beats_popularity() -> None:
    result = simulate(learning())
    for group in result.groups:
        assert group.quality is not None
        assert group.baselines["popularity"] < group.quality < group.baselines["best possible"]
    assert result.baselines["popularity"] < result.quality < result.baselines["best possible"]


def test_a_third_of_failing_clients_costs_little() -> None:
    shares = {"drop": 0.05, "late": 0.05, "nan": 0.05, "infinite": 0.05, "wrong_size": 0.05, "out_of_range": 0.05}
    clean, failing = simulate(learning()), simulate(learning(faults=shares))
    assert failing.quality > 0.95 * clean.quality
    assert set(failing.rejections) == {"no update in time", "NaN or infinity", "wrong size", "values out of range"}
    assert 0.2 < sum(failing.rejections.values()) / (40 * 40) < 0.4


def test_a_round_without_updates_keeps_the_model() -> None:
    before, after = simulate(small(rounds=1)), simulate(small(rounds=1, faults={"drop": 1.0}))
    assert after.quality != before.quality
    assert after.rejections == {"no update in time": 30}
    assert torch.equal(
        after.state.full["item.weight"], simulate(small(rounds=2, faults={"nan": 1.0})).state.full["item.weight"]
    )


def test_the_same_settings_give_the_same_numbers() -> None:
    first, second = simulate(small(rounds=3)), simulate(small(rounds=3))
    assert torch.equal(first.state.full["item.weight"], second.state.full["item.weight"])
    other = simulate(small(rounds=3, seed=1))
    assert not torch.equal(first.state.full["item.weight"], other.state.full["item.weight"])


@pytest.mark.parametrize("method", ["fair", "fair_hom", "full_trn", "fedavg", "fedhm", "heterofl", "inconsistent"])
def test_every_method_runs(method: str) -> None:
    result = simulate(small(rounds=2, model="neumf", method=method, capacities="1x-4x", **GRADIENT))
    assert all(torch.isfinite(tensor).all() for tensor in result.state.full.values())
    assert 0 <= result.quality <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"mapping": "element", "rehash": True, "algorithm": "closed_form"},
        {"mapping": "chunk", "chunk": 4, "sign": False},
        {"server_optimizer": "sgd", "server_lr": 0.1},
        {"capacities": "1x"},
        {"capacities": "1x-...-64x"},
        GRADIENT | {"user_vectors": "uploaded", "model": "neumf", "local_epochs": 2},
        GRADIENT | {"compress": "all", "model": "neumf", "mapping": "element", "capacities": "1x-4x"},
        GRADIENT | {"prox": 0.1},
        GRADIENT | {"objective": "softmax", "num_negatives": 3, "model": "neumf"},
        GRADIENT | {"objective": "squared", "num_negatives": 3, "item_bias": True},
        {"algorithm": "central", "objective": "squared", "item_bias": True},
        GRADIENT | {"objective": "softmax", "item_bias": True, "capacities": "1x-40x", "support": 3, "tail_share": 0.5},
        GRADIENT | {"objective": "squared", "model": "tests.support.own_models:BiasedMF"},
        GRADIENT | {"backend": "sequential", "replacement": True, "weighting": "data"},
    ],
)
def test_every_setting_runs(changes: dict[str, object]) -> None:
    result = simulate(small(rounds=2, evaluate_every=2, **changes))
    assert all(torch.isfinite(tensor).all() for tensor in result.state.full.values())
    assert 0 <= result.quality <= 1


def test_dropout_changes_training_alone_and_is_drawn_by_the_seed() -> None:
    def table(**changes: Any) -> torch.Tensor:
        model = {"kind": "neumf", "factors": 4} | changes
        return simulate(small(rounds=1, model=model, **GRADIENT)).state.full["item_network.weight"]

    assert torch.equal(table(dropout=0.4), table(dropout=0.4))
    assert not torch.equal(table(dropout=0.4), table())


def test_bytes_are_counted_either_way() -> None:
    compact = simulate(small(rounds=1))
    assert [group.bytes_up for group in compact.groups] == [9_600, 2_400, 600]
    assert [group.bytes_down for group in compact.groups] == [9_600, 2_400, 600]
    assert compact.history[0].bytes_down == compact.history[0].bytes_up < 30 * 9_600


def test_a_bias_is_counted_and_fits_into_a_budget() -> None:
    changes = GRADIENT | {"chunk": 1, "rounds": 1, "item_bias": True, "clients_per_round": None}
    shares = simulate(small(capacities="1x-4x-16x", **changes))
    assert [group.bytes_held for group in shares.groups] == [9_600 + 1_200, 2_400 + 1_200, 600 + 1_200]
    assert [group.bytes_up for group in shares.groups] == [group.bytes_down for group in shares.groups]
    assert shares.history[0].bytes_up == sum(20 * group.bytes_held for group in shares.groups)
    budget = simulate(small(capacities="1800B-10800B", **changes))
    assert [group.bytes_held for group in budget.groups] == [1_800, 10_800]
    with pytest.raises(InvalidCapacity, match="1,200 bytes held beside"):
        simulate(small(capacities="1200B", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "softmax"}, "unknown key 'algorithm.objective' with algorithm.kind='closed_form'"),
        ({"objective": "squared", "algorithm": "ratings"}, "with algorithm.kind='ratings'"),
        ({"objective": "squared", "algorithm": "gradient", "model": "neumf-mlp"}, "where the quality is MSE"),
        ({"num_negatives": 2, "algorithm": "central", "model": "neumf-mlp"}, "where the quality is MSE"),
        (
            {"objective": "softmax", "algorithm": "images", "model": "mlp", "data": "mnist"},
            "with algorithm.kind='images'",
        ),
        ({"objective": "hinge", "algorithm": "gradient"}, "'bpr', 'softmax' or 'squared'"),
        ({"item_bias": True}, "model.kind='mf' without item_bias; 'gradient' serves others"),
        (
            {"item_bias": True, "algorithm": "gradient", "model": "neumf"},
            "inactive key 'model.item_bias' with model.kind='neumf'",
        ),
        (
            {"item_bias": True, "algorithm": "gradient", "model": "tests.support.own_models:BiasedMF"},
            "inactive key 'model.item_bias'",
        ),
    ],
)
def test_objectives_and_biases_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        make_settings(**{"algorithm": "closed_form"} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "fedhm", "capacities": "1x-8x"}, "N/A"),
        ({"method": "heterofl", "capacities": "1x-16x"}, "N/A"),
        ({"method": "full_trn", "capacities": "2x-4x"}, "no device can hold"),
    ],
)
def test_capacities_a_method_cannot_serve_are_refused_before_any_work(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidCapacity, match=message):
        simulate(small(model="neumf", **GRADIENT, **changes))


def test_devices_that_are_left_out_are_not_drawn() -> None:
    changes = {"method": "full_trn", "capacities": "1x-2x", "shares": [5, 95], "group_seed": 101, **GRADIENT}
    few = simulate(small(rounds=2, clients_per_round=2, **changes))
    assert [report.num_clients for report in few.history] == [2, 2]
    all_there_are = simulate(small(rounds=1, clients_per_round=30, **changes))
    assert all_there_are.history[0].num_clients == 3  # 5 % of 60
    with pytest.raises(InvalidSettings, match="one for each capacity"):
        small(capacities="1x-2x", shares=[1, 2, 3], algorithm="gradient")


def published_at(path: Path, **changes: object) -> Settings:
    return make_settings(**CLOSED | {"data": str(path), "clients_per_round": 2} | changes)


def test_a_published_split_can_be_pooled_and_split_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text("".join(f"{user} {' '.join(map(str, range(9)))}\n" for user in range(4)))
    (tmp_path / "test.txt").write_text("".join(f"{user} 9\n" for user in range(4)))
    published, _ = load_data(published_at(tmp_path))
    pooled, _ = load_data(published_at(tmp_path, resplit=True))
    assert isinstance(published, Dataset)
    assert isinstance(pooled, Dataset)
    assert (len(published.train), len(published.test)) == (36, 4)
    assert (len(pooled.train), len(pooled.test)) == (28, 12)


def test_a_published_validation_set_is_trained_on_and_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    for name, items in (("train", range(7)), ("valid", range(7, 9)), ("test", range(9, 10))):
        lines = (f"{user} {' '.join(map(str, items))}\n" for user in range(4))
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    data, _ = load_data(published_at(tmp_path))
    assert isinstance(data, Dataset)
    assert (len(data.train), len(data.test), data.valid) == (36, 4, None)
    assert Federation.of(published_at(tmp_path), data).clients.train is data.train


def test_the_model_and_its_references_are_compared_over_users() -> None:
    data = SyntheticDataset(users=60, items=300, interactions_per_user=30).dataset()
    settings, everybody = small(rounds=2, evaluate_every=1), torch.arange(60)
    alone = simulate(settings, data=data)
    plan = (world := Federation.of(settings, data)).plan
    score = plan.algorithm.scorer(
        plan, alone.state.full, plan.assignments(1), Clients(plan, data.train, alone.local_state)
    )
    mine = evaluate_ranking(score, world.interactions.train, world.interactions.test)
    other_baselines = {
        "nothing": RankingResult(0.0, everybody, torch.zeros(60, dtype=torch.float64)),
        "a tenth less": RankingResult(mine.ndcg - 0.1, everybody, mine.ndcg_by_user - 0.1),
    }
    found = simulate(settings, data=data, evaluated_baselines=other_baselines)
    error = float(mine.ndcg_by_user.std()) / 60**0.5
    assert found.differences["nothing"] == pytest.approx((mine.ndcg, error))
    assert found.differences["a tenth less"] == pytest.approx((0.1, 0.0), abs=1e-9)  # paired: certain to the last digit
    assert found.baselines["a tenth less"] == pytest.approx(found.quality - 0.1)
    assert list(alone.differences) == ["popularity"]


def test_of_fewer_clients_than_asked_for_all_take_part() -> None:
    result = simulate(small(clients_per_round=61, rounds=1))
    assert [report.num_clients for report in result.history] == [60]


def test_early_stopping_by_trend_and_by_threshold() -> None:
    reached = simulate(small(rounds=30, evaluate_every=1, threshold=0.05))
    assert len(reached.history) < 30
    assert reached.quality >= 0.05
    still = simulate(small(rounds=30, evaluate_every=1, faults={"drop": 1.0}, patience=3))
    assert len(still.history) == 4  # the first evaluation is the best, three more are no better


def test_central_training_takes_the_steps_of_torch() -> None:
    """Everybody's samples in one place: plain Adam over the whole model, going on from round to round."""
    settings = small(
        rounds=2, model="neumf", algorithm="central", batch_size=40, local_optimizer="adam", local_lr=0.01,
        clients_per_round=3,
    )  # fmt: skip
    data, _ = load_data(settings)
    assert isinstance(data, Dataset)
    world = Federation.of(settings, data)
    state = world.initial()
    clients, architecture = world.clients, world.plan.architecture
    model = architecture.model_of(cloned(state.full), cloned(clients.local_state))
    assert isinstance(model, NeuMF)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(2):
        for part in clients.training.everything(clients.source(number, 0), 40 * 3):
            assert part.users is not None
            users, items = model.embed_users(part.users[:, None]), model.embed_items(part.items)
            scores = model.combine(tuple(user.expand(-1, 2, -1) for user in users), items)
            norms = sum(vectors.square().sum() for vectors in [*users, *items]) / len(scores)
            loss = sampled_bpr(scores).mean() + 0.5 * clients.training.steps.l2 * norms
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        state = after_rounds(world, state)
    after = state.full | clients.local_state
    for name, tensor in model.named_parameters():
        assert torch.allclose(after[name].view(tensor.shape), tensor, atol=2e-4), name


@pytest.mark.parametrize("changes", [{}, {"replacement": True}])
def test_central_training_moves_no_bytes_and_holds_everything(changes: dict[str, Any]) -> None:
    result = simulate(small(rounds=2, algorithm="central", factors=8, **changes))
    assert result.history[0].bytes_down == result.history[0].bytes_up == 0
    assert result.history[0].num_clients == 1
    assert all(group.bytes_up == 0 and group.bytes_held == 9_600 for group in result.groups)
