"""A device's weight is bound to its invitation, and all of its updates together to its users' contribution."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairfold.algorithms.cooccurrence.cooccurrence import (
    CoOccurrenceUpload,
    frobenius_norm,
    triangle_size,
    unpack_triangle,
)
from fairfold.algorithms.cooccurrence.uploads import (
    ITEMS,
    NO_HISTORY,
    TOO_MUCH,
    VALUE,
    check_contribution,
    sketch_of,
)
from fairfold.federation.updates import State
from fairfold.flower.nodes import OTHER_NAME
from fairfold.flower.persistence import NetworkState
from fairfold.flower.protocol import CAPACITY, STATISTICS
from fairfold.flower.roster import Roster, make_signer
from fairfold.flower.vectors import INDICES
from fairfold.kernels.sparse_pairs import columns_of
from fairfold.privacy.secure.log import Enrolled
from fairfold.typing import Weights
from tests.flower.test_failed_steps import ITEMS as NUM_ITEMS
from tests.flower.test_failed_steps import NODES, USERS, arrays_of, fleet, plain_settings
from tests.flower.test_roster import new_key
from tests.flower.test_strategy import facts
from tests.support.federations import tiny_data
from tests.support.nodes import in_process

LEADING = 12
TUNED = {"kind": "co_occurrence", "support": 1, "tune": False}
histories = st.sets(st.integers(0, LEADING - 1), max_size=LEADING).map(sorted)


def contribution(items: list[int], exponent: float = 1.0, most: int = LEADING) -> Tensor:
    mine = torch.tensor(items, dtype=torch.int64)
    upload = CoOccurrenceUpload.of(mine, torch.tensor([len(items)]), most, exponent)
    return upload.dense(LEADING, torch.float32)


def check(change: Tensor, held: Weights, users: int = 1, most: int = LEADING, exponent: float = 1.0) -> Any:
    return check_contribution(change, held, users=users, most=most, exponent=exponent, seed=12345)


@settings(max_examples=40)
@given(st.lists(histories, min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, LEADING))
def test_every_chain_of_histories_is_accepted(chain: list[list[int]], exponent: float, most: int) -> None:
    held: Weights = {}
    before = torch.zeros(triangle_size(LEADING))
    for items in chain:
        now = contribution(items, exponent, most)
        for change in (now - before, (now - before).to_sparse()):
            problem, after = check(change, held, most=most, exponent=exponent)
            assert problem is None
        assert after[ITEMS].tolist() == items[:most]
        held, before = after, now


def is_a_history(matrix: Tensor) -> bool:
    """Whether a matrix is v·x xᵀ of a set with v no more than 1/n: by its definition, not by the code's way."""
    held = matrix.diagonal() != 0
    value = float(matrix.max())
    whole = torch.outer(held, held).float() * value
    return matrix.equal(whole) and (not held.any() or 2**-16 <= value <= 1 / int(held.sum()))


