"""Evaluation of a run: quality by size of client, beside baselines, and what each size costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from fairfold.config import Settings
from fairfold.config.tables import InteractionData
from fairfold.data import Interactions
from fairfold.data.download import PUBLIC_DATASETS
from fairfold.data.images import ImageDataset
from fairfold.data.interactions import PopularityCounts
from fairfold.federation.aggregation import ONE, Ranks
from fairfold.federation.algorithm import Centralized, PredictsRatings
from fairfold.federation.clients import ImageClients
from fairfold.federation.federation import Federation
from fairfold.federation.plan import StreamsRows
from fairfold.federation.training import as_input
from fairfold.federation.updates import State, reduce_per_size
from fairfold.metrics import RankingResult, evaluate_ranking
from fairfold.metrics.ranking import Scorer, is_cut, sampled_users
from fairfold.metrics.rating import Predictor, correct_predictions, error_shares
from fairfold.subspace import Capacity
from fairfold.subspace.projection import Assignment
from fairfold.typing import Weights

POPULARITY, CATALOGUE_ORDER = "popularity", "order of the catalogue"
"""Baselines that rank items by their number of users; or, of a fleet that does not count, by the catalogue's order."""

LARGER_STEP, MORE_CLIENTS, MORE_ROUNDS = 10, 6, 2
"""Factors by which settings are advised to grow: together they lift NeuMF on MovieLens 100K above popularity."""

Baseline = Scorer | RankingResult | Predictor  # a baseline, or how it was evaluated
TEST_BLOCK = 1_000  # test images in memory as floats at a time


def below_popularity(settings: Settings, quality: float, baseline: float | None, name: str = POPULARITY) -> list[str]:
    """A sentence on a ranking that is worse than popularity, and what to change; none for any other run."""
    if baseline is None or settings.predicts_ratings or settings.model.reads_images or not quality < baseline:
        return []
    alone = "number of users" if name == POPULARITY else name
    fact = f"Below {name}: {settings.metric} is {quality:.4f}, and {baseline:.4f} by the {alone} alone."
    return [f"{fact} {_advice_on_settings(settings)}"]


def _advice_on_settings(settings: Settings) -> str:
    algorithm, keys = settings.algorithm, settings.algorithm.effective()
    if algorithm.kind == "co_occurrence":
        return "Bring more users or interactions; with privacy.level='private', a larger privacy.epsilon."
    if keys.get("server_optimizer") == "newton":
        if settings.fleet.clients_per_round is not None:  # rounds until everybody has been asked many times
            longer = f"--rounds {LARGER_STEP * settings.run.rounds}"
            return f"Newton steps like all clients: try --set fleet.clients_per_round=none, or {longer}."
        weaker = f"algorithm.item_ridge={keys['item_ridge'] / LARGER_STEP:g}"
        return f"Try --set {weaker}, more rounds (--rounds {MORE_ROUNDS * settings.run.rounds}), or --recipe default."
    changes = [f"--rounds {MORE_ROUNDS * settings.run.rounds}"]
    clients = settings.fleet.clients_per_round
    if clients is not None and not isinstance(algorithm, Centralized):
        changes.append(f"--set fleet.clients_per_round={MORE_CLIENTS * clients}")
    if "local_lr" in keys and algorithm.kind != "closed_form":
        changes.append(f"--set algorithm.local_lr={LARGER_STEP * keys['local_lr']:g}")
    return f"Try --recipe fair; or stay, with more rounds, clients per round and a larger step: {' '.join(changes)}."


@dataclass(frozen=True)
class Quality:
    """NDCG@k or accuracy (larger is better) or MSE (smaller), of the server's model and each size's for its users."""

    server: float
    groups: tuple[float | None, ...]


@dataclass(frozen=True)
class RoundReport:
    """Figures of one round: updates, traffic, quality where evaluated; seconds are simulated with ``fleet.latency``."""

    round_number: int
    seconds: float
    num_clients: int
    bytes_down: int
    bytes_up: int
    quality: Quality | None


