"""Server updates by averaging: the paper's rule, or an optimizer along the mean change."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.config.tables import FrozenSettings
from fairfold.federation.aggregation import ROBUST
from fairfold.federation.algorithm import Algorithm, WeighsUsers
from fairfold.federation.plan import Plan
from fairfold.federation.updates import Aggregate, State
from fairfold.subspace.projection import Hashed, SizeSum, sums_of
from fairfold.subspace.stored_table import StoredTable
from fairfold.typing import Weights

MOMENTUM, SECOND, EPSILON = 0.9, 0.999, 1e-8  # decay of the moments of the server's optimizers, and ε


class ServerOptimizer(FrozenSettings):
    """Settings of a server that averages updates.

    Attributes:
        weighting: Weight of a client: its number of samples (``"data"``, the paper), 1 (``"equal"``), or a power of
            that number in between (0.5; 1 is ``"data"`` and 0 ``"equal"``).
        aggregation: ``"paper"``: θ ← Σ pᵢ Sᵢψᵢ′. ``"delta"``: θ ← θ + the optimizer's step along Σ pᵢ Sᵢ(ψᵢ′ − ψᵢ).
        server_optimizer: With the delta rule: ``"sgd"``, ``"momentum"``, ``"adam"``, ``"yogi"`` or ``"adagrad"``.
        server_lr: Learning rate of the server's optimizer, η.
        step_per: Unit of the learning rate: a ``"round"``, along the clients' mean change, however many they are; or a
            ``"client"``, η times the clients of a round, so that fewer rounds of more clients go as far
            (docs/default-recommender.md).
    """

    ACTIVE_WHEN: ClassVar = dict.fromkeys(
        ("server_optimizer", "server_lr", "step_per"), ("aggregation", ("delta", *ROBUST))
    )

    weighting: Literal["data", "equal"] | float = Field("equal", union_mode="left_to_right")
    aggregation: Literal["paper", "delta"] = "delta"
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = "adam"
    server_lr: float = Field(0.03, gt=0)
    step_per: Literal["round", "client"] = "round"

    def weight(self, samples: float) -> float:
        """Weight pᵢ of a client with some samples, before division by the sum of weights."""
        power = {"data": 1.0, "equal": 0.0}.get(self.weighting, self.weighting)  # type: ignore[arg-type]
        return float(samples**power)

    @property
    def weighs_samples(self) -> bool:
        """Whether a client weighs more the more samples it has."""
        return self.weight(2.0) != 1


class AveragingAlgorithm(Algorithm, ServerOptimizer, WeighsUsers):
    """An algorithm whose server averages models, or takes steps along the mean of their changes."""

    @property
    def sends_weights(self) -> bool:  # type: ignore[override]
        """Whether an update is the weighted model itself: under the paper's rule."""
        return self.aggregation == "paper"

    def max_user_weight(self, plan: Plan) -> float:
        return self.weight(max(plan.public.num_items, 1))  # a user has an item once

    @torch.no_grad()
    def server_update(self, plan: Plan, state: State, aggregate: Aggregate) -> State:
        next_round = state.round_number + 1
        if not aggregate.weight:
            return replace(state, round_number=next_round)
        parts = size_sums(aggregate)
        if self.aggregation == "paper":
            mean = {name: _mean_update(state.full[name], of, changes=False) for name, of in parts.items()}
            return replace(state, full=state.full | mean, round_number=next_round)
        return self._optimizer_step(plan, state, parts)

    def _optimizer_step(self, plan: Plan, state: State, parts: dict[str, list[SizeSum]]) -> State:
        next_round = state.round_number + 1
        full = dict(state.full)
        algorithm_state = {name: dict(of) for name, of in state.algorithm_state.items()}
        cohort = plan.settings.fleet.clients_per_round if self.step_per == "client" else None
        step = self.server_lr * (cohort or 1)
        for name, of in parts.items():
            table = full[name]
            if isinstance(table, StoredTable):
                self._step_on_disk(table, name, of, step, algorithm_state, next_round)
                continue
            if self.server_optimizer == "sgd" and all(isinstance(part.projection, Hashed) for part in of):
                add_mean(full[name], of, step)  # into the model itself: no second vector of its size
                continue
            change = _mean_update(full[name], of, changes=True)
            if self.server_optimizer == "sgd":
                full[name] = change.mul_(step).add_(full[name])
                continue
            direction = self._direction(name, change, algorithm_state, next_round)
            full[name] = full[name].add(direction, alpha=step)
        return State(full, next_round, algorithm_state)

    def _direction(self, name: str, change: Tensor, algorithm_state: dict[str, Weights], next_round: int) -> Tensor:
        before = {moment: kept[name] for moment, kept in algorithm_state.items() if name in kept}
        direction, after = direction_of(self.server_optimizer, change, before, next_round)
        for moment, tensor in after.items():
            algorithm_state.setdefault(moment, {})[name] = tensor
        return direction

    def _step_on_disk(
        self,
        table: StoredTable,
        name: str,
        parts: Sequence[SizeSum],
        step: float,
        algorithm_state: dict[str, Weights],
        next_round: int,
    ) -> None:
        """Step in the largest compact subspace: all coordinates of a slot change alike, and so do their moments."""
        change = table.mean_change(parts)
        if self.server_optimizer != "sgd" and change.compact is not None:
            change = change._replace(compact=self._direction(name, change.compact, algorithm_state, next_round))
        table.take_step(change, step)


