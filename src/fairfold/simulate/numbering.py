"""The catalogue numbered by what devices say of it before the first round.

*By counts* (``popularity = "counts"``): the numbers of the items are taken to mean nothing; everybody who takes part is
asked once, in a ring drawn by chance. ``backend = "loop"`` lets devices and server carry the count out under masks;
``"batched"`` adds up without masks, which cancel to the last bit. Every draw comes from the run's seed, so that whoever
opens the run again finds the same order.

*By the algorithm* (:meth:`Algorithm.numbering`): from its own sums over devices, such as mean ratings.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fairfold.data import Dataset, Interactions
from fairfold.data.counted import Counted, items_at, ranks_of
from fairfold.metrics.ranking import Scorer
from fairfold.projections import Hashed
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.counting import Flags, bytes_of_count, masked_count, staying
from fairfold.protocol.faults import fault_of
from fairfold.protocol.fleet import Fleet
from fairfold.protocol.plan import Plan
from fairfold.protocol.sampling import Purpose, generator
from fairfold.protocol.words import Public
from fairfold.settings import Settings

NONE_LEADS = torch.empty(0, dtype=torch.int32)


def public_of(data: Dataset, settings: Settings) -> Public:
    """What the server knows of the users: how many, and what they sum up before the first round."""
    survey = settings.algorithm.survey(settings, data.train, range(data.num_items)).sums
    if data.counted is not None and COUNTS in survey:
        survey = survey | {COUNTS: data.counted.counts.double()}
    return Public(data.num_items, data.num_users, survey)


def numbered(data: Dataset, settings: Settings) -> Dataset:
    """The data set as a federation of these settings numbers its items."""
    if settings.subspace.counted and data.counted is None:
        return numbered_by_counts(data, settings)
    place = settings.algorithm.numbering(Plan.of(settings, public_of(data, settings)))
    return data if place is None else data.renumbered(place)


def numbered_by_counts(data: Dataset, settings: Settings) -> Dataset:
    """The data set with its items numbered by a count, with what the count told and cost."""
    known = Public(data.num_items, data.num_users, {COUNTS: data.train.counts_by_item.double()})
    devices = Fleet.of(Plan.of(settings, known), data.num_users).taking_part
    source = generator(settings, Purpose.COUNTING)
    devices = devices[torch.randperm(len(devices), generator=source)]
    secret = int(torch.randint(2**62, (), generator=source))
    answered = _answers(devices, settings)
    if settings.run.backend == "loop":
        counts = masked_count(data.train, devices, answered, secret)
    else:
        counts = plain_count(data.train, devices, answered)
    told = Counted(counts, NONE_LEADS, len(devices), int(staying(answered).sum()))
    leading, place = order_by(counts, settings, data.num_users)
    ranked = torch.empty_like(told.counts)
    ranked[place] = told.counts
    down, up = bytes_of_count(data.num_items, answered, len(leading))
    return data.renumbered(place, replace(told, counts=ranked, leading=leading, bytes_down=down, bytes_up=up))


def order_by(counts: Tensor, settings: Settings, users: int = 1) -> tuple[Tensor, Tensor]:
    """The items that lead, by falling counts, and the new number of every item.

    Sizes depend on how many items have which count, not on their order; what they own says how many items lead.
    """
    plan = Plan.of(settings, Public(len(counts), users, {COUNTS: counts.double()}))
    leading = counts.argsort(descending=True, stable=True)[: owned_items(plan)].to(torch.int32)
    return leading, ranks_of(torch.arange(len(counts)), leading)


def plain_count(histories: Interactions, devices: Tensor, answered: Flags) -> Tensor:
    """The numbers of ``masked_count``, by one pass over the interactions."""
    counted = torch.zeros(histories.num_users, dtype=torch.bool)
    counted[devices[torch.from_numpy(staying(answered))]] = True
    return torch.bincount(histories.items[counted[histories.users]], minlength=histories.num_items)


def owned_items(plan: Plan) -> int:
    """How many leading items own numbers on some device that does not hold everything: all whose order matters."""
    found = [0]
    for held in plan.assignments(0):
        for name, (_, length) in plan.architecture.tables.items():
            projection = (held.projections or {}).get(name)
            if isinstance(projection, Hashed) and not projection.subspace.is_full:
                found.append(-(-projection.subspace.head // length))
    return max(found)


def renumbered_scores(references: Mapping[str, Scorer], data: Dataset) -> dict[str, Scorer]:
    """Reference rows that score the catalogue's own numbers, in the order of ranks."""
    assert data.counted is not None
    order = items_at(torch.arange(data.num_items), data.counted.leading)

    def moved(score: Scorer) -> Scorer:
        return lambda users: score(users)[:, order]

    return {name: moved(score) for name, score in references.items()}


def _answers(devices: Tensor, settings: Settings) -> Flags:
    """Who answers. A reply under masks cannot be looked into: whoever fails in whatever way is as if silent."""
    faults = settings.fleet.faults
    if not any(faults.model_dump().values()):
        return np.ones(len(devices), dtype=np.bool_)
    draws = (generator(settings, Purpose.COUNTING, 1, client) for client in devices.tolist())
    return np.array([fault_of(faults, source) is None for source in draws], dtype=np.bool_)
