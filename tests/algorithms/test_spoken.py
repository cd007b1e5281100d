"""What devices say of their pairs: the shorter of two ways, as much as they have room for, what has changed alone."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.algorithms import pairs
from fairfold.algorithms.correlations import ASKED, SUM, Correlations
from fairfold.algorithms.pair_architecture import ROWS
from fairfold.algorithms.said import SAID
from fairfold.algorithms.spoken import Spoken, heard_of
from fairfold.backends.batched import batched
from fairfold.protocol.faults import Rejections
from fairfold.protocol.round import in_turn, run_round
from fairfold.protocol.words import Answer, Public, Totals
from fairfold.settings import read_settings
from fairfold.simulate.numbering import numbered
from fairfold.simulate.world import World
from tests.federations import tiny_data

HISTORIES = st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=6)


def world_of(users: int, items: int, capacities: str, **tables: Any) -> World:
    settings = read_settings(
        {
            "model": {"factors": 4},
            "algorithm": {"kind": "correlations", "support": 1, "choose": False},
            "fleet": {"capacities": capacities, "clients_per_round": None},
        }
        | tables
    )
    return World.of(settings, numbered(tiny_data(2, users, items), settings))


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
def test_both_ways_say_the_same(sets: list[set[int]], most: int, leading: int) -> None:
    found = Spoken.of(*histories_of(sets), most)
    short, wanted = found.shortest(leading, torch.float32), dense_sum(sets, most, leading)
    assert np.array_equal(pairs.matrix_of(short.to_dense()).numpy(), wanted)
    assert np.array_equal(pairs.matrix_of(found.summed(leading, torch.float32)).numpy(), wanted)
    assert pairs.frobenius(short) == pytest.approx(float(np.linalg.norm(wanted)), rel=1e-6)
    if short.is_sparse:  # no longer than all of the numbers
        assert Answer({SUM: short}, 1.0).bytes_up == 8 * short.coalesce().values().numel() < 4 * pairs.size_of(leading)


@given(HISTORIES, st.data())
def test_what_is_said_again_is_what_has_changed(sets: list[set[int]], data: Any) -> None:
    then = [set(data.draw(st.lists(st.sampled_from(sorted(one)), unique=True))) if one else set() for one in sets]
    items, lengths = histories_of(sets)
    said = torch.tensor([item in before for one, before in zip(sets, then, strict=True) for item in sorted(one)])
    said = said.bool() if len(said) else torch.zeros(0, dtype=torch.bool)
    found = Spoken.changes(items, lengths, torch.ones_like(said), said, 7)
    wanted = dense_sum(sets, 7, 41) - dense_sum(then, 7, 41)
    assert np.array_equal(pairs.matrix_of(found.shortest(41, torch.float32).to_dense()).numpy(), wanted)
    same = Spoken.changes(items, lengths, said, said, 7).shortest(41, torch.float32)
    assert same.is_sparse
    assert not same.coalesce().values().numel()  # who has nothing new sends nothing


def test_a_device_lists_its_pairs_and_makes_nothing_of_the_size_of_the_sum() -> None:
    world = world_of(12, 300, "1x-2x")
    plan, state = world.plan, world.initial()
    large, small = plan.algorithm.send(plan, state, [0, 1])
    answers = [plan.algorithm.answer(plan, sent, world.people.client(3, 0))[0] for sent in (large, small)]
    mine = world.people.train.of(3)
    for answer in answers:
        assert answer.sums[SUM].is_sparse
        assert answer.bytes_up == 8 * pairs.size_of(len(mine))
        assert plan.algorithm.problem(plan, large, answer) is None
    assert answers[0].sums[SUM].to_dense().equal(answers[1].sums[SUM].to_dense())  # both have room for all


def test_a_list_takes_the_memory_of_its_pairs() -> None:
    """In a process of its own: 300 of 8,000 items, where all numbers of the sum would take 128 MB."""
    code = """
