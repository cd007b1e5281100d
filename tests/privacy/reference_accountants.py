"""What two published accountants say of Gaussian noise, written to ``accountants.json`` for the tests to compare with.

Their pins do not bear those of Flower, so they live in an environment of their own; fairfold is not needed there:

    python -m venv accountants
    accountants/bin/pip install dp-accounting==0.6.0 prv-accountant==0.2.0
    accountants/bin/python tests/privacy/reference_accountants.py
"""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("accountants.json")
DELTA = 1e-5
ONE = (0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 4.0, 10.0)
"""σ of single releases."""

SEVERAL = ((1.9, 0.64), (2.0, 3.0, 1.2), (1.0, 1.0), (4.0, 4.0, 4.0, 4.0), (0.9, 5.0, 5.0))
"""σ of releases one after the other; the first are those of a run with ε = 8, a tenth and nine tenths of the budget."""

SAME = ((1.0, 3), (2.0, 10), (6.0, 100))
"""σ, and how often: the other accountant composes a release with itself."""


def written() -> dict[str, Any]:
    """What they say."""
    import dp_accounting  # type: ignore[import-not-found]
    from dp_accounting import pld
    from prv_accountant import GaussianMechanism, PRVAccountant  # type: ignore[import-not-found]

    several = []
    for sigmas in SEVERAL:
        accountant = pld.PLDAccountant()
        for sigma in sigmas:
            accountant.compose(dp_accounting.GaussianDpEvent(sigma))
        several.append([list(sigmas), float(accountant.get_epsilon(DELTA))])
    same = []
    for sigma, times in SAME:
        found = PRVAccountant(GaussianMechanism(sigma), max_self_compositions=times, eps_error=0.005, delta_error=1e-12)
        low, middle, high = found.compute_epsilon(DELTA, num_self_compositions=times)
        same.append([sigma, times, float(low), float(middle), float(high)])
    return {
        "delta": DELTA,
        "dp-accounting": metadata.version("dp-accounting"),
        "prv-accountant": metadata.version("prv-accountant"),
        "one": [[sigma, float(dp_accounting.get_epsilon_gaussian(sigma, DELTA))] for sigma in ONE],
        "several": several,
        "same": same,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(written(), indent=1) + "\n")
