"""What an update reveals of its user: the attack of ``fairfold audit`` on federated baselines and on ours.

A method's devices train for some rounds. Then some of them send one more update, and the attacker, who has tuned itself
on devices that it made up, ranks all items by one update, or by the sum of a cohort.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from experiments.combine import pack_per_user
from experiments.fedrec import FedRecSettings, leave_newest_out, run_settings
from fairfold.config import Settings
from fairfold.data.interactions import Dataset
from fairfold.federation.federation import Federation
from fairfold.privacy.audit.auditor import Auditor
from fairfold.privacy.audit.history import Figure, attack_sums, attack_updates
from fairfold.privacy.audit.reconstruction import UpdateReader
from fairfold.privacy.audit.replay import ReplayedClients

AUC, OTHERS, FOUND = "AUC", "AUC by another's answer", "history found"


@dataclass(frozen=True)
class FedRecAuditSettings:
    """Settings of one cell."""

    method: str  # a baseline, or "ours"
    data: str = "ml-100k"
    capacities: str = "1x"
    rounds: int = 5  # before the update
    clients: int = 200  # in each of them
    cohort: int = 1  # updates that the server sees as one sum
    targets: int = 60  # users who are attacked

    def __post_init__(self) -> None:
        FedRecSettings(self.method)  # refuses a method that nobody knows


def audit_updates(
    given: FedRecAuditSettings, seed: int, advance: Callable[[], None]
) -> tuple[dict[str, Any], dict[str, str]]:
    """AUC among equally popular items, AUC by the updates of others, and precision; with values by target.

    Beside it what is found of each target.
    """
    data = leave_newest_out(given.data).with_validation()
    like = FedRecSettings(given.method, given.data, capacities=given.capacities, clients=given.clients)
    devices = _devices(run_settings(like, {}, seed, max(given.rounds, 1), data.num_users), data, given)
    reader, source = UpdateReader(devices), torch.Generator().manual_seed(seed)
    if given.cohort == 1:
        everybody = devices.sampler.participants
        users = everybody[torch.randperm(len(everybody), generator=source)[: given.targets]].tolist()
        found = attack_updates(devices, reader, users, source, advance)
    else:
        found = attack_sums(devices, reader, given.cohort, given.targets, source, advance)
    known = [one for one in found if one.inside and one.auc == one.auc]  # NaN: none of the items has an equal
    others = [one.auc for one in found if not one.inside and one.auc == one.auc]
    each = {AUC: [one.auc for one in known], OTHERS: others, FOUND: [one.precision for one in known]}
    figures = {name: Figure.of(values) for name, values in each.items()}
    facts = {
        "measures": {name: figure.value for name, figure in figures.items()},
        "errors": {name: _error(values) for name, values in each.items()},
        "intervals": {name: [figure.low, figure.high] for name, figure in figures.items()},
        "targets": len(each[AUC]),
    }
    return facts, {name: pack_per_user(numpy.asarray(values)) for name, values in each.items()}


def _devices(settings: Settings, data: Dataset, given: FedRecAuditSettings) -> ReplayedClients:
    if given.cohort > 1:
        views = Auditor(settings, data).views()
        settings = next(view.settings for view in views if view.cohort == given.cohort)
    return ReplayedClients.of_run(Federation.of(settings, data), rounds=given.rounds)


def _error(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).std(unbiased=False) / max(len(values), 1) ** 0.5)
