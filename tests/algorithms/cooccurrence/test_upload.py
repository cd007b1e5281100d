"""Uploads of co-occurrences: dense or sparse, within a client's capacity, and only what has changed."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.algorithms.cooccurrence import cooccurrence
from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.cooccurrence import REQUEST, SUM, SYNC_STATE, CoOccurrenceUpload, covered_items
from fairfold.algorithms.cooccurrence.scorer import ROWS
from fairfold.backends.batched import batched
from fairfold.config import read_settings
from fairfold.federation.algorithm import SparseUpdates
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round, sequential
from fairfold.federation.updates import Aggregate, PublicStatistics, Update
from tests.support.cooccurrence import co_occurrence_federation, pair_sums
from tests.support.federations import tiny_data

HISTORIES = st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=6)


def federation_of(users: int, items: int, capacities: str, **keys: Any) -> Federation:
    fleet = {"capacities": capacities, "clients_per_round": None}
    return co_occurrence_federation(tiny_data(2, users, items), fleet=fleet, **keys)


def histories_of(sets: list[set[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([item for one in sets for item in sorted(one)], dtype=torch.int64), torch.tensor(
        list(map(len, sets))
    )


def dense_sum(sets: list[set[int]], most: int, leading: int) -> np.ndarray:
    """By outer products: of every user the first so many items, weighed by how many they have in all."""
    total = np.zeros((leading, leading))
    for one in sets:
        x = np.zeros(41)
        x[sorted(one)[:most]] = 1
        total += (65_536 // max(len(one), 1)) / 65_536 * np.outer(x, x)[:leading, :leading]
    return total


@given(HISTORIES, st.integers(1, 50), st.integers(1, 41))
def test_dense_and_sparse_uploads_are_the_same(sets: list[set[int]], most: int, leading: int) -> None:
    found = CoOccurrenceUpload.of(*histories_of(sets), most)
    short, wanted = found.shortest(leading, torch.float32), dense_sum(sets, most, leading)
    assert np.array_equal(cooccurrence.unpack_triangle(short.to_dense()).numpy(), wanted)
    assert np.array_equal(cooccurrence.unpack_triangle(found.dense(leading, torch.float32)).numpy(), wanted)
    assert cooccurrence.frobenius_norm(short) == pytest.approx(float(np.linalg.norm(wanted)), rel=1e-6)
    if short.is_sparse:  # no longer than all of the numbers
        assert (
            Update({SUM: short}, 1.0).bytes_up
            == 8 * short.coalesce().values().numel()
            < 4 * cooccurrence.triangle_size(leading)
        )


@given(HISTORIES, st.data())
def test_a_later_upload_is_what_has_changed(sets: list[set[int]], data: Any) -> None:
    then = [set(data.draw(st.lists(st.sampled_from(sorted(one)), unique=True))) if one else set() for one in sets]
    items, lengths = histories_of(sets)
    uploaded = torch.tensor([item in before for one, before in zip(sets, then, strict=True) for item in sorted(one)])
    uploaded = uploaded.bool() if len(uploaded) else torch.zeros(0, dtype=torch.bool)
    found = CoOccurrenceUpload.changes(items, lengths, torch.ones_like(uploaded), uploaded, 7)
    wanted = dense_sum(sets, 7, 41) - dense_sum(then, 7, 41)
    assert np.array_equal(cooccurrence.unpack_triangle(found.shortest(41, torch.float32).to_dense()).numpy(), wanted)
    same = CoOccurrenceUpload.changes(items, lengths, uploaded, uploaded, 7).shortest(41, torch.float32)
    assert same.is_sparse
    assert not same.coalesce().values().numel()  # who has nothing new sends nothing


def test_a_client_lists_its_pairs_and_allocates_nothing_of_the_size_of_the_sum() -> None:
    federation = federation_of(12, 300, "1x-2x")
    plan, state = federation.plan, federation.initial()
    large, small = plan.algorithm.tasks(plan, state, [0, 1])
    updates = [plan.algorithm.client_update(plan, task, federation.clients.client(3, 0))[0] for task in (large, small)]
    mine = federation.clients.train.of(3)
    for update in updates:
        assert update.sums[SUM].is_sparse
        assert update.bytes_up == 8 * cooccurrence.triangle_size(len(mine))
        assert plan.algorithm.validate_update(plan, large, update) is None
    assert updates[0].sums[SUM].to_dense().equal(updates[1].sums[SUM].to_dense())  # both have room for all


def test_a_list_takes_the_memory_of_its_pairs() -> None:
    """In a process of its own: 300 of 8,000 items, where all numbers of the sum would take 128 MB."""
    code = """
