"""The Triton body gives what the plain torch body gives: on a GPU where there is one, else in Triton's interpreter."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fairfold.kernels.gpu import triton_problem

if (problem := triton_problem()) is not None:
    pytest.skip(problem, allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from fairfold.backends.cuda_graph import GraphBackend
from fairfold.errors import InvalidSubspace
from fairfold.federation.updates import to_device
from fairfold.kernels import gpu, hashing, reference
from fairfold.kernels.gpu import calls, training
from fairfold.kernels.gpu.launch import piece_layout
from fairfold.kernels.hashing import Layout, expand_seed
from fairfold.kernels.training import LookupBuffers, ModelForm, SignedPositions
from tests.kernels import gpu_checks
from tests.support.federations import after_rounds, make_federation, tiny_data, tiny_settings
from tests.support.parity import precision

CHUNKS = [1, 2, 3, 4, 8, 12, 16, 32, 48, 64, 100]


@st.composite
def layouts(draw: st.DrawFn, full_size: int | None = None) -> Layout:
    """Any layout, also those that no Subspace has, such as a head that is no multiple of the chunk."""
    full_size = draw(st.integers(1, 800)) if full_size is None else full_size
    chunk = draw(st.sampled_from(CHUNKS))
    if draw(st.integers(0, 7)) == 0:
        return Layout(full_size, full_size, 0, chunk, 0, True)
    head = draw(st.just(0) | st.integers(0, full_size) | st.just(full_size // 2 // chunk * chunk))
    key = expand_seed(draw(st.integers(0, 2**64 - 1)))
    return Layout(full_size, head, chunk * draw(st.integers(1, 20)), chunk, key, draw(st.booleans()))


def failed(checks: Any) -> list[gpu_checks.Check]:
    return [check for check in checks if not check.passed]


def test_golden_vectors() -> None:
    assert not failed(gpu_checks.golden_checks(DEVICE))


@given(layouts(2**50), st.lists(st.integers(0, 2**50 - 1), min_size=1, max_size=40), st.data())
@settings(max_examples=60)
def test_slots_and_signs_of_any_coordinate(layout: Layout, coordinates: list[int], data: st.DataObject) -> None:
    assume(layout.chunk & (layout.chunk - 1) == 0 or layout.tail == 0)
    widest = piece_layout(layout).width
    width = data.draw(st.sampled_from([width for width in (1, 2, 4, 8, 16, 32) if widest % width == 0]))
    numbers = torch.tensor(coordinates, device=DEVICE)
    found = calls.slots_and_signs(layout, numbers, width)
    expected = hashing.slots_and_signs(layout, numbers)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_odd_chunks_of_huge_tables_are_refused() -> None:
    with pytest.raises(InvalidSubspace, match="power of two"):
        piece_layout(Layout(2**40, 0, 4_800, 48, expand_seed(1), True))


@given(st.data(), st.integers(1, 40), st.integers(1, 30), st.integers(1, 20))
@settings(max_examples=40)
def test_every_operation_on_generated_layouts(data: st.DataObject, rows: int, row_size: int, batch: int) -> None:
    layout = data.draw(layouts(rows * row_size + data.draw(st.integers(0, row_size - 1))))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
    torch.manual_seed(0)
    assert not failed(gpu_checks.layout_checks(layout, row_size, dtype, batch, DEVICE))


@given(layouts(), st.data())
@settings(max_examples=30)
def test_any_range(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.full_size))
    stop = data.draw(st.integers(start, layout.full_size))
    compact = torch.randn(layout.size, device=DEVICE)
    out, expected = torch.zeros(2, stop - start, device=DEVICE)
    calls.recover_range(layout, compact, start, out)
    reference.recover_range(layout, compact, start, expected)
    assert torch.equal(out, expected)
    counts, right = torch.zeros(2, layout.size, dtype=torch.int64, device=DEVICE)
    calls.count_range(layout, start, stop, counts)
    reference.count_range(layout, start, stop, right)
    assert torch.equal(counts, right)


def test_tensors_with_gaps() -> None:
    layout = Layout(600, 0, 64, 8, expand_seed(1), True)
    gappy = torch.randn(64, 2, device=DEVICE)[:, 0]
    rows = torch.arange(60, device=DEVICE)[::3]
    expected = reference.recover_rows(layout, gappy, rows, 10)
    assert torch.equal(calls.recover_rows(layout, gappy, rows, 10), expected)
    out = torch.zeros(600, 2, device=DEVICE)[:, 1]
    calls.recover_range(layout, gappy, 0, out)
    assert torch.equal(out.view(60, 10)[rows], expected)
    sums = torch.zeros(64, 2, device=DEVICE)[:, 0]
    calls.accumulate_rows(layout, expected.T.contiguous().T, rows, sums)
    right = torch.zeros(64, device=DEVICE)
    reference.accumulate_rows(layout, expected, rows, right)
    torch.testing.assert_close(sums, right)
    values = expected.half()
    stepped, expected_step = gappy.clone().half()[:, None].expand(-1, 2).clone()[:, 0], gappy.clone().half()
    calls.accumulate_rows(layout, values, rows, stepped, -0.5)
    calls.accumulate_rows(layout, values, rows, expected_step, -0.5)
    torch.testing.assert_close(stepped, expected_step)


def test_nothing_to_do() -> None:
    layout = Layout(600, 0, 64, 8, expand_seed(1), True)
    compact, none = torch.ones(64, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    empty = torch.empty(0, 10, device=DEVICE)
    assert calls.recover_rows(layout, compact, none, 10).shape == (0, 10)
    calls.accumulate_rows(layout, empty, none, compact)
    calls.recover_range(layout, compact, 5, torch.empty(0, device=DEVICE))
    calls.accumulate_range(layout, torch.empty(0, device=DEVICE), 5, compact, compact)
    slots, sums = calls.touched_rows(layout, empty, none)
    assert len(slots) == len(sums) == 0
    assert bool((compact == 1).all())


def test_autograd_knows_what_was_written() -> None:
    layout = Layout(600, 0, 64, 8, expand_seed(1), True)
    compact = torch.ones(64, device=DEVICE, requires_grad=True)
    squared = (compact**2).sum()
    calls.accumulate_rows(layout, torch.ones(1, 10, device=DEVICE), torch.zeros(1, device=DEVICE).long(), compact)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(squared)


@pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion ends all work on a GPU; the benchmark script tries it")
@pytest.mark.parametrize("row", [-1, 60, 2**40])
def test_a_row_outside_of_the_table_is_refused(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    options = replace(interpreter.InterpreterOptions(), debug=True, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    layout = Layout(600, 0, 64, 8, expand_seed(1), True)
    with pytest.raises((InterpreterError, AssertionError), match="a row that the table does not have"):
        calls.recover_rows(layout, torch.ones(64), torch.tensor([3, row]), 10)


def test_available_needs_a_device() -> None:
    assert gpu.available() == torch.cuda.is_available()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 7), st.integers(1, 60), st.integers(1, 9), st.integers(0, 2**20))
def test_positions(count: int, width: int, size: int, rows: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, generator=source).to(DEVICE)
    found = torch.randint(size, (rows, width), generator=source, dtype=torch.int32).to(DEVICE)
    signs = (torch.randint(2, (rows, width), generator=source) * 2 - 1).to(DEVICE, torch.int8)
    lines = torch.randint(rows, (count,), generator=source).to(DEVICE)
    values = torch.randn(count, width, generator=source).to(DEVICE)
    expected = reference.recover_lines(vector, found, signs, lines)
    torch.testing.assert_close(training.recover_lines(vector, found, signs, lines), expected, rtol=0, atol=0)
    sums, other = vector.clone(), vector.clone()
    training.accumulate_lines(values, found, signs, lines, sums)
    reference.accumulate_lines(values, found, signs, lines, other)
    torch.testing.assert_close(sums, other, rtol=1e-5, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2**20))
def test_step_of_a_prefix(size: int, share: float, moments: int, step: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    moving, rates = torch.full((3,), size), torch.rand(3, 2, generator=source) + 0.1
    moving[step], number = int(size * share), torch.tensor([step])
    vectors = [torch.randn(size, generator=source), torch.randn(size, generator=source)]
    vectors += [torch.rand(size, generator=source) for _ in range(moments)]
    ours = [vector.to(DEVICE, copy=True) for vector in vectors]
    reference.step_prefix(vectors[0], vectors[1], vectors[2:], rates, moving, number)
    training.step_prefix(ours[0], ours[1], ours[2:], rates.to(DEVICE), moving.to(DEVICE), number.to(DEVICE))
    for mine, expected in zip(ours, vectors, strict=True):
        torch.testing.assert_close(mine.cpu(), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["mf", "neumf"]),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([3, 40]),
    st.sampled_from([{}, {"user_vectors": "uploaded", "compress": "all"}, {"l2": 0.1}]),
    st.integers(0, 2**16),
)
def test_slopes_of_a_step(
    model: str, factors: int, negatives: int, batch: int, changes: dict[str, Any], seed: int
) -> None:
    """One pass adds the gradient that autograd finds, at every step of a round."""
    chosen = tiny_settings(
        model=model, factors=factors, num_negatives=negatives, batch_size=batch, seed=seed, capacities="1x-4x",
        local_optimizer="sgd", **changes,
    )  # fmt: skip
    device = torch.device(DEVICE)
    with precision():
        world, state = make_federation(tiny_data(seed, 9, 40), chosen)
        world.clients.local_state = to_device(world.clients.local_state, device)
        backend = GraphBackend(world.sampler, world.clients, device, torch.float64)
    work = world.clients.training
    found: list[torch.Tensor] = []

    def run(steps: int) -> None:
        held, form = backend.buffers, work.form
        assert form is not None
        for _ in range(steps):
            before = held.gradient.clone()
            assert training.add_gradients(form, work.steps.l2, held.values, held.gradient, held.lookups)
            found.append(held.gradient.clone())
            held.gradient.copy_(before)
            backend.add_gradients()
            torch.testing.assert_close(found[-1], held.gradient, rtol=1e-9, atol=1e-13)
            reference.step_prefix(held.values, held.gradient, held.moments, held.rates, held.moving, held.step)
            held.step += 1

    backend._replay_steps = run  # type: ignore[method-assign]
    with precision():
        after_rounds(world, state.to(device), backend=backend)
    assert any(bool(each.any()) for each in found)


def test_a_form_that_registers_cannot_hold_is_left_to_autograd() -> None:
    nothing = torch.zeros(1)
    lines = LookupBuffers(
        SignedPositions(nothing, nothing), SignedPositions(nothing, nothing), nothing.view(1, 1, 1, 1), nothing, nothing
    )
    for form in (ModelForm(user=8, item=8, layers=(8, 8)), ModelForm(user=64, item=64, layers=(64,))):
        assert not training.add_gradients(form, 0.0, nothing, nothing, lines)
