"""A user's posterior by their ratings, in plain Python: ``algorithms.rating_model`` for one user, in double precision.

The worker computes in single precision; numbers agree to its rounding errors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Any

Numbers = Sequence[float]
Matrix = list[list[float]]

STEP_WEIGHT = 0.5  # share of the sum of squared codes that stands for their matrix
SWEEPS = 40  # of rotations at most; ten are enough


def dot(one: Numbers, other: Numbers) -> float:
    """The scalar product."""
    return math.fsum(map(mul, one, other))


def inverse(matrix: Matrix) -> Matrix:
    """The inverse of a positive definite matrix, by Gauss and Jordan."""
    size = len(matrix)
    rows = [row + [float(place == number) for place in range(size)] for number, row in enumerate(matrix)]
    for place, pivot in enumerate(rows):
        if not pivot[place] > 0:
            raise ValueError("a matrix that is not positive definite")
        pivot[:] = [number / pivot[place] for number in pivot]
        for row in rows:
            if row is not pivot and row[place]:
                factor = row[place]
                row[:] = [number - factor * of for number, of in zip(row, pivot, strict=True)]
    return [row[size:] for row in rows]


def symmetric_eigen(matrix: Matrix) -> tuple[list[float], Matrix]:
    """Eigenvalues and the matrix of eigenvectors, which are its columns, by Jacobi's rotations."""
    size = len(matrix)
    rest, vectors = [row[:] for row in matrix], [[float(i == j) for j in range(size)] for i in range(size)]
    smallest = 1e-15 * max((abs(number) for row in matrix for number in row), default=0.0)
    for _ in range(SWEEPS):
        pairs = [(i, j) for j in range(size) for i in range(j) if abs(rest[i][j]) > smallest]
        if not pairs:
            break
        for first, second in pairs:
            if not rest[first][second]:
                continue
            slope = (rest[second][second] - rest[first][first]) / (2 * rest[first][second])
            tangent = math.copysign(1 / (abs(slope) + math.hypot(slope, 1)), slope)
            cosine = 1 / math.hypot(tangent, 1)
            sine = tangent * cosine
            for row in (*rest, *vectors):
                row[first], row[second] = (
                    cosine * row[first] - sine * row[second],
                    sine * row[first] + cosine * row[second],
                )
            one, other = rest[first], rest[second]
            rest[first] = [cosine * a - sine * b for a, b in zip(one, other, strict=True)]
            rest[second] = [sine * a + cosine * b for a, b in zip(one, other, strict=True)]
    return [rest[place][place] for place in range(size)], vectors


@dataclass(frozen=True)
class Hyperparameters:
    """What all clients know beside the rows (``algorithms.rating_model.RatingHyperparameters``)."""

    center: Numbers
    metric: Matrix
    variances: Matrix
    regression: Matrix

    @property
    def shrinkage(self) -> list[float]:
        """Ridge of users towards their expectation."""
        return [self.center[2] / variance for variance in self.variances[0]]

    @cached_property
    def axes(self) -> tuple[Matrix, list[float]]:
        """T and λ such that an item of n ratings has the covariance T diag(1/(nλ + 1)) Tᵀ."""
        root = [math.sqrt(variance) for variance in self.variances[1]]
        scaled = [
            [a * number * b / self.center[2] for number, b in zip(row, root, strict=True)]
            for a, row in zip(root, self.metric, strict=True)
        ]
        values, vectors = symmetric_eigen(scaled)
        return [[a * number for number in row] for a, row in zip(root, vectors, strict=True)], [
            max(value, 0.0) for value in values
        ]

    def centered(self, rating: float) -> float:
        """A rating less the mean of all, in units of their standard deviation."""
        return (rating - self.center[0]) / self.center[1]

    def predicted(self, mine: Numbers, item_row: Numbers) -> float:
        """A rating from a user's row and an item's."""
        return self.center[0] + self.center[1] * (mine[0] + item_row[0] + dot(mine[1:], item_row[1 : len(mine)]))


class UserPosterior:
    """The posterior of a user's row (bᵤ, u), given the rows (bᵢ, vᵢ, n) of their items, and centered ratings."""

    def __init__(self, rows: Sequence[Numbers], targets: Numbers, known: Hyperparameters) -> None:
        self.rows = rows
        self.targets = targets
        self.count = len(rows)
        self.columns: list[Any] = list(zip(*([1.0, *row[1:-1]] for row in rows), strict=True))
        biases, size = [row[0] for row in rows], len(known.metric)
        self.columns = self.columns or [() for _ in range(size)]
        axes, values = known.axes
        weights = [math.fsum(1 / (max(row[-1], 0.0) * value + 1) for row in rows) for value in values]
        scaled = [[weight * number for weight, number in zip(weights, row, strict=True)] for row in axes]
        self.items = [[dot(row, other) for other in axes] for row in scaled]
        count = max(self.count, 1)
        means = [math.fsum(biases) / count, *(math.fsum(column) / count for column in self.columns[1:])]
        self.features = [1.0, math.log(count), *means]
        matrix = [[dot(one, other) for other in self.columns] for one in self.columns]
        shrinkage = known.shrinkage
        for i in range(size):
            matrix[i][i] += shrinkage[i]
            for j in range(size):
                matrix[i][j] += self.items[i][j] if i and j else 0.0
        left = [target - bias for target, bias in zip(targets, biases, strict=True)]
        sums = [dot(column, left) - (self.items[i][0] if i else 0.0) for i, column in enumerate(self.columns)]
        expected = [ridge * dot(row, self.features) for ridge, row in zip(shrinkage, known.regression, strict=True)]
        solved = inverse(matrix)
        right = [one + other for one, other in zip(sums, expected, strict=True)]
        self.row = [dot(row, right) for row in solved]
        self.covariance = [[known.center[2] * number for number in row] for row in solved]
        self.code = [1.0, *self.row[1:]]
        # The expectation of c·cᵀ: the first number of a code is certain.
        self.codes = [
            [a * b + (self.covariance[i][j] if i and j else 0.0) for j, b in enumerate(self.code)]
            for i, a in enumerate(self.code)
        ]

    def row_sums(self) -> tuple[list[list[float]], float]:
        """Each rating's part in the sums of its item's row, and the user's expected squared errors."""
        weight = sum(self.codes[i][i] for i in range(len(self.code)))
        squares = 0.0
        parts = []
        for row, target, inputs in zip(self.rows, self.targets, zip(*self.columns, strict=True), strict=True):
            error = target - self.row[0] - dot(self.code, row[:-1])
            spread = [dot(of, inputs) for of in self.covariance]
            squares += error * error + dot(inputs, spread)
            spread[0] = 0.0
            found = zip(self.code, spread, row[:-1], strict=True)
            parts.append([error * mine - of + STEP_WEIGHT * weight * number for mine, of, number in found] + [weight])
        return parts, squares + sum(map(dot, self.codes, self.items))

    def sums(self, squares: float) -> list[float]:
        """The user's part in the sums over users; zero without ratings."""
        joint, size = [*self.row, *self.features], len(self.row)
        codes = [self.count * number for row in self.codes for number in row]
        pairs = [[a * b for b in joint] for a in joint]
        for i in range(size):
            for j in range(size):
                pairs[i][j] += self.covariance[i][j]
        found = [*codes, *(number for row in pairs for number in row), squares]
        return found if self.count else [0.0] * len(found)
