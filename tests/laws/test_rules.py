"""The two aggregation rules, and FAIR among full devices."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.errors import InvalidSettings
from fairfold.federation.federation import Federation
from fairfold.federation.updates import Aggregate, ClientTask, State
from fairfold.subspace.projection import whole
from fairfold.typing import Weights
from tests.support.federations import after_rounds, make_federation, tiny_data, tiny_settings
from tests.support.strategies import vector

RULES: dict[str, dict[str, Any]] = {
    "paper": {"aggregation": "paper"},
    "delta": {"aggregation": "delta", "server_optimizer": "sgd", "server_lr": 1.0},
}


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def fedavg_round(federation: Federation, state: State) -> Weights:
    """FedAvg as in its paper: every client trains the whole model; the weighted mean of the models is the next one."""
    plan, clients = federation.plan, federation.clients
    held: Any = {name: whole(shape) for name, shape in plan.architecture.shapes.items()}
    total, weights = {name: torch.zeros_like(tensor) for name, tensor in state.full.items()}, 0.0
    for client in federation.sampler.cohort(0).tolist():
        update, _ = plan.algorithm.client_update(plan, ClientTask(0, 0, held, state.full), clients.client(client, 0))
        for name, tensor in update.sums.items():
            total[name].add_(tensor)
        weights += float(clients.num_samples(client))
    return {name: tensor / weights for name, tensor in total.items()}


@given(st.integers(0, 999), st.sampled_from(["gradient", "closed_form"]), st.sampled_from(["element", "ranked"]))
@settings(max_examples=20)
def test_all_devices_full_is_fedavg_bit_for_bit(seed: int, algorithm: str, mapping: str) -> None:
    chosen = tiny_settings(algorithm=algorithm, mapping=mapping, seed=seed, capacities="1x")
    federation, state = make_federation(tiny_data(seed), chosen)
    expected = fedavg_round(federation, state)
    after = after_rounds(federation, state).full
    assert all(torch.equal(after[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("algorithm", ["gradient", "closed_form"])
@pytest.mark.parametrize("mapping", ["element", "ranked"])
@pytest.mark.parametrize("seed", range(5))
def test_both_rules_agree_for_one_size_and_a_server_inside_it(seed: int, algorithm: str, mapping: str) -> None:
    results = []
    for rule in ("paper", "delta"):
        chosen = tiny_settings(algorithm=algorithm, mapping=mapping, capacities="4x", seed=seed, **RULES[rule])
        federation, state = make_federation(tiny_data(seed), chosen)
        held = federation.plan.assignments(0)[0].projections
        assert held is not None
        inside = State({name: p.recover(p.reduce(state.full[name])) for name, p in held.items()})
        results.append(after_rounds(federation, inside).full)
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("double")
def test_the_rules_differ_when_the_server_knows_more_than_the_devices() -> None:
    """What the delta rule is for: the paper's rule forgets whatever lies outside the devices' subspace."""
    kept = []
    for rule in ("paper", "delta"):
        federation, state = make_federation(tiny_data(1), tiny_settings(capacities="4x", **RULES[rule]))
        held = federation.plan.assignments(0)[0].projections
        assert held is not None
        after = after_rounds(federation, state).full
        outside = [after[name] - p.recover(p.reduce(after[name])) for name, p in held.items()]
        kept.append(float(torch.cat(outside).norm()))
    assert kept[0] == pytest.approx(0, abs=1e-9)
    assert kept[1] > 0.1


@pytest.mark.parametrize("rule", ["paper", "delta"])
def test_a_round_without_updates_keeps_the_model(rule: str) -> None:
    federation, _ = make_federation(tiny_data(), tiny_settings(aggregation=rule))
    state = State({"item.weight": vector(33)})
    after = federation.plan.algorithm.server_update(federation.plan, state, Aggregate())
    assert torch.equal(after.full["item.weight"], vector(33))
    assert after.round_number == 1


@pytest.mark.usefixtures("double")
def test_closed_form_is_the_minimum_for_the_user_and_a_descent_step_for_the_items() -> None:
    """Against autograd on the dense problem: the user's gradient vanishes, the compact step is the projected one."""
    chosen = tiny_settings(algorithm="closed_form", unobserved_weight=0.3, ridge=0.2, capacities="4x")
    federation, _ = make_federation(tiny_data(3), chosen)
    held = federation.plan.assignments(0)[0].projections
    assert held is not None
    projection = held["item.weight"]
    compact = vector(projection.size, 5)
    update, own = chosen.algorithm.client_update(
        federation.plan, ClientTask(0, 0, held, {"item.weight": compact}), federation.clients.client(1, 0)
    )
    user = own["user.weight"].clone().requires_grad_()
    table = projection.recover(compact).view(11, 3).requires_grad_()
    liked = torch.zeros(11)
    liked[federation.clients.train.of(1)] = 1
    loss = ((0.3 + 0.7 * liked) * (table @ user - liked).square()).sum() / 2 + 0.2 * user.square().sum() / 2
    for_user, for_table = torch.autograd.grad(loss, [user, table])
    torch.testing.assert_close(for_user, torch.zeros(3), rtol=0, atol=1e-10)
    trained = update.sums["item.weight"] / update.weight
    torch.testing.assert_close(trained, compact - 0.1 * projection.reduce(for_table.view(-1)))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("client", "negatives"), [(0, 1), (1, 1), (1, 2)])
