"""Updates as fixed-point numbers: sums are exact, nothing wraps, and segments are summed over all who own them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.errors import InvalidMessage, InvalidSettings
from fairfold.federation.updates import Update
from fairfold.privacy.fixed_point import (
    FRACTION_STEPS,
    HEADER_LENGTH,
    MAX_SUM,
    Encoding,
    FixedPointVector,
    MeasuredUpdate,
    Segment,
    VectorLayout,
    add_modular,
)

NUMBERS = st.floats(-200_000, 200_000, width=32)  # on the finest grid of nine devices there is room for these


@st.composite
def updates(draw: Any) -> tuple[Encoding, list[tuple[int, MeasuredUpdate]]]:
    """An encoding of two sizes, nested or not, on a grid or not, and what some devices say."""
    nested = draw(st.booleans())
    small, large = {"b": draw(st.integers(1, 4))}, {"b": draw(st.integers(5, 7))}
    if not nested:
        small["a"], large["a"] = 2, 1
    fixed_point = draw(st.sampled_from([{}, {"b": 1 << 10}]))
    many = draw(st.integers(1, 6))
    layout = VectorLayout({0: small, 1: large}, frozenset({"b"}))
    encoding = Encoding(layout, draw(st.sampled_from([0.5, 16.0, 1000.0])), draw(st.integers(many, 9)), fixed_point)
    devices = []
    for _ in range(many):
        size = draw(st.sampled_from([0, 1]))
        sums = {
            name: torch.tensor(draw(st.lists(NUMBERS, min_size=of, max_size=of))) for name, of in layout.ordered(size)
        }
        weight, quality = draw(st.integers(0, 500)), draw(st.floats(0, 1))
        devices.append((size, MeasuredUpdate(Update(sums, weight / 4), quality, 1.0)))
    return encoding, devices


def quantised(encoding: Encoding, name: str, vector: torch.Tensor) -> np.ndarray:
    """A device's numbers as the words say them, in steps: worked out apart from the code."""
    steps, limit = encoding.steps(name), float(encoding.max_value)
    numbers = vector.double().numpy()
    if name not in encoding.fixed_point:
        numbers = numbers.clip(-encoding.clip, encoding.clip)
    return np.rint(numbers * steps).clip(-limit, limit)


def summed(encoding: Encoding, devices: list[tuple[int, MeasuredUpdate]]) -> dict[Segment, FixedPointVector]:
    sums: dict[Segment, FixedPointVector] = {}
    for size, measured in devices:
        words = encoding.encode(measured, size)
        for segment in encoding.layout.segments_of(size):
            sums[segment] = add_modular(sums.get(segment), words[segment.start : segment.stop])
    return sums


@given(updates())
@settings(max_examples=200, deadline=None)
def test_what_is_decoded_of_a_sum_is_the_sum_of_what_was_quantised(world: Any) -> None:
    encoding, devices = world
    found = encoding.decode(summed(encoding, devices))
    largest = max(size for size, _ in devices)
    assert set(found) == ({largest} if encoding.layout.nested else {size for size, _ in devices})
    for size, measured in found.items():
        for name, length in encoding.layout.ordered(size):
            expected = np.zeros(length)
            for other, additive_form in devices:
                if encoding.layout.nested or other == size:
                    steps = quantised(encoding, name, additive_form.update.sums[name])
                    expected[: len(steps)] += steps
            assert np.abs(expected).max() <= MAX_SUM  # of numbers as they are, and not modulo 2³²
            assert (measured.update.sums[name].numpy() * float(encoding.steps(name)) == expected).all()
        mine = [one for other, one in devices if encoding.layout.nested or other == size]
        assert measured.update.weight == sum(one.update.weight for one in mine)
        assert measured.num_validated == len(mine)
        assert measured.quality == pytest.approx(sum(one.quality for one in mine), abs=len(mine) / FRACTION_STEPS)