@dataclass(frozen=True)
class GroupReport:
    """Figures of the clients of one capacity: numbers and bytes held, traffic per round, and quality of their model."""

    capacity: str
    users: int
    size: int
    bytes_held: int
    bytes_down: int
    bytes_up: int
    quality: float | None  # for the users of the group, like those of the baselines
    baselines: Mapping[str, float]
    everybody: float | None = None  # for all users; None where vectors of others were trained together with a model

    @property
    def comparable_quality(self) -> float | None:
        """Quality by which sizes are compared: for all users where it is known."""
        return self.quality if self.everybody is None else self.everybody


@dataclass(frozen=True)
class Result:
    """The outcome of a run: its model, quality by size, baselines, and a report per round."""

    settings: Settings
    metric: str  # name of the quality, for example ``"NDCG@20"``
    state: State
    local_state: Weights
    history: list[RoundReport]  # a report per round
    groups: list[GroupReport]  # a report per capacity
    quality: float  # quality of the server's model over all users
    baselines: Mapping[str, float]  # quality of the baselines on the same data, by name
    users: int
    rejections: Mapping[str, int] = field(default_factory=dict)  # numbers of refused updates, by reason
    counted: PopularityCounts | None = None  # how items were numbered, where clients counted them
    notes: list[str] = field(default_factory=list)  # sentences about the run, for a reader
    privacy: Mapping[str, Any] = field(default_factory=dict)  # see :func:`~fairfold.federation.plan.privacy_report`
    differences: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # to baselines, with standard errors
    by_user: Mapping[int, Tensor] = field(default_factory=dict, repr=False)  # quality for each user, by round
    group_by_user: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # by each size's model, at the end

    @property
    def warnings(self) -> list[str]:
        """What a reader should know first: that the model ranks worse than popularity, and what to change."""
        name = CATALOGUE_ORDER if CATALOGUE_ORDER in self.baselines else POPULARITY
        return below_popularity(self.settings, self.quality, self.baselines.get(name), name)