import resource, torch
from fairfold.algorithms.spoken import Spoken
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
said = lambda mine: Spoken.of(mine, torch.tensor([len(mine)]), len(mine)).shortest(8_000, torch.float32)
said(torch.arange(5))
before, answer = peak(), said(torch.arange(0, 8_000, 26)[:300])
print(answer.is_sparse, answer.values().numel(), peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sparse, many, more = done.stdout.split()
    assert sparse == "True"
    assert int(many) == pairs.size_of(300)
    assert float(more) < 8


def test_who_has_no_room_says_the_pairs_of_their_first_items() -> None:
    world = world_of(12, 300, "1x-64x-4kB")
    plan, state = world.plan, world.initial()
    whole = pairs.size_of(plan.architecture.tables[ROWS][0])
    for size, sent in enumerate(plan.algorithm.send(plan, state, [0, 1, 2])):
        most = int(sent.vectors[ASKED][3])
        if size:
            share = plan.settings.subspace.share(plan.architecture.tensors, plan.capacities[size])  # type: ignore[attr-defined]
            assert 2 * pairs.size_of(most) <= share * whole < 2 * pairs.size_of(most + 1)
        answer, own = plan.algorithm.answer(plan, sent, world.people.client(3, 0))
        mine = world.people.train.of(3)
        wanted = pairs.pair_sums([mine[:most]], pairs.weights_of(torch.tensor([len(mine)])), 300)
        found = answer.sums[SUM].to_dense()
        assert found.equal(wanted[: len(found)])
        assert not wanted[len(found) :].any()
        assert bool(own[SAID].all())
    assert most < len(mine)  # the last one had no room


def test_clients_alone_and_together_give_the_same_sums() -> None:
    states = []
    for backend in (in_turn, batched):
        world = world_of(20, 120, "1x-64x-2kB")
        state = world.initial()
        for _ in range(2):
            state = run_round(state, world.fleet, world.people, Rejections(), backend)
        states.append(state)
    first, second = states
    assert first.moments[SUM][SUM].equal(second.moments[SUM][SUM])
    assert all(of.equal(second.full[name]) for name, of in first.full.items())


def test_sparse_and_other_answers_are_added_in_any_order() -> None:
    world = world_of(8, 200, "1x")
    plan = world.plan
    (sent,) = plan.algorithm.send(plan, world.initial(), [0])
    some = [plan.algorithm.answer(plan, sent, world.people.client(user, 0))[0] for user in range(4)]
    some[1] = some[1].dense()
    wanted = torch.stack([answer.sums[SUM].to_dense() for answer in some]).sum(0)
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 3, 1], [3, 2, 1, 0]):
        totals, added = Totals(), some[order[0]]
        for place in order:
            totals.add(sent, some[place])
        for place in order[1:]:
            added = added + some[place]
        ((_, found),) = totals.parts()
        assert found.sums[SUM].equal(wanted)
        assert added.sums[SUM].to_dense().equal(wanted)
        assert found.weight == added.weight == 4.0


def test_under_masks_all_numbers_are_said() -> None:
    world = world_of(12, 300, "1x-16x", privacy={"level": "secure", "smallest_cohort": 2})
    plan = world.plan
    for sent in plan.algorithm.send(plan, world.initial(), [0, 1]):
        answer, _ = plan.algorithm.answer(plan, sent, world.people.client(3, 0))
        assert not answer.sums[SUM].is_sparse
        assert answer.bytes_up == sent.context[SUM].size * 4 == plan.algorithm.traffic(plan, sent.size)[1]


def test_support_is_counted_among_those_who_speak() -> None:
    """Under masks a rare item is spoken of by larger devices alone: so many of their users have to have it."""
    counts, masks = torch.arange(100, 0, -1), {"level": "secure"}

    def head_of(capacities: str, least: float, **tables: Any) -> int:
        settings = read_settings({"fleet": {"capacities": capacities}} | tables)
        return heard_of(settings, Public(300, 100), 100, counts, least)

    for least in (3, 10, 40):
        enough = int((counts >= least).sum())
        assert head_of("1x", least, privacy=masks) == enough  # all speak of all
        assert head_of("1x-4x-16x", least) == enough  # and where answers may be seen
        assert head_of("16x", least, privacy=masks) == min(enough, 24)  # a sixteenth of the pairs
        mixed = head_of("1x-4x-16x", least, privacy=masks)
        speak = torch.tensor([1.0] * 24 + [2 / 3] * 25 + [1 / 3] * 51)  # of 24, 49 and 100 items
        assert bool((counts[:mixed] * speak[:mixed] >= least).all())
        assert not bool((counts[mixed:] * speak[mixed:] >= least).any())
    assert heard_of(read_settings({"privacy": masks}), Public(300, 100), 100, None, 3) == 100


