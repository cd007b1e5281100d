"""The server's knowledge is public facts and sums: nothing that it holds leads to what a client has.

Both ways are walked: the types that the server's things are declared to have, and live objects of small federations,
through containers, attributes and the variables of functions.
"""

import inspect
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import fairfold.metrics.ranking
import fairfold.metrics.rating
from fairfold.algorithms import ALGORITHMS
from fairfold.config import Settings
from fairfold.data import Dataset, Interactions
from fairfold.data.images import ImageDataset, Images
from fairfold.data.partition import Partition
from fairfold.federation.algorithm import Algorithm
from fairfold.federation.architecture import Architecture
from fairfold.federation.clients import Client, Clients, ImageClients
from fairfold.federation.federation import Federation
from fairfold.federation.plan import Plan
from fairfold.federation.round import sequential
from fairfold.federation.training import ImageTraining, RankingTraining
from fairfold.federation.updates import (
    Aggregate,
    ClientTask,
    ClientUpdate,
    PublicStatistics,
    ScheduledTask,
    State,
    Update,
)
from tests.support.federations import tiny_data, tiny_settings
from tests.support.pictures import SMALL, pictures
from tests.support.settings import make_settings

PRIVATE: tuple[type, ...] = (
    Interactions, Dataset, ImageDataset, Images, Partition, Clients,
    ImageClients, Client, RankingTraining, ImageTraining, Federation, ClientUpdate,
)  # fmt: skip
SERVERS: tuple[type, ...] = (PublicStatistics, Plan, State, ClientTask, Update, Aggregate, ScheduledTask, Architecture)
SERVER_CALLS = ("tasks", "server_update", "validate_update", "init", "update_shapes")
NAMES = {
    "Settings": Settings, "Plan": Plan, "Clients": Clients, "Client": Client, "Interactions": Interactions,
    "Scorer": fairfold.metrics.ranking.Scorer, "Predictor": fairfold.metrics.rating.Predictor,
}  # fmt: skip
"""What modules import for annotations alone."""


# -- types -------------------------------------------------------------------------------------------------------------


def hints(of: Any) -> dict[str, Any]:
    return typing.get_type_hints(of, localns=NAMES)


def reached(start: Iterable[Any]) -> dict[type, str]:
    """Classes that can be reached from annotations, each with the way there."""
    found: dict[type, str] = {}
    todo = [(one, getattr(one, "__name__", str(one))) for one in start]
    while todo:
        one, way = todo.pop()
        todo += [(argument, way) for argument in typing.get_args(one)]
        if not isinstance(one, type) or one in found or not one.__module__.startswith("fairfold"):
            continue
        found[one] = way
        todo += [(kind, f"{way}.{name}") for name, kind in hints(one).items()]
        below: list[type] = one.__subclasses__()
        todo += [(kind, f"{way} → {kind.__name__}") for kind in below]
    return found


def test_types_of_the_server_lead_to_no_client_data() -> None:
    found = reached(SERVERS)
    assert {Settings, Algorithm, *ALGORITHMS} <= found.keys()  # the walk gets somewhere
    assert not [way for kind, way in found.items() if kind in PRIVATE]


@pytest.mark.parametrize("algorithm", [Algorithm, *ALGORITHMS], ids=lambda kind: kind.__name__)
def test_what_the_server_calls_takes_no_client_data(algorithm: type[Algorithm]) -> None:
    for name in SERVER_CALLS:
        call = getattr(algorithm, name)
        parameters = [given for given in inspect.signature(call).parameters if given != "self"]
        known = hints(call)
        assert all(given in known for given in parameters), name
        found = reached(known[given] for given in parameters)
        assert not [way for kind, way in found.items() if kind in PRIVATE], name


def test_the_walk_over_types_sees_what_is_hidden() -> None:
    @dataclass
    class Deep:
        kept: dict[str, list[tuple[int, Interactions | None]]]

    Deep.__module__ = "fairfold.somewhere"
    assert Interactions in reached([Deep])
    assert Clients in reached([Client])
    assert Interactions in reached(hints(Algorithm.client_statistics).values())


# -- objects -----------------------------------------------------------------------------------------------------------


