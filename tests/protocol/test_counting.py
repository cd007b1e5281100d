"""The count under masks: its sums are exact, what a device sends is not its counts, silence is made good."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fairfold.data import Interactions
from fairfold.errors import InvalidData
from fairfold.protocol import counting
from fairfold.protocol.counting import Flags, masked_count, neighbours, pair_key, said, staying, windows, word_for


def drawn(seed: int, users: int, items: int) -> tuple[Interactions, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    pairs = (torch.rand(users, items, generator=source) < 0.4).nonzero()
    order = torch.randperm(users, generator=source)
    return Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, items), order


def all_answer(devices: int) -> Flags:
    return np.ones(devices, dtype=np.bool_)


@given(
    seed=st.integers(0, 2**32), users=st.integers(3, 30), items=st.integers(1, 50), window=st.integers(1, 60),
    silent=st.sets(st.integers(0, 29), max_size=8),
)  # fmt: skip
def test_sums_of_what_devices_send_are_the_plain_counts(
    seed: int, users: int, items: int, window: int, silent: set[int]
) -> None:
    histories, order = drawn(seed, users, items)
    answered = np.array([place not in silent for place in range(users)])
    try:
        counted = staying(answered)
    except InvalidData:
        assume(False)
    expected: Counter[int] = Counter()
    for place in range(users):
        if counted[place]:
            expected.update(histories.of(int(order[place])).tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "WINDOW", window)
        found = masked_count(histories, order, answered, seed)
    assert found.tolist() == [expected[item] for item in range(items)]


@given(seed=st.integers(0, 2**32), devices=st.integers(3, 400), items=st.integers(40, 300), window=st.integers(20, 400))
def test_a_device_sends_its_counts_in_no_window(seed: int, devices: int, items: int, window: int) -> None:
    histories, _ = drawn(seed, 1, items)
    mine, word = histories.of(0).numpy(), word_for(devices)
    keys = {int(other): pair_key(seed, 0, int(other)) for other in neighbours(devices)[0]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "WINDOW", window)
        parts = [part for part in windows(items) if part[1] >= 20]
    for start, length in parts:
        plain = said(mine, start, length, 0, {}, word)
        assert np.array_equal(plain.nonzero()[0] + start, mine[(mine >= start) & (mine < start + length)])
        sent = said(mine, start, length, 0, keys, word)
        assert (sent != plain).mean() > 0.5
        for left_out in keys:  # with all keys but one the server would still see nothing
            taken_off = said(mine, start, length, 0, {left_out: keys[left_out]}, word)
            assert (taken_off != plain).mean() > 0.5


@pytest.mark.parametrize("devices", [100, 60_000, 70_000])
def test_what_is_sent_looks_uniform_and_differs_from_window_to_window(devices: int) -> None:
    length, word = 65_536, word_for(devices)
    mine = np.arange(0, 2 * length, 3)
    keys = {int(other): pair_key(1, 5, int(other)) for other in neighbours(devices)[5]}
    first, second = (said(mine, start, length, 5, keys, word) for start in (0, length))
    plain = [said(mine, start, length, 5, {}, word) for start in (0, length)]
    assert ((first - plain[0]) != (second - plain[1])).mean() > 0.9  # no mask is used twice
    for sent in (first, second):
        found = np.bincount(sent.view(np.uint8), minlength=256)
        expected = sent.nbytes / 256
        chi_square = float(((found - expected) ** 2 / expected).sum())
        assert 160 < chi_square < 370  # 255 degrees of freedom: one in ten thousand lies outside


def test_words_are_as_narrow_as_the_number_of_devices_allows() -> None:
    assert [word_for(devices).itemsize for devices in (3, 255, 256, 65_535, 65_536)] == [1, 1, 2, 2, 4]
    histories = Interactions.from_pairs(torch.arange(255), torch.zeros(255, dtype=torch.long), 255, 1)
    assert masked_count(histories, torch.arange(255), all_answer(255), 3).tolist() == [255]  # no room to spare


@given(devices=st.integers(3, 60), silent=st.sets(st.integers(0, 59), max_size=20))
def test_no_sum_of_fewer_than_five_can_be_seen(devices: int, silent: set[int]) -> None:
    answered = np.array([place not in silent for place in range(devices)])
    near = neighbours(devices)
    assert all(place in near[other] for place in range(devices) for other in near[place])  # a pair has two ends
    try:
        counted = staying(answered)
    except InvalidData:
        assert answered.sum() < devices
        return
    assert not (counted & ~answered).any()
    for place in counted.nonzero()[0]:  # whom the masks that are left tie together: sums of parts of them tell nothing
        together, new = {int(place)}, {int(place)}
        while new:
            new = {int(other) for one in new for other in near[one] if counted[other]} - together
            together |= new
        assert len(together) >= (5 if devices >= 9 else 3)
    if answered.all():
        assert counted.all()


def answering(devices: int, *places: int) -> Flags:
    flags = np.zeros(devices, dtype=np.bool_)
    flags[list(places)] = True
    return flags


def test_a_counted_device_stands_among_four_others() -> None:
    assert staying(answering(40, 0, 1, 2, 3, 4)).nonzero()[0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidData, match="4 of 40 devices"):  # three others each: a sum of four could be seen
        staying(answering(40, 0, 1, 2, 3))


def test_whoever_loses_a_neighbour_is_asked_again() -> None:
    """7 has but three neighbours and goes, and 0 with them; then 1, 2 and 3, who had four, have too few as well."""
    with pytest.raises(InvalidData, match="5 of 40 devices"):
        staying(answering(40, 0, 1, 2, 3, 7))
    counted = staying(answering(40, 0, 1, 2, 3, 7, 20, 21, 22, 23, 24))
    assert counted.nonzero()[0].tolist() == [20, 21, 22, 23, 24]


def test_too_few_devices_are_not_counted() -> None:
    histories, _ = drawn(0, 2, 5)
    with pytest.raises(InvalidData, match="at least 3"):
        masked_count(histories, torch.arange(2), all_answer(2), 0)
    lonely = np.zeros(40, dtype=np.bool_)
    lonely[::10] = True  # four devices, none a neighbour of another
    with pytest.raises(InvalidData, match="4 of 40 devices"):
        staying(lonely)


MEMORY = """
import resource
import numpy as np
from fairfold.protocol.counting import KEY_BYTES, WINDOW, neighbours, pair_key, said, windows, word_for

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def work(items):
    keys = {int(other): pair_key(0, 7, int(other)) for other in neighbours(100_000)[7]}
    mine = np.arange(0, items, items // 500)
    for start, length in windows(items):
        said(mine, start, length, 7, keys, word_for(100_000))

work(1_000)
before = peak()
work(10_000_000)
print(peak() - before, WINDOW * word_for(100_000).itemsize)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_a_device_counts_ten_million_items_in_the_memory_of_a_window() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    grown, window = (int(word) for word in done.stdout.split())
    assert grown < 16 * window  # 4 MiB; the counts of the catalogue would be 40 MB
