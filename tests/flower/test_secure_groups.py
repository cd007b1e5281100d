"""Groups of devices with secure sums of their own: the sums of the simulation, and little that one device can spoil."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fairfold.algorithms.cooccurrence.cooccurrence import SUM
from fairfold.algorithms.cooccurrence.groups import GROUP_SUMS
from fairfold.config import Settings
from fairfold.errors import InvalidSettings
from fairfold.federation.randomness import Purpose, generator
from fairfold.flower.nodes import Node
from fairfold.flower.nodes import Nodes as FleetNodes
from fairfold.flower.persistence import NetworkState
from fairfold.flower.rounds import GROUP_REFUSED
from fairfold.flower.wire import client_settings
from fairfold.privacy.fixed_point import HEADER_LENGTH
from fairfold.privacy.ledger import STATISTICS_PURPOSE
from fairfold.privacy.secure.masking import FixedPointVector
from fairfold.subspace import Capacity
from tests.flower.test_bounds import lies_in, number
from tests.flower.test_contributions import Enrolment
from tests.flower.test_secure import data, secure_settings
from tests.support.nodes import Nodes, as_devices, assert_same, in_process, simulated

USERS, GROUPS = 12, 3


def grouped(case: str, rounds: int = 2, **changes: Any) -> Settings:
    settings = secure_settings(case, smallest=2, rounds=rounds)
    return settings.with_changes({"fleet.secure_groups": GROUPS} | changes)


def fleet(settings: Settings, where: Path, **options: Any) -> Nodes:
    """A fleet whose groups, and so its statistics, are not those of the simulation."""
    nodes = in_process(data(USERS), settings, USERS, where, **options)
    nodes.start.clear()
    return nodes


def as_simulated(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the groups of a fleet as the simulation does."""
    place = torch.randperm(USERS, generator=generator(settings, Purpose.GROUPS)).argsort().tolist()
    monkeypatch.setattr(FleetNodes, "_secret_numbers", lambda _self, nodes: [place[one.partition_id] for one in nodes])


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("co_occurrence", {}),
        ("parts", {}),
        ("gradient", {"algorithm.aggregation": "median"}),
        ("gradient", {"algorithm.aggregation": "trimmed", "algorithm.byzantine_share": 0.3}),
        ("newton", {}),
    ],
)
def test_the_sums_of_groups_are_those_of_the_simulation(
    case: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = grouped(case, **changes)
    as_simulated(settings, monkeypatch)
    nodes = in_process(data(USERS, case), settings, USERS, tmp_path)
    state = nodes.run()
    expected, _, rejections = simulated(data(USERS, case), settings, as_devices)
    assert_same(state.full, expected.full)
    assert not rejections.counts
    assert not nodes.strategy.progress.rejections.counts
    assert len(nodes.strategy.open_round.used) in (0, USERS)
    assert sorted(nodes.strategy.network_state.groups.values()) == sorted(list(range(GROUPS)) * (USERS // GROUPS))
    if case in ("co_occurrence", "parts"):
        sums, others = (of.algorithm_state[GROUP_SUMS] for of in (state, expected))
        assert sorted(sums) == ["0", "1", "2"]
        assert_same(sums, others)
        assert not state.algorithm_state[SUM][SUM].equal(torch.stack([*sums.values()]).sum(0)), "held to the others"


def test_a_sum_that_its_users_cannot_have_costs_its_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on with the groups that are left, where one sum of all would be dropped again and again."""
    lies_in(monkeypatch, "train", number)
    roster = Enrolment(tmp_path, users=1)
    nodes = fleet(grouped("parts", **{"fleet.secure_groups": 4}), tmp_path, roster=roster)
    state = nodes.run()
    strategy = nodes.strategy
    assert state.round_number == 2
    assert not strategy.nodes.left_out, "nobody is named"
    refused = strategy.progress.rejections.counts
    assert refused == {GROUP_REFUSED: refused[GROUP_REFUSED]}
    assert [report.num_clients for report in strategy.progress.history] == [USERS - USERS // 4] * 2
    assert len(state.algorithm_state[GROUP_SUMS]) == 3


def test_statistics_that_users_cannot_have_cost_their_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lies_in(monkeypatch, STATISTICS_PURPOSE, number)
    roster = Enrolment(tmp_path, users=1)
    nodes = fleet(grouped("parts", **{"fleet.secure_groups": 4}), tmp_path, roster=roster)
    assert nodes.run().round_number == 2
    assert "counts out of range in a secure sum" in caplog.text


def test_what_one_device_says_of_a_pair_counts_no_more_than_another_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims all users of its group for every pair, which its group's bound allows."""

    def claim(vector: FixedPointVector) -> None:
        vector[HEADER_LENGTH:] = numpy.uint32(2**17)

    settings = grouped("parts", rounds=1, **{"fleet.capacities": "1x"})
    lies_in(monkeypatch, "train", claim)
    state = fleet(settings, tmp_path).run()
    sums = torch.stack([*state.algorithm_state[GROUP_SUMS].values()])
    spoiled = int(sums.sum(1).argmax())
    others = torch.cat([sums[:spoiled], sums[spoiled + 1 :]])
    assert bool((state.algorithm_state[SUM][SUM] <= GROUPS * others.amax(0) + 1e-9).all())
    assert float(sums[spoiled].sum()) > 2 * float(others.sum())


def test_devices_stay_in_their_groups(tmp_path: Path) -> None:
    """Over a restart, and as others come: differences to earlier sums belong to the group that has these."""
    settings = grouped("co_occurrence")
    whole = fleet(settings, tmp_path / "whole")
    expected = whole.run()
    assert NetworkState(expected).groups == whole.strategy.network_state.groups

    first = fleet(settings, tmp_path / "devices", folder=tmp_path / "run")
    first.run(num_rounds=1)
    again = fleet(settings, tmp_path / "devices", folder=tmp_path / "run", resume=True)
    assert again.strategy.network_state.groups == first.strategy.network_state.groups
    again.run()
    assert again.strategy.network_state.groups == first.strategy.network_state.groups
    assert again.strategy.progress.state.round_number == 2


def test_groups_are_alike_and_nobody_chooses_one() -> None:
    settings = grouped("parts")

    def groups_by(secret: int) -> list[int]:
        fleet = FleetNodes(settings, secret=secret)
        nodes = [Node(one, Capacity.parse("1x" if one % 2 else "2x"), one) for one in range(30)]
        fleet._with_groups(nodes[:20])
        before = [node.group for node in nodes[:20]]
        fleet._with_groups(nodes)
        assert [node.group for node in nodes[:20]] == before
        for capacity in ("1x", "2x"):
            of = [node.group for node in nodes[:20] if str(node.capacity) == capacity]
            assert {of.count(group) for group in range(GROUPS)} <= {3, 4}
        return [node.group for node in nodes]

    one, other = groups_by(1), groups_by(2)
    assert one != other
    assert [one.count(group) for group in range(GROUPS)] == [10, 10, 10]


def test_devices_know_nothing_of_groups() -> None:
    """What a device reads of the settings is what it would read without groups."""
    for case in ("parts", "gradient"):
        assert client_settings(grouped(case)) == client_settings(secure_settings(case, smallest=2))
    rule: dict[str, Any] = {"algorithm.aggregation": "trimmed", "algorithm.byzantine_share": 0.3}
    sent = client_settings(grouped("gradient", **rule))
    assert sent == client_settings(secure_settings("gradient", smallest=2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fleet.secure_groups": 2}, "too few to compare"),
        ({"privacy.level": "plain", "fleet.secure_groups": 3}, "needs privacy.level='secure'"),
        ({"algorithm.kind": "ratings"}, "no rule for them"),
        ({"fleet.clients_per_round": 5}, "in 3 groups"),
        ({"fleet.secure_groups": 1, "algorithm.kind": "gradient", "algorithm.aggregation": "median"}, "compare sums"),
    ],
)
def test_settings_that_do_not_go_with_groups_are_refused(changes: dict[str, Any], words: str) -> None:
    base = {"privacy": {"level": "secure", "min_cohort": 2}, "fleet": {"secure_groups": 3, "clients_per_round": None}}
    with pytest.raises((InvalidSettings, ValueError), match=words):
        Settings(**base).with_changes(changes)


def test_a_simulation_of_too_few_devices_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="in 3 groups"):
        in_process(data(5), grouped("parts"), 5, tmp_path)
