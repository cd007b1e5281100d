"""What a federation over a network serves, and who fits: sizes from the capacity scheme, one for every device."""

from dataclasses import dataclass
from math import prod

import torch

from fairfold.algorithms import assign
from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings
from fairfold.federation.defaults import IMAGE_MODELS
from fairfold.federation.projection import Assignment, Projection
from fairfold.federation.sampling import hash_seed
from fairfold.federation.settings import Settings
from fairfold.federation.task import Task
from fairfold.subspace import Capacity, parse_scheme

METHODS = ("fair", "fair_hom", "full_trn", "fedavg")
BYTES = 4


def task_of(num_items: int, settings: Settings, users: int = 1) -> Task:
    """The model alone: its tensors for a catalogue, with nobody's data."""
    ratings = torch.empty(0) if settings.predicts_ratings else None
    nothing = torch.empty(0, dtype=torch.int64)
    nobody = Interactions(users, num_items, torch.zeros(users + 1, dtype=torch.int64), nothing, ratings)
    return Task(Dataset("catalogue", nobody, nobody), settings)


def refuse_unserved(settings: Settings) -> None:
    """Refuse settings that only make sense where one process holds everybody's data."""
    problems = []
    if settings.method not in METHODS:
        problems.append(f"method={settings.method!r} (one of {', '.join(METHODS)})")
    if settings.model in IMAGE_MODELS:
        problems.append(f"model={settings.model!r} (a recommender: devices bring interactions)")
    if settings.user_vectors != "private":
        problems.append("user_vectors='uploaded' (a user's vectors stay on the device)")
    if settings.broadcast or settings.replacement:
        problems.append("broadcast or replacement (false)")
    if any(settings.faults.model_dump().values()):
        problems.append("faults (none: real devices have their own)")
    if settings.solver == "least_squares" or settings.support or settings.reference_factors or settings.tail_share:
        problems.append("solver='least_squares', support, reference_factors, tail_share (so far in simulations alone)")
    if settings.popularity == "counts":
        problems.append("popularity='counts' (so far in simulations alone: number the items by a public order)")
    if problems:
        raise InvalidSettings("; ".join(problems), "settings a real federation can serve", "Change these.")


def trains(model: str | None, settings: Settings) -> bool:
    """Whether a device that was given this model takes part in such a run; without one it trains any of fairfold's."""
    return settings.model == model if model is not None else not settings.own_model


@dataclass(frozen=True)
class Plan:
    """The sizes of a federation: one a capacity of the scheme, fixed before anybody joins.

    Attributes:
        settings: Of the run.
        task: The model.
        capacities: Of the scheme, in its order.
    """

    settings: Settings
    task: Task
    capacities: list[Capacity]

    @classmethod
    def of(cls, settings: Settings, num_items: int) -> "Plan":
        """From settings; refused where the method cannot serve them."""
        refuse_unserved(settings)
        plan = cls(settings, task_of(num_items, settings), parse_scheme(settings.capacities))
        plan.assignments(0)
        return plan

    def assignments(self, round_number: int) -> list[Assignment]:
        """What the devices of each capacity hold in a round."""
        task = self.task
        whole = {name: shape for name, shape in task.shapes.items() if name not in task.compressed}
        return assign(
            self.settings, task.compressed, whole, list(map(task.left, self.capacities)), self.seed(round_number)
        )

    def seed(self, round_number: int) -> int:
        """Of a round's hash."""
        return hash_seed(self.settings, round_number)

    def group_of(self, capacity: Capacity) -> int | None:
        """The largest size of the scheme that a device can hold; None if it can hold none."""
        sizes = [
            (held.size(), group)
            for group, held in enumerate(self.assignments(0))
            if held.projections is not None and fits(held.projections, capacity, self.task)
        ]
        return max(sizes, key=lambda pair: (pair[0], -pair[1]))[1] if sizes else None


def fits(projections: dict[str, Projection], capacity: Capacity, task: Task) -> bool:
    """Whether a device can hold this: a budget counts every byte, a share is one of what is compressed."""
    if capacity.budget is not None:
        return sum(held.size for held in projections.values()) * BYTES <= capacity.budget
    assert capacity.share is not None
    full = sum(prod(shape) for shape in task.compressed.values())
    return sum(projections[name].size for name in task.compressed) <= capacity.share * full
