"""Every objective of the gradient solver, with and without a bias an item: the numbers of the readable loop."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.backends.batched import batched
from fairfold.federation.architecture import ITEM_BIAS
from fairfold.kernels import gpu, ops
from tests.support.federations import after_rounds, make_federation, tiny_data, tiny_settings
from tests.support.parity import RUNNERS, Runner, by_backend, check_rounds, graph, precision

DEVICE = torch.device("cuda" if gpu.available() else "cpu")
RUN = {"batched": RUNNERS["batched"], "graph": Runner(by_backend(graph(DEVICE), DEVICE), lambda _: True)}


def check(runner: str, seed: int, rounds: int = 2, **changes: Any) -> None:
    chosen = tiny_settings(seed=seed, **changes)
    check_rounds(lambda: tiny_data(seed, 9, 40), chosen, rounds=rounds, runner=RUN[runner], absolute=1e-7)


@pytest.mark.parametrize("runner", list(RUN))
@pytest.mark.parametrize("item_bias", [False, True])
@pytest.mark.parametrize("objective", ["bpr", "softmax", "squared"])
@pytest.mark.parametrize("changes", [
    {},
    {"local_optimizer": "adam", "local_lr": 0.02, "local_epochs": 2, "l2": 0.1},
    {"aggregation": "delta", "server_optimizer": "adam", "weighting": "equal", "rehash": True},
    {"user_vectors": "uploaded", "compress": "all"},
])  # fmt: skip
def test_objectives(runner: str, objective: str, item_bias: bool, changes: dict[str, Any]) -> None:
    check(runner, 1, objective=objective, item_bias=item_bias, capacities="1x-4x", num_negatives=3, **changes)


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
    base: dict[str, Any] = {"capacities": "1x-2x", "factors": 8, "local_lr": 0.02, "num_negatives": 2}
    check("batched", 2, objective=objective, **base | changes)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_generated_federations(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(["mf", "neumf"]))
    changes: dict[str, Any] = {
        "model": model,
        "objective": data.draw(st.sampled_from(["bpr", "softmax", "squared"])),
        "factors": data.draw(st.integers(2, 9)),
        "batch_size": data.draw(st.integers(1, 30)),
        "local_epochs": data.draw(st.integers(1, 3)),
        "num_negatives": data.draw(st.integers(1, 4)),
        "local_optimizer": data.draw(st.sampled_from(["sgd", "adagrad", "adam"])),
        "local_lr": data.draw(st.sampled_from([1e-3, 0.02])),
        "capacities": data.draw(st.sampled_from(["1x", "1x-2x", "2x-8x"])),
        "mapping": data.draw(st.sampled_from(["element", "chunk", "ranked"])),
    }
    if model == "mf":
        changes["item_bias"] = data.draw(st.booleans())
    if changes["objective"] == "squared":
        changes["unobserved_weight"] = data.draw(st.sampled_from([1e-3, 0.5]))
    check(data.draw(st.sampled_from(list(RUN))), data.draw(st.integers(0, 99)), rounds=1, **changes)


@pytest.mark.parametrize(
    ("changes", "served"),
    [({}, True), ({"item_bias": True}, False), ({"objective": "softmax"}, False), ({"objective": "squared"}, False)],
)
def test_only_pairs_go_to_the_kernel_of_pairs(
    changes: dict[str, Any], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(ops, "add_gradients", lambda *_: asked.append(1))
    with precision():
        RUN["graph"].run(tiny_settings(**changes), tiny_data(3, 9, 40), 1)
    assert bool(asked) is served


def test_one_negative_makes_the_softmax_bpr() -> None:
    found = []
    for objective in ("bpr", "softmax"):
        with precision():
            world, state = make_federation(tiny_data(3, 9, 40), tiny_settings(objective=objective, capacities="1x-4x"))
            found.append(after_rounds(world, state, backend=batched).full)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_the_bias_is_held_whole_and_counted() -> None:
    def made(**changes: Any) -> Any:
        chosen = tiny_settings(capacities="1x-4x-8x", compress="all", factors=8, **changes)
        return make_federation(tiny_data(0, 9, 40), chosen)

    (world, state), (plain, _) = made(item_bias=True), made()
    assert torch.equal(state.full[ITEM_BIAS], torch.zeros(40))
    sizes = [held.size() for held in world.plan.assignments(0)]
    assert sizes == [held.size() + 40 for held in plain.plan.assignments(0)]
