"""What a run gives: quality by device size, beside references, and what each size cost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.data import Dataset
from fairfold.federation.aggregate import ServerState
from fairfold.federation.settings import Settings
from fairfold.federation.train import solve_user
from fairfold.metrics.ranking import Scorer, evaluate_ranking
from fairfold.subspace import Subspace, parse_scheme


@dataclass(frozen=True)
class Scoring:
    """The data to be scored on, and rankings that need no training, so that no figure stands alone."""

    data: Dataset
    references: Mapping[str, Scorer]


@dataclass(frozen=True)
class Quality:
    """NDCG@k of the server's full model over all users, and of each size's own model over its own users."""

    server: float
    groups: tuple[float, ...]


@dataclass(frozen=True)
class RoundReport:
    """One round: its number, and its quality where it was evaluated."""

    round_number: int
    quality: Quality | None


@dataclass(frozen=True)
class GroupReport:
    """Devices of one capacity: who they are, what they hold, what they send, how well their own model does."""

    capacity: str
    users: int
    size: int
    bytes_held: int
    bytes_each_way: int
    quality: float
    references: Mapping[str, float]


@dataclass(frozen=True)
class Result:
    """The end of a run."""

    settings: Settings
    state: ServerState
    history: list[RoundReport]
    groups: list[GroupReport]
    quality: float
    references: Mapping[str, float]
    users: int

    @classmethod
    def of(
        cls,
        settings: Settings,
        state: ServerState,
        history: list[RoundReport],
        subspaces: list[Subspace],
        group: Tensor,
        scoring: Scoring,
    ) -> "Result":
        """Gather the last evaluation and the cost of every size."""
        last = history[-1].quality
        assert last is not None  # the last round is always evaluated
        itemsize = state.full.element_size()
        groups = []
        for number, (capacity, subspace) in enumerate(zip(parse_scheme(settings.capacities), subspaces, strict=True)):
            members = (group == number).nonzero().flatten()
            groups.append(
                GroupReport(
                    capacity=str(capacity),
                    users=len(members),
                    size=subspace.size,
                    bytes_held=subspace.size * itemsize,
                    bytes_each_way=subspace.size * itemsize,
                    quality=last.groups[number],
                    references=_references(scoring, members, settings),
                )
            )
        everyone = torch.arange(len(group))
        return cls(settings, state, history, groups, last.server, _references(scoring, everyone, settings), len(group))


def _references(scoring: Scoring, users: Tensor, settings: Settings) -> dict[str, float]:
    return {name: _ndcg(score, scoring, settings, users) for name, score in scoring.references.items()}


def _ndcg(score: Scorer, scoring: Scoring, settings: Settings, users: Tensor) -> float:
    return evaluate_ranking(score, scoring.data.train, scoring.data.test, settings.top, users=users).ndcg


def evaluate(
    full: Tensor,
    private: Tensor,
    subspaces: Iterable[Subspace],
    group: Tensor,
    scoring: Scoring,
    settings: Settings,
) -> Quality:
    """Score the server's model for everybody, and each size's model for the users who hold it."""
    by_group = []
    for number, subspace in enumerate(subspaces):
        members = (group == number).nonzero().flatten()
        held = subspace.recover(subspace.reduce(full))
        by_group.append(_ndcg(_scorer(held, private, scoring.data, settings), scoring, settings, members))
    score = _scorer(full, private, scoring.data, settings)
    return Quality(_ndcg(score, scoring, settings, torch.arange(len(group))), tuple(by_group))


def _scorer(full: Tensor, private: Tensor, data: Dataset, settings: Settings) -> Scorer:
    """Scores of all items from an item table and each user's own vector, which only the user's device knows."""
    table = full.view(data.num_items, settings.factors)
    if settings.solver == "gradient":
        return lambda users: private[users] @ table.T
    gram_matrix = table.T @ table

    def score(users: Tensor) -> Tensor:
        # Everybody, drawn or not, has a vector: it follows from their own history and the items.
        vectors = [solve_user(table[data.train.of(user)], gram_matrix, settings) for user in users.tolist()]
        return torch.stack(vectors) @ table.T

    return score
