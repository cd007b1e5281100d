"""The paper's ablation on MNIST in small: subspaces that differ from client to client learn far less."""

from fractions import Fraction

import pytest

from fairfold.data import load_images
from fairfold.federation.simulation import simulate
from tests.nn.test_mnist import DATA, needs_mnist
from tests.support.settings import make_settings


@needs_mnist
@pytest.mark.slow
@pytest.mark.parametrize("compress", ["all", "model"])
def test_consistent_subspaces_learn_more(compress: str) -> None:
    data = load_images(DATA)
    reached = {}
    for method in ("fair", "inconsistent"):
        settings = make_settings(
            data="mnist", model="mlp", method=method, capacities="4x", compress=compress, local_epochs=2, rounds=8,
            evaluate_every=2,
        )  # fmt: skip
        result = simulate(settings, data=data)
        reached[method] = max(report.quality.server for report in result.history if report.quality is not None)
        share = Fraction(result.groups[0].size, sum(tensor.numel() for tensor in result.state.full.values()))
        assert share <= Fraction(251, 1000)
    assert reached["fair"] > 0.85
    assert reached["fair"] > reached["inconsistent"] + 0.05
