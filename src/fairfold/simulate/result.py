"""What a run gives: quality by device size, beside references, and what each size cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from fairfold.data import Interactions
from fairfold.data.counted import Counted
from fairfold.data.images import ImageDataset
from fairfold.metrics import RankingResult, evaluate_ranking
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor, error_shares, told_right
from fairfold.projections import Assignment
from fairfold.protocol.people import ImagePeople
from fairfold.protocol.ranks import ONE, Ranks
from fairfold.protocol.words import State, reduced
from fairfold.protocol.work import as_input
from fairfold.settings import Settings
from fairfold.simulate.world import World
from fairfold.values import Weights

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
    """One round: its number, its seconds, how many answers came, and its quality where it was evaluated.

    Where a clock is simulated (``fleet.clock``), its seconds are the clock's.
    """

    round_number: int
    seconds: float
    clients: int
    bytes_down: int
    bytes_up: int
    quality: Quality | None


@dataclass(frozen=True)
class GroupReport:
    """Devices of one capacity: who they are, what they hold and send, how well their own model does.

    Attributes:
        capacity: The size, for example ``"16x"``.
        users: How many users have such a device.
        size: Numbers that a device holds.
        bytes_held: Bytes that it holds.
        bytes_down: Bytes that it receives per round.
        bytes_up: Bytes that it sends per round.
        quality: Quality of its model for the users who hold it.
        references: Quality of other recommenders for the same users.
        everybody: Quality of its model for all users, so that sizes can be compared; None where nobody else could use
            the model, because users' vectors were trained together with it.
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
    """The end of a run.

    Attributes:
        settings: Settings of the run.
        metric: Name of the quality, for example ``"NDCG@20"``.
        state: What the server holds.
        private: Users' private vectors, where the algorithm has any.
        history: A report per round.
        groups: A report per size of device.
        quality: Quality of the server's model over all users.
        references: Quality of other recommenders on the same data, by their names.
        users: How many users were judged.
        rejections: How many answers were refused, by reason.
        counted: How items were numbered, where devices counted them.
        told: Sentences about the run, for a person.
        privacy: The level of privacy, what it cost and what was assumed.
        differences: The server's model less each reference, with its standard error, paired over users.
        by_user: Quality for each user by the server's model, by round.
        own_by_user: Quality for each user by each size's own model, by its capacity, at the end.
    """

    settings: Settings
    metric: str
    state: State
    private: Weights
    history: list[RoundReport]
    groups: list[GroupReport]
    quality: float
    references: Mapping[str, float]
    users: int
    rejections: Mapping[str, int] = field(default_factory=dict)
    counted: Counted | None = None
    told: list[str] = field(default_factory=list)
    privacy: Mapping[str, Any] = field(default_factory=dict)  # see privacy_facts
    differences: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # see Judge.differences
    by_user: Mapping[int, Tensor] = field(default_factory=dict, repr=False)  # see Judge.by_user
    own_by_user: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


