"""Uploads in parts: a device too small for all pairs sends them over several rounds, and nothing is lost."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.algorithms.cooccurrence import cooccurrence, parts
from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.cooccurrence import SUM, SYNC_STATE, CoOccurrenceUpload, triangle_size
from fairfold.algorithms.cooccurrence.parts import MAX_PARTS, TrianglePart, TuningSchedule, add_parts, is_uploaded
from fairfold.backends.batched import batched
from fairfold.config import read_settings
from fairfold.federation import updates
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Backend, run_round, sequential
from fairfold.federation.updates import State
from fairfold.subspace.projection import LeadingBlock, describe_projection, make_projection
from tests.support.cooccurrence import SECURE, co_occurrence_federation
from tests.support.federations import tiny_data

HISTORIES = st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=6)


def part_of(items: int, leading: int, part: int, parts: int) -> TrianglePart:
    return TrianglePart((triangle_size(items),), (triangle_size(leading),), part, parts)


def fleet_of(capacities: str, rounds: int, **keys: Any) -> Federation:
    tables = {"fleet": {"capacities": capacities, "clients_per_round": None}, "run": {"rounds": rounds}}
    return co_occurrence_federation(tiny_data(2, 24, 40), **(tables | keys))


def after_rounds(world: Federation, count: int, backend: Backend = batched) -> State:
    state = world.initial()
    for _ in range(count):
        state = run_round(state, world.sampler, world.clients, Rejections(), backend)
    return state


@given(HISTORIES, st.integers(1, 41), st.integers(1, MAX_PARTS))
def test_all_parts_together_are_the_whole_and_leading_items_come_first_in_each(
    sets: list[set[int]], leading: int, many: int
) -> None:
    items = torch.tensor([item for one in sets for item in sorted(one)], dtype=torch.int64)
    upload = CoOccurrenceUpload.of(items, torch.tensor([len(one) for one in sets]), 100, 0.5)
    whole = upload.dense(41, torch.float32)
    prefix, found = whole[: triangle_size(leading)], list[tuple[TrianglePart, torch.Tensor]]()
    for part in range(many):
        block = part_of(41, leading, part, many)
        sums = upload.part(block, torch.float32)
        assert len(sums) == block.size
        assert sums.equal(upload.part(part_of(41, 41, part, many), torch.float32)[: block.size])
        assert sums.equal(block.reduce(whole))
        matrix = cooccurrence.unpack_triangle(block.recover(sums))
        norm = cooccurrence.frobenius_norm(sums, block.diagonal)
        assert norm == pytest.approx(float(torch.linalg.norm(matrix)), rel=1e-6)
        assert make_projection(describe_projection(block)) == block
        found.append((block, sums))
    assert add_parts(None, found, triangle_size(41))[: len(prefix)].equal(prefix.double())
    sizes = [block.size for block, _ in found]
    assert sum(sizes) == len(prefix)
    assert max(sizes) <= len(prefix) / many + leading


@pytest.mark.parametrize("facts", [{"part": [3, 3]}, {"part": [-1, 3]}, {"part": [0, 17]}, {"kept": [8]}])
def test_a_part_that_is_none_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="triangle"):
        TrianglePart.from_description((triangle_size(9),), {"kept": [10], "part": [0, 2]} | facts)


@pytest.mark.parametrize("backend", [sequential, batched])
def test_a_mixed_fleet_under_masks_has_the_sum_of_a_plain_one(backend: Backend) -> None:
    """Bit for bit, once the smallest device has sent all of its parts; each is about its share of all numbers."""
    world = fleet_of("1x-4x-16x", 16, privacy=SECURE)
    plan, algorithm = world.plan, world.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    head = plan.architecture.head  # type: ignore[attr-defined]
    plain = fleet_of("1x", 1)
    assert head == plain.plan.architecture.head  # type: ignore[attr-defined]
    expected, state = after_rounds(plain, 1, backend), after_rounds(world, 16, backend)
    assert state.algorithm_state[SUM][SUM].equal(expected.algorithm_state[SUM][SUM])
    assert all(state.full[name].equal(of) for name, of in expected.full.items())
    assert (world.clients.local_state[SYNC_STATE] == 2**16 - 1).all()
    sent = [algorithm.traffic(plan, 2, number)[1] for number in range(16)]
    assert sum(sent) == 4 * triangle_size(head)
    assert max(sent) <= 4 * (triangle_size(head) / 16 + head)


def test_there_may_be_fewer_items_than_parts() -> None:
    few = {"privacy": SECURE, "max_items": 5}
    world, plain = fleet_of("1x-16x", 16, **few), fleet_of("1x", 1, max_items=5)
    found, expected = (after_rounds(of, of.plan.settings.run.rounds) for of in (world, plain))
    assert found.algorithm_state[SUM][SUM].equal(expected.algorithm_state[SUM][SUM])


@pytest.mark.parametrize("dense", [True, False])
def test_parts_make_room_for_more_items_than_can_be_sent_at_once(monkeypatch: pytest.MonkeyPatch, dense: bool) -> None:
    """Also where the server's sum is too long to be dense."""
    expected = after_rounds(fleet_of("1x", 1), 1).algorithm_state[SUM][SUM]
    monkeypatch.setattr(cooccurrence, "MASKED_ITEMS", 12)
    for module in () if dense else (parts, updates):
        monkeypatch.setattr(module, "MAX_DENSE", 100)
    world = fleet_of("1x", 16, privacy=SECURE)
    assert len(expected) > triangle_size(12)
    state = after_rounds(world, 16)
    size = triangle_size(world.plan.architecture.head)  # type: ignore[attr-defined]
    found = updates.vector_in(state.algorithm_state[SUM], SUM, size)
    assert found is not None
    assert found.is_sparse != dense
    assert found.to_dense().equal(expected)
    assert bool(state.full["rows"].any())
    parts_of = cooccurrence.num_parts(world.plan.settings, world.plan.public)
    assert parts_of == -(-size // triangle_size(12))  # no more than the items with support need
    assert fleet_of("1x", 1, privacy=SECURE).plan.architecture.head == 12  # type: ignore[attr-defined]


def test_rounds_that_do_not_suffice_send_the_leading_pairs() -> None:
    """In as many parts as there are rounds, of the longest prefix that the rounds have room for."""
    world = fleet_of("1x-4x-16x", 4, privacy=SECURE)
    plan, algorithm = world.plan, world.plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    blocks = [[algorithm.upload_projection(plan, size, part) for part in range(4)] for size in range(3)]
    whole = plan.architecture.whole  # type: ignore[attr-defined]
    for of, share in zip(blocks, (1.0, 1.0, 0.25), strict=True):
        leading = cooccurrence.triangle_items(int(share * triangle_size(whole)))
        head = min(leading, plan.architecture.head)  # type: ignore[attr-defined]
        assert sum(block.size for block in of) == triangle_size(head)
        assert all(block.kept == (triangle_size(head),) for block in of)


@given(st.data())
def test_whatever_changes_between_parts_the_sum_is_that_of_the_last_histories(data: Any) -> None:
    """After a round of every part in which nothing changes, by the states that a client remembers."""
    plan = fleet_of("16x", 3, privacy=SECURE).plan
    algorithm = plan.algorithm
    assert isinstance(algorithm, CoOccurrence)
    task = algorithm.tasks(plan, algorithm.init(plan, plan.architecture.initial(torch.Generator())[0]), [0])[0]
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=3)))
    count, head = int(lengths.sum()), plan.architecture.head  # type: ignore[attr-defined]
    items = torch.cat([torch.randperm(head)[: int(length)].sort().values for length in lengths])
    states, sums = torch.zeros(count), torch.zeros(triangle_size(head), dtype=torch.float64)
    lost = torch.zeros(count, dtype=torch.bool)
    bits = st.lists(st.booleans(), min_size=count, max_size=count)
    changing = data.draw(st.integers(0, 5))
    for number in range(changing + 3):
        wanted = torch.tensor(data.draw(bits) if number < changing else [True] * count, dtype=torch.bool)
        if number < changing:
            lost = torch.tensor(data.draw(bits), dtype=torch.bool)
        memory = {SYNC_STATE: states[:, None]}
        algorithm.mark_lost(memory, lost)
        block = TrianglePart((triangle_size(head),), (triangle_size(head),), number % 3, 3)
        task.context[SUM] = block
        update, after = algorithm.upload(plan, task, items, lengths, memory[SYNC_STATE][:, 0], wanted)
        states = after[SYNC_STATE][:, 0]
        sums = add_parts(sums, [(block, update.sums[SUM])], triangle_size(head))
    assert is_uploaded(states).equal(~lost)
    mine, left = cooccurrence.select_items(items, lengths, ~lost)
    expected = CoOccurrenceUpload.of(mine, left, 100, 0.5).dense(head, torch.float64)
    assert sums.equal(expected)