def test_what_is_told_of_bytes_is_what_usual_devices_send() -> None:
    world = world_of(40, 400, "1x-2x")
    plan, algorithm = world.plan, world.plan.algorithm
    assert isinstance(algorithm, Correlations)
    sent = algorithm.send(plan, world.initial(), [0, 1])
    sizes = world.fleet.size.tolist()
    moved = [algorithm.answer(plan, sent[sizes[user]], world.people.client(user, 0))[0].bytes_up for user in range(40)]
    told = [algorithm.traffic(plan, sizes[user])[1] for user in range(40)]
    assert sum(told) == pytest.approx(sum(moved), rel=1e-3)
    assert max(moved) <= algorithm.largest_answer(plan, 0)
    run_round(world.initial(), world.fleet, world.people, Rejections(), batched)
    again = [algorithm.answer(plan, sent[sizes[user]], world.people.client(user, 1))[0].bytes_up for user in range(40)]
    assert sum(again) == sum(algorithm.traffic(plan, size, 1)[1] for size in sizes) == 0  # nothing new to say


def test_what_is_told_of_bytes_is_of_the_items_of_the_head() -> None:
    rare = {"algorithm": {"kind": "correlations", "support": 26, "choose": False}}
    world = world_of(60, 400, "1x", **rare)
    plan, algorithm = world.plan, world.plan.algorithm
    assert isinstance(algorithm, Correlations)
    assert plan.architecture.tables[ROWS][0] < 200  # of 400 items
    (sent,) = algorithm.send(plan, world.initial(), [0])
    moved = sum(algorithm.answer(plan, sent, world.people.client(user, 0))[0].bytes_up for user in range(60))
    assert 60 * algorithm.traffic(plan, 0)[1] == pytest.approx(moved, rel=0.25)


def test_devices_that_tried_models_speak_a_second_time_when_the_trials_are_over() -> None:
    world = world_of(40, 400, "1x", algorithm={"kind": "correlations", "support": 1}, run={"rounds": 16})
    plan, algorithm, state = world.plan, world.plan.algorithm, world.initial()
    assert isinstance(algorithm, Correlations)
    end = algorithm.trials(plan).schedule.end
    assert 1 < end < 15
    for number in range(16):
        (sent,) = algorithm.send(plan, state, [0])
        moved = sum(algorithm.answer(plan, sent, world.people.client(user, number))[0].bytes_up for user in range(40))
        told = 40 * algorithm.traffic(plan, 0, number)[1]
        assert (moved > 0) == (told > 0), number
        if number in (0, end):  # at first nine tenths of the histories
            assert 0.7 * told < moved < 1.01 * told, number
        state = run_round(state, world.fleet, world.people, Rejections(), batched)


def test_a_norm_that_no_history_has_is_refused_in_both_ways() -> None:
    world = world_of(6, 100, "1x")
    plan = world.plan
    (sent,) = plan.algorithm.send(plan, world.initial(), [0])
    good, _ = plan.algorithm.answer(plan, sent, world.people.client(1, 0))
    assert good.sums[SUM].is_sparse
    for answer in (good, good.dense()):
        assert plan.algorithm.problem(plan, sent, answer) is None
        loud = replace(answer, sums={SUM: 1.01 * answer.sums[SUM]})
        assert plan.algorithm.problem(plan, sent, loud) == "a norm above that of its users"
        wrong = replace(answer, sums={SUM: answer.sums[SUM] * torch.nan})
        assert plan.algorithm.problem(plan, sent, wrong) == "NaN or infinity"
