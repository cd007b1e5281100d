"""A device's memory is its compact vector: measured in processes of their own, against one with an empty model."""

import pytest

from fairfold.nn.footprint import FootprintJob, footprint, measure

MEGABYTE = 10**6


def check(items: int, dim: int, chunk: int, way: str = "active") -> None:
    size = items * dim // 64
    job = FootprintJob(items, dim, size, "chunk" if chunk > 1 else "element", chunk, batch=512, rows=5000, way=way)
    growth = measure(job)
    compact = 4 * size
    assert growth >= 0.9 * compact, "the vector itself must be seen, or nothing was measured"
    assert growth <= 1.25 * compact + 64 * MEGABYTE
    assert growth <= footprint(size, dim, 512, 5000).training + 16 * MEGABYTE, "the formula of `fairfold plan`"


@pytest.mark.parametrize("chunk", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_device_with_a_64th_of_ten_million_rows(chunk: int) -> None:
    check(10_000_000, 64, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["backward", "serve"])
def test_every_way_of_training_keeps_to_the_vector(way: str) -> None:
    check(10_000_000, 64, 8, way)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 8])
def test_a_device_with_a_64th_of_a_hundred_million_rows(chunk: int) -> None:
    check(100_000_000, 64, chunk)
