"""FAIR and its rivals by gradient: E epochs of steps inside the subspaces, the paper's Algorithm 2.

A device receives ψ, minimises F(S·ψ) over ψ with a fresh optimiser, and answers with ψ′ (the paper's rule) or with
ψ′ − ψ, times its weight pᵢ. Its user's own vectors are trained along and not sent, unless they are to be uploaded:
their direction can be read from the answer all the same (docs/privacy.md).
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms.server_step import Stepping
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor
from fairfold.models import predictor, scorer
from fairfold.projections import Projection
from fairfold.protocol.algorithm import Algorithm
from fairfold.protocol.people import Client, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.steps import RankingSteps, Steps
from fairfold.protocol.words import Answer, Sent
from fairfold.values import Weights


class Descending(Stepping, Steps):
    """An algorithm whose devices take gradient steps: what recommenders and networks of images have in common.

    Attributes:
        prox: μ of FedProx: ½μ‖S(ψ − ψ_sent)‖² is added to the loss.
    """

    prox: float = Field(0.0, ge=0)

    def problem_with(self, settings: Any) -> str | None:
        if settings.subspace.method == "fedhm" and self.aggregation == "delta":
            return "method='fedhm' averages models: use algorithm.aggregation='paper'"
        return None

    @property
    def steps(self) -> bool:
        """Whether a device does just what this class says, so that faster programs may do it in its place."""
        return all(
            getattr(type(self), name) is getattr(Descending, name) for name in ("answer", "local_loss", "optimiser")
        )

    def answer(self, plan: Plan, sent: Sent, client: Client) -> tuple[Answer, Weights]:
        """E epochs of gradient steps inside the subspaces, with a fresh optimiser: F(S·ψ) minimised over ψ."""
        compacts = {name: vector.clone().requires_grad_() for name, vector in sent.vectors.items()}
        own = {name: vector.clone().requires_grad_() for name, vector in client.own.items()}
        optimiser = self.optimiser([*compacts.values(), *own.values()])
        for batch in client.people.work.batches(client.number, client.generator):
            loss = self.local_loss(batch, sent, compacts, own, client)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        weight = self.weight(client.samples)  # pᵢ
        learned = {name: tensor.detach() for name, tensor in compacts.items()}
        if not self.values:
            learned = {name: vector - sent.vectors[name] for name, vector in learned.items()}
        sums = {name: vector * weight for name, vector in learned.items()}
        return Answer(sums, weight), {name: tensor.detach() for name, tensor in own.items()}

    def local_loss(self, batch: Any, sent: Sent, compacts: Weights, own: Weights, client: Client) -> Tensor:
        """What a step makes smaller."""
        work, projections, me = client.people.work, sent.projections, torch.tensor(client.number)
        users = [own[name] if name in own else projections[name].rows(compacts[name], me) for name in work.own]
        rows = [projections[name].rows(compacts[name], batch.items) for name in work.tables]
        dense = {name: projections[name].whole(compacts[name]) for name in work.dense}
        loss = work.losses(batch, dense, users, rows).mean()
        if self.prox:
            loss = loss + 0.5 * self.prox * distance(compacts, sent.vectors, projections)
        return loss

    def optimiser(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """The device's optimiser, as torch has it."""
        kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
        optimiser: torch.optim.Optimizer = kinds[self.local_optimiser](parameters, lr=self.local_step)
        return optimiser


class Recommending(Algorithm, RankingSteps):
    """A recommender trained by gradient steps on items, and others drawn for them, or on ratings."""

    NEEDS: ClassVar = RankingSteps.NEEDS

    def without_effect(self, settings: Any) -> Sequence[str]:
        """Ratings are predicted, not ranked against items that were drawn."""
        return [f"algorithm.{key}" for key in RankingSteps.RANKING_KEYS] if settings.model.predicts_ratings else []

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """By the model, with the vectors that users trained."""
        return scorer(plan.architecture.model_of(full, people.private))

    def predictor(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Predictor:
        """By the model, with the vectors that users trained."""
        return predictor(plan.architecture.model_of(full, people.private))


class Gradient(Descending, Recommending):
    """Recommenders by gradient steps.

    Attributes:
        kind: Its name.
        user_vectors: ``"private"``: not sent; ``"uploaded"``: sent and averaged, as the authors' code does.
    """

    NEEDS: ClassVar = Stepping.NEEDS | RankingSteps.NEEDS

    kind: Literal["gradient"] = "gradient"
    user_vectors: Literal["private", "uploaded"] = "private"

    def problem_with(self, settings: Any) -> str | None:
        if settings.model.own and settings.subspace.method == "heterofl":
            return "method='heterofl' has to know which layers read a table's columns: use a built-in model"
        return super().problem_with(settings)


def distance(compacts: Weights, received: Weights, projections: dict[str, Projection]) -> Tensor:
    """‖S(ψ − ψ_received)‖²: norms live in the full space, where a slot counts as often as it has coordinates."""
    total = torch.zeros(())
    for name, compact in compacts.items():
        total = total + (projections[name].whole(compact) - projections[name].whole(received[name])).square().sum()
    return total
