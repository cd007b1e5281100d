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
from fairfold.data import Dataset, Interactions
from fairfold.data.clients import Clients
from fairfold.data.images import ImageDataset, Images
from fairfold.protocol.algorithm import Algorithm
from fairfold.protocol.architecture import Architecture
from fairfold.protocol.people import Client, ImagePeople, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.round import in_turn
from fairfold.protocol.words import Answer, Public, Sent, State, Totals, Visit, Word
from fairfold.protocol.work import ImageWork, Work
from fairfold.settings import Settings
from fairfold.simulate.world import World
from tests.federations import tiny_data, tiny_settings
from tests.flat import flat
from tests.pictures import SMALL, pictures

PRIVATE: tuple[type, ...] = (
    Interactions, Dataset, ImageDataset, Images, Clients, People, ImagePeople, Client, Work, ImageWork, World, Word,
)  # fmt: skip
SERVERS: tuple[type, ...] = (Public, Plan, State, Sent, Answer, Totals, Visit, Architecture)
SERVER_CALLS = ("send", "apply", "problem", "init", "answer_shapes", "change", "remembered", "numbering")
NAMES = {
    "Settings": Settings, "Plan": Plan, "People": People, "Client": Client, "Interactions": Interactions,
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


def test_types_of_the_servers_things_lead_to_nobodys_data() -> None:
    found = reached(SERVERS)
    assert {Settings, Algorithm, *ALGORITHMS} <= found.keys()  # the walk gets somewhere
    assert not [way for kind, way in found.items() if kind in PRIVATE]


@pytest.mark.parametrize("algorithm", [Algorithm, *ALGORITHMS], ids=lambda kind: kind.__name__)
def test_what_the_server_calls_takes_nobodys_data(algorithm: type[Algorithm]) -> None:
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
    assert People in reached([Client])
    assert Interactions in reached(hints(Algorithm.survey).values())


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
    """The ways from an object to somebody's data."""
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
    "own model": {"model": "tests.own_models:BiasedMF"},
    "closed_form": {"solver": "closed_form", "aggregation": "delta"},
    "ratings": {"solver": "ratings", "tail_share": 0.5, "reference_factors": 3, "streamed": True},
    "central": {"solver": "central"},
    "images": SMALL,
}


@pytest.mark.parametrize("case", list(CASES))
def test_live_objects_of_the_server_lead_to_nobodys_data(case: str) -> None:
    if case == "images":
        world = World.of(flat(**CASES[case]), pictures())
    else:
        chosen = tiny_settings(**{"capacities": "1x-4x"} | CASES[case])
        world = World.of(chosen, tiny_data(2, 8, 40, ratings=case == "ratings"))
    plan, algorithm, totals = world.plan, world.plan.algorithm, Totals()
    state = world.initial()
    visits = list(world.fleet.visits(state, world.fleet.cohort(0).tolist()))
    answers = []
    for word in in_turn(world.people, visits, {}):
        assert algorithm.problem(plan, word.sent, word.answer) is None
        answers.append(word.answer)
        totals.add(word.sent, word.answer, alone=plan.method.per_client)
    after = algorithm.apply(plan, state, totals)
    assert private_in([plan, plan.public, state, visits, answers, totals, after, world.fleet]) == []
    # The last word of a tensor that grew out of another's: no graph of autograd keeps anything alive.
    kept = [*after.full.values(), *(vector for answer in answers for vector in answer.sums.values())]
    assert all(not vector.requires_grad and vector.grad_fn is None for vector in kept)
    assert private_in(world) != []


def test_the_walk_over_objects_sees_what_is_hidden() -> None:
    data = tiny_data()
    assert private_in({"a": [(1, {"b": data.train})]})
    assert private_in(lambda: data)
    assert private_in(data.train.of)
    assert private_in(partial(print, data))
    assert private_in(State({}, 0, {"moment": {"x": data}}))  # type: ignore[dict-item]
    assert not private_in([torch.zeros(3), "text", State({})])
