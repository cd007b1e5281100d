"""The convergence corollary: homogeneous FAIR approaches the optimum of its subspace like 1/T."""

import pytest
import torch

from experiments.convex import ConvexFederation, fitted_slope

ROUNDS = (50, 100, 200, 400, 800, 1600)


def mean_errors(full_size: int, size: int) -> list[float]:
    federation = ConvexFederation(full_size=full_size, size=size, rounds=ROUNDS)
    runs = [federation.errors(seed) for seed in range(6)]
    return torch.tensor(runs).mean(0).tolist()


def test_the_error_falls_like_one_over_t() -> None:
    errors = mean_errors(full_size=40, size=10)
    assert fitted_slope(ROUNDS, errors) == pytest.approx(-1, abs=0.2)
    assert min(errors) > 0  # towards the optimum of the subspace, from above


def test_a_new_subspace_every_round_forgets() -> None:
    """The corollary supposes one; with another every round the error stays, but at 1x, where nothing is lost."""
    for size, falls in ((10, False), (40, True)):
        federation = ConvexFederation(size=size, rounds=(50, 200), rehash=True)
        first, last = torch.tensor([federation.errors(seed) for seed in range(3)]).mean(0).tolist()
        assert (last < 0.6 * first) == falls


def test_the_slope_distinguishes_rates() -> None:
    assert fitted_slope(ROUNDS, [1 / t for t in ROUNDS]) == pytest.approx(-1)
    assert fitted_slope(ROUNDS, [t**-0.5 for t in ROUNDS]) == pytest.approx(-0.5)
