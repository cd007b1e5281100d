"""What a fleet's server takes from its devices is bounded by their users: statistics, reports, sums under masks."""

import logging
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from flwr.app import Array, Message
from hypothesis import example, given
from hypothesis import strategies as st

from fairfold.algorithms.cooccurrence.cooccurrence import UNIT
from fairfold.algorithms.cooccurrence.tuning import problem
from fairfold.algorithms.rating_updates import MAX_RATING, MAX_SQUARES
from fairfold.errors import InvalidMessage, InvalidState
from fairfold.federation.bounds import MAX_USER_IMAGES, checked_statistics, max_evaluated
from fairfold.federation.randomness import panel
from fairfold.federation.round import STEP_FAILED
from fairfold.federation.updates import Update
from fairfold.flower.nodes import Node
from fairfold.flower.nodes import Nodes as FleetNodes
from fairfold.flower.protocol import STATISTICS
from fairfold.privacy.fixed_point import HEADER_LENGTH
from fairfold.privacy.ledger import STATISTICS_PURPOSE
from fairfold.privacy.secure.client import SecureClient
from fairfold.privacy.secure.log import Enrolled
from fairfold.privacy.secure.masking import FixedPointVector
from fairfold.subspace import Capacity
from tests.flower.test_contributions import Enrolment
from tests.flower.test_failed_steps import ITEMS, arrays_of, fleet, plain_settings
from tests.flower.test_roster import new_key
from tests.flower.test_secure import federation
from tests.support.settings import make_settings

RATINGS = {"kind": "ratings"}


# -- statistics of ratings ---------------------------------------------------------------------------------------------


def rating_sums(secure: bool, users: float = 1.0, items: int = 50, **sums: list[float]) -> dict[str, torch.Tensor]:
    level = {"level": "secure", "min_cohort": 2} if secure else {}
    settings = make_settings(algorithm=RATINGS, privacy=level) if level else make_settings(algorithm=RATINGS)
    given = {"counts": torch.ones(items)} | {name: torch.tensor(of) for name, of in sums.items()}
    update = Update({name: of.double() for name, of in given.items()}, users)
    return dict(checked_statistics(settings, update, items).sums)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    "totals",
    [
        [-0.5, 1e12, 1e12],  # one user with these made the mean and the variance of all ratings what it liked
        [51.0, 51.0, 51.0],
        [10.0, 1010.0, 1e5],
        [10.0, 90.0, 90.0],  # squares that are too small for their sum
        [2.0, 0.0, 30_000.0],
        [0.0, 1.0, 1.0],
        [10.0, 10.0, -1.0],
        [float("nan"), 1.0, 1.0],
    ],
)
def test_sums_that_no_ratings_have_are_refused(totals: list[float], secure: bool) -> None:
    with pytest.raises(InvalidMessage):
        rating_sums(secure, rating_totals=totals)


def test_offsets_are_bounded_by_the_users_of_their_items() -> None:
    with pytest.raises(InvalidMessage, match="offsets"):
        rating_sums(False, rating_offsets=[1e12] + [0.0] * 49)
    with pytest.raises(InvalidMessage, match="offsets"):
        rating_sums(False, counts=[0.0] + [1.0] * 49, rating_offsets=[1.0] + [0.0] * 49)
    rating_sums(False, rating_offsets=[2 * MAX_RATING] * 50)


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=50), min_size=1, max_size=6), st.booleans())
def test_honest_ratings_pass(users: list[list[float]], secure: bool) -> None:
    """As a client computes them: :func:`.rating_updates.rating_totals` by its definition."""
    total = torch.zeros(3, dtype=torch.float64)
    for ratings in users:
        values = torch.tensor(ratings, dtype=torch.float32).double()
        moments = torch.stack([torch.ones_like(values), values, values.square()]).sum(1)
        total += (moments * min(1.0, MAX_SQUARES / max(float(moments[2]), 1e-30))).round() if secure else moments
    found = rating_sums(secure, float(len(users)), rating_totals=total.tolist())["rating_totals"]
    assert float(found[2]) <= len(users) * (MAX_SQUARES + 0.5), "no user counts for more than under masks"
    assert secure or found.tolist() == pytest.approx(
        (total * min(1.0, len(users) * MAX_SQUARES / max(float(total[2]), 1e-30))).tolist()
    )


@pytest.mark.parametrize("name", ["rating_totals", "rating_offsets"])
def test_one_user_s_statistics_do_not_move_the_ratings_of_all(name: str, tmp_path: Path) -> None:
    def lie(reply: Message) -> None:
        values = arrays_of(reply)[name].numpy()
        lies = numpy.array([-0.5, 1e12, 1e12]) if name == "rating_totals" else numpy.full_like(values, -1e12)
        arrays_of(reply)[name] = Array(lies)

    settings = plain_settings(algorithm=RATINGS, rounds=1)
    nodes = fleet(settings, tmp_path, {STATISTICS: lie}, ratings=True)
    nodes.run()
    honest = fleet(settings, tmp_path / "honest", {}, ratings=True)
    honest.run()
    lied, true = (of.strategy.network_state.statistics["rating_totals"] for of in (nodes, honest))
    assert 0 < float(lied[0]) < float(true[0]), "the liar is left out"
    assert float(lied[1] / lied[0]) == pytest.approx(float(true[1] / true[0]), abs=0.5)


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("report", [[0.0, 0, 1, 0], [1, 2, 0, 0], [1, 0, 1, 0.5], [0, 0, 0, 1], [3, 0, 0, 0]])
def test_reports_that_no_users_have_are_refused(report: list[float]) -> None:
    assert problem(torch.tensor(report), 2.0) is not None


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=30))
@example([(0.4680786, 0.4637146)])  # whose square rounds to one step
@example([(0.2613831, 0.1819763)])
def test_honest_reports_pass(qualities: list[tuple[float, float]]) -> None:
    """Sums of what users report: 1, the quality, how much better it is than the default's, and the square of that."""
    rows = [[1.0, one, one - default, (one - default) ** 2] for one, default in qualities]
    rounded = (torch.tensor(rows or [[0.0] * 4], dtype=torch.float64) * UNIT).round() / UNIT
    assert problem(rounded.sum(0), float(len(qualities))) is None