@given(st.floats(-1, 1, width=32), st.sampled_from([0.25, 16.0]), st.integers(1, 5000))
def test_a_number_within_the_bound_is_off_by_half_a_step_at_most(number: float, bound: float, devices: int) -> None:
    encoding = Encoding(VectorLayout({0: {"x": 1}}), bound, devices)
    measured = encoding.decode(
        {encoding.layout.segments[0]: encoding.encode(MeasuredUpdate(Update({"x": torch.tensor([number])}, 1)), 0)}
    )
    kept = min(max(number, -bound), bound)
    step = 1 / float(encoding.steps("x"))
    assert abs(float(measured[0].update.sums["x"]) - kept) <= step / 2
    assert step < 2 * bound * devices / MAX_SUM * 1.01  # no coarser than it has to be


def test_what_does_not_fit_on_a_grid_is_refused_and_not_clipped() -> None:
    encoding = Encoding(VectorLayout({0: {"many": 2}}), 16.0, 1000, {"many": 1 << 7}, value_bounds={"many": 512.0})
    measured = MeasuredUpdate(Update({"many": torch.tensor([512.0, -10000.0])}, 1))
    assert encoding.encode(measured, 0)[-2:].view(np.int32).tolist() == [512 << 7, -10000 << 7]
    with pytest.raises(InvalidMessage, match=r"many with a number of 20000 in a sum of 1,000 devices.*16777.2 at most"):
        encoding.encode(MeasuredUpdate(Update({"many": torch.tensor([1.0, -20000.0])}, 1)), 0)


def test_devices_on_a_grid_may_be_added_up_before() -> None:
    encoding = Encoding(VectorLayout({0: {"x": 3}}), 1.0, 300, {"x": 1 << 16})
    some = [torch.randint(-(1 << 16), 1 << 16, (3,)).float() / (1 << 16) for _ in range(200)]
    one_by_one = None
    for vector in some:
        one_by_one = add_modular(one_by_one, encoding.encode(MeasuredUpdate(Update({"x": vector}, 1.0)), 0))
    at_once = encoding.encode(
        MeasuredUpdate(Update({"x": torch.stack(some).double().sum(0)}, 200.0)), 0, num_clients=200
    )
    assert one_by_one is not None
    assert (one_by_one == at_once).all()


@given(st.integers(0, 12), st.integers(0, 12))
def test_any_stretch_of_words_can_be_had_by_itself(start: int, stop: int) -> None:
    encoding = Encoding(VectorLayout({0: {"x": 4, "a": 2}}), 4.0, 10)
    both = MeasuredUpdate(Update({"x": torch.tensor([1.0, -2, 3, 9]), "a": torch.tensor([0.5, -0.5])}, 2.5), 0.75, 1)
    assert (encoding.encode(both, 0, start, stop) == encoding.encode(both, 0)[start:stop]).all()


def test_segments_of_nested_sizes_are_owned_by_all_who_reach_them() -> None:
    layout = VectorLayout({0: {"x": 10}, 1: {"x": 3}, 2: {"x": 6}}, frozenset({"x"}))
    assert [(len(one), one.owners) for one in layout.segments] == [
        (HEADER_LENGTH + 3, (0, 1, 2)),
        (3, (0, 2)),
        (4, (0,)),
    ]
    assert [one.stop for one in layout.segments_of(2)] == [HEADER_LENGTH + 3, HEADER_LENGTH + 6]
    apart = VectorLayout({0: {"x": 10}, 1: {"x": 3}})
    assert [one.owners for one in apart.segments] == [(0,), (1,)]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_sent(number: float) -> None:
    encoding = Encoding(VectorLayout({0: {"x": 2}}), 1.0, 10)
    with pytest.raises(InvalidMessage, match="NaN or infinity in x"):
        encoding.encode(MeasuredUpdate(Update({"x": torch.tensor([0.0, number])}, 1.0)), 0)
    with pytest.raises(InvalidMessage, match="a weight or quality"):
        encoding.encode(MeasuredUpdate(Update({"x": torch.zeros(2)}, number)), 0)


def test_more_devices_than_a_sum_can_have_are_refused() -> None:
    with pytest.raises(InvalidSettings, match="a sum of 40,000 devices"):
        Encoding(VectorLayout({0: {"x": 1}}), 1.0, 40_000, {"x": 1 << 16})
    with pytest.raises(InvalidSettings, match=r"a sum of 40,000 devices; needed: 1 to 32,767"):
        Encoding(VectorLayout({0: {"x": 1}}), 1.0, 40_000, {"x": 1 << 7}, value_bounds={"x": 512.0})
