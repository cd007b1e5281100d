"""A run whose data lies on devices, opened again: all that the server knows of them is in its checkpoint.

That is the sums before the first round, and the numbers that items got by them. There are no users here: whoever is to
be served brings a history.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidState
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.architecture import Picture
from fairfold.protocol.fleet import Fleet
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Public, State
from fairfold.settings import Settings
from fairfold.settings.parts import DeviceData
from fairfold.simulate.world import World

SURVEY, NUMBERING, PLACE = "survey", "numbering", "place"
"""Moments of a server's state: the sums before the first round; which numbers items have in this run."""

CATALOGUE = "catalogue.txt"
"""In a server's folder, beside its run: the names of the items, a line each, where they have some."""


def on_devices(settings: Settings, num_items: int) -> Settings:
    """Settings that say where the data is; networks of images keep theirs, by which devices read their own."""
    if settings.model.reads_images or num_items < 1:  # the latter is refused, with words, where a plan is made
        return settings
    return settings.model_copy(update={"data": DeviceData(items=num_items)})


def plan_of(settings: Settings, items: int, state: State, picture: Picture | None = None) -> Plan:
    """What server and devices agree on, by what these have said before the first round."""
    return Plan.of(settings, Public(items, survey=dict(state.moments.get(SURVEY, {}))), picture)


def catalogue_of(state: State) -> Tensor | None:
    """The catalogue's number of every item, in the order of the run's numbers; None where these are the same."""
    place = state.moments.get(NUMBERING, {}).get(PLACE)
    return None if place is None else place.argsort()


def names_beside(run: Path, items: int) -> list[str] | None:
    """The names of the items of a run that lies in its server's folder; None where they have numbers alone."""
    path = run.absolute().parent / CATALOGUE
    if not path.is_file():
        return None
    names = path.read_text(encoding="utf-8").splitlines()
    if len(names) != items:
        given = f"{path}, which has {len(names):,} names"
        raise InvalidState(given, f"those of the {items:,} items of {run}", "Put back the catalogue of this server.")
    return names


def world_of(settings: Settings, state: State, names: Sequence[str] | None = None) -> World:
    """A federation without its devices: its plan, nobody's history, and how many have each item where that is known."""
    assert isinstance(settings.data, DeviceData)
    items, survey = settings.data.items, state.moments.get(SURVEY, {})
    plan = plan_of(settings, items, state)
    nobody = Interactions(0, items, torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    counts = survey.get(COUNTS)
    known = torch.ones(items, dtype=torch.int64) if counts is None else counts.long()
    nobody.__dict__["counts_by_item"] = known  # what devices said together, in the place of their histories
    order = catalogue_of(state)
    if order is not None:
        names = [str(number) if names is None else names[number] for number in order.tolist()]
    data = Dataset("devices", nobody, nobody, item_ids=None if names is None else list(names))
    none = torch.empty(0, dtype=torch.int64)
    return World(plan, Fleet(plan, none, none), People(plan, nobody, {}), data)
