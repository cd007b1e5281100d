"""What a run gives: quality by device size, beside references, and what each size cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fairfold.data import Interactions
from fairfold.data.counted import Counted
from fairfold.federation.aggregate import ServerState
from fairfold.federation.image_task import ImageTask
from fairfold.federation.least_squares import server_owned, solve_users
from fairfold.federation.projection import Assignment
from fairfold.federation.rating_squares import rating_predictor
from fairfold.federation.send import send
from fairfold.federation.settings import Settings
from fairfold.federation.task import GRAM, Task, Weights
from fairfold.federation.train import solve_user
from fairfold.metrics import RankingResult, accuracy, evaluate_ranking
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor
from fairfold.models import predictor, scorer
from fairfold.simulate.federation import Federation

TEST_BLOCK = 1_000
"""Test images in memory as numbers at a time."""


@dataclass(frozen=True)
class Quality:
    """NDCG@k or accuracy (larger is better) or MSE (smaller): of the server's model, and of each size's.

    Recommenders of a size are judged by the users who hold it. Images for the test belong to nobody, so networks of all
    sizes are judged by all of them.
    """

    server: float
    groups: tuple[float | None, ...]


@dataclass(frozen=True)
class RoundReport:
    """One round: its number, its seconds, how many replies counted, and its quality where it was evaluated."""

    round_number: int
    seconds: float
    clients: int
    bytes_down: int
    bytes_up: int
    quality: Quality | None


@dataclass(frozen=True)
class GroupReport:
    """Devices of one capacity: who they are, what they hold and send, how well their own model does.

    ``quality`` is of the users who hold it, ``everybody`` of all users alike, so that sizes can be compared; None where
    nobody else could use the model, because users' vectors were trained together with it.
    """

    capacity: str
    users: int
    size: int
    bytes_held: int
    bytes_down: int
    bytes_up: int
    quality: float | None
    references: Mapping[str, float]
    everybody: float | None = None


@dataclass(frozen=True)
class Result:
    """The end of a run."""

    settings: Settings
    metric: str
    state: ServerState
    private: Weights
    history: list[RoundReport]
    groups: list[GroupReport]
    quality: float
    references: Mapping[str, float]
    users: int
    rejections: Mapping[str, int] = field(default_factory=dict)
    counted: Counted | None = None


class Judge:
    """Evaluates models of one federation against the test set, with reference rows that need no training.

    Args:
        federation: Whose models they are.
        references: Rows beside them.
        device: Where networks of images are run; recommenders are judged where their tensors are.
    """

    def __init__(
        self, federation: Federation, references: Mapping[str, Scorer], device: torch.device | None = None
    ) -> None:
        self.federation = federation
        self._device = device or torch.device("cpu")
        self._references = references
        self._judged: dict[str, RankingResult] = {}
        self.metric = federation.settings.metric
        self._everybody = torch.arange(federation.task.num_clients)

    def quality(self, state: ServerState, private: Weights, assignments: list[Assignment]) -> Quality:
        """The server's model for everybody, and each size's own model for the users who hold it."""
        by_group: list[float | None] = []
        for number, (held, sent) in enumerate(zip(assignments, send(state.full, assignments), strict=True)):
            members = (self.federation.group == number).nonzero().flatten()
            by_group.append(None if sent is None else self.value(_recovered(held, sent), private, members, [held]))
        return Quality(self.value(state.full, private, self._everybody, assignments), tuple(by_group))

    def for_everybody(self, state: ServerState, assignments: list[Assignment]) -> list[float | None]:
        """Each size's own model for all users, where their vectors follow from their histories; else None."""
        if self.federation.settings.solver == "gradient":
            return [None] * len(assignments)
        found: dict[Any, float | None] = {}
        keys = [None if held.projections is None else tuple(held.projections.items()) for held in assignments]
        for key, held, sent in zip(keys, assignments, send(state.full, assignments), strict=True):
            if key not in found:  # sizes that hold the same have one model
                found[key] = None if sent is None else self.value(_recovered(held, sent), {}, self._everybody, [held])
        return [found[key] for key in keys]

    def references(self, users: Tensor) -> dict[str, float]:
        """The reference rows over some users."""
        if self.metric in ("MSE", "accuracy"):
            return {}
        if not self._judged:  # what learns nothing is judged once
            self._judged = {name: self._ranked(score, self._everybody) for name, score in self._references.items()}
        return {
            name: float(found.ndcg_by_user[torch.isin(found.users, users)].mean())
            for name, found in self._judged.items()
        }

    def value(self, full: Weights, private: Weights, users: Tensor, held: list[Assignment]) -> float:
        """Of one model, for some users.

        Args:
            full: Its tensors in full.
            private: The users' own vectors.
            users: By whom it is judged.
            held: What the devices hold whose model this is: all of them for the server's.
        """
        task, settings = self.federation.task, self.federation.settings
        if task.ratings and settings.solver != "gradient":
            return _mean_squared_error(rating_predictor(full, task, settings), task.data.test, users)
        if settings.solver != "gradient":
            return self._ndcg(history_scorer(full, task, settings, held), users)
        model = task.model_of(full, private)
        if isinstance(task, ImageTask):
            return _accuracy(model.to(self._device), task)
        if task.ratings:
            return _mean_squared_error(predictor(model), task.data.test, users)
        return self._ndcg(scorer(model), users)

    def _ndcg(self, score: Scorer, users: Tensor) -> float:
        return self._ranked(score, users).ndcg

    def _ranked(self, score: Scorer, users: Tensor) -> RankingResult:
        data, top = self.federation.task.data, self.federation.settings.top
        return evaluate_ranking(score, data.train, data.test, top, users=users)