import resource, torch
from fairfold.algorithms.cooccurrence.cooccurrence import CoOccurrenceUpload
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
uploaded = lambda mine: CoOccurrenceUpload.of(mine, torch.tensor([len(mine)]), len(mine)).shortest(8_000, torch.float32)
uploaded(torch.arange(5))
before, update = peak(), uploaded(torch.arange(0, 8_000, 26)[:300])
print(update.is_sparse, update.values().numel(), peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sparse, many, more = done.stdout.split()
    assert sparse == "True"
    assert int(many) == cooccurrence.triangle_size(300)
    assert float(more) < 8


def test_clients_without_room_upload_the_pairs_of_their_first_items() -> None:
    federation = federation_of(12, 300, "1x-64x-4kB")
    plan, state = federation.plan, federation.initial()
    whole = cooccurrence.triangle_size(plan.architecture.tables[ROWS][0])
    for size, task in enumerate(plan.algorithm.tasks(plan, state, [0, 1, 2])):
        most = int(task.vectors[REQUEST][3])
        if size:
            share = plan.settings.subspace.share(plan.architecture.tensors, plan.capacities[size])  # type: ignore[attr-defined]
            assert 2 * cooccurrence.triangle_size(most) <= share * whole < 2 * cooccurrence.triangle_size(most + 1)
        update, local_state = plan.algorithm.client_update(plan, task, federation.clients.client(3, 0))
        mine = federation.clients.train.of(3)
        wanted = pair_sums([mine[:most]], cooccurrence.history_weights(torch.tensor([len(mine)]), 0.5), 300)
        found = update.sums[SUM].to_dense()
        assert found.equal(wanted[: len(found)])
        assert not wanted[len(found) :].any()
        assert bool(local_state[SYNC_STATE].all())
    assert most < len(mine)  # the last one had no room


def test_clients_alone_and_together_give_the_same_sums() -> None:
    states = []
    for backend in (sequential, batched):
        federation = federation_of(20, 120, "1x-64x-2kB")
        state = federation.initial()
        for _ in range(2):
            state = run_round(state, federation.sampler, federation.clients, Rejections(), backend)
        states.append(state)
    first, second = states
    assert first.algorithm_state[SUM][SUM].equal(second.algorithm_state[SUM][SUM])
    assert all(of.equal(second.full[name]) for name, of in first.full.items())


def test_sparse_and_dense_updates_are_added_in_any_order() -> None:
    federation = federation_of(8, 200, "1x")
    plan = federation.plan
    (task,) = plan.algorithm.tasks(plan, federation.initial(), [0])
    some = [plan.algorithm.client_update(plan, task, federation.clients.client(user, 0))[0] for user in range(4)]
    some[1] = some[1].dense()
    wanted = torch.stack([update.sums[SUM].to_dense() for update in some]).sum(0)
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 3, 1], [3, 2, 1, 0]):
        aggregate, added = Aggregate(), some[order[0]]
        for place in order:
            aggregate.add(task, some[place])
        for place in order[1:]:
            added = added + some[place]
        ((_, found),) = aggregate.parts()
        assert found.sums[SUM].equal(wanted)
        assert added.sums[SUM].to_dense().equal(wanted)
        assert found.weight == added.weight == 4.0


def test_secure_aggregation_uploads_all_numbers() -> None:
    federation = federation_of(12, 300, "1x-16x", privacy={"level": "secure", "min_cohort": 2})
    plan = federation.plan
    for task in plan.algorithm.tasks(plan, federation.initial(), [0, 1]):
        update, _ = plan.algorithm.client_update(plan, task, federation.clients.client(3, 0))
        assert not update.sums[SUM].is_sparse
        assert update.bytes_up == task.context[SUM].size * 4 == plan.algorithm.traffic(plan, task.size)[1]


def test_support_is_counted_among_users_whose_clients_upload() -> None:
    """Under masks a rare item is uploaded by larger devices alone: so many of their users have to have it."""
    counts, masks = torch.arange(100, 0, -1), {"level": "secure"}

    def head_of(capacities: str, least: float, rounds: int = 16, **tables: Any) -> int:
        settings = read_settings({"fleet": {"capacities": capacities}, "run": {"rounds": rounds}} | tables)
        return covered_items(settings, PublicStatistics(300, 100), 100, counts, least)

    for least in (3, 10, 40):
        enough = int((counts >= least).sum())
        assert head_of("1x", least, privacy=masks) == enough  # all share of all
        assert head_of("1x-4x-16x", least) == enough  # and where updates may be seen
        assert head_of("16x", least, privacy=masks) == min(enough, 24)  # a sixteenth of the pairs
        assert head_of("1x-4x-16x", least, 46, privacy=masks) == enough  # who sends all, in parts
        mixed = head_of("1x-4x-16x", least, privacy=masks)
        share = torch.tensor([1.0] * 24 + [2 / 3] * 25 + [1 / 3] * 51)  # of 24, 49 and 100 items
        assert bool((counts[:mixed] * share[:mixed] >= least).all())
        assert not bool((counts[mixed:] * share[mixed:] >= least).any())
    assert covered_items(read_settings({"privacy": masks}), PublicStatistics(300, 100), 100, None, 3) == 100