def test_squares_of_drawn_items_expect_the_whole_catalogue(client: int, negatives: int) -> None:
    """Over all draws of negatives: the gradient is the one by which the closed form moves the items, a c-th of it."""
    changes: dict[str, Any] = {"unobserved_weight": 0.3, "capacities": "1x", "local_lr": 1.0}
    federation, _ = make_federation(tiny_data(3), tiny_settings(algorithm="closed_form", weighting="equal", **changes))
    held = federation.plan.assignments(0)[0].projections
    assert held is not None
    table = vector(33, 5)
    task = ClientTask(0, 0, held, {"item.weight": table})
    step, own = federation.plan.algorithm.client_update(federation.plan, task, federation.clients.client(client, 0))
    mine = federation.clients.train.of(client)
    others = torch.tensor([item for item in range(11) if item not in mine.tolist()])
    sampled = tiny_settings(objective="squared", num_negatives=negatives, l2=0.0, **changes)
    work = Federation.of(sampled, federation.data).clients.training
    every = torch.cartesian_prod(mine, *[others] * negatives)  # each positive with each draw, all as likely
    rows = table.clone().requires_grad_()
    weight = work.round_samples(client, torch.Generator()).targets
    assert weight is not None
    losses = work.sample_losses({}, [own["user.weight"]], [rows.view(11, 3)[every]], weight[:1].expand(len(every)))
    (slope,) = torch.autograd.grad(losses.mean(), rows)
    torch.testing.assert_close(table - len(mine) * slope, step.sums["item.weight"])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "yogi", "adagrad"])
def test_a_step_a_client_is_the_rounds_clients_times_as_long(optimizer: str) -> None:
    def after(**changes: Any) -> Weights:
        chosen = tiny_settings(aggregation="delta", server_optimizer=optimizer, clients_per_round=4, **changes)
        return after_rounds(*make_federation(tiny_data(3), chosen), 2).full

    a_client, a_round = after(server_lr=0.25, step_per="client"), after(server_lr=1.0)
    assert all(torch.equal(a_client[name], a_round[name]) for name in a_round)
    assert any(not torch.equal(a_round[name], other) for name, other in after(server_lr=0.25).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": "paper"}, "'algorithm.step_per' with algorithm.aggregation='paper': it needs 'delta'"),
        ({"clients_per_round": None}, "a number of fleet.clients_per_round"),
    ],
)
def test_a_step_a_client_where_it_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        tiny_settings(**({"aggregation": "delta", "step_per": "client"} | changes))
