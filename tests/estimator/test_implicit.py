"""The example for users of implicit: both sides run, and ours is no worse."""

import pytest

from fairfold.data.synthetic import SyntheticDataset

pytest.importorskip("implicit", reason="implicit is not installed: pip install implicit")


@pytest.mark.filterwarnings("ignore")  # implicit's own, of threads and of matrix forms
def test_two_lines_are_changed() -> None:
    from examples.from_implicit import main

    found = main(SyntheticDataset(users=150, items=200, interactions_per_user=30).dataset())
    assert found["fairfold"][0] > found["implicit"][0] - 0.02
