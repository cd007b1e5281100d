"""Co-occurrence sums: storage, cohorts, sizes, and updates that are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.algorithms.cooccurrence import cooccurrence
from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.cooccurrence import SUM, SYNC_STATE
from fairfold.algorithms.cooccurrence.scorer import (
    CoOccurrenceArchitecture,
)
from fairfold.config import read_settings
from fairfold.errors import FairfoldError, InvalidSettings
from fairfold.federation.simulation import simulate
from fairfold.federation.updates import Update
from fairfold.methods.truncated import candidate_splits
from tests.support.cooccurrence import SECURE, co_occurrence_federation, pair_sums
from tests.support.federations import after_rounds, tiny_data


@given(st.lists(st.sets(st.integers(0, 30), max_size=31), min_size=1, max_size=12), st.integers(1, 31))
def test_the_packed_sum_is_the_sum_of_outer_products(histories: list[set[int]], items: int) -> None:
    mine = [torch.tensor(sorted(one), dtype=torch.int64) for one in histories]
    weights = cooccurrence.history_weights(torch.tensor([len(one) for one in mine]))
    wanted = np.zeros((items, items))
    for history, weight in zip(mine, weights.tolist(), strict=True):
        x = np.zeros(31)
        x[history.numpy()] = 1
        wanted += weight * np.outer(x, x)[:items, :items]
    found = cooccurrence.unpack_triangle(pair_sums(mine, weights, items)).numpy()
    assert np.array_equal(found, wanted)  # to the bit: multiples of the unit


@pytest.mark.parametrize("items", [1, 2, 7, 40])
def test_leading_blocks_are_prefixes(items: int) -> None:
    train = tiny_data(1, 9, 40).train
    histories, weights = [train.of(user) for user in range(9)], cooccurrence.history_weights(train.counts_by_user)
    whole = pair_sums(histories, weights, 40)
    part = pair_sums(histories, weights, items)
    assert part.equal(whole[: len(part)])
    assert cooccurrence.unpack_triangle(part).equal(cooccurrence.unpack_triangle(whole)[:items, :items])
    assert cooccurrence.triangle_items(len(part)) == items
    assert cooccurrence.triangle_items(len(part) - 1) == items - 1


@given(st.integers(1, 60_000), st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0]))
def test_pairs_weigh_a_power_of_the_length_rounded_down(length: int, exponent: float) -> None:
    (found,) = cooccurrence.history_weights(torch.tensor([length]), exponent).double().tolist()
    steps = found * cooccurrence.UNIT
    assert steps == int(steps) >= 1
    assert found <= length**-exponent * (1 + 1e-12) < found + 1 / cooccurrence.UNIT + 1e-9
    if exponent == 1:
        assert steps == cooccurrence.UNIT // length  # whole numbers alone: nothing is rounded


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 61), st.sampled_from([0.0, 0.5, 1.0]))
def test_no_history_has_a_norm_above_a_power_of_its_length(history: set[int], items: int, exponent: float) -> None:
    mine = torch.tensor(sorted(history))
    packed = pair_sums([mine], cooccurrence.history_weights(torch.tensor([len(mine)]), exponent), items)
    most = len(mine) ** (1 - exponent)
    assert cooccurrence.frobenius_norm(packed) == pytest.approx(
        float(torch.linalg.norm(cooccurrence.unpack_triangle(packed))), rel=1e-6
    )
    assert cooccurrence.frobenius_norm(packed) <= most + 1e-6
    if items > int(mine[-1]):
        assert cooccurrence.frobenius_norm(packed) == pytest.approx(most, abs=len(mine) / cooccurrence.UNIT)


@pytest.mark.parametrize("cohort", [1, 3, None])
def test_cohorts_and_their_order_do_not_matter(cohort: int | None) -> None:
    data = tiny_data(2, 12, 30)
    fleet = {"capacities": "1x-4x", "clients_per_round": cohort}
    wanted = co_occurrence_federation(data, fleet=fleet | {"clients_per_round": None})
    expected = after_rounds(wanted, wanted.initial(), 1)
    federation = co_occurrence_federation(data, fleet=fleet, run={"seed": 5})
    state, rounds = federation.initial(), 0
    while not bool(federation.clients.local_state[SYNC_STATE].all()):
        state = after_rounds(federation, state, 1)
        rounds += 1
        assert rounds < 200
    assert state.algorithm_state[SUM][SUM].equal(expected.algorithm_state[SUM][SUM])
    assert all(state.full[name].equal(of) for name, of in expected.full.items())
    again = after_rounds(federation, state, 2)  # who comes back adds nothing
    assert again.algorithm_state[SUM][SUM].equal(state.algorithm_state[SUM][SUM])
    assert all(again.full[name].equal(of) for name, of in state.full.items())


def test_small_clients_upload_a_shorter_prefix_in_secure_aggregation() -> None:
    federation = co_occurrence_federation(
        tiny_data(2, 12, 30), fleet={"capacities": "1x-4x-16x"}, privacy=SECURE, run={"rounds": 1}
    )
    plan, algorithm = federation.plan, federation.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    assert isinstance(plan.architecture, CoOccurrenceArchitecture)
    head, whole = plan.architecture.head, plan.architecture.whole
    for size, share in enumerate((1, 4, 16)):
        uploaded = algorithm.upload_projection(plan, size).size
        assert uploaded == cooccurrence.triangle_size(
            min(head, cooccurrence.triangle_items(cooccurrence.triangle_size(whole) // share))
        )
        assert algorithm.traffic(plan, size)[1] == 4 * uploaded


def test_small_clients_upload_all_where_uploads_do_not_depend_on_size() -> None:
    federation = co_occurrence_federation(
        tiny_data(2, 12, 30), fleet={"capacities": "1x-4x-16x"}, subspace={"uploads": "all"}
    )
    plan, algorithm = federation.plan, federation.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    assert len({algorithm.upload_projection(plan, size).size for size in range(3)}) == 1
    assert len({held.bytes() for held in plan.assignments(0)}) > 1  # their models do


def test_updates_that_no_history_has_are_refused() -> None:
    federation = co_occurrence_federation(tiny_data(2, 6, 20), history_exponent=1.0)
    plan, algorithm = federation.plan, federation.plan.algorithm
    (task,) = algorithm.tasks(plan, federation.initial(), [0])
    good, _ = algorithm.client_update(plan, task, federation.clients.client(1, 0))
    assert algorithm.validate_update(plan, task, good) is None
    assert (
        algorithm.validate_update(plan, task, Update({SUM: 1.01 * good.sums[SUM]}, 1.0))
        == "a norm above that of its users"
    )
    assert algorithm.validate_update(plan, task, good + Update({SUM: good.sums[SUM]}, 0.0)) is not None
    below = good.sums[SUM].to_dense()
    assert algorithm.validate_update(plan, task, Update({SUM: below * torch.nan}, 1.0)) == "NaN or infinity"
    assert algorithm.validate_update(plan, task, Update({SUM: below[:-1]}, 1.0)) == "wrong size"


def test_settings_that_do_not_go_together() -> None:
    for tables in (
        {"algorithm": {"kind": "co_occurrence"}, "subspace": {"method": "fair"}},
        {"algorithm": {"kind": "co_occurrence"}, "model": {"kind": "neumf"}},
        {"algorithm": {"kind": "co_occurrence", "ridge": 0}},
    ):
        with pytest.raises(InvalidSettings):
            read_settings(tables)
    with pytest.raises(InvalidSettings, match="co_occurrence"):
        simulate(read_settings({"algorithm": {"kind": "gradient"}, "subspace": {"method": "truncated"}}))


def test_no_row_is_of_an_item_that_no_client_uploads() -> None:
    """Where the largest devices are 16x: what they hold is then all that there is, with as many columns as fit."""
    data = tiny_data(40, 12, 200)
    seen, whole = (co_occurrence_federation(data, **of).plan.architecture.head for of in ({}, {"privacy": SECURE}))  # type: ignore[attr-defined]
    for capacities, share in (("4x-64x", 4), ("16x", 16)):
        assert co_occurrence_federation(data, fleet={"capacities": capacities}).plan.architecture.head == seen  # type: ignore[attr-defined]
        once = {"rounds": 1}
        federation = co_occurrence_federation(data, fleet={"capacities": capacities}, privacy=SECURE, run=once)
        head = federation.plan.architecture.head  # type: ignore[attr-defined]
        assert head == cooccurrence.triangle_items(cooccurrence.triangle_size(whole) // share) < whole
        assert federation.plan.algorithm.upload_projection(federation.plan, 0).size == cooccurrence.triangle_size(head)  # type: ignore[attr-defined]
    assert candidate_splits(7_412, 437, 384, 6_040, whole=3_503)[0].columns == 24  # 437 rows of 24 columns in 4 bits
    assert candidate_splits(7_412, 437, 384, 6_040)[0].columns == 48


def test_a_capacity_without_a_row_is_refused() -> None:
    with pytest.raises(FairfoldError, match="truncated"):
        co_occurrence_federation(tiny_data(), fleet={"capacities": "1x-3B"})
