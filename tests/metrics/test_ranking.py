"""The batched NDCG equals the obvious slow computation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData, InvalidVector
from fairfold.metrics import ranking
from fairfold.metrics.ranking import evaluate_ranking, first_by_score, recommend


def random_case(seed: int, users: int, items: int, levels: int) -> tuple[Tensor, Interactions, Interactions]:
    """Scores with few levels, so that ties abound, and disjoint train and test sets."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (users, items), generator=generator).float() - levels / 2
    owner = torch.randint(4, (users, items), generator=generator)  # 0 train, 1 test, otherwise neither
    parts = []
    for part in (0, 1):
        pairs = (owner == part).nonzero()
        parts.append(Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, items))
    return scores, parts[0], parts[1]


def slow(scores: list[float], train: set[int], test: set[int], k: int) -> float:
    ranked = sorted((item for item in range(len(scores)) if item not in train), key=lambda i: (-scores[i], i))[:k]
    gain = sum(1 / math.log2(rank + 2) for rank, item in enumerate(ranked) if item in test)
    return gain / sum(1 / math.log2(rank + 2) for rank in range(min(k, len(test))))


@given(
    seed=st.integers(0, 2**32),
    users=st.integers(1, 12),
    items=st.integers(1, 40),
    levels=st.integers(1, 60),
    k=st.integers(1, 50),
    users_per_batch=st.integers(1, 13),
)
@settings(deadline=None, max_examples=150)
def test_fast_equals_slow(seed: int, users: int, items: int, levels: int, k: int, users_per_batch: int) -> None:
    scores, train, test = random_case(seed, users, items, levels)
    if not len(test):
        return
    before = scores.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "BATCH_ELEMENTS", users_per_batch * items)
        result = evaluate_ranking(lambda asked: scores[asked], train, test, k)
    assert scores.equal(before)
    tested = [user for user in range(users) if len(test.of(user))]
    expected = [
        slow(scores[user].tolist(), {*train.of(user).tolist()}, {*test.of(user).tolist()}, k) for user in tested
    ]
    assert result.users.tolist() == tested
    assert torch.allclose(result.ndcg_by_user, torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert result.ndcg == pytest.approx(sum(expected) / len(expected))


@given(seed=st.integers(0, 2**32), columns=st.integers(1, 60), levels=st.integers(1, 20), data=st.data())
@settings(deadline=None, max_examples=150)
def test_equal_scores_are_taken_in_order_of_number(seed: int, columns: int, levels: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, columns))
    scores = torch.randint(levels, (5, columns), generator=torch.Generator().manual_seed(seed)).float()
    values, top = first_by_score(scores, count)
    expected = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    assert top.equal(expected)
    assert values.equal(scores.gather(1, expected))


def test_a_table_shared_by_all_users_is_not_written_to() -> None:
    _, train, test = random_case(1, 6, 30, 5)
    popularity = torch.arange(30.0)
    evaluate_ranking(lambda users: popularity.expand(len(users), -1), train, test)
    assert popularity.equal(torch.arange(30.0))


def test_users_can_be_chosen_and_those_without_test_items_are_left_out() -> None:
    train = Interactions.from_pairs(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), 3, 5)
    test = Interactions.from_pairs(torch.tensor([0, 2]), torch.tensor([4, 0]), 3, 5)
    result = evaluate_ranking(lambda users: torch.arange(5.0).expand(len(users), -1), train, test, 2)
    assert result.users.tolist() == [0, 2]
    assert result.ndcg_by_user.tolist() == [1.0, 0.0]
    chosen = evaluate_ranking(
        lambda users: torch.arange(5.0).expand(len(users), -1), train, test, 2, users=torch.tensor([2, 1])
    )
    assert chosen.users.tolist() == [2]


def test_fewer_items_than_ranks_leave_ranks_empty() -> None:
    train = Interactions.from_pairs(torch.tensor([0, 0]), torch.tensor([0, 2]), 1, 4)
    scores = torch.tensor([[5.0, 1.0, 7.0, -torch.inf]])
    assert recommend(lambda users: scores, torch.tensor([0]), train, 6).tolist() == [[1, -1, -1, -1, -1, -1]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("levels", [3, 10_000])
def test_scores_on_the_gpu_give_the_same_result(levels: int) -> None:
    scores, train, test = random_case(4, 30, 500, levels)
    on_cpu = evaluate_ranking(lambda users: scores[users], train, test)
    on_gpu = evaluate_ranking(lambda users: scores[users].cuda(), train, test)
    assert on_gpu.ndcg_by_user.equal(on_cpu.ndcg_by_user)


def test_half_precision_scores_are_accepted() -> None:
    scores, train, test = random_case(3, 6, 30, 5)
    half = evaluate_ranking(lambda users: scores[users].to(torch.bfloat16), train, test)
    assert half.ndcg == evaluate_ranking(lambda users: scores[users], train, test).ndcg


def test_wrong_input_is_refused() -> None:
    scores, train, test = random_case(2, 6, 30, 5)
    nothing = Interactions.from_pairs(torch.tensor([]).long(), torch.tensor([]).long(), 6, 30)
    with pytest.raises(InvalidVector, match="NaN"):
        evaluate_ranking(lambda users: scores[users].masked_fill(scores[users] > 1, torch.nan), train, test)
    with pytest.raises(InvalidVector, match="shape"):
        evaluate_ranking(lambda users: scores[users][:, :-1], train, test)
    with pytest.raises(InvalidData, match="test items"):
        evaluate_ranking(lambda users: scores[users], train, nothing)
    with pytest.raises(InvalidData, match="k = 0"):
        evaluate_ranking(lambda users: scores[users], train, test, 0)
    with pytest.raises(InvalidData, match="same users"):
        evaluate_ranking(lambda users: scores[users], random_case(2, 7, 30, 5)[1], test)
