"""Every objective of the gradient solver, with and without a bias an item: the numbers of the readable loop."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.federation.aggregate import ServerState
from fairfold.federation.replies import Rejections
from fairfold.federation.task import ITEM_BIAS, Weights
from fairfold.kernels import gpu, ops
from fairfold.simulate import batched, loop
from fairfold.simulate.captured import Cohorts
from fairfold.simulate.federation import Federation
from tests.federations import tiny_data, tiny_federation, tiny_settings

Round = Callable[[ServerState, Weights, Federation, Rejections], ServerState]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def captured(state: ServerState, private: Weights, federation: Federation, rejections: Rejections) -> ServerState:
    """The program of a GPU, on one where there is one."""
    device, cpu = torch.device("cuda" if gpu.available() else "cpu"), torch.device("cpu")
    moments = {moment: on(of, device) for moment, of in state.moments.items()}
    before, own = ServerState(on(state.full, device), state.round_number, moments), on(private, device)
    after = Cohorts(federation, device, torch.float64).run_round(before, own, rejections)
    for name, rows in own.items():
        private[name].copy_(rows)
    moments = {moment: on(of, cpu) for moment, of in after.moments.items()}
    return ServerState(on(after.full, cpu), after.round_number, moments)


def on(weights: Weights, device: torch.device) -> Weights:
    return {name: tensor.to(device) for name, tensor in weights.items()}


def check(backend: Round, seed: int, rounds: int = 2, **changes: Any) -> None:
    results = []
    for run_round in (loop.run_round, backend):
        chosen = tiny_settings(seed=seed, **changes)
        federation, state, private = tiny_federation(tiny_data(seed, 9, 40), chosen)
        before, rejections = dict(state.full), Rejections()
        for _ in range(rounds):
            state = run_round(state, private, federation, rejections)
        results.append((state.full, private, rejections.counts))
        assert all(not torch.equal(before[name], state.full[name]) for name in federation.task.tables)
    (full, own, left_out), (full_fast, own_fast, left_out_fast) = results
    for expected, found in ((full, full_fast), (own, own_fast)):
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert left_out == left_out_fast


@pytest.mark.parametrize("backend", [batched.run_round, captured], ids=["batched", "captured"])
@pytest.mark.parametrize("item_bias", [False, True])
@pytest.mark.parametrize("objective", ["bpr", "softmax", "squared"])
@pytest.mark.parametrize("changes", [
    {},
    {"local_optimiser": "adam", "local_step": 0.02, "local_epochs": 2, "regulariser": 0.1},
    {"aggregation": "delta", "server_optimiser": "adam", "weighting": "equal", "rehash": True},
    {"user_vectors": "uploaded", "compress": "all"},
])  # fmt: skip
def test_objectives(backend: Round, objective: str, item_bias: bool, changes: dict[str, Any]) -> None:
    check(backend, 1, objective=objective, item_bias=item_bias, capacities="1x-4x", negatives=3, **changes)


@pytest.mark.parametrize("objective", ["bpr", "softmax", "squared"])
@pytest.mark.parametrize("changes", [
    {"method": "fedhm", "item_bias": True},
    {"method": "heterofl", "item_bias": True},
    {"method": "heterofl", "model": "neumf"},
    {"method": "inconsistent", "item_bias": True},
    {"method": "full_trn", "item_bias": True},
    {"prox": 0.5, "item_bias": True},
    {"replacement": True, "faults": {"drop": 0.2, "nan": 0.2}, "item_bias": True},
])  # fmt: skip
def test_methods(objective: str, changes: dict[str, Any]) -> None:
    base: dict[str, Any] = {"capacities": "1x-2x", "factors": 8, "local_step": 0.02, "negatives": 2}
    check(batched.run_round, 2, objective=objective, **base | changes)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_generated_federations(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(["mf", "neumf"]))
    changes: dict[str, Any] = {
        "model": model,
        "objective": data.draw(st.sampled_from(["bpr", "softmax", "squared"])),
        "item_bias": model == "mf" and data.draw(st.booleans()),
        "unobserved_weight": data.draw(st.sampled_from([1e-3, 0.5])),
        "factors": data.draw(st.integers(2, 9)),
        "batch_size": data.draw(st.integers(1, 30)),
        "local_epochs": data.draw(st.integers(1, 3)),
        "negatives": data.draw(st.integers(1, 4)),
        "local_optimiser": data.draw(st.sampled_from(["sgd", "adagrad", "adam"])),
        "local_step": data.draw(st.sampled_from([1e-3, 0.02])),
        "capacities": data.draw(st.sampled_from(["1x", "1x-2x", "2x-8x"])),
        "mapping": data.draw(st.sampled_from(["element", "chunk", "ranked"])),
    }
    check(data.draw(st.sampled_from([batched.run_round, captured])), data.draw(st.integers(0, 99)), rounds=1, **changes)


@pytest.mark.parametrize(
    ("changes", "served"),
    [({}, True), ({"item_bias": True}, False), ({"objective": "softmax"}, False), ({"objective": "squared"}, False)],
)
def test_only_pairs_go_to_the_kernel_of_pairs(
    changes: dict[str, Any], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(ops, "add_slopes", lambda *_: asked.append(1))
    federation, state, private = tiny_federation(tiny_data(3, 9, 40), tiny_settings(**changes))
    captured(state, private, federation, Rejections())
    assert bool(asked) is served


def test_one_negative_makes_the_softmax_bpr() -> None:
    found = []
    for objective in ("bpr", "softmax"):
        federation, state, private = tiny_federation(
            tiny_data(3, 9, 40), tiny_settings(objective=objective, capacities="1x-4x", negatives=1)
        )
        found.append(batched.run_round(state, private, federation, Rejections()).full)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_the_bias_is_held_whole_and_counted() -> None:
    federation, state, _ = tiny_federation(
        tiny_data(0, 9, 40), tiny_settings(item_bias=True, capacities="1x-4x-8x", compress="all", factors=8)
    )
    assert torch.equal(state.full[ITEM_BIAS], torch.zeros(40))
    sizes = [held.size() for held in federation.assignments(0)]
    plain, _, _ = tiny_federation(tiny_data(0, 9, 40), tiny_settings(capacities="1x-4x-8x", compress="all", factors=8))
    assert sizes == [held.size() + 40 for held in plain.assignments(0)]
