"""The server's optimisers are those of torch.optim; the mean into the model itself is the mean beside it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fairfold.algorithms.averaging import AveragingAlgorithm, add_mean, direction_of
from fairfold.federation.updates import Aggregate, ClientTask, State, Update
from fairfold.subspace import Subspace, nested_subspaces
from fairfold.subspace.projection import Hashed, SizeSum
from tests.support.federations import make_federation, tiny_data, tiny_settings
from tests.support.strategies import vector

ROUNDS, STEP = 7, 0.1
NAME = "item.weight"


def changes(number: int, size: int = 33) -> Tensor:
    """What a round's clients would change; not alike from round to round."""
    return vector(size, seed=number) * (1 + number % 3)


def by_server(optimizer: str) -> Tensor:
    """A model after some rounds of one client each, by the delta rule."""
    chosen = tiny_settings(aggregation="delta", server_optimizer=optimizer, server_lr=STEP, capacities="1x")
    world, _ = make_federation(tiny_data(), chosen)
    (held,) = world.plan.assignments(0)
    assert held.projections is not None
    state = State({NAME: vector(33, seed=99)})
    for number in range(ROUNDS):
        aggregate = Aggregate()
        task = ClientTask(number, 0, held.projections, {NAME: state.full[NAME]})
        aggregate.add(task, Update({NAME: 3.0 * changes(number)}, 2.0))
        aggregate.add(task, Update({NAME: -1.0 * changes(number)}, 0.0))
        state = chosen.algorithm.server_update(world.plan, state, aggregate)
    return state.full[NAME]


def by_torch(make: Any, **options: Any) -> Tensor:
    model = vector(33, seed=99).requires_grad_()
    optimizer = make([model], lr=STEP, **options)
    for number in range(ROUNDS):
        model.grad = -changes(number)  # two of two in the sum over a weight of 2
        optimizer.step()
    return model.detach()


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("sgd", torch.optim.SGD, {}),
        ("momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("adam", torch.optim.Adam, {}),
        ("adagrad", torch.optim.Adagrad, {"eps": 1e-8, "initial_accumulator_value": 0.0}),
    ],
)
def test_the_numbers_of_torch(name: str, make: Any, options: dict[str, Any]) -> None:
    expected = by_torch(make, **options)
    torch.testing.assert_close(by_server(name), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(expected, vector(33, seed=99), atol=0.05)


def test_yogi_is_its_formula() -> None:
    """Zaheer et al., 2018, Algorithm 2, with Adam's corrections of the bias."""
    model, first, second = vector(33, seed=99), torch.zeros(33).double(), torch.zeros(33).double()
    for number in range(ROUNDS):
        slope = -changes(number)
        first = 0.9 * first + 0.1 * slope
        second = second - 0.001 * torch.sign(second - slope**2) * slope**2
        unbiased = first / (1 - 0.9 ** (number + 1))
        model = model - STEP * unbiased / ((second / (1 - 0.999 ** (number + 1))).sqrt() + 1e-8)
    torch.testing.assert_close(by_server("yogi"), model, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(by_server("adam"), model, atol=1e-4)


def test_optimisers_go_different_ways() -> None:
    ways = [direction_of(kind, changes(1), {}, 1)[0] for kind in ("momentum", "adam", "adagrad")]
    assert not torch.allclose(ways[0], ways[1])
    torch.testing.assert_close(ways[1], ways[2], rtol=1e-6, atol=1e-6)  # the first step of both is a sign


@pytest.mark.parametrize("sizes", [["1x"], ["4x"], ["1x", "2x", "8x"], ["2x", "8x"]])
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_the_mean_into_the_model_is_the_mean_beside_it(
    sizes: list[str], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairfold.algorithms.averaging.BLOCK", block)
    spaces = nested_subspaces(96, sizes, mapping="ranked", chunk=2)
    parts = [SizeSum(Hashed((12, 8), space), vector(space.size, seed), 1.0 + seed) for seed, space in enumerate(spaces)]
    full = vector(96, seed=50)
    expected = full + 0.3 * Hashed.mean(full, parts, changes=True)
    memory = full.data_ptr()
    add_mean(full, parts, 0.3)
    torch.testing.assert_close(full, expected, rtol=1e-12, atol=1e-12)
    assert full.data_ptr() == memory


def test_independent_hashes_have_their_mean_as_well() -> None:
    spaces = [Subspace(96, 12, seed, "chunk", 2) for seed in (1, 2)]
    parts = [SizeSum(Hashed((12, 8), space), vector(12, seed), 2.0) for seed, space in enumerate(spaces)]
    full = vector(96, seed=50)
    expected = full + 0.5 * Hashed.mean(full, parts, changes=True)
    add_mean(full, parts, 0.5)
    torch.testing.assert_close(full, expected, rtol=1e-12, atol=1e-12)


def test_plain_steps_need_no_second_model() -> None:
    """The server's vector is changed where it is: a model as large as the memory has no successor beside it."""
    chosen = tiny_settings(aggregation="delta", server_optimizer="sgd", server_lr=1.0, capacities="4x")
    assert isinstance(chosen.algorithm, AveragingAlgorithm)
    world, state = make_federation(tiny_data(), chosen)
    memory = state.full[NAME].data_ptr()
    (task,) = chosen.algorithm.tasks(world.plan, state, [0])
    aggregate = Aggregate()
    aggregate.add(task, Update({NAME: torch.ones(task.projections[NAME].size)}, 1.0))
    assert chosen.algorithm.server_update(world.plan, state, aggregate).full[NAME].data_ptr() == memory
