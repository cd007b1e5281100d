"""The two aggregation rules, and FAIR among full devices."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import seeds, vector

from fairfold.data import Dataset, Interactions
from fairfold.federation.aggregate import ServerState, aggregate
from fairfold.federation.sampling import generator, sample_cohort
from fairfold.federation.settings import Settings, WorldSettings, read_settings
from fairfold.federation.train import SOLVERS, Device
from fairfold.simulate.loop import run_round
from fairfold.subspace import Subspace, Sums, nested_subspaces

FACTORS = 3


def small_data(seed: int, users: int = 6, items: int = 11) -> Dataset:
    drawn = torch.rand(users, items, generator=torch.Generator().manual_seed(seed % 2**32)) < 0.4
    drawn[:, 0] = True
    pairs = drawn.nonzero()
    train = Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, items)
    return Dataset("tiny", train, train)


def some_settings(**changes: object) -> Settings:
    base = {"factors": FACTORS, "clients_per_round": 4, "world": {"users": 6, "items": 11}, "local_step": 0.1}
    return read_settings(base | changes)


def fedavg_round(full: torch.Tensor, private: torch.Tensor, data: Dataset, chosen: Settings) -> torch.Tensor:
    """FedAvg as in its paper: every client trains the whole model; the weighted mean of the models is the next one."""
    identity = Subspace(full.numel(), full.numel())
    noise = generator(chosen, 4, 0)
    total, weights = torch.zeros_like(full), 0.0
    for client in sample_cohort(chosen, data.num_users, 0).tolist():
        device = Device(identity, data.num_items, data.train.of(client), private[client], noise)
        trained, _ = SOLVERS[chosen.solver](full, device, chosen)
        weight = float(len(device.items))
        total.add_(trained, alpha=weight)
        weights += weight
    return total / weights


@given(seeds, st.sampled_from(["gradient", "closed_form"]), st.sampled_from(["element", "chunk", "ranked"]))
@settings(max_examples=25)
def test_all_devices_full_is_fedavg_bit_for_bit(seed: int, solver: str, mapping: str) -> None:
    data = small_data(seed)
    chosen = some_settings(solver=solver, aggregation="paper", weighting="data", seed=seed % 1000)
    full, private = vector(33, seed % 2**32, torch.float32), vector(18, 1, torch.float32).view(6, FACTORS)
    subspaces = nested_subspaces(33, ["1x"], seed=seed, mapping=mapping)
    state, _ = run_round(ServerState(full), private, data, subspaces, torch.zeros(6, dtype=torch.long), chosen)
    assert torch.equal(state.full, fedavg_round(full, private, data, chosen))


@given(seeds, st.sampled_from(["gradient", "closed_form"]), st.sampled_from(["element", "ranked"]))
@settings(max_examples=25)
def test_both_rules_agree_for_one_size_and_a_server_inside_it(seed: int, solver: str, mapping: str) -> None:
    data = small_data(seed)
    subspaces = nested_subspaces(33, ["4x"], seed=seed, mapping=mapping)
    inside = subspaces[0].recover(vector(subspaces[0].size, 7))
    private = vector(18, 1).view(6, FACTORS)
    group = torch.zeros(6, dtype=torch.long)
    results = []
    for rule in ("paper", "delta"):
        chosen = some_settings(solver=solver, aggregation=rule, server_optimiser="sgd", server_step=1.0)
        results.append(run_round(ServerState(inside), private, data, subspaces, group, chosen)[0].full)
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-10)


def test_the_rules_differ_when_the_server_knows_more_than_the_devices() -> None:
    """What the delta rule is for: the paper's rule forgets whatever lies outside the devices' subspace."""
    data, private = small_data(1), vector(18, 1).view(6, FACTORS)
    subspaces, group = nested_subspaces(33, ["4x"], seed=1), torch.zeros(6, dtype=torch.long)
    full = vector(33)
    kept = []
    for rule in ("paper", "delta"):
        chosen = some_settings(aggregation=rule, server_optimiser="sgd", server_step=1.0)
        after = run_round(ServerState(full), private, data, subspaces, group, chosen)[0].full
        outside = after - subspaces[0].recover(subspaces[0].reduce(after))
        kept.append(float(outside.norm()))
    assert kept[0] == pytest.approx(0, abs=1e-9)
    assert kept[1] > 1


@pytest.mark.parametrize("rule", ["paper", "delta"])
def test_a_round_nobody_answers_keeps_the_model(rule: str) -> None:
    state = ServerState(vector(33))
    after = aggregate(state, Sums(), some_settings(aggregation=rule))
    assert torch.equal(after.full, state.full)
    assert after == replace(state, round_number=1)


def test_closed_form_is_the_minimum_for_the_user_and_a_descent_step_for_the_items() -> None:
    """Against autograd on the dense problem: the user's gradient vanishes, the compact step is the projected one."""
    data, chosen = small_data(3), some_settings(unobserved_weight=0.3, ridge=0.2)
    subspace = Subspace(33, 8, seed=2)
    compact = vector(8, 5)
    device = Device(subspace, data.num_items, data.train.of(1), vector(FACTORS), torch.Generator())
    trained, user = SOLVERS["closed_form"](compact, device, chosen)
    table = subspace.recover(compact).view(11, FACTORS).requires_grad_()
    vector_of_user = user.clone().requires_grad_()
    liked = torch.zeros(11, dtype=torch.float64)
    liked[device.items] = 1
    weight = 0.3 + 0.7 * liked
    loss = (weight * (table @ vector_of_user - liked).square()).sum() / 2 + 0.2 * vector_of_user.square().sum() / 2
    loss.backward()  # type: ignore[no-untyped-call]
    assert vector_of_user.grad is not None
    assert table.grad is not None
    torch.testing.assert_close(vector_of_user.grad, torch.zeros(FACTORS, dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(trained, compact - 0.1 * subspace.reduce(table.grad.view(-1)))


def test_gradient_solver_is_stochastic_gradient_descent_on_the_pairwise_loss() -> None:
    data, chosen = small_data(3), some_settings(solver="gradient", batch_size=100)
    subspace = Subspace(33, 8, seed=2)
    compact, private = vector(8, 5), vector(FACTORS, 6)
    device = Device(subspace, data.num_items, data.train.of(1), private, torch.Generator().manual_seed(1))
    trained, user = SOLVERS["gradient"](compact, device, chosen)
    again = torch.Generator().manual_seed(1)
    positives = device.items[torch.randperm(len(device.items), generator=again)]
    negatives = torch.randint(11, positives.shape, generator=again)
    slots, signs = subspace.slots(0, 33)
    parameters = [compact.clone().requires_grad_(), private.clone().requires_grad_()]
    table = (parameters[0][slots] * signs).view(11, FACTORS)
    lead = (table[positives] - table[negatives]) @ parameters[1]
    optimiser = torch.optim.SGD(parameters, lr=0.1)
    (-torch.nn.functional.logsigmoid(lead).mean()).backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    torch.testing.assert_close(trained, parameters[0].detach())
    torch.testing.assert_close(user, parameters[1].detach())


def test_world_settings_are_known() -> None:
    assert some_settings().world == WorldSettings(users=6, items=11)
