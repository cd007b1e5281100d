"""Probabilistic model of :mod:`fairfold.algorithms.ratings`: posteriors of users, rows of items, hyperparameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fairfold.algorithms.incremental import rows_of
from fairfold.federation.architecture import SPREAD, Architecture, Storage
from fairfold.methods import Tensors
from fairfold.subspace import Subspace
from fairfold.typing import Weights

ROWS = "item.weight"  # name of the table, with rows (bᵢ, vᵢ, n)
USERS = "users"  # name of the sums over users, and of what a client last sent of them
# Initial variances of the noise and of biases; those of items' tastes are as drawn, of users' tastes always 1
NOISE, BIAS = 0.75, 0.2
BLOCK_RATINGS = 1 << 16  # ratings whose outer products are in memory at a time
STEP_WEIGHT = 0.5  # share of the sum of squared codes that stands for their matrix: no step of an item is then too long
QUICK_SHARE = 0.2  # weight of the quick estimate of the variance of a taste, against the slow one
ITEM_VARIANCES = (1e-3, 1.0)  # bounds, in units of the ratings' variance: a taste next to nothing may still grow
MIN_VARIANCE = 1e-6  # lower bound of the other variances


@dataclass(frozen=True)
class RatingHyperparameters:
    """What all clients know beside the rows, with d = 1 + tastes."""

    center: Tensor  # mean and standard deviation of all ratings, and σ², the noise variance in units of that deviation
    metric: Tensor  # K, the mean of c·cᵀ over all ratings, [d, d]
    variances: Tensor  # of users' and of items' rows around their expectation, [2, d]
    regression: Tensor  # A, of a user's row on their features, [d, d + 2]

    @classmethod
    def of(cls, vectors: Weights) -> "RatingHyperparameters":
        """Make the hyperparameters from flat vectors under the names of the fields."""
        size = vectors["variances"].numel() // 2
        shapes = {"center": (3,), "metric": (size, size), "variances": (2, size), "regression": (size, size + 2)}
        return cls(**{name: vectors[name].view(shape) for name, shape in shapes.items()})

    def flat(self, dtype: torch.dtype) -> Weights:
        """Flat vectors under the names of the fields."""
        return {name: of.to(dtype).reshape(-1) for name, of in vars(self).items()}

    @property
    def shrinkage(self) -> Tensor:
        """Ridge of users and of items towards their expectation, in ratings, [2, d]."""
        return self.center[2] / self.variances

    @property
    def axes(self) -> tuple[Tensor, Tensor]:
        """T and λ such that an item of n ratings has the covariance σ²(nK + shrinkage)⁻¹ = T diag(1/(nλ + 1)) Tᵀ."""
        root = self.variances[1].double().sqrt()
        values, vectors = torch.linalg.eigh(root[:, None] * self.metric.double() * root / self.center[2].double())
        return root[:, None] * vectors, values.clamp(min=0)

    def centered(self, ratings: Tensor) -> Tensor:
        """Ratings less the mean of all, in units of their standard deviation."""
        return (ratings.to(self.center.dtype) - self.center[0]) / self.center[1]

    def predicted(self, mine: Tensor, item_rows: Tensor) -> Tensor:
        """Ratings from rows of users and of items: bᵤ + bᵢ + u·vᵢ, and the mean of all."""
        scores = mine[..., 0] + (with_unit(mine) * item_rows[..., : mine.shape[-1]]).sum(-1)
        return self.center[0] + self.center[1] * scores


class RatingArchitecture(Architecture):
    """A table of items, hyperparameters, and of each user what was last sent."""

    def __init__(self, items: int, users: int, factors: int) -> None:
        self.items = items
        self.users = users
        size = factors - 1
        self.tables = {ROWS: (items, factors)}
        self.dense = {"center": (3,), "metric": (size, size), "variances": (2, size), "regression": (size, size + 2)}
        self.user_tables, self.user_vectors = {}, {USERS: num_user_statistics(size)}

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        size = self.tables[ROWS][1] - 1
        rows = SPREAD * torch.randn(self.tables[ROWS], generator=generator)
        rows[:, 0] = rows[:, -1] = 0
        variances = torch.tensor([1.0, SPREAD**2])[:, None].repeat(1, size)
        variances[:, 0] = BIAS
        center, regression = torch.tensor([0.0, 1.0, NOISE]), torch.zeros(size, size + 2)
        known = RatingHyperparameters(center, torch.eye(size), variances, regression)
        users = torch.zeros(self.users, self.user_vectors[USERS])
        return {ROWS: rows.view(-1)} | known.flat(rows.dtype), {USERS: users}

    @property
    def tensors(self) -> Tensors:
        return Tensors(self.tables, self.dense, whole_rows=True)


@dataclass(frozen=True)
class UserPosteriors:
    """Posterior distributions of users' rows, given their ratings."""

    rows: Tensor  # (bᵤ, u), [users, d]
    covariances: Tensor  # of the rows, [users, d, d]
    features: Tensor  # regressors of the rows: 1, log of the number of ratings, mean row of the items
    items: Tensor  # sums of the covariances of their items, [users, d, d]
    counts: Tensor  # number of ratings of each

    @classmethod
    def of(
        cls, table: Tensor, targets: Tensor, owners: Tensor, users: int, known: RatingHyperparameters
    ) -> "UserPosteriors":
        """Solve for users, given the row (bᵢ, vᵢ, n) of each rating's item, its centered target and its owner."""
        item_rows, inputs = table[:, :-1], with_unit(table[:, :-1])
        size, dtype = inputs.shape[1], inputs.dtype
        matrix = torch.zeros(users, size * size, dtype=dtype)
        for part in torch.split(torch.arange(len(inputs)), BLOCK_RATINGS):
            outer = inputs[part][:, :, None] * inputs[part][:, None]
            matrix.index_add_(0, owners[part], outer.view(-1, size * size))

        def summed(of: Tensor) -> Tensor:
            return torch.zeros(users, of.shape[1], dtype=dtype).index_add_(0, owners, of)

        axes, values = (of.to(dtype) for of in known.axes)
        items = axes * summed(1 / (table[:, -1:].clamp(min=0) * values + 1))[:, None] @ axes.T
        counts = torch.bincount(owners, minlength=users)
        count = counts.clamp(min=1).to(dtype)[:, None]
        features = torch.cat([torch.ones_like(count), count.log(), summed(item_rows) / count], dim=1)
        shrinkage = known.shrinkage[0]
        sums = summed(inputs * (targets - item_rows[:, 0])[:, None]) - without_bias(items[:, 0])
        uncertain = without_bias(without_bias(items).mT)
        inverse = torch.linalg.inv(matrix.view(-1, size, size) + uncertain + torch.diag(shrinkage))
        rows = (inverse @ (sums + shrinkage * (features @ known.regression.T))[:, :, None])[:, :, 0]
        return cls(rows, known.center[2] * inverse, features, items, counts)

    def row_sums(self, table: Tensor, targets: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Each rating's part in the sums of its item's row, [ratings, d + 1], and expected squared errors by user."""
        item_rows, code = table[:, :-1], with_unit(self.rows)
        inputs, mine = with_unit(item_rows), code[owners]
        errors = targets - self.rows[owners, 0] - (mine * item_rows).sum(1)
        blocks = torch.split(torch.arange(len(owners)), BLOCK_RATINGS)
        products = [(self.covariances[owners[part]] @ inputs[part][:, :, None])[:, :, 0] for part in blocks]
        covariances = torch.cat(products)
        weights = self._codes().diagonal(dim1=1, dim2=2).sum(1)[owners, None]
        parts = errors[:, None] * mine - without_bias(covariances) + STEP_WEIGHT * weights * item_rows
        squares = torch.zeros_like(code[:, 0]).index_add_(0, owners, errors.square() + (inputs * covariances).sum(1))
        return torch.cat([parts, weights], dim=1), squares + (self._codes() * self.items).sum((1, 2))

    def sums(self, squares: Tensor) -> Tensor:
        """Each user's part in the sums over users, [users, numbers]; zero of those without ratings."""
        joint, size = torch.cat([self.rows, self.features], dim=1), self.rows.shape[1]
        codes = self.counts[:, None, None] * self._codes()
        pairs = joint[:, :, None] * joint[:, None]
        pairs[:, :size, :size] += self.covariances
        found = torch.cat([codes.flatten(1), pairs.flatten(1), squares[:, None]], dim=1)
        return found * (self.counts > 0)[:, None]

    def _codes(self) -> Tensor:
        """Expectation of c·cᵀ: the first number of a code is certain."""
        code = with_unit(self.rows)
        return code[:, :, None] * code[:, None] + without_bias(without_bias(self.covariances).mT)


def num_user_statistics(size: int) -> int:
    """Length of :meth:`UserPosteriors.sums` for each user."""
    return size**2 + (2 * size + 2) ** 2 + 1


def estimate_hyperparameters(
    sums: Tensor, before: RatingHyperparameters, rounding: Tensor | None = None
) -> RatingHyperparameters:
    """Hyperparameters from sums over all users, rounded to ``rounding`` each; variances of items stay as they were."""
    size = before.metric.shape[0]
    codes, pairs, squares = torch.split(sums, [size**2, (2 * size + 2) ** 2, 1])
    metric, pairs = codes.view(size, size), pairs.view(2 * size + 2, -1)
    ratings, count = metric[0, 0], pairs[size, size]
    features, both = pairs[size:, size:], pairs[size:, :size]
    # One imagined user with mean features and the prior's row keeps few users from explaining too much.
    ridge = features.diagonal() / count + MIN_VARIANCE
    if rounding is not None:  # errors of half a step in everybody's numbers do not make the matrix indefinite
        steps = rounding[size**2 : -1].view(2 * size + 2, -1).diagonal()[size:]
        ridge = ridge + count * (size + 2) / 2 * steps
    regression = torch.linalg.solve(features + torch.diag(ridge), both).T
    around = pairs[:size, :size] - regression @ both - (regression @ both).T + regression @ features @ regression.T
    users = torch.cat([(around[:1, 0] / count).clamp(min=MIN_VARIANCE), torch.ones(size - 1).double()])
    variances = torch.stack([users, before.variances[1].double()])
    center = torch.cat([before.center[:2].double(), (squares / ratings).clamp(min=MIN_VARIANCE)])
    return RatingHyperparameters(center, metric / ratings, variances, regression)


def row_correction(rows: Tensor, target: Tensor, weights: Tensor, metric: Tensor) -> Tensor:
    """What sums computed at some rows lack to be those at ``target``, by the weights in them."""
    deviations = rows - target
    return weights[:, None] * (deviations @ metric / metric.trace() - STEP_WEIGHT * deviations)


def solve_items(sums: Tensor, sharing: Tensor, known: RatingHyperparameters, before: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (w, n) of (Σ + shrinkage)·w = sums + shrinkage·m, and variances of w around its expectation m.

    A row that ``sharing`` items share has so many equal parts, as the ridge is one per item; m is of the rows before.
    """
    sums = sums / sharing[:, None]
    shrinkage, weights = known.shrinkage[1], sums[:, -1:].clamp(min=0)
    counts = weights / known.metric.trace()
    row_weights = sharing[:, None] * (weights > 0)  # rows without updates have no weight
    line = torch.cat([torch.ones_like(counts), counts.clamp(min=1).log()], dim=1)

    def expected(rows: Tensor) -> Tensor:
        """A line over the log of the counts."""
        weighted = (row_weights * line).T
        found: Tensor = line @ torch.linalg.lstsq(weighted @ line, weighted @ rows, driver="gelsd").solution
        return found

    def mean(of: Tensor) -> Tensor:
        return (row_weights * of).sum(0) / row_weights.sum()

    rows = (sums[:, :-1] + shrinkage * expected(before)) / (STEP_WEIGHT * weights + shrinkage)
    axes, values = known.axes
    deviations, covariances = (rows - expected(rows)).square(), 1 / (counts * values + 1) @ axes.square().T
    # Two estimates with one fixed point. The slow one hardly moves where few ratings leave a row to its prior; the
    # quick one gives a taste up before it has grown. A bias is there from the start.
    slow = mean(deviations + covariances)
    quick = mean(deviations) / mean(1 - covariances / known.variances[1]).clamp(min=MIN_VARIANCE)
    quick_share = torch.tensor([1.0] + [QUICK_SHARE] * (len(slow) - 1))
    variances = slow ** (1 - quick_share) * quick**quick_share
    return torch.cat([rows, counts], dim=1), variances.clamp(*ITEM_VARIANCES)


def with_unit(rows: Tensor) -> Tensor:
    """(1, u) from a row (b, u)."""
    return torch.cat([torch.ones_like(rows[..., :1]), rows[..., 1:]], dim=-1)


def without_bias(rows: Tensor) -> Tensor:
    """(0, u) from (b, u), or matrices without their first row."""
    return torch.cat([torch.zeros_like(rows[:, :1]), rows[:, 1:]], dim=1)


def similar_item_numbers(chain: Sequence[Subspace], factors: int, means: Tensor) -> Tensor:
    """A numbering of items such as those that share a row have similar means."""
    place = torch.arange(len(means))
    for start, stop in pairwise(sorted({0, len(means), *(subspace.head // factors for subspace in chain)})):
        here = torch.arange(start, stop)
        row = rows_of(chain[0], here, factors)  # equal tails: what the smallest size folds, all fold alike
        place[here[means[here].argsort(stable=True)]] = here[row.argsort(stable=True)]
    return place