class Judge:
    """Evaluates models of one world against the test set, with reference rows, to be judged or judged already.

    Networks of images are run on ``device``; recommenders are judged where their tensors are.

    Attributes:
        by_user: What each user with test items gets of the server's model, by round, where it was evaluated here: a
            ranking's quality, or a share in the error of ratings; of images whether each is told right. Its mean is
            the quality.
        own: The same of each size's own model at the end, by its capacity.
    """

    def __init__(
        self,
        world: World,
        references: Mapping[str, Scorer | RankingResult | Predictor],
        device: torch.device | None = None,
    ) -> None:
        self.world, self._references, self._ranks = world, references, world.fleet.ranks
        self._device = device or torch.device("cpu")
        self._judged: dict[str, RankingResult] = {}
        self._latest: tuple[int, RankingResult] | None = None  # the server's model after a round
        self.by_user: dict[int, Tensor] = {}
        self.own: dict[str, Tensor] = {}
        self.metric = world.plan.settings.metric
        data = world.data
        self.everybody = torch.arange(world.people.num_clients if isinstance(data, ImageDataset) else data.num_users)

    def members(self, size: int) -> Tensor:
        """The users who hold a size, or would, where all data is in one place."""
        plan, groups = self.world.plan, self.world.fleet.size
        if plan.algorithm.pooled:
            groups = plan.settings.fleet.groups(len(self.everybody))
        return (groups == size).nonzero().flatten()

    def quality(self, state: State, assignments: list[Assignment]) -> Quality:
        """The server's model for everybody, and each size's own model for the users who hold it."""
        by_group: list[float | None] = []
        for number, (held, sent) in enumerate(zip(assignments, reduced(state.full, assignments), strict=True)):
            members = self.members(number)
            usable = sent is not None and self._judge(members)
            by_group.append(self._of_size(held, sent, members)[0] if usable else None)
        # Ranks decide by it when to end, and have to decide alike.
        return self._ranks.tell(Quality(self._server(state, assignments), tuple(by_group)))

    def _judge(self, members: Tensor) -> bool:
        """Whether some users can judge a model: one of them has something to find, where anybody has."""
        data = self.world.data
        if isinstance(data, ImageDataset) or not len(data.test):
            return len(members) > 0
        return bool(data.test.counts_by_user[members].any())

    def _server(self, state: State, assignments: list[Assignment]) -> float:
        plan = self.world.plan
        if self.metric in ("MSE", "accuracy"):
            found, self.by_user[state.round_number] = self._judged_by(state.full, self.everybody, assignments)
            return found
        score = plan.algorithm.scorer(plan, state.full, assignments, self.world.people)
        self._latest = state.round_number, self._ranked(score, self.everybody)
        self.by_user[state.round_number] = self._latest[1].ndcg_by_user
        return self._latest[1].ndcg

    def differences(self, state: State, assignments: list[Assignment]) -> dict[str, tuple[float, float]]:
        """How much better the server's model ranks than each reference: the mean over users, and its standard error."""
        if self.metric == "MSE" or not self.references(self.everybody):
            return {}
        if self._latest is None or self._latest[0] != state.round_number:
            self._server(state, assignments)
        assert self._latest is not None
        mine, found = self._latest[1].ndcg_by_user, dict[str, tuple[float, float]]()
        for name, judged in self._judged.items():
            apart = mine - judged.ndcg_by_user
            error = float(apart.std()) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
            found[name] = float(apart.mean()), error
        return found

    def for_everybody(self, state: State, assignments: list[Assignment]) -> list[float | None]:
        """Each size's own model for all users, where their scores follow from their histories; else None."""
        if not self.world.plan.algorithm.from_history:
            return [None] * len(assignments)
        found: dict[Any, tuple[float | None, Tensor | None]] = {}
        keys = [None if held.projections is None else tuple(held.projections.items()) for held in assignments]
        for key, held, sent in zip(keys, assignments, reduced(state.full, assignments), strict=True):
            if key not in found:  # sizes that hold the same have one model
                found[key] = self._of_size(held, sent, self.everybody)
        for key, capacity in zip(keys, self.world.plan.capacities, strict=True):
            each = found[key][1]
            self.own |= {} if each is None else {str(capacity): each}
        return [found[key][0] for key in keys]

    def _of_size(
        self, held: Assignment, sent: Weights | None, users: Tensor
    ) -> tuple[float, Tensor | None] | tuple[None, None]:
        """A size's own model, in full, for some users, and for each of them."""
        if held.projections is None or sent is None:
            return None, None
        full = {name: projection.recover(sent[name]) for name, projection in held.projections.items()}
        return self._judged_by(full, users, [held])

    def references(self, users: Tensor) -> dict[str, float]:
        """The reference rows over some users."""
        if self.metric == "accuracy":
            return {}
        if self.metric == "MSE":
            predictors = cast(Mapping[str, Predictor], self._references)
            test = self.world.interactions.test
            return {name: squared_errors(predict, test, users)[0] for name, predict in predictors.items()}
        if not self._judged:  # once: no reference changes from round to round
            self._judged = {
                name: given if isinstance(given, RankingResult) else self._alone(cast(Scorer, given), self.everybody)
                for name, given in self._references.items()
            }
        return {
            name: float(found.ndcg_by_user[torch.isin(found.users, users)].mean())
            for name, found in self._judged.items()
        }

    def value(self, full: Weights, users: Tensor, held: list[Assignment]) -> float:
        """Of a model with these tensors, for some users; ``held`` by the devices whose model this is."""
        return self._judged_by(full, users, held)[0]

    def _judged_by(self, full: Weights, users: Tensor, held: list[Assignment]) -> tuple[float, Tensor]:
        """The same, and for each of them who has something to be judged by, or for each test image."""
        plan, people = self.world.plan, self.world.people
        if isinstance(people, ImagePeople):
            right = _told_right(plan.architecture.model_of(full, {}).to(self._device), people)
            return float(right.double().mean()), right
        if self.metric == "MSE":
            test = self.world.interactions.test
            predict = plan.algorithm.predictor(plan, full, held, people)
            return squared_errors(predict, test, users, self._ranks)
        found = self._ranked(plan.algorithm.scorer(plan, full, held, people), users)
        return found.ndcg, found.ndcg_by_user

    def _ranked(self, score: Scorer, users: Tensor) -> RankingResult:
        """Each rank judges its own users, and hears of the others."""
        data, ranks = self.world.interactions, self._ranks
        if ranks.many == 1 or not len(data.test):
            return self._alone(score, users)
        judged = torch.unique(users[data.test.counts_by_user[users] > 0])
        mine = judged[judged % ranks.many == ranks.number]
        by_user = torch.zeros(data.num_users, dtype=torch.float64)
        if len(mine):
            by_user[mine] = self._alone(score, mine).ndcg_by_user
        ranks.add_up([by_user])
        return RankingResult(float(by_user[judged].mean()), judged, by_user[judged])

    def _alone(self, score: Scorer, users: Tensor) -> RankingResult:
        data = self.world.interactions
        if not len(data.test):  # everything is trained on: there is nothing to judge by
            return RankingResult(float("nan"), users[:0], torch.zeros(0, dtype=torch.float64))
        return evaluate_ranking(score, data.train, data.test, self.world.plan.settings.run.top, users=users)


def _told_right(model: nn.Module, people: ImagePeople) -> Tensor:
    """Whether a network names the class of each test image."""
    test, seen = people.images.test, people.plan.settings.data
    device = next(model.parameters()).device
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        logits = [model(as_input(part.to(device), seen)).cpu() for part in torch.split(test.images, TEST_BLOCK)]
    return told_right(torch.cat(logits), test.labels)


def squared_errors(predict: Predictor, test: Interactions, users: Tensor, ranks: Ranks = ONE) -> tuple[float, Tensor]:
    """The mean of what is predicted of some users' ratings, and each one's share in it; their mean is the same.

    Each rank sees to its own users, and hears of the others.
    """
    chosen = torch.isin(test.users, users)
    assert test.ratings is not None  # checked when the task was made
    mine = chosen & (test.users % ranks.many == ranks.number)
    predicted = predict(test.users[mine], test.items[mine]).cpu()
    squares = torch.zeros(len(test), dtype=predicted.dtype)
    squares[mine] = (predicted - test.ratings[mine]).square()
    ranks.add_up([squares])
    return float(squares[chosen].mean()), error_shares(squares[chosen], test.users[chosen])
