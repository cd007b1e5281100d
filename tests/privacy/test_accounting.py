"""What noise costs, beside a numerical integration of privacy losses and, where they are installed, two accountants."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfold.errors import InvalidSettings
from fairfold.privacy.accounting import delta_of, epsilon_of, part_of, sigma_for, together

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
    assert delta_of(together(sigmas), 3.0) == pytest.approx(integrated(sigmas, 3.0), rel=1e-4)


@given(st.floats(0.05, 20), st.sampled_from([1e-8, 1e-5, 1e-3]))
def test_the_noise_for_a_budget_costs_the_budget(epsilon: float, delta: float) -> None:
    sigma = sigma_for(epsilon, delta)
    assert delta_of(sigma, epsilon) <= delta
    assert epsilon_of(sigma, delta) == pytest.approx(epsilon, rel=1e-6)
    assert delta_of(sigma * 0.999, epsilon) > delta


@given(st.floats(0.3, 30), st.floats(0.01, 0.99))
def test_parts_of_a_budget_are_the_budget(sigma: float, share: float) -> None:
    assert together([part_of(sigma, share), part_of(sigma, 1 - share)]) == pytest.approx(sigma)


def test_known_figures() -> None:
    assert sigma_for(1.0, 1e-5) == pytest.approx(3.7304, abs=1e-3)  # Balle and Wang's closed form, as others print it
    assert epsilon_of(1e6, 1e-5) == 0


@pytest.mark.parametrize("bad", [(0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_what_is_no_budget_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(InvalidSettings):
        sigma_for(*bad)


@pytest.mark.parametrize(("sigma", "epsilon"), CASES)
def test_dp_accounting_agrees(sigma: float, epsilon: float) -> None:
    why = "dp-accounting is not installed, whose pin of attrs Flower's does not bear (docs/privacy.md)"
    accounting = pytest.importorskip("dp_accounting", reason=why)
    delta = delta_of(sigma, epsilon)
    found = accounting.get_epsilon_gaussian(sigma, delta)
    assert found == pytest.approx(epsilon, rel=1e-3)
    accountant = pytest.importorskip("dp_accounting.pld", reason=why).PLDAccountant()
    accountant.compose(accounting.GaussianDpEvent(sigma * 2**0.5), 2)
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=2e-3)


@pytest.mark.parametrize(("sigma", "epsilon"), CASES[:3])
def test_prv_accountant_agrees(sigma: float, epsilon: float) -> None:
    why = "prv-accountant is not installed (docs/privacy.md)"
    accountants = pytest.importorskip("prv_accountant", reason=why)
    mechanism = accountants.GaussianMechanism(noise_multiplier=sigma * 3**0.5)
    found = accountants.PRVAccountant(mechanism, max_self_compositions=3, eps_error=0.005, delta_error=1e-12)
    low, _, high = found.compute_epsilon(delta_of(sigma, epsilon), num_self_compositions=3)
    assert low - 1e-3 <= epsilon <= high + 1e-3
