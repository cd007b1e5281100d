"""Reductions by a cache order: the numbers of the plain torch body, and an order only where it pays."""

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairfold.kernels.gpu import triton_problem

if (problem := triton_problem()) is not None:
    pytest.skip(problem, allow_module_level=True)

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from fairfold.kernels import hashing, reference
from fairfold.kernels.gpu import calls
from fairfold.kernels.gpu.launch import TILES, Tile
from fairfold.kernels.hashing import Layout, expand_seed
from tests.kernels.gpu_checks import TOLERANCE, close

LAYOUT = Layout(800, 0, 160, 8, expand_seed(5), True)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small layouts are ordered too, in tiles that leave some programs half empty."""
    monkeypatch.setattr(calls, "MAX_COUNTED_SLOTS", 0)
    monkeypatch.setitem(TILES, "segment_mean", Tile(128, 4))
    calls._reduction_cache.cache_clear()
    yield
    calls._reduction_cache.cache_clear()


@st.composite
def whole_layouts(draw: st.DrawFn) -> Layout:
    """Head and full size of whole chunks; from one slot for all chunks to more slots than there are chunks."""
    chunk = draw(st.sampled_from([1, 3, 4, 8, 12, 16, 32, 48, 64, 100]))
    chunks = draw(st.integers(1, 40))
    head = draw(st.just(0) | st.integers(0, chunks))
    slots = draw(st.integers(1, 20) | st.just(chunks - head) | st.just(2 * chunks))
    key = expand_seed(draw(st.integers(0, 2**64 - 1)))
    return Layout(chunks * chunk, head * chunk, max(slots, 1) * chunk, chunk, key, draw(st.booleans()))


@given(whole_layouts(), st.sampled_from(list(TOLERANCE)), st.integers(0, 2**20))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_means_by_order(layout: Layout, dtype: torch.dtype, seed: int) -> None:
    full = torch.randn(layout.full_size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    expected = reference.reduce(layout, full.double())
    means = calls.segment_means(layout, full, calls.make_order(layout, DEVICE))
    check = close("means", means.to(dtype), expected, TOLERANCE[dtype])
    assert check.passed, check.detail
    counts = torch.zeros(layout.size, dtype=torch.int64, device=DEVICE)
    reference.count_range(layout, 0, layout.full_size, counts)
    assert bool((means[counts == 0] == 0).all())
    assert torch.equal(means[counts == 1].to(dtype), expected[counts == 1].to(dtype))  # a mean of one is that one


@given(whole_layouts())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_order_lists_every_hashed_chunk_at_its_place(layout: Layout) -> None:
    order = calls.make_order(layout, DEVICE)
    chunks = torch.arange(layout.head // layout.chunk, layout.full_size // layout.chunk, device=DEVICE)
    slots, _ = hashing.slots_and_signs(layout, chunks * layout.chunk)
    places = (slots - layout.head) // layout.chunk
    assert order.chunks.dtype == order.starts.dtype == torch.int32
    sizes = order.starts.diff().long()
    assert torch.equal(sizes, torch.bincount(places, minlength=layout.blocks))
    every = torch.arange(layout.blocks, device=DEVICE)
    assert torch.equal(order.chunks.long(), chunks[torch.argsort(places, stable=True)])
    assert torch.equal(places.sort()[0], every.repeat_interleave(sizes))


def test_the_second_reduction_makes_an_order_and_the_first_does_not() -> None:
    full = torch.randn(LAYOUT.full_size, device=DEVICE)
    expected = reference.reduce(LAYOUT, full)
    cache = calls._reduction_cache(LAYOUT, DEVICE)
    for asked in range(1, 5):
        torch.testing.assert_close(calls.reduce(LAYOUT, full), expected)
        assert (cache.order is not None) == (asked >= 2)
        assert (cache.counts is not None) == (asked == 1)
    made = cache.order
    calls.reduce(LAYOUT, full)
    assert cache.order is made
    assert torch.equal(calls.reduce(LAYOUT, full), calls.reduce(LAYOUT, full))
    calls._reduction_cache.cache_clear()
    assert calls._reduction_cache(LAYOUT, DEVICE).asked == 0


def _no_memory(*_: object, **__: object) -> NoReturn:
    raise torch.OutOfMemoryError("none left")


@pytest.mark.parametrize("reason", ["cached", "long", "memory"])
def test_counts_serve_where_an_order_does_not(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "cached":
        monkeypatch.setattr(calls, "MAX_COUNTED_SLOTS", LAYOUT.size)
    elif reason == "long":
        monkeypatch.setattr(calls, "_MAX_CHUNKS", LAYOUT.full_size // LAYOUT.chunk)
    else:
        monkeypatch.setattr(calls, "make_order", _no_memory)
    full = torch.randn(LAYOUT.full_size, device=DEVICE)
    for _ in range(3):
        torch.testing.assert_close(calls.reduce(LAYOUT, full), reference.reduce(LAYOUT, full))
    cache = calls._reduction_cache(LAYOUT, DEVICE)
    assert cache.order is None
    assert cache.counts is not None


def test_short_and_cut_chunks_keep_nothing() -> None:
    key = expand_seed(5)
    for layout in (Layout(800, 0, 160, 4, key, True), Layout(801, 0, 160, 8, key, True), Layout(9, 9, 0, 8, key, True)):
        full = torch.randn(layout.full_size, device=DEVICE)
        for _ in range(3):
            torch.testing.assert_close(calls.reduce(layout, full), reference.reduce(layout, full))
        assert calls._reduction_cache(layout, DEVICE).asked == 0


def test_gaps_and_gradients() -> None:
    """A full vector with gaps in memory that autograd follows is read as it is."""
    full = torch.randn(LAYOUT.full_size, 2, device=DEVICE, requires_grad=True)[:, 1]
    for _ in range(2):
        reduced = calls.reduce(LAYOUT, full)
        torch.testing.assert_close(reduced, reference.reduce(LAYOUT, full.detach()))
        assert not reduced.requires_grad