def test_evaluations_count_no_more_than_a_device_s_users() -> None:
    images = make_settings(algorithm={"kind": "images"}, model={"kind": "lenet"}, data={"name": "mnist"})
    assert max_evaluated(make_settings(algorithm=RATINGS), ITEMS, 2) == 2 * ITEMS
    assert max_evaluated(make_settings(), ITEMS, 2) == 2
    assert max_evaluated(images, 0, 2) == 2 * MAX_USER_IMAGES


def test_one_liar_cannot_overturn_the_trials(tmp_path: Path) -> None:
    """A device that states a place of a simulation was always in the panel that judges candidates."""
    settings = plain_settings(algorithm={"kind": "co_occurrence", "support": 1})
    roster = Enrolment(tmp_path, users=1)
    keys = [roster.add(Enrolled(new_key(), node, 1)) for node in range(1, 201)]
    drawn = dict.fromkeys(range(1, 201), 0)
    for secret in range(40):
        nodes = FleetNodes(settings, roster=roster, secret=secret)
        members = [Node(one.node, Capacity.parse("1x"), one.name, partition_id=0) for one in keys]
        for place in panel(nodes._panel_numbers(members), 0.1).tolist():
            drawn[members[place].node_id] += 1
    assert sum(drawn.values()) == 40 * 20
    assert max(drawn.values()) <= 14, "each is in a tenth of the panels: in so many by a chance of 1e-5"
    one = FleetNodes(settings, roster=roster, secret=1)
    assert one._panel_numbers(members).equal(one._panel_numbers(members)), "the same panel in all rounds"


def test_a_stated_place_counts_in_a_simulation_alone(tmp_path: Path) -> None:
    nodes = fleet(plain_settings(rounds=1), tmp_path / "a", {}, roster=Enrolment(tmp_path, users=2))
    nodes.run()
    assert {node.partition_id for node in nodes.strategy.nodes.usable.values()} == {-1}


def test_a_node_without_an_invitation_is_known_by_its_node(tmp_path: Path) -> None:
    """It says its name itself: a new one each round would have added its history each round."""
    roster = Enrolment(tmp_path, users=1)
    key = roster.add(Enrolled(new_key(), 7, 1))
    nodes = FleetNodes(plain_settings(), roster=roster)
    invited, first, renamed = (Node(node, Capacity.parse("1x"), name) for node, name in ((7, key.name), (8, 1), (8, 2)))
    assert nodes.identity(invited) == key.name
    assert nodes.identity(first) == nodes.identity(renamed) < 0
    nodes = FleetNodes(plain_settings())
    assert nodes.identity(first) != nodes.identity(renamed), "without a roster, in a simulation, there is nothing else"


# -- sums under masks --------------------------------------------------------------------------------------------------


def lies_in(monkeypatch: pytest.MonkeyPatch, purpose: str, change: Any) -> None:
    """The device of a fleet that comes first adds numbers of its choice to the sums of a purpose."""
    true, liar = SecureClient.mask, list[int]()

    def mask(device: SecureClient, vector: FixedPointVector) -> bytes:
        liar[:] = liar or [device.identity.name]
        if device.session.purpose == purpose and device.identity.name == liar[0]:
            vector = vector.copy()
            change(vector)
        return true(device, vector)

    monkeypatch.setattr(SecureClient, "mask", mask)


def weight(vector: FixedPointVector) -> None:
    vector[0] += 100


def number(vector: FixedPointVector) -> None:
    vector[HEADER_LENGTH] += 100 * UNIT


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("parts", weight, "a weight of 10"),
        ("parts", number, "numbers of up to 10"),
        ("gradient", weight, "a weight of 10"),
        ("newton", weight, "a weight of 10"),
    ],
)
def test_a_masked_sum_is_bounded_by_the_users_of_its_devices(
    case: str,
    change: Any,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A masked number is any of 32 bits: one of eight devices, invited for one user each, said 100 of them."""
    lies_in(monkeypatch, "train", change)
    nodes = federation(case, tmp_path, tries=2, roster=Enrolment(tmp_path, users=1))
    with pytest.raises(InvalidState, match=f"{words}.*with . users.*nobody can be named"):
        nodes.run()
    assert nodes.strategy.progress.rejections.counts[STEP_FAILED] == 2
    assert not nodes.strategy.nodes.left_out


def test_a_masked_sum_of_statistics_is_bounded_by_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lies_in(monkeypatch, STATISTICS_PURPOSE, number)
    nodes = federation("parts", tmp_path, tries=2, roster=Enrolment(tmp_path, users=1))
    with pytest.raises(InvalidState, match=r"counts out of range in a secure sum, and under masks nobody can be named"):
        nodes.run()


def test_a_masked_quality_counts_no_more_than_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def evaluated(vector: FixedPointVector) -> None:
        vector[4] += 100

    lies_in(monkeypatch, "evaluate", evaluated)
    nodes = federation("parts", tmp_path, roster=Enrolment(tmp_path, users=1))
    with caplog.at_level(logging.WARNING, "fairfold"):
        nodes.run()
    assert nodes.strategy.progress.history[-1].quality is None