def test_candidates_are_tried_between_two_uploads_of_all_parts() -> None:
    for rounds in range(1, 60):
        for many in range(1, 1 + max(1, (rounds - 14) // 2)):
            schedule = TuningSchedule.of(rounds, 19, many)
            before, after = range(schedule.first), range(schedule.end, rounds)
            for phase in (before, after) if schedule.num_candidates else (after,):
                asked = [schedule.part(number) for number in phase]
                assert set(asked) == set(range(many))
                assert asked[:many] == list(range(many))
                assert all(map(schedule.uploads, phase[:many]))
                assert not any(map(schedule.uploads, phase[many:]))
                assert schedule.completes(phase[-1], rounds)
            assert schedule.num_candidates <= max(0, rounds - 2 * many)


def test_under_masks_the_default_has_rounds_for_all_parts() -> None:
    def rounds(**tables: Any) -> int:
        return read_settings(tables).run.rounds

    assert rounds() == 16
    assert rounds(privacy="secure") == 14 + 2 * 16
    assert rounds(privacy="secure", fleet={"capacities": "1x"}) == 16
    assert rounds(privacy="secure", fleet={"capacities": "1x-4x"}) == 14 + 2 * 4
    assert rounds(privacy="secure", fleet={"capacities": "1x-64x"}) == 14 + 2 * MAX_PARTS
    assert rounds(privacy="secure", fleet={"capacities": "1x-9MB"}) == 14 + 2 * MAX_PARTS
    assert rounds(privacy="secure", fleet={"clients_per_round": 200}) == 16  # who is drawn when is chance
    assert rounds(privacy="secure", run={"rounds": 3}) == 3
    once = fleet_of("1x-16x", 16, privacy=SECURE, tune=True)
    block = once.plan.algorithm.upload_projection(once.plan, 1)  # type: ignore[attr-defined]
    assert type(block) is LeadingBlock  # no room for parts beside candidates


@pytest.mark.parametrize("sparse", [False, True])
def test_a_part_that_no_histories_have_is_refused(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model waits for all parts; what one device added to a part is refused before the next."""
    if sparse:
        monkeypatch.setattr("fairfold.algorithms.cooccurrence.parts.MAX_DENSE", 0)
    size = triangle_size(6)
    block = TrianglePart((size,), (size,), 1, 3)
    matrix = torch.eye(6) * 5 + 2
    honest = torch.cat([matrix[: column + 1, column] for column in (1, 4)])
    total = add_parts(None, [(block, honest)], size)
    assert float(total.sum()) == float(honest.sum())
    for place, value in ((0, -1.0), (0, 7.5), (int(block.diagonal[1]), 1.0)):
        lie = honest.clone()
        lie[place] = value
        with pytest.raises(ValueError, match="no histories have"):
            add_parts(None, [(block, lie)], size)
        assert torch.equal(add_parts(total, [(block, 0 * lie)], size).to_dense(), total.to_dense())
