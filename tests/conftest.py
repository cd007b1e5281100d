"""Settings shared by all tests."""

import atexit
import os
import shutil
import tempfile

# Nothing is left in the cache of the user who runs the tests, nor found there; each process of theirs has its own.
_cache = tempfile.mkdtemp(prefix="fairfold-tests-")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ["FAIRFOLD_CACHE"] = _cache

# Before torch loads: tests use small tensors, where threads cost more than they give, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

# Examples differ widely in cost, and machines in speed: no deadline. A fixed stream of examples keeps CI repeatable.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests an hour each; the limit of all others stands in pyproject.toml."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))
