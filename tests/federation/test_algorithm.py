"""The base class of algorithms stays small, and capabilities are asked for by isinstance."""

import inspect

import pytest

from fairfold.algorithms import ALGORITHMS, Algorithm, CoOccurrence, Gradient
from fairfold.config.tables import FrozenSettings
from fairfold.federation import algorithm as base
from fairfold.federation.algorithm import Capability, FixedPointUpdates, RemembersUpdates


def own_members(kind: type) -> set[str]:
    """Public names that a class defines itself, fields of settings included."""
    return {name for name in {*vars(kind), *kind.__annotations__} if not name.startswith(("_", "model_"))}


def test_an_algorithm_has_at_most_twelve_methods_and_six_fields() -> None:
    methods = {name for name in own_members(Algorithm) if inspect.isfunction(vars(Algorithm).get(name))}
    fields = own_members(Algorithm) - methods
    assert len(methods) <= 12, methods
    assert len(fields) <= 6, fields
    assert {"client_update", "server_update"} == set(Algorithm.__abstractmethods__)


def test_a_capability_is_the_algorithm_itself_or_its_defaults() -> None:
    chosen, other = CoOccurrence(), Gradient()
    assert FixedPointUpdates.of(chosen) is chosen
    assert isinstance(chosen, RemembersUpdates)
    assert not isinstance(other, RemembersUpdates)
    assert FixedPointUpdates.of(other).fixed_point == {}


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_algorithms_override_only_what_the_base_and_capabilities_have(kind: type[Algorithm]) -> None:
    """A method with the name of a capability's belongs to a class with that capability."""
    capabilities = [of for _, of in inspect.getmembers(base, inspect.isclass) if issubclass(of, Capability)]
    for capability in capabilities:
        if not issubclass(kind, capability):
            names = own_members(capability) - {"of"}
            assert not {name for name in names if hasattr(kind, name)} - set(dir(FrozenSettings)), capability
