"""Whole runs: they learn, repeat themselves, take every setting and survive clients that fail."""

from pathlib import Path

import pytest
import torch

from fairfold import Settings, simulate
from fairfold.data import Dataset
from fairfold.errors import InvalidCapacity, InvalidSettings
from fairfold.federation.aggregate import ServerState
from fairfold.federation.replies import Rejections
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.settings import read_settings
from fairfold.federation.task import Task
from fairfold.models import NeuMF, bpr_loss
from fairfold.simulate import central
from fairfold.simulate.federation import Federation
from fairfold.simulate.run import load_data

SMALL = {
    "world": {"users": 60, "items": 300, "interactions_per_user": 30},
    "clients_per_round": 30,
    "rounds": 25,
    "evaluate_every": 25,
    "chunk": 1,
}
GRADIENT = {"solver": "gradient", "local_optimiser": "adam", "local_step": 0.01, "aggregation": "paper"}


def small(**changes: object) -> Settings:
    return read_settings(SMALL | changes)


def learning(**changes: object) -> Settings:
    world = {"users": 200, "items": 1_500, "interactions_per_user": 60}
    return small(world=world, clients_per_round=40, rounds=40, evaluate_every=40, server_step=0.1, **changes)


def test_every_size_of_device_beats_popularity() -> None:
    result = simulate(learning())
    for group in result.groups:
        assert group.quality is not None
        assert group.references["popularity"] < group.quality < group.references["best possible"]
    assert result.references["popularity"] < result.quality < result.references["best possible"]


def test_a_third_of_failing_clients_costs_little() -> None:
    shares = {"drop": 0.05, "late": 0.05, "nan": 0.05, "infinite": 0.05, "wrong_size": 0.05, "out_of_range": 0.05}
    clean, failing = simulate(learning()), simulate(learning(faults=shares))
    assert failing.quality > 0.95 * clean.quality
    assert set(failing.rejections) == {"no answer in time", "NaN or infinity", "wrong size", "values out of range"}
    assert 0.2 < sum(failing.rejections.values()) / (40 * 40) < 0.4


def test_a_federation_in_which_nobody_answers_keeps_its_model() -> None:
    before, after = simulate(small(rounds=1)), simulate(small(rounds=1, faults={"drop": 1.0}))
    assert after.quality != before.quality
    assert after.rejections == {"no answer in time": 30}
    assert torch.equal(
        after.state.full["item.weight"], simulate(small(rounds=2, faults={"nan": 1.0})).state.full["item.weight"]
    )


def test_the_same_settings_give_the_same_numbers() -> None:
    first, second = simulate(small(rounds=3)), simulate(small(rounds=3))
    assert torch.equal(first.state.full["item.weight"], second.state.full["item.weight"])
    other = simulate(small(rounds=3, seed=1))
    assert not torch.equal(first.state.full["item.weight"], other.state.full["item.weight"])


@pytest.mark.parametrize("method", ["fair", "fair_hom", "full_trn", "fedavg", "fedhm", "heterofl", "inconsistent",
                                    "central"])  # fmt: skip
def test_every_method_runs(method: str) -> None:
    result = simulate(small(rounds=2, model="neumf", method=method, capacities="1x-4x", **GRADIENT))
    assert all(torch.isfinite(tensor).all() for tensor in result.state.full.values())
    assert 0 <= result.quality <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"mapping": "element", "rehash": True},
        {"mapping": "chunk", "chunk": 4, "sign": False, "size_rule": "paper"},
        {"server_optimiser": "sgd", "server_step": 0.1},
        {"capacities": "1x"},
        {"capacities": "1x-...-64x"},
        {"broadcast": True},
        GRADIENT | {"user_vectors": "uploaded", "model": "neumf", "local_epochs": 2},
        GRADIENT | {"compress": "all", "model": "neumf", "mapping": "element", "capacities": "1x-4x"},
        GRADIENT | {"prox": 0.1},
        GRADIENT | {"objective": "softmax", "negatives": 3, "model": "neumf"},
        GRADIENT | {"objective": "squared", "negatives": 3, "item_bias": True},
        GRADIENT | {"objective": "squared", "item_bias": True, "method": "central"},
        GRADIENT | {"objective": "softmax", "item_bias": True, "capacities": "1x-40x", "support": 3, "tail_share": 0.5},
        GRADIENT | {"objective": "squared", "model": "tests.own_models:BiasedMF"},
        GRADIENT | {"backend": "loop", "replacement": True, "weighting": "data"},
    ],
)
def test_every_setting_runs(changes: dict[str, object]) -> None:
    result = simulate(small(rounds=2, evaluate_every=2, **changes))
    assert all(torch.isfinite(tensor).all() for tensor in result.state.full.values())
    assert 0 <= result.quality <= 1


