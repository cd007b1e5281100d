"""Robust rules against their definitions, and what a few hostile clients can do under each."""

import statistics
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from flwr.app import Array, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.backends.batched import batched
from fairfold.config import Settings
from fairfold.errors import InvalidSettings
from fairfold.federation.aggregation import ROBUST, RobustRule, make_aggregate
from fairfold.federation.robust import _RULES, COMPARED, BoundedAggregate, combine
from fairfold.federation.updates import ClientTask, Update
from fairfold.subspace.projection import Projection, whole
from tests.flower.test_failed_steps import NODES, arrays_of, fleet
from tests.support.federations import tiny_data
from tests.support.nodes import assert_same, in_process, simulated
from tests.support.settings import make_settings

rows = st.integers(1, 12)


def drawn(clients: int, seed: int, length: int = 6) -> tuple[numpy.ndarray, numpy.ndarray]:
    source = numpy.random.default_rng(seed)
    return source.normal(size=(clients, length)), source.uniform(0.5, 3.0, clients)


def combined(kind: str, changes: numpy.ndarray, weights: numpy.ndarray, share: float = 0.2) -> numpy.ndarray:
    """The mean change that a rule makes, of two tensors."""
    updates = [
        Update({"a": torch.tensor(row[:2] * weight), "b": torch.tensor(row[2:] * weight)}, float(weight))
        for row, weight in zip(changes, weights, strict=True)
    ]
    found = combine(RobustRule(kind, share), updates)
    assert found.weight == pytest.approx(weights.sum())
    return torch.cat([found.sums["a"], found.sums["b"]]).numpy() / found.weight


def krum_by_definition(changes: numpy.ndarray, weights: numpy.ndarray, hostile: int) -> numpy.ndarray:
    count = len(changes)
    scores = []
    for one in range(count):
        others = sorted(((changes[one] - changes[other]) ** 2).sum() for other in range(count) if other != one)
        scores.append(sum(others[: max(count - hostile - 2, 1)]))
    chosen = numpy.argsort(scores, kind="stable")[: count - hostile]
    return numpy.average(changes[chosen], axis=0, weights=weights[chosen])