def _recovered(held: Assignment, sent: Weights) -> Weights:
    """A device's tensors in full."""
    return {name: projection.recover(sent[name]) for name, projection in (held.projections or {}).items()}


def history_scorer(
    full: Weights, task: Task, settings: Settings, held: Sequence[Assignment], histories: Interactions | None = None
) -> Scorer:
    """Scores of all items from an item table alone: everybody's vector follows from their own history.

    Args:
        full: The server's tensors, or those that a device's stand for.
        task: What they were trained for.
        settings: Of the run.
        held: What the devices hold whose model this is: all of them for the server's.
        histories: Of the users asked for, who need not have taken part; those of the task if not given.
    """
    if task.ratings:
        predict, everything = rating_predictor(full, task, settings, histories), torch.arange(task.data.num_items)
        return lambda users: predict(users[:, None], everything)
    (name,) = task.tables
    table = full[name].view(task.tables[name])
    of = (task.data.train if histories is None else histories).of
    if settings.solver == "closed_form":
        everything = table.T @ table
        return lambda users: (
            torch.stack([solve_user(table[of(user)], everything, settings) for user in users.tolist()]) @ table.T
        )
    owned = server_owned(held, name, settings.factors)
    gram_matrix = full[GRAM].view(settings.factors, settings.factors)

    def score(users: Tensor) -> Tensor:
        sums = torch.stack([table[mine[mine < owned]].sum(0) for mine in map(of, users.tolist())])
        return solve_users(sums, gram_matrix, settings) @ table.T

    return score


def _accuracy(model: nn.Module, task: ImageTask) -> float:
    test = task.images.test
    device = next(model.parameters()).device
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        logits = [model(task.as_input(part.to(device))).cpu() for part in torch.split(test.images, TEST_BLOCK)]
    return accuracy(torch.cat(logits), test.labels)


def _mean_squared_error(predict: Predictor, test: Interactions, users: Tensor) -> float:
    chosen = torch.isin(test.users, users)
    assert test.ratings is not None  # checked when the task was made
    predicted = predict(test.users[chosen], test.items[chosen]).cpu()
    return float((predicted - test.ratings[chosen]).square().mean())
