"""A user of `implicit` changes two lines: the one that fits, and the one that recommends.

python examples/from_implicit.py [FILE]    # needs `pip install implicit`; without a file, a synthetic world
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy
from scipy.sparse import csr_matrix

import fairfold
from fairfold.data import Dataset, Interactions
from fairfold.data.synthetic import SyntheticDataset

Recommend = Callable[[int], Any]


def by_implicit(train: csr_matrix) -> Recommend:
    """As it was: alternating least squares by implicit, at its defaults."""
    from implicit.als import AlternatingLeastSquares

    model = AlternatingLeastSquares(random_state=0)
    model.fit(train, show_progress=False)
    return lambda user: model.recommend(user, train[user], N=20)[0]


def by_fairfold(train: csr_matrix) -> Recommend:
    """As it is: the same matrix, two lines."""
    model = fairfold.fit(train, capacities="1x-4x-16x", split=1.0, progress=False)
    return lambda user: model.recommend(user, k=20)[0]


def main(data: Dataset) -> dict[str, tuple[float, float]]:
    """NDCG@20 and seconds of both, over all users with something held out."""
    train, test = matrix_of(data.train), data.test
    found = {}
    for name, fit in (("implicit", by_implicit), ("fairfold", by_fairfold)):
        begun = time.monotonic()
        recommend = fit(train)
        seconds = time.monotonic() - begun
        users = [user for user in range(test.num_users) if len(test.of(user)) and len(data.train.of(user))]
        found[name] = float(numpy.mean([ndcg(recommend(user), test.of(user).numpy()) for user in users])), seconds
        print(f"{name:10} NDCG@20 {found[name][0]:.4f}, fitted in {seconds:.1f} s")
    return found


def matrix_of(part: Interactions) -> csr_matrix:
    """Users × items, as implicit takes them."""
    places = part.users.numpy(), part.items.numpy()
    return csr_matrix((numpy.ones(len(part), dtype=numpy.float32), places), shape=(part.num_users, part.num_items))


def ndcg(items: Any, wanted: Any, k: int = 20) -> float:
    """Of one user."""
    discount = 1 / numpy.log2(numpy.arange(2, k + 2))
    hits = numpy.isin(items[:k], wanted)
    return float((hits * discount[: len(hits)]).sum() / discount[: min(k, len(wanted))].sum())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(fairfold.data.load(sys.argv[1]))
    else:
        main(SyntheticDataset(users=400, items=800, interactions_per_user=50).dataset())