def test_bytes_are_counted_either_way() -> None:
    compact, broadcast = simulate(small(rounds=1)), simulate(small(rounds=1, broadcast=True))
    assert [group.bytes_up for group in compact.groups] == [9_600, 2_400, 600]
    assert [group.bytes_down for group in compact.groups] == [9_600, 2_400, 600]
    assert [group.bytes_down for group in broadcast.groups] == [9_600, 9_600, 9_600]
    assert broadcast.history[0].bytes_down == 30 * 9_600
    assert torch.equal(compact.state.full["item.weight"], broadcast.state.full["item.weight"])


def test_a_bias_is_counted_and_fits_into_a_budget() -> None:
    changes = GRADIENT | {"rounds": 1, "item_bias": True, "clients_per_round": None}
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
        ({"objective": "softmax"}, "solver='gradient'"),
        ({"objective": "squared", "solver": "least_squares"}, "solver='gradient'"),
        ({"objective": "squared", "solver": "gradient", "model": "neumf-mlp"}, "rank items"),
        ({"objective": "softmax", "model": "mlp", "data": "mnist"}, "rank items"),
        ({"objective": "hinge"}, "'bpr', 'softmax' or 'squared'"),
        ({"item_bias": True}, "solver='gradient', not 'mf' and 'closed_form'"),
        ({"item_bias": True, "solver": "gradient", "model": "neumf"}, "not 'neumf'"),
        ({"item_bias": True, "solver": "gradient", "model": "tests.own_models:BiasedMF"}, "table of one column"),
    ],
)
def test_objectives_and_biases_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        small(**changes)


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
    assert [report.clients for report in few.history] == [2, 2]
    all_there_are = simulate(small(rounds=1, clients_per_round=30, **changes))
    assert all_there_are.history[0].clients == 3  # 5 % of 60
    with pytest.raises(InvalidSettings, match="one above 0 for each capacity"):
        small(capacities="1x-2x", shares=[1, 2, 3])


def test_a_published_split_can_be_pooled_and_split_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text("".join(f"{user} {' '.join(map(str, range(9)))}\n" for user in range(4)))
    (tmp_path / "test.txt").write_text("".join(f"{user} 9\n" for user in range(4)))
    published, _ = load_data(small(data=str(tmp_path)))
    pooled, _ = load_data(small(data=str(tmp_path), resplit=True))
    assert isinstance(published, Dataset)
    assert isinstance(pooled, Dataset)
    assert (len(published.train), len(published.test)) == (36, 4)
    assert (len(pooled.train), len(pooled.test)) == (28, 12)


def test_more_clients_than_exist_are_refused() -> None:
    with pytest.raises(InvalidSettings, match="61 of 60"):
        simulate(small(clients_per_round=61))


def test_early_stopping_by_trend_and_by_threshold() -> None:
    reached = simulate(small(rounds=30, evaluate_every=1, threshold=0.05))
    assert len(reached.history) < 30
    assert reached.quality >= 0.05
    still = simulate(small(rounds=30, evaluate_every=1, faults={"drop": 1.0}, patience=3))
    assert len(still.history) == 4  # the first evaluation is the best, three more are no better


@pytest.mark.parametrize("vectors", ["private", "uploaded"])
def test_central_training_takes_the_steps_of_torch(vectors: str) -> None:
    """Everybody's samples in one place: plain Adam over the whole model, going on from round to round."""
    settings = small(rounds=2, model="neumf", method="central", user_vectors=vectors, batch_size=40, **GRADIENT)
    settings = settings.model_copy(update={"local_optimiser": "adam", "local_step": 0.01, "clients_per_round": 3})
    data, _ = load_data(settings)
    assert isinstance(data, Dataset)
    task = Task(data, settings)
    federation = Federation.of(settings, task)
    full, private = federation.initial()
    model = task.model_of({name: tensor.clone() for name, tensor in full.items()},
                          {name: rows.clone() for name, rows in private.items()})  # fmt: skip
    assert isinstance(model, NeuMF)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    state = ServerState(full)
    for number in range(2):
        samples = task.everything(generator(settings, Purpose.TRAINING, number))
        for part in samples.parts(40 * 3):
            users, items = model.embed_users(part.users[:, None]), model.embed_items(part.items)
            scores = model.combine(tuple(user.expand(-1, 2, -1) for user in users), items)
            loss = bpr_loss(scores[:, 0], scores[:, 1], [*users, *items], settings.regulariser)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        state = central.run_round(state, private, federation, Rejections())
    after = state.full | private
    for name, tensor in model.named_parameters():
        assert torch.allclose(after[name].view(tensor.shape), tensor, atol=2e-4), name


def test_central_training_moves_no_bytes_and_holds_everything() -> None:
    for changes in ({}, GRADIENT):
        result = simulate(small(rounds=2, method="central", **changes))
        assert result.history[0].bytes_down == result.history[0].bytes_up == 0
        assert result.history[0].clients == 60
        assert all(group.bytes_up == 0 and group.bytes_held == 9_600 for group in result.groups)
