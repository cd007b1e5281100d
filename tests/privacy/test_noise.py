"""Discrete Gaussians are drawn with their chances, and shares add up to what is needed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfold.errors import InvalidSettings
from fairfold.privacy.noise import client_noise_sigma, discrete_gaussian
from fairfold.privacy.noise import seeded_random as source


@pytest.mark.parametrize("sigma", [1, 3, 17])
def test_every_number_comes_as_often_as_it_should(sigma: int) -> None:
    many = 200_000
    drawn = discrete_gaussian(sigma, many, source(sigma))
    reach = 5 * sigma
    chance = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2.0 * sigma**2))
    expected = many * chance / chance.sum()
    found = np.bincount((drawn + reach).clip(0, 2 * reach), minlength=2 * reach + 1)
    frequent = expected >= 5
    chi = float((((found - expected) ** 2 / expected)[frequent]).sum())
    degrees = int(frequent.sum()) - 1
    assert abs(chi - degrees) < 5 * math.sqrt(2 * degrees)  # five deviations of that statistic


@pytest.mark.parametrize("sigma", [10, 431, 20_000])
def test_its_moments_are_those_of_a_gaussian(sigma: int) -> None:
    drawn = discrete_gaussian(sigma, 100_000, source(sigma)).astype(float) / sigma
    assert abs(drawn.mean()) < 5 / math.sqrt(len(drawn))
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / len(drawn))
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / len(drawn))


@given(st.floats(50, 1e5), st.integers(1, 5000), st.floats(0, 0.3))
def test_those_who_stay_add_enough(sigma: float, devices: int, dropped: float) -> None:
    try:
        share = client_noise_sigma(sigma, devices)
    except InvalidSettings:
        return
    stayed = devices - math.floor(dropped * devices)
    assert stayed * share**2 >= sigma**2 * (1 - 1e-12)


def test_shares_of_a_cohort_add_up_to_the_noise_that_was_asked_for() -> None:
    share = client_noise_sigma(2_000.0, 100)
    drawn = sum(discrete_gaussian(share, 20_000, source(device)) for device in range(70))
    found = float(np.asarray(drawn, dtype=float).std())
    assert 2_000 * 0.98 < found < 2_000 * 1.03


@pytest.mark.parametrize("sigma", [0, -3, 1 << 40])
def test_what_is_no_deviation_is_refused(sigma: int) -> None:
    with pytest.raises(InvalidSettings):
        discrete_gaussian(sigma, 3, source(0))
    with pytest.raises(InvalidSettings, match="noise of"):
        client_noise_sigma(1.0, 1000)