class Evaluator:
    """Evaluates models of a federation on its test set, beside baselines that are scorers or results.

    Networks of images run on ``device``; recommenders where their tensors are. ``by_user`` is the quality of the
    server's model for each user with test items, by round: NDCG, a share in the squared error, or whether each test
    image is classified correctly. Its mean is the quality. ``group_by_user`` is that of each size's model at the end.
    """

    def __init__(
        self, federation: Federation, baselines: Mapping[str, Baseline], device: torch.device | None = None
    ) -> None:
        self.federation, self.metric = federation, federation.plan.settings.metric
        self.by_user: dict[int, Tensor] = {}
        self.group_by_user: dict[str, Tensor] = {}
        images = isinstance(federation.data, ImageDataset)
        users = federation.clients.num_clients if images else federation.interactions.evaluated.num_users
        self.all_users = torch.arange(users)
        ranked = not images and self.metric != "MSE"
        self._sample = sampled_users(federation.interactions.evaluated.test) if ranked else self.all_users
        self._baselines, self._ranks = baselines, federation.sampler.ranks
        self._device = device or torch.device("cpu")
        self._baseline_results: dict[str, RankingResult] = {}

    def members(self, size: int) -> Tensor:
        """The users of a size; under centralized training, and of held-out users, those who would have it."""
        plan, federation = self.federation.plan, self.federation
        would = isinstance(plan.algorithm, Centralized) or federation.evaluated_clients is not federation.clients
        groups = plan.settings.fleet.groups(len(self.all_users)) if would else federation.sampler.size
        return (groups == size).nonzero().flatten()

    def quality(self, state: State, assignments: list[Assignment]) -> Quality:
        """Quality of the server's model for all users, and of each size's own model for the users who hold it."""
        groups: list[float | None] = []
        for size, (held, vectors) in enumerate(zip(assignments, reduce_per_size(state.full, assignments), strict=True)):
            members = self.members(size)
            evaluated = vectors is not None and self._have_test_data(members)
            groups.append(self._size_quality(state, held, vectors, members)[0] if evaluated else None)
        server, self.by_user[state.round_number] = self._evaluate(state.full, self.all_users, assignments)
        return self._ranks.broadcast(Quality(server, tuple(groups)))  # ranks stop by it, and have to agree

    def quality_for_all_users(self, state: State, assignments: list[Assignment]) -> list[float | None]:
        """Quality of each size's own model for all users; None where scores do not follow from histories."""
        if not self.federation.plan.algorithm.serves_new_users:
            return [None] * len(assignments)
        found: dict[Any, tuple[float | None, Tensor | None]] = {}  # sizes that hold the same have one model
        qualities = []
        sizes = self.federation.plan.capacities, assignments, reduce_per_size(state.full, assignments)
        for capacity, held, vectors in zip(*sizes, strict=True):
            key = None if held.projections is None else tuple(held.projections.items())
            if key not in found:
                found[key] = self._size_quality(state, held, vectors, self.all_users)
            value, by_user = found[key]
            qualities.append(value)
            if by_user is not None:
                self.group_by_user[str(capacity)] = by_user
        return qualities

    def baselines(self, users: Tensor) -> dict[str, float]:
        """Quality of the baselines for some users."""
        if self.metric == "accuracy":
            return {}
        if self.metric == "MSE":
            predictors = cast(Mapping[str, Predictor], self._baselines)
            test = self.federation.interactions.evaluated.test
            return {name: squared_errors(predict, test, users)[0] for name, predict in predictors.items()}
        if not self._baseline_results:  # evaluated once: baselines do not change from round to round
            self._baseline_results = {
                name: given
                if isinstance(given, RankingResult)
                else self._evaluate_ranking(cast(Scorer, given), self.all_users)
                for name, given in self._baselines.items()
            }
        results = self._baseline_results.items()
        return {name: float(one.ndcg_by_user[torch.isin(one.users, users)].mean()) for name, one in results}

    def published(self) -> Mapping[str, float]:
        """What papers report on this split of a public data set."""
        data, settings = self.federation.data, self.federation.plan.settings
        known = PUBLIC_DATASETS.get(data.name)
        split_anew = isinstance(settings.data, InteractionData) and settings.data.resplit
        if known is None or known.published is None or isinstance(data, ImageDataset) or split_anew:
            return {}
        return known.published.on(len(data.train), len(data.test), self.metric) if settings.run.baselines else {}

    def notes(self) -> list[str]:
        """A sentence where not all users are evaluated."""
        if isinstance(self.federation.data, ImageDataset):
            return []
        count, several = len(self._sample), int((self.federation.data.evaluated.test.counts_by_user > 0).sum())
        drawn = (
            f"evaluated: {count:,} of {several:,} users with held-out items, drawn by chance, the same in every run."
        )
        return [drawn] if count < several else []

    def differences(self, state: State, assignments: list[Assignment]) -> dict[str, tuple[float, float]]:
        """NDCG of the server's model minus that of each baseline: mean over users, and its standard error.

        None from a baseline that was cut: to be ahead of less than the method means nothing.
        """
        if self.metric == "MSE" or not self.baselines(self.all_users):
            return {}
        if state.round_number not in self.by_user:
            _, self.by_user[state.round_number] = self._evaluate(state.full, self.all_users, assignments)
        found: dict[str, tuple[float, float]] = {}
        for name, result in self._baseline_results.items():
            if is_cut(name):
                continue
            difference = self.by_user[state.round_number] - result.ndcg_by_user
            error = float(difference.std()) / len(difference) ** 0.5 if len(difference) > 1 else 0.0
            found[name] = float(difference.mean()), error
        return found

    def value(self, full: Weights, users: Tensor, held: list[Assignment]) -> float:
        """Quality of a model with these tensors for some users; ``held`` by the clients whose model this is."""
        return self._evaluate(full, users, held)[0]

    def _have_test_data(self, members: Tensor) -> bool:
        data = self.federation.data
        if isinstance(data, ImageDataset) or not len(data.evaluated.test):
            return len(members) > 0
        return bool(data.evaluated.test.counts_by_user[self._evaluated(members)].any())

    def _evaluated(self, users: Tensor) -> Tensor:
        """Those of some users who are in the sample that is evaluated: all, where they are not very many."""
        return users[torch.isin(users, self._sample)]

    def _size_quality(
        self, state: State, held: Assignment, vectors: Weights | None, users: Tensor
    ) -> tuple[float, Tensor | None] | tuple[None, None]:
        """Quality of a size's own model, recovered, for some users, and for each of them."""
        if held.projections is None or vectors is None:
            return None, None
        plan = self.federation.plan
        full = {name: projection.recover(vectors[name]) for name, projection in held.projections.items()}
        full |= StreamsRows.of(plan.algorithm).encoding_rows(plan, state.full, held.projections)
        return self._evaluate(full, users, [held])

    def _evaluate(self, full: Weights, users: Tensor, held: list[Assignment]) -> tuple[float, Tensor]:
        """Quality of a model for some users, and for each of them who has test items, or for each test image."""
        plan, clients = self.federation.plan, self.federation.evaluated_clients
        if isinstance(clients, ImageClients):
            correct = _correctly_classified(plan.architecture.model_of(full, {}).to(self._device), clients)
            return float(correct.double().mean()), correct
        if self.metric == "MSE":
            predict = PredictsRatings.of(plan.algorithm).predictor(plan, full, held, clients)
            return squared_errors(predict, self.federation.interactions.evaluated.test, users, self._ranks)
        result = self._rank_shared(plan.algorithm.scorer(plan, full, held, clients), users)
        return result.ndcg, result.ndcg_by_user

    def _rank_shared(self, score: Scorer, users: Tensor) -> RankingResult:
        """Evaluate a ranking; each rank evaluates its own users, and all get the results of all."""
        data, ranks = self.federation.interactions.evaluated, self._ranks
        if ranks.num_ranks == 1 or not len(data.test):
            return self._evaluate_ranking(score, users)
        tested = torch.unique(self._evaluated(users))
        own = tested[tested % ranks.num_ranks == ranks.rank]
        by_user = torch.zeros(data.num_users, dtype=torch.float64)
        if len(own):
            by_user[own] = self._evaluate_ranking(score, own).ndcg_by_user
        ranks.all_reduce([by_user])
        return RankingResult(float(by_user[tested].mean()), tested, by_user[tested])

    def _evaluate_ranking(self, score: Scorer, users: Tensor) -> RankingResult:
        data = self.federation.interactions.evaluated
        if not len(data.test):  # nothing is held out
            return RankingResult(float("nan"), users[:0], torch.zeros(0, dtype=torch.float64))
        top = self.federation.plan.settings.run.top
        return evaluate_ranking(score, data.train, data.test, top, users=self._evaluated(users))