def size_sums(aggregate: Aggregate) -> dict[str, list[SizeSum]]:
    """The sums of each tensor of the model, one per size of client."""
    parts: dict[str, list[SizeSum]] = {}
    for task, update in aggregate.parts():
        if update.weight:
            for name, total in update.sums.items():
                if name in task.projections:
                    parts.setdefault(name, []).append(SizeSum(task.projections[name], total, update.weight))
    return parts


def mean_changes(full: Weights, aggregate: Aggregate) -> Weights:
    """The mean change of each tensor over the clients of all sizes."""
    return {name: _mean_update(full[name], of, changes=True) for name, of in size_sums(aggregate).items()}


def _mean_update(full: Tensor, parts: Sequence[SizeSum], *, changes: bool) -> Tensor:
    found: Tensor = type(parts[0].projection).mean(full, parts, changes=changes)
    return found


BLOCK = 1 << 22  # numbers recovered at a time where the model is updated in place


def add_mean(full: Tensor, parts: Sequence[SizeSum], step: float) -> None:
    """Add ``step`` times the mean update to the server's vector, in place, a block at a time."""
    first, *others = sums_of(parts)
    if others:
        full.copy_(_mean_update(full, parts, changes=True).mul_(step).add_(full))
        return
    space, mean = first.mean()
    for start in range(0, len(full), BLOCK):
        stop = min(start + BLOCK, len(full))
        block = mean[start:stop] if space.is_full else space.recover_range(mean, start, stop, trusted=True)
        full[start:stop] = block.mul_(step).add_(full[start:stop])


def direction_of(kind: str, change: Tensor, algorithm_state: Weights, next_round: int) -> tuple[Tensor, Weights]:
    """An optimizer's direction for a mean change (minus the pseudo-gradient), and its moments afterwards."""
    zero = torch.zeros_like(change)
    first = algorithm_state.get("first", zero)
    if kind == "momentum":
        first = MOMENTUM * first + change
        return first, {"first": first}
    second, square = algorithm_state.get("second", zero), change.square()
    if kind == "adagrad":
        second = second + square
        return change / (second.sqrt() + EPSILON), {"second": second}
    first = torch.lerp(first, change, 1 - MOMENTUM)
    if kind == "yogi":
        second = second + (1 - SECOND) * torch.sign(square - second) * square
    else:
        second = torch.lerp(second, square, 1 - SECOND)
    corrected = (second / (1 - SECOND**next_round)).sqrt_().add_(EPSILON)
    return first / (1 - MOMENTUM**next_round) / corrected, {"first": first, "second": second}