@settings(max_examples=25)
@given(rows, st.integers(0, 999), st.sampled_from([0.05, 0.2, 0.4]))
def test_every_rule_is_its_definition(clients: int, seed: int, share: float) -> None:
    changes, weights = drawn(clients, seed)
    hostile = RobustRule("trimmed", share).num_hostile(clients)
    assert hostile == min(int(numpy.ceil(share * clients)), (clients - 1) // 2)
    numpy.testing.assert_allclose(combined("median", changes, weights), numpy.median(changes, axis=0))
    trimmed = numpy.sort(changes, axis=0)[hostile : clients - hostile].mean(0)
    numpy.testing.assert_allclose(combined("trimmed", changes, weights, share), trimmed)
    norms = numpy.linalg.norm(changes, axis=1)
    scaled = changes * numpy.minimum(1, numpy.median(norms) / norms)[:, None]
    numpy.testing.assert_allclose(combined("clipped", changes, weights), numpy.average(scaled, axis=0, weights=weights))
    if clients >= 3:
        expected = krum_by_definition(changes, weights, hostile)
        numpy.testing.assert_allclose(combined("multi-krum", changes, weights, share), expected)


@given(st.sampled_from(ROBUST), st.integers(0, 99), st.floats(1.0, 1e6))
def test_a_fifth_of_hostile_clients_moves_no_rule_further_than_the_others_spread(
    kind: str, seed: int, size: float
) -> None:
    changes, _ = drawn(10, seed)
    poisoned = changes.copy()
    poisoned[:2] = size * 100
    found = combined(kind, poisoned, numpy.ones(10), 0.2)
    assert numpy.linalg.norm(found) <= 2 * numpy.linalg.norm(changes[2:], axis=1).max()


def bounded_sum(settings: Settings, updates: list[Update], task: ClientTask) -> Update:
    aggregate = make_aggregate(settings, bounded=True)
    assert isinstance(aggregate, BoundedAggregate)
    for update in updates:
        aggregate.add(task, update)
    assert aggregate.weight == pytest.approx(sum(update.weight for update in updates))
    ((_, found),) = aggregate.parts()
    return found


@pytest.mark.parametrize("rule", ["delta", "paper"])
@pytest.mark.parametrize("place", [0, 30])
@pytest.mark.parametrize(("groups", "times"), [(1, 5), (3, 2)])
def test_devices_without_a_rule_are_bounded_by_the_median_norm(rule: str, place: int, groups: int, times: int) -> None:
    """Honest changes stay as they are, to the digit; a hostile one has five times the median norm, a group's two."""
    chosen: dict[str, Any] = {"algorithm": {"kind": "gradient", "aggregation": rule}}
    if groups > 1:
        chosen |= {"privacy": {"level": "secure"}, "fleet": {"clients_per_round": None, "secure_groups": groups}}
    settings = Settings(**chosen)
    source = torch.Generator().manual_seed(0)
    sent = torch.randn(8, generator=source)
    task = ClientTask(0, 0, {"t": whole((8, 1))}, {"t": sent})
    changes = torch.randn(40, 8, generator=source)
    weights = torch.rand(40, generator=source) + 0.5

    def updates(of: torch.Tensor) -> list[Update]:
        models = of + sent if rule == "paper" else of
        return [Update({"t": row * weight}, float(weight)) for row, weight in zip(models, weights, strict=True)]

    honest = bounded_sum(settings, updates(changes), task)
    expected = sum(update.sums["t"] for update in updates(changes))
    torch.testing.assert_close(honest.sums["t"], expected)
    others = expected - weights[place] * changes[place]
    changes[place] *= 1e4
    kept = bounded_sum(settings, updates(changes), task).sums["t"] - others
    norms = changes[: max(COMPARED, place) + 1].norm(dim=1)
    assert kept.norm() / weights[place] == pytest.approx(times * statistics.median(norms.tolist()), rel=1e-3)


@pytest.mark.parametrize("rule", ["delta", "paper", *ROBUST])
def test_numbers_without_a_weight_count_for_nothing(rule: str) -> None:
    """Before, numbers just within ``max_change`` joined the sums of others without any bound on their norm."""
    settings = Settings(algorithm={"kind": "gradient", "aggregation": rule})
    task = ClientTask(0, 0, {"t": whole((8, 1))}, {"t": torch.ones(8)})
    honest = [Update({"t": row}, 1.0) for row in torch.randn(5, 8, generator=torch.Generator().manual_seed(0))]
    alone, joined = make_aggregate(settings, bounded=True), make_aggregate(settings, bounded=True)
    for update in honest:
        alone.add(task, update)
    for update in [Update({"t": torch.full((8,), 9e3)}, 0.0), *honest]:
        joined.add(task, update)
    ((_, expected),), ((_, found),) = alone.parts(), joined.parts()
    assert found.weight == expected.weight
    assert found.sums["t"].equal(expected.sums["t"])


def test_a_device_alone_of_its_size_is_compared_with_all_others() -> None:
    """A device chooses its capacity: before, one of a size that nobody else had was compared with itself."""
    source = torch.Generator().manual_seed(0)
    common, rare = (ClientTask(0, size, {"t": whole((8, 1))}, {"t": torch.zeros(8)}) for size in (0, 1))
    for rule in ("delta", *ROBUST):
        aggregate = make_aggregate(Settings(algorithm={"kind": "gradient", "aggregation": rule}), bounded=True)
        for row in torch.randn(9, 8, generator=source):
            aggregate.add(common, Update({"t": row}, 1.0))
        aggregate.add(rare, Update({"t": torch.full((8,), 9e3)}, 1.0))
        found = {task.size: update.sums["t"].norm() for task, update in aggregate.parts()}
        assert 0 < found[1] < 5 * 4, rule


def test_a_sum_beside_the_model_has_a_bound_of_its_own() -> None:
    """Before, it could be as large as the whole update: the sum of u uᵀ of the recipe ``fair``, turned round."""
    shapes: dict[str, Projection] = {"rows": whole((8, 1)), "gram": whole((4, 1))}
    task = ClientTask(0, 0, shapes, {"rows": torch.zeros(8)})
    aggregate = make_aggregate(Settings(algorithm={"kind": "closed_form"}), bounded=True)
    for _ in range(4):
        aggregate.add(task, Update({"rows": torch.ones(8), "gram": torch.full((4,), 0.01)}, 1.0))
    aggregate.add(task, Update({"rows": torch.ones(8), "gram": torch.full((4,), -1.0)}, 1.0))
    ((_, found),) = aggregate.parts()
    torch.testing.assert_close(found.sums["gram"], torch.full((4,), 4 * 0.01 - 10 * 0.01))
    torch.testing.assert_close(found.sums["rows"], torch.full((8,), 5.0))


def test_a_small_vector_of_an_honest_model_is_bounded_with_the_whole() -> None:
    """A bias may change ten times as much as others': the model's vectors have one norm."""
    shapes: dict[str, Projection] = {"rows": whole((8, 1)), "bias": whole((1, 1))}
    task = ClientTask(0, 0, shapes, {"rows": torch.zeros(8), "bias": torch.zeros(1)})
    aggregate = make_aggregate(Settings(algorithm={"kind": "gradient"}), bounded=True)
    for bias in (0.01, 0.01, 0.01, 1.0):
        aggregate.add(task, Update({"rows": torch.ones(8), "bias": torch.tensor([bias])}, 1.0))
    ((_, found),) = aggregate.parts()
    torch.testing.assert_close(found.sums["bias"], torch.tensor([1.03]))


@pytest.mark.parametrize("rule", ["delta", "paper"])
def test_a_users_weight_by_samples_is_bounded_by_the_median(rule: str) -> None:
    """Nobody can check a number of samples: before, one device weighed as much as a user who has every item."""
    settings = Settings(algorithm={"kind": "gradient", "aggregation": rule, "weighting": "data"})
    task = ClientTask(0, 0, {"t": whole((8, 1))}, {"t": torch.ones(8)})
    aggregate = make_aggregate(settings, bounded=True)
    for weight, users in [(90.0, 1), (100.0, 1), (3_000.0, 30), (110.0, 1), (9e6, 2)]:
        aggregate.add(task, Update({"t": torch.full((8,), weight)}, weight), users=users)
    ((_, found),) = aggregate.parts()
    assert found.weight == pytest.approx(90 + 100 + 3_000 + 110 + 2 * 5 * 100)
    torch.testing.assert_close(found.sums["t"], torch.full((8,), found.weight))
    equal = make_aggregate(settings.with_changes({"algorithm.weighting": "equal"}), bounded=True)
    for weight, users in [(1.0, 50), (1.0, 50), (1.0, 50), (50.0, 50)]:
        equal.add(task, Update({"t": torch.full((8,), weight)}, weight), users=users)
    assert equal.weight == 53
    ((_, found),) = equal.parts()
    assert found.weight == 53


@pytest.mark.parametrize("kind", ["trimmed", "multi-krum"])
def test_a_network_combines_as_a_simulation(kind: str, tmp_path: Path) -> None:
    chosen = make_settings(
        rounds=1, capacities="1x-2x", clients_per_round=None, evaluate_every=9, factors=4,
        algorithm={"kind": "gradient", "aggregation": kind},
    )  # fmt: skip
    data = tiny_data(3, 10, 30)
    state = in_process(data, chosen, 10, tmp_path).run()
    assert_same(state.full, simulated(data, chosen)[0].full, 1e-5)
    assert_same(state.full, simulated(data, chosen, batched)[0].full, 1e-4)
    mean = simulated(data, chosen.with_changes({"algorithm.aggregation": "delta"}))[0].full
    assert any(not tensor.equal(state.full[name]) for name, tensor in mean.items())


def test_a_hostile_node_hardly_moves_a_robust_model(tmp_path: Path) -> None:
    """Changes near the bound: the model stays near that without the node; before, one of forty destroyed it."""

    def near_the_bound(reply: Message) -> None:
        arrays = arrays_of(reply)
        for name in arrays:
            arrays[name] = Array(numpy.full_like(arrays[name].numpy(), -9e3))

    def moved(where: str, **algorithm: Any) -> float:
        chosen = make_settings(
            rounds=2, capacities="1x", clients_per_round=None, evaluate_every=9, factors=4,
            algorithm={"kind": "gradient", "server_optimizer": "sgd", "server_lr": 1.0} | algorithm,
        )  # fmt: skip
        honest = fleet(chosen, tmp_path / where / "honest", {}).run().full
        poisoned = fleet(chosen, tmp_path / where / "hostile", {"train": near_the_bound}).run().full
        return max(float((poisoned[name] - tensor).abs().max()) for name, tensor in honest.items())

    assert moved("krum", aggregation="multi-krum", byzantine_share=1 / NODES) < 1.0
    assert moved("default") < 10.0, "within five times the median of the norms"


def test_masks_hide_what_robust_rules_compare() -> None:
    with pytest.raises(InvalidSettings, match="compares updates number by number"):
        make_settings(algorithm={"kind": "gradient", "aggregation": "median"}, method="inconsistent")
    with pytest.raises(InvalidSettings, match="compares single updates, which masks hide"):
        make_settings(algorithm={"kind": "gradient", "aggregation": "median"}, privacy={"level": "secure"})


def test_every_rule_that_can_be_named_is_there() -> None:
    assert tuple(_RULES) == ROBUST


def test_few_updates_are_combined() -> None:
    for clients in (1, 2):
        changes, weights = drawn(clients, 0)
        for kind in ROBUST:
            assert numpy.isfinite(combined(kind, changes, weights)).all()
    assert combine(RobustRule("median", 0.1), [Update({"a": torch.zeros(2)}, 0.0)]).weight == 0
