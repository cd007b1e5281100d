"""What a cell keeps of a federation that has ended, and federations whose order of popularity comes from few users."""

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from fairfold.data import Dataset
from fairfold.data.counted import Counted
from fairfold.data.seeds import generator
from fairfold.errors import InvalidSettings
from fairfold.reproduce.paired import packed
from fairfold.reproduce.records import Outcome
from fairfold.settings import Settings
from fairfold.simulate import simulate
from fairfold.simulate.result import Result
from fairfold.simulate.world import load_catalogued
from fairfold.trackers import Callback

ORDER = 6
"""Purpose of the draw of those who are counted."""


def outcome_of_run(result: Result, seconds: float) -> Outcome:
    """Quality over rounds, what devices of each size hold, move and reach, and what each user got."""
    rounds = max(len(result.history), 1)
    facts = {
        "metric": result.metric,
        "users": result.users,
        "seconds a round": sum(report.seconds for report in result.history) / rounds,
        "bytes a round": sum(report.bytes_down + report.bytes_up for report in result.history) / rounds,
        "devices": {
            group.capacity: {
                "users": group.users, "numbers held": group.size, "bytes held": group.bytes_held,
                "bytes down": group.bytes_down, "bytes up": group.bytes_up, "quality": group.quality,
                "everybody": group.everybody,
            }
            for group in result.groups
        },
        "rejections": dict(result.rejections),
        "told": result.told,
    }  # fmt: skip
    curve = [(float(one.round_number), one.quality.server) for one in result.history if one.quality is not None]
    by_user = {f"size {capacity}": each for capacity, each in result.own_by_user.items()}
    outcome = Outcome.of_curve(curve, result.metric, seconds=seconds, facts=facts)
    outcome.by_user.update(_of_server(outcome, result.by_user))
    outcome.by_user.update({name: packed(each.numpy()) for name, each in by_user.items()})
    return outcome


def _of_server(outcome: Outcome, known: Mapping[int, Tensor]) -> dict[str, str]:
    """What each user got in the best evaluation and in the last; empty where an earlier sitting made one of them."""
    rounds = {"best": outcome.best_round, "last": outcome.last_round}
    if not all(number in known for number in rounds.values()):
        return {}
    return {name: packed(known[int(number or 0)].numpy()) for name, number in rounds.items()}


def ordered_by_few(settings: Settings, share: float, callback: Callback) -> Outcome:
    """A federation whose items are numbered, and whose support is counted, by a share of the users."""
    started = time.monotonic()
    data = counted_by(load_catalogued(settings)[0], share, settings.run.seed)
    return outcome_of_run(simulate(settings, data=data, callbacks=[callback]), time.monotonic() - started)


def counted_by(data: Dataset, share: float, seed: int) -> Dataset:
    """A data set as it is numbered where a share of the users, drawn by chance, is counted; equal counts by chance."""
    if not 0 < share <= 1:
        raise InvalidSettings(f"order_from = {share}", "above 0 and at most 1", "Take 0.1 for a tenth of the users.")
    many, chance = max(1, round(share * data.num_users)), generator(seed, ORDER)
    chosen = torch.zeros(data.num_users, dtype=torch.bool)
    chosen[torch.randperm(data.num_users, generator=chance)[:many]] = True
    found = torch.bincount(data.train.items[chosen[data.train.users]], minlength=data.num_items)
    counts = (found * (data.num_users / many)).round().long()  # each stands for several
    order = torch.randperm(data.num_items, generator=chance)  # numbers at hand may be of everybody's counts
    order = order[counts[order].argsort(descending=True, stable=True)]
    return data.renumbered(order.argsort(), Counted(counts[order], order.to(torch.int32), many, many))