def _correctly_classified(model: nn.Module, clients: ImageClients) -> Tensor:
    test, device = clients.images.test, next(model.parameters()).device
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        blocks = torch.split(test.images, TEST_BLOCK)
        logits = [model(as_input(block.to(device), clients.plan.settings.data)).cpu() for block in blocks]
    return correct_predictions(torch.cat(logits), test.labels)


def squared_errors(predict: Predictor, test: Interactions, users: Tensor, ranks: Ranks = ONE) -> tuple[float, Tensor]:
    """Mean squared error of ratings of some users, on all ranks, and each user's share in it, with the same mean."""
    chosen = torch.isin(test.users, users)
    assert test.ratings is not None  # checked when the training was set up
    own = chosen & (test.users % ranks.num_ranks == ranks.rank)
    predicted = predict(test.users[own], test.items[own]).cpu()
    squares = torch.zeros(len(test), dtype=predicted.dtype)
    squares[own] = (predicted - test.ratings[own]).square()
    ranks.all_reduce([squares])
    return float(squares[chosen].mean()), error_shares(squares[chosen], test.users[chosen])


class Callback:
    """Base of callbacks that follow a run: override what you need. An error in one ends the run.

    Example:
        >>> from fairfold import Settings, simulate
        >>> class Printer(Callback):
        ...     def on_round(self, report):
        ...         print("round", report.round_number)
        >>> world = {"users": 30, "items": 80, "interactions_per_user": 20}
        >>> result = simulate(Settings(data=world, run={"rounds": 2}), callbacks=[Printer()])
        round 1
        round 2
    """

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:
        """Called before the first round, or before the first one after a resume."""

    def on_round(self, report: RoundReport) -> None:
        """Called after every round."""

    def on_end(self, result: Result) -> None:
        """Called after the last round."""

    def close(self) -> None:
        """Called when the run is over, however it ended."""
