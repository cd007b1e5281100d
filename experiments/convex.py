"""The convergence corollary, by experiment: homogeneous FAIR on strongly convex, non-i.i.d. least squares.

Device k minimises F_k(θ) = mean over its samples of ½(xᵀθ − y)² + ½μ‖θ‖². Its samples are drawn around a solution of
its own, so the devices disagree. All hold subspaces of one size, with columns of unit length, as the proof asks. Each
round K of N devices are drawn with replacement (scheme I of Li et al., 2020) and take E stochastic steps of size
2 / (μ(g + t)); the server averages. The corollary promises that the error falls like 1/T towards the optimum *of the
subspace*, which is one and the same in all rounds. Algorithm 1 draws a new one every round (``rehash``): the error is
then measured towards the optimum of the last round's subspace.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.subspace import Subspace, Sums

SEED_BITS = 20
"""Problems are numbered below it, rounds above."""


@dataclass(frozen=True)
class ConvexFederation:
    """Least squares spread over N devices of m of n numbers, whose solutions disagree; μ is the weight of the ridge.

    The error of a single run is a random number; the corollary is about its mean, taken over ``problems``.
    """

    full_size: int = 40
    size: int = 10
    devices: int = 20
    samples: int = 30
    disagreement: float = 1.0
    strong_convexity: float = 0.5
    clients_per_round: int = 5
    local_steps: int = 5
    rounds: tuple[int, ...] = (50, 100, 200, 400, 800, 1600)  # after which the error is measured
    problems: int = 8
    rehash: bool = False  # a new subspace every round

    def problem(self, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs [devices, samples, full_size] and targets [devices, samples]."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.devices, self.samples, self.full_size)
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64) / self.full_size**0.5
        shared = torch.randn(self.full_size, generator=generator, dtype=torch.float64)
        own = torch.randn(self.devices, self.full_size, generator=generator, dtype=torch.float64)
        targets = torch.einsum("ksn,kn->ks", inputs, shared + self.disagreement * own)
        return inputs, targets

    def errors(self, seed: int) -> list[float]:
        """F(θ_T) − F* after T rounds, T ascending in ``rounds``, F* being the optimum of the subspace."""
        inputs, targets = self.problem(seed)
        subspace, mu = self._subspace(seed), self.strong_convexity
        smoothness = float(inputs.square().sum(-1).max()) + mu  # of every stochastic gradient
        shift = max(8 * smoothness / mu, self.local_steps)
        generator = torch.Generator().manual_seed(seed + 1)
        full, found = torch.zeros(self.full_size, dtype=torch.float64), list[float]()
        columns = self._columns(subspace)
        for round_number in range(max(self.rounds)):
            if self.rehash and round_number:
                subspace = self._subspace(seed + (round_number << SEED_BITS))
                columns = self._columns(subspace)
            client_ids = torch.randint(self.devices, (self.clients_per_round,), generator=generator)
            local = subspace.reduce(full).repeat(self.clients_per_round, 1)
            for step_number in range(self.local_steps):
                samples = torch.randint(self.samples, (self.clients_per_round,), generator=generator)
                row, target = inputs[client_ids, samples] @ columns, targets[client_ids, samples]  # xᵀSψ = (Sᵀx)ᵀψ
                gradient = ((row * local).sum(1) - target)[:, None] * row + mu * local
                local -= 2 / (mu * (shift + round_number * self.local_steps + step_number)) * gradient
            sums = Sums()
            for compact in local:
                sums.add(subspace, compact)
            full = sums.recover()
            if round_number + 1 in self.rounds:
                best = self._loss(self._optimum(inputs, targets, columns), inputs, targets)
                found.append(self._loss(full, inputs, targets) - best)
        return found

    def _subspace(self, seed: int) -> Subspace:
        return Subspace(self.full_size, self.size, seed=seed, orthonormal=True)

    def _columns(self, subspace: Subspace) -> Tensor:
        """S, one column per number of the subspace: a row of it has one number, at the slot of its weight."""
        numbers = torch.arange(1, self.size + 1, dtype=torch.float64)
        values = subspace.recover(torch.ones_like(numbers))
        slots = (subspace.recover(numbers) / values).round().long() - 1
        columns = torch.zeros(self.full_size, self.size, dtype=torch.float64)
        columns[torch.arange(self.full_size), slots] = values
        return columns

    def _loss(self, full: Tensor, inputs: Tensor, targets: Tensor) -> float:
        squared = (inputs @ full - targets).square().mean()
        return float(squared + self.strong_convexity * full.square().sum()) / 2

    def _optimum(self, inputs: Tensor, targets: Tensor, columns: Tensor) -> Tensor:
        """The best vector of the subspace, by a dense solve."""
        rows = inputs.reshape(-1, self.full_size) @ columns
        normal = rows.T @ rows / len(rows) + self.strong_convexity * columns.T @ columns
        right = rows.T @ targets.reshape(-1) / len(rows)
        solution: Tensor = torch.linalg.pinv(normal, hermitian=True) @ right  # an empty slot leaves a zero row
        return columns @ solution


def fitted_slope(rounds: Sequence[int], errors: Sequence[float]) -> float:
    """The slope of log(error) over log(rounds): −1 for an error that falls like 1/T."""
    x = torch.tensor(rounds, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