def test_traffic_is_what_typical_clients_send() -> None:
    federation = federation_of(40, 400, "1x-2x")
    plan, algorithm = federation.plan, federation.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    task = algorithm.tasks(plan, federation.initial(), [0, 1])
    sizes = federation.sampler.size.tolist()
    sent = [
        algorithm.client_update(plan, task[sizes[user]], federation.clients.client(user, 0))[0].bytes_up
        for user in range(40)
    ]
    expected = [algorithm.traffic(plan, sizes[user])[1] for user in range(40)]
    assert sum(expected) == pytest.approx(sum(sent), rel=1e-3)
    assert max(sent) <= SparseUpdates.of(algorithm).max_update_bytes(plan, 0)
    run_round(federation.initial(), federation.sampler, federation.clients, Rejections(), batched)
    again = [
        algorithm.client_update(plan, task[sizes[user]], federation.clients.client(user, 1))[0].bytes_up
        for user in range(40)
    ]
    assert sum(again) == sum(algorithm.traffic(plan, size, 1)[1] for size in sizes) == 0  # nothing new to say


def test_traffic_is_of_the_items_of_the_head() -> None:
    federation = federation_of(60, 400, "1x", support=26)
    plan, algorithm = federation.plan, federation.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    assert plan.architecture.tables[ROWS][0] < 200  # of 400 items
    (task,) = algorithm.tasks(plan, federation.initial(), [0])
    sent = sum(
        algorithm.client_update(plan, task, federation.clients.client(user, 0))[0].bytes_up for user in range(60)
    )
    assert 60 * algorithm.traffic(plan, 0)[1] == pytest.approx(sent, rel=0.25)


def test_clients_upload_the_rest_when_tuning_is_over() -> None:
    federation = federation_of(40, 400, "1x", tune=True, run={"rounds": 16})
    plan, algorithm, state = federation.plan, federation.plan.algorithm, federation.initial()
    assert isinstance(algorithm, CoOccurrence)
    end = algorithm.tuning(plan).schedule.end
    assert 1 < end < 15
    for number in range(16):
        (task,) = algorithm.tasks(plan, state, [0])
        sent = sum(
            algorithm.client_update(plan, task, federation.clients.client(user, number))[0].bytes_up
            for user in range(40)
        )
        expected = 40 * algorithm.traffic(plan, 0, number)[1]
        assert (sent > 0) == (expected > 0), number
        if number in (0, end):  # at first nine tenths of the histories
            assert 0.7 * expected < sent < 1.01 * expected, number
        state = run_round(state, federation.sampler, federation.clients, Rejections(), batched)


def test_a_norm_that_no_history_has_is_refused_dense_and_sparse() -> None:
    federation = federation_of(6, 100, "1x", history_exponent=1.0)
    plan = federation.plan
    (task,) = plan.algorithm.tasks(plan, federation.initial(), [0])
    good, _ = plan.algorithm.client_update(plan, task, federation.clients.client(1, 0))
    assert good.sums[SUM].is_sparse
    for update in (good, good.dense()):
        assert plan.algorithm.validate_update(plan, task, update) is None
        loud = replace(update, sums={SUM: 1.01 * update.sums[SUM]})
        assert plan.algorithm.validate_update(plan, task, loud) == "a norm above that of its users"
        wrong = replace(update, sums={SUM: update.sums[SUM] * torch.nan})
        assert plan.algorithm.validate_update(plan, task, wrong) == "NaN or infinity"


@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_histories_weigh_what_the_settings_say_and_their_norm_is_bounded(exponent: float) -> None:
    federation = federation_of(6, 100, "1x", history_exponent=exponent)
    plan, clients = federation.plan, federation.clients
    assert isinstance(plan.algorithm, CoOccurrence)
    (task,) = plan.algorithm.tasks(plan, federation.initial(), [0])
    head = plan.architecture.tables[ROWS][0]
    update, _ = plan.algorithm.client_update(plan, task, clients.client(1, 0))
    x = np.zeros(head)
    x[[item for item in clients.train.of(1).tolist() if item < head]] = 1
    found = cooccurrence.unpack_triangle(update.sums[SUM].to_dense()).numpy()
    assert found == pytest.approx(np.outer(x, x) * x.sum() ** -exponent, abs=2**-16)
    assert plan.algorithm.validate_update(plan, task, update) is None
    largest = head ** (1 - exponent) / x.sum() ** (1 - exponent)  # as if one user had all items
    for factor, problem in ((0.99, None), (1.02, "a norm above that of its users")):
        other = replace(update, sums={SUM: factor * largest * update.sums[SUM]})
        assert plan.algorithm.validate_update(plan, task, other) == problem
