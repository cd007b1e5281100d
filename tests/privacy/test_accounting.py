"""What noise costs, beside a numerical integration of privacy losses and what two published accountants say."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfold.errors import InvalidSettings
from fairfold.privacy.accounting import composed_sigma, delta_of, epsilon_of, sigma_for, sigma_for_share
from tests.privacy.reference_accountants import FILE

CASES = [(0.6, 8.0), (1.0, 4.0), (1.0, 1.0), (2.0, 2.0), (4.0, 0.5)]


def integrated(sigmas: list[float], epsilon: float) -> float:
    """δ by its definition, for releases one after the other: ∫ (p − e^ε q)⁺ over what is released, step by step.

    The ratio of a release's densities is that of N(1, σ²) and N(0, σ²). The losses of several are convolved.
    """
    grid = np.linspace(-60, 60, 1 << 16, endpoint=False)
    step = grid[1] - grid[0]
    total = None
    for sigma in sigmas:  # of a draw from N(1, σ²): (2x − 1)/2σ², so that it is itself normal
        mean, deviation = 0.5 / sigma**2, 1 / sigma
        density = np.exp(-((grid - mean) ** 2) / (2 * deviation**2)) / (deviation * np.sqrt(2 * np.pi))
        spectrum = np.fft.rfft(np.fft.ifftshift(density) * step)
        total = spectrum if total is None else total * spectrum
    assert total is not None
    losses = np.fft.fftshift(np.fft.irfft(total, len(grid)))
    return float((losses * np.clip(1 - np.exp(epsilon - grid), 0, None)).sum())


@pytest.mark.parametrize(("sigma", "epsilon"), CASES)
def test_delta_is_what_integration_finds(sigma: float, epsilon: float) -> None:
    assert delta_of(sigma, epsilon) == pytest.approx(integrated([sigma], epsilon), rel=1e-4, abs=1e-12)


def test_releases_together_cost_what_one_costs() -> None:
    sigmas = [2.0, 3.0, 1.2]
    assert delta_of(composed_sigma(sigmas), 3.0) == pytest.approx(integrated(sigmas, 3.0), rel=1e-4)


@given(st.floats(0.05, 20), st.sampled_from([1e-8, 1e-5, 1e-3]))
def test_the_noise_for_a_budget_costs_the_budget(epsilon: float, delta: float) -> None:
    sigma = sigma_for(epsilon, delta)
    assert delta_of(sigma, epsilon) <= delta
    assert epsilon_of(sigma, delta) == pytest.approx(epsilon, rel=1e-6)
    assert delta_of(sigma * 0.999, epsilon) > delta


@given(st.floats(0.3, 30), st.floats(0.01, 0.99))
def test_parts_of_a_budget_are_the_budget(sigma: float, share: float) -> None:
    assert composed_sigma([sigma_for_share(sigma, share), sigma_for_share(sigma, 1 - share)]) == pytest.approx(sigma)


def test_known_figures() -> None:
    assert sigma_for(1.0, 1e-5) == pytest.approx(3.7304, abs=1e-3)  # Balle and Wang's closed form, as others print it
    assert epsilon_of(1e6, 1e-5) == 0


@pytest.mark.parametrize("bad", [(0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_what_is_no_budget_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(InvalidSettings):
        sigma_for(*bad)


# -- what published accountants say, in an environment of their own (reference_accountants.py) -------------------------

PUBLISHED = json.loads(FILE.read_text())


@pytest.mark.parametrize(("sigma", "epsilon"), PUBLISHED["one"])
def test_dp_accounting_says_the_same_of_one_release(sigma: float, epsilon: float) -> None:
    assert epsilon_of(sigma, PUBLISHED["delta"]) == pytest.approx(epsilon, rel=1e-7)
    assert sigma_for(epsilon, PUBLISHED["delta"]) == pytest.approx(sigma, rel=1e-7)


@pytest.mark.parametrize(("sigmas", "epsilon"), PUBLISHED["several"])
def test_dp_accounting_says_the_same_of_several(sigmas: list[float], epsilon: float) -> None:
    ours = epsilon_of(composed_sigma(sigmas), PUBLISHED["delta"])
    assert ours <= epsilon * (1 + 1e-9)  # theirs is rounded up to a grid of losses
    assert ours == pytest.approx(epsilon, rel=2e-4)


@pytest.mark.parametrize(("sigma", "times", "low", "middle", "high"), PUBLISHED["same"])
def test_prv_accountant_says_the_same(sigma: float, times: int, low: float, middle: float, high: float) -> None:
    ours = epsilon_of(composed_sigma([sigma] * times), PUBLISHED["delta"])
    assert low <= ours <= high
    assert ours == pytest.approx(middle, abs=2e-4)
