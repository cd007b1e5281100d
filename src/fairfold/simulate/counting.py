"""The count before the first round, and the catalogue numbered by it: what ``popularity="counts"`` does.

The numbers of the items are taken to mean nothing. Everybody who takes part is asked once, in a ring drawn by chance.
``backend="loop"`` lets devices and server carry the count out; ``"batched"`` adds up without masks, which cancel to
the last bit. Every draw comes from the run's seed, so that whoever opens the run again finds the same order.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fairfold.data import Dataset, Interactions
from fairfold.data.counted import Counted, items_at, ranks_of
from fairfold.federation.counting import Flags, bytes_of_count, masked_count, staying
from fairfold.federation.projection import Hashed
from fairfold.federation.replies import fault_of
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.settings import Settings
from fairfold.federation.task import Task
from fairfold.metrics.ranking import Scorer
from fairfold.simulate.federation import Federation

NONE_LEADS = torch.empty(0, dtype=torch.int32)


def numbered_by_counts(data: Dataset, settings: Settings) -> Dataset:
    """The data set as a federation of these settings numbers its items, with what the count told and cost."""
    devices = Federation.of(settings, Task(data, settings)).taking_part
    if settings.method == "central":  # all data in one place: nobody to ask, nothing to hide
        told, answered = Counted(data.train.counts_by_item, NONE_LEADS, len(devices), len(devices)), None
    else:
        source = generator(settings, Purpose.COUNTING)
        devices = devices[torch.randperm(len(devices), generator=source)]
        secret = int(torch.randint(2**62, (), generator=source))
        answered = _answers(devices, settings)
        if settings.backend == "loop":
            counts = masked_count(data.train, devices, answered, secret)
        else:
            counts = plain_count(data.train, devices, answered)
        told = Counted(counts, NONE_LEADS, len(devices), int(staying(answered).sum()))
    # Sizes depend on how many items have which count, not on their order; what they own says how many items lead.
    owned = owned_items(Federation.of(settings, Task(replace(data, counted=told), settings)))
    leading = told.counts.argsort(descending=True, stable=True)[:owned].to(torch.int32)
    place = ranks_of(torch.arange(data.num_items), leading)
    counts = torch.empty_like(told.counts)
    counts[place] = told.counts
    down, up = (0, 0) if answered is None else bytes_of_count(data.num_items, answered, owned)
    return data.renumbered(place, replace(told, counts=counts, leading=leading, bytes_down=down, bytes_up=up))


def plain_count(histories: Interactions, devices: Tensor, answered: Flags) -> Tensor:
    """The numbers of ``masked_count``, by one pass over the interactions."""
    counted = torch.zeros(histories.num_users, dtype=torch.bool)
    counted[devices[torch.from_numpy(staying(answered))]] = True
    return torch.bincount(histories.items[counted[histories.users]], minlength=histories.num_items)


def owned_items(federation: Federation) -> int:
    """How many leading items own numbers on some device that does not hold everything: all whose order matters."""
    found = [0]
    for held in federation.assignments(0):
        for name, (_, length) in federation.task.tables.items():
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
    if not any(settings.faults.model_dump().values()):
        return np.ones(len(devices), dtype=np.bool_)
    draws = (generator(settings, Purpose.COUNTING, 1, client) for client in devices.tolist())
    return np.array([fault_of(settings, source) is None for source in draws], dtype=np.bool_)
