"""The catalogue numbered by what devices say of it before the first round.

*By counts* (``popularity = "counts"``): the numbers of the items are taken to mean nothing; everybody who takes part is
asked once. Every draw comes from the run's seed, so that whoever opens the run again finds the same order.

*By the algorithm* (:meth:`Algorithm.numbering`): from its own sums over devices, such as mean ratings.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fairfold.data import Dataset
from fairfold.data.counted import Counted, items_at, ranks_of
from fairfold.errors import InvalidData
from fairfold.metrics.ranking import Scorer
from fairfold.privacy.encoding import Encoding, Heard, Layout
from fairfold.projections import Hashed
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.faults import fault_of
from fairfold.protocol.fleet import Fleet
from fairfold.protocol.noising import noised, simulated, spare_for
from fairfold.protocol.plan import Plan
from fairfold.protocol.sampling import Purpose, generator
from fairfold.protocol.words import Public
from fairfold.settings import Settings
from fairfold.settings.privacy import PrivatePrivacy
from fairfold.values import BYTES, Weights


def public_of(data: Dataset, settings: Settings) -> Public:
    """What the server knows of the users: how many, and what they sum up before the first round."""
    survey = surveyed(data, settings)
    if data.counted is not None and COUNTS in survey:
        survey = survey | {COUNTS: data.counted.counts.double()}
    return Public(data.num_items, data.num_users, survey)


def surveyed(data: Dataset, settings: Settings) -> Weights:
    """What devices sum up before the first round; with noise where that is asked for, the same for the same seed."""
    said = settings.algorithm.survey(settings, data.train, range(data.num_items))
    if not isinstance(settings.privacy, PrivatePrivacy):
        return said.sums
    grids, devices = settings.algorithm.survey_grids(settings), data.num_users
    layout = Layout({0: {name: len(of) for name, of in said.sums.items()}})
    encoding = Encoding(layout, 1.0, devices, grids, spare_for(settings, grids, devices))
    (segment,), draw = layout.segments, simulated(settings, -1)
    words = encoding.encode(Heard(said), 0, together=devices)
    for name in said.sums:
        if name in settings.algorithm.releases:
            words = noised(settings, encoding, name, segment, devices, devices, words, draw)
    return encoding.decode({segment: words})[0].answer.sums


def numbered(data: Dataset, settings: Settings) -> Dataset:
    """The data set as a federation of these settings numbers its items."""
    if settings.subspace.counted and data.counted is None:
        return numbered_by_counts(data, settings)
    known = public_of(data, settings)
    place = settings.algorithm.numbering(Plan.of(settings, known))
    if place is None:
        return data
    if not isinstance(settings.privacy, PrivatePrivacy):
        return data.renumbered(place)
    order, users = place.argsort(), data.num_users  # what was let out once is not asked for again
    moved = users * data.num_items * BYTES
    counted = Counted(known.survey[COUNTS][order], order.to(torch.int32), users, users, moved, moved)
    return data.renumbered(place, counted)


def numbered_by_counts(data: Dataset, settings: Settings) -> Dataset:
    """The data set with its items numbered by a count, with what the count told and cost."""
    train, many = data.train, data.num_items
    known = Public(many, data.num_users, {COUNTS: train.counts_by_item.double()})
    asked = Fleet.of(Plan.of(settings, known), data.num_users).taking_part.tolist()
    draws = ((client, generator(settings, Purpose.COUNTING, 1, client)) for client in asked)
    answering = [client for client, source in draws if fault_of(settings.fleet.faults, source) is None]
    if not answering:
        raise InvalidData(
            f"a count that 0 of {len(asked)} devices answered", "at least one that does",
            "Ask more devices, or take the catalogue's own order (popularity='catalogue').",
        )  # fmt: skip
    counted = torch.zeros(data.num_users, dtype=torch.bool)
    counted[answering] = True
    counts = torch.bincount(train.items[counted[train.users]], minlength=many)
    leading, place = order_by(counts, settings, data.num_users)
    ranked = torch.empty_like(counts)
    ranked[place] = counts
    down, up = (len(asked) * numbers * BYTES for numbers in (len(leading), many))
    return data.renumbered(place, Counted(ranked, leading, len(asked), len(answering), down, up))


def order_by(counts: Tensor, settings: Settings, users: int = 1) -> tuple[Tensor, Tensor]:
    """The items that lead, by falling counts, and the new number of every item.

    Sizes depend on how many items have which count, not on their order; what they own says how many items lead: all
    that own numbers on some device that does not hold everything.
    """
    plan = Plan.of(settings, Public(len(counts), users, {COUNTS: counts.double()}))
    owned = 0
    for held in plan.assignments(0):
        for name, (_, length) in plan.architecture.tables.items():
            projection = (held.projections or {}).get(name)
            if isinstance(projection, Hashed) and not projection.subspace.is_full:
                owned = max(owned, -(-projection.subspace.head // length))
    leading = counts.argsort(descending=True, stable=True)[:owned].to(torch.int32)
    return leading, ranks_of(torch.arange(len(counts)), leading)


def renumbered_scores(references: Mapping[str, Scorer], data: Dataset) -> dict[str, Scorer]:
    """Reference rows that score the catalogue's own numbers, in the order of ranks."""
    assert data.counted is not None
    order = items_at(torch.arange(data.num_items), data.counted.leading)

    def moved(score: Scorer) -> Scorer:
        return lambda users: score(users)[:, order]

    return {name: moved(score) for name, score in references.items()}
