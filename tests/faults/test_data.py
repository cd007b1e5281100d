"""A few seconds of what ``fuzz_data.py`` does for as long as it is told."""

import sys

import pytest

from tests.faults import fuzz_data


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to bound the memory")
@pytest.mark.parametrize("seed", [1])
def test_damaged_data_files_are_read_right_or_refused(seed: int) -> None:
    failures, told = fuzz_data.fuzz(seed, 150)
    assert failures == 0, told
    assert "150 files" in told