@given(st.data())
def test_nothing_else_is_accepted(data: st.DataObject) -> None:
    """Honest changes with one number changed, taken twice, negated or moved, in one update or over several."""
    kind = data.draw(st.sampled_from(["once more", "negative", "another number", "times", "random"]))
    first, second = data.draw(histories), data.draw(histories)
    held: Weights = check(contribution(first), {})[1]
    change = contribution(second) - contribution(first)
    if kind == "once more":
        change = contribution(second)
    elif kind == "negative":
        change = -contribution(second)
    elif kind == "another number":
        place = data.draw(st.integers(0, len(change) - 1))
        change[place] += data.draw(st.sampled_from([-1.0, -(2**-16), 2**-16, 0.25]))
    elif kind == "times":
        change = data.draw(st.sampled_from([0.5, 1.5, 2.0])) * change
    else:
        drawn = torch.randn(len(change), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
        change = drawn / frobenius_norm(drawn)
    problem, _ = check(change, held)
    assert (problem is None) == is_a_history(unpack_triangle(contribution(first) + change))
    assert problem in (None, NO_HISTORY)


def test_rounds_do_not_add_up_for_a_device_of_several_users() -> None:
    """Accepted once and once more in every round before, up to the norm that two updates may have."""
    users, accepted = 10, torch.zeros(triangle_size(LEADING))
    held: Weights = {}
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(triangle_size(LEADING), generator=generator)
    change = direction / frobenius_norm(direction) * users
    for _ in range(16):
        problem, after = check(change, held, users)
        if problem is None:
            held, accepted = after, accepted + change
        else:
            assert problem == TOO_MUCH
    assert frobenius_norm(accepted) <= 1.5 * users
    assert check(-change, held, users)[0] is None, "what it takes back leaves room"


@pytest.mark.parametrize(("exponent", "most"), [(0.0, 2.0), (0.5, 2.0**0.5), (1.0, 1.0)])
def test_no_pair_gets_more_than_the_users_of_a_device(exponent: float, most: float) -> None:
    """Two users put 60 on one pair of a large catalogue, whose norm was allowed."""
    change = torch.zeros(triangle_size(LEADING))
    for place, largest in ((1, most), (2, 2.0)):  # a pair, and an item of its own
        change[:] = 0
        change[place] = largest
        assert check(change, {}, users=2, exponent=exponent)[0] is None
        change[place] = -1.01 * largest
        assert check(change, {}, users=2, exponent=exponent)[0] == TOO_MUCH


@settings(max_examples=20)
@given(st.integers(0, 2**20), st.integers(0, 2**62))
def test_a_sketch_is_linear_and_keeps_norms(draw: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(draw)
    places = torch.randperm(triangle_size(400), generator=generator)[:3000].sort()[0]
    one, other = torch.randn(2, 3000, generator=generator, dtype=torch.float64)
    both = sketch_of(places, one + other, seed)
    torch.testing.assert_close(both, sketch_of(places, one, seed) + sketch_of(places, other, seed))
    dense = torch.zeros(triangle_size(400), dtype=torch.float64).index_copy_(0, places, one)
    assert float(sketch_of(places, one, seed).norm()) == pytest.approx(frobenius_norm(dense), rel=0.25)


def test_columns_are_exact_at_every_end() -> None:
    items = torch.tensor([0, 1, 2, 7_999, 32_766, 2**26 + 1])
    first = items * (items + 1) // 2
    for places in (first, first + items):
        assert columns_of(places).equal(items)


# -- over a network ----------------------------------------------------------------------------------------------------


class Enrolment(Roster):
    """A roster that allows every node so many users."""

    def __init__(self, folder: Path, users: int) -> None:
        super().__init__(folder / "roster.jsonl", make_signer(folder / "signer"))
        self.users = users

    def users_of(self, node: int) -> int:
        return self.users


def claim(users: float) -> Any:
    """A node that says that it acts for so many users."""

    def change(reply: Message) -> None:
        facts(reply)["weight"] = users
        arrays: ArrayRecord = arrays_of(reply)
        for name in [name for name in arrays if not name.endswith(INDICES)]:
            values = arrays[name].numpy()
            arrays[name] = Array((values * users / 2).astype(values.dtype))

    return change


@pytest.mark.parametrize(
    ("kind", "algorithm"), [("train", "co_occurrence"), (STATISTICS, "co_occurrence"), ("train", "gradient")]
)
def test_a_device_contributes_for_no_more_users_than_it_was_invited_with(
    kind: str, algorithm: str, tmp_path: Path
) -> None:
    """The statistics are those of the others, or less; before, 10,000 users of a device were accepted."""
    chosen = plain_settings(rounds=1, algorithm=TUNED if algorithm == "co_occurrence" else {"kind": algorithm})
    roster = Enrolment(tmp_path, users=2)
    nodes = fleet(chosen, tmp_path / "a", {kind: claim(300.0)}, roster=roster)
    state = nodes.run()
    if kind == "train":
        assert nodes.strategy.progress.rejections.counts == {"a weight out of range": 1}
    others = fleet(chosen, tmp_path / "b", {}, roster=roster)
    others.run()
    sums = nodes.strategy.network_state.statistics
    for name, of in others.strategy.network_state.statistics.items():
        assert float(sums[name].sum()) <= float(of.sum())
    assert state.round_number == 1


def test_a_device_of_one_user_adds_its_history_once(tmp_path: Path) -> None:
    """Sent again in every round it was added in every round: nine users' worth of one device in sixteen rounds."""
    roster, sent = Enrolment(tmp_path, users=1), dict[str, Array]()
    few = plain_settings(rounds=3, algorithm=TUNED)

    def run(where: str, hostile: bool) -> Any:
        nodes = in_process(tiny_data(3, USERS, NUM_ITEMS), few, USERS, tmp_path / where, roster=roster)
        true = nodes.grid.app

        def app(message: Message, context: Any) -> Message:
            reply = true(message, context)
            if context.node_id == USERS and message.metadata.message_type == "train" and hostile:
                sent.update(sent or arrays_of(reply))
                arrays_of(reply).update(sent)
            return reply

        nodes.grid.app = app  # type: ignore[assignment]
        nodes.run()
        return nodes.strategy

    strategy, others = run("a", hostile=True), run("b", hostile=False)
    assert strategy.progress.rejections.counts == {NO_HISTORY: 2}
    assert len(strategy.network_state.contributions) == USERS
    for name, tensor in others.progress.state.full.items():
        assert strategy.progress.state.full[name].equal(tensor)


def test_another_name_than_the_keys_is_left_out(tmp_path: Path) -> None:
    roster = Enrolment(tmp_path, users=2)
    thief, owner = roster.add(Enrolled(new_key(), NODES, 2)), roster.add(Enrolled(new_key(), 1, 2))
    for stolen, left_out in ((thief.name, {1}), (owner.name, {1, NODES})):

        def named(reply: Message, name: int = stolen) -> None:
            facts(reply)["name"] = f"{name:x}"

        nodes = fleet(plain_settings(rounds=1), tmp_path / str(stolen), {CAPACITY: named}, roster=roster)
        nodes.run()
        assert nodes.strategy.nodes.left_out == dict.fromkeys(left_out, OTHER_NAME)


def test_contributions_are_stored_with_the_sums() -> None:
    state = NetworkState(None)
    state.contributions = {
        5: {ITEMS: torch.tensor([1, 3]), VALUE: torch.tensor([0.5], dtype=torch.float64)},
        2**62: {"sketch": torch.rand(4, dtype=torch.float64)},
        6: {ITEMS: torch.empty(0, dtype=torch.int64), VALUE: torch.zeros(1, dtype=torch.float64)},
    }
    again = NetworkState(state.save_in(State({})))
    assert again.secret == state.secret != state.run
    assert list(again.contributions) == list(state.contributions)
    for client, held in state.contributions.items():
        assert held.keys() == again.contributions[client].keys()
        assert all(held[name].equal(again.contributions[client][name]) for name in held)