def inside(one: Any) -> list[tuple[str, Any]]:
    """What an object leads to."""
    if isinstance(one, Mapping):
        return [(f"[{key!r}]", value) for key, value in one.items()] + [("key", key) for key in one]
    if isinstance(one, list | tuple | set | frozenset):
        return [("[…]", value) for value in one]
    found: list[tuple[str, Any]] = []
    if inspect.ismethod(one):
        return [("self", one.__self__), ("function", one.__func__)]
    if isinstance(one, partial):
        return [("func", one.func), ("args", one.args), ("keywords", one.keywords)]
    if inspect.isfunction(one):
        cells = one.__closure__ or ()
        return [("closure", cell.cell_contents) for cell in cells] + [("defaults", one.__defaults__ or ())]
    if inspect.isclass(one) or inspect.ismodule(one) or isinstance(one, torch.Tensor | np.ndarray):
        return []
    found += [(f".{name}", value) for name, value in getattr(one, "__dict__", {}).items()]
    slots = {name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())}
    return found + [(f".{name}", getattr(one, name)) for name in slots if hasattr(one, name)]


def private_in(start: Any) -> list[str]:
    """Paths from an object to data of clients."""
    found, seen, todo = list[str](), dict[int, Any](), [("", start)]
    while todo:
        way, one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # kept, so that no number is used twice
        if isinstance(one, PRIVATE):
            found.append(f"{way}: {type(one).__name__}")
            continue
        todo += [(way + step, value) for step, value in inside(one)]
    return found


CASES: dict[str, dict[str, Any]] = {
    "gradient": {"rehash": True, "mapping": "element"},
    "neumf": {"model": "neumf", "factors": 4, "method": "heterofl", "capacities": "1x-2x"},
    "fedhm": {"method": "fedhm", "factors": 4, "capacities": "1x-2x"},
    "inconsistent": {"method": "inconsistent", "mapping": "element"},
    "uploaded": {"user_vectors": "uploaded"},
    "own model": {"model": "tests.support.own_models:BiasedMF"},
    "closed_form": {"algorithm": "closed_form", "aggregation": "delta"},
    "newton": {"algorithm": "closed_form", "aggregation": "delta", "server_optimizer": "newton"},
    "ratings": {"algorithm": "ratings", "tail_share": 0.5, "reference_factors": 3, "streamed": True},
    "central": {"algorithm": "central"},
    "images": SMALL,
}


@pytest.mark.parametrize("case", list(CASES))
def test_live_objects_of_the_server_lead_to_no_client_data(case: str) -> None:
    if case == "images":
        federation = Federation.of(make_settings(**CASES[case]), pictures())
    else:
        chosen = tiny_settings(**{"capacities": "1x-4x"} | CASES[case])
        federation = Federation.of(chosen, tiny_data(2, 8, 40, ratings=case == "ratings"))
    plan, algorithm, aggregate = federation.plan, federation.plan.algorithm, Aggregate()
    state = federation.initial()
    scheduled = list(federation.sampler.schedule(state, federation.sampler.cohort(0).tolist()))
    updates = []
    for client_update in sequential(federation.clients, scheduled, {}):
        assert algorithm.validate_update(plan, client_update.task, client_update.update) is None
        updates.append(client_update.update)
        aggregate.add(client_update.task, client_update.update, alone=plan.method.per_client)
    after = algorithm.server_update(plan, state, aggregate)
    assert private_in([plan, plan.public, state, scheduled, updates, aggregate, after, federation.sampler]) == []
    # No graph of autograd keeps data of clients alive.
    kept = [*after.full.values(), *(vector for update in updates for vector in update.sums.values())]
    assert all(not vector.requires_grad and vector.grad_fn is None for vector in kept)
    assert private_in(federation) != []


def test_the_walk_over_objects_sees_what_is_hidden() -> None:
    data = tiny_data()
    assert private_in({"a": [(1, {"b": data.train})]})
    assert private_in(lambda: data)
    assert private_in(data.train.of)
    assert private_in(partial(print, data))
    assert private_in(State({}, 0, {"moment": {"x": data}}))  # type: ignore[dict-item]
    assert not private_in([torch.zeros(3), "text", State({})])
