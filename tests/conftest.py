"""Settings shared by all tests."""

from hypothesis import HealthCheck, settings

# Examples differ widely in cost, and machines in speed: no deadline. A fixed stream of examples keeps CI repeatable.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("default")
