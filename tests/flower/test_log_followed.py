"""Federations whose devices have enrolled: each follows the server's log before it takes part in a secure sum."""

import logging
from collections.abc import Generator
from pathlib import Path

import pytest

from fairfold.atomic_io import make_private_folder
from fairfold.device.store import save_device_id
from fairfold.errors import InvalidState
from fairfold.flower.fleet import connection
from fairfold.flower.nodes import NOT_ENROLLED
from fairfold.flower.roster import Roster, make_signer
from fairfold.privacy.secure.keys import point_of, read_enrolled
from fairfold.privacy.secure.log import Enrolled, device_name
from tests.flower.test_roster import new_key
from tests.flower.test_secure import ALGORITHMS, USERS, federation
from tests.support.nodes import Nodes


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What devices are shown, by the server that they ask."""
    shown: dict[str, bytes] = {}

    def stream(server: str, _authority: Path, start: int) -> Generator[bytes]:
        yield shown[server][start:]

    monkeypatch.setattr(connection, "stream_roster", stream)
    return shown


def enrolled(folder: Path, logs: dict[str, bytes], many: int = USERS) -> Roster:
    """A server's roster with devices whose state is in a folder, and who are shown it."""
    roster = Roster(folder / "roster.jsonl", make_signer(folder / "signer"))
    for number in range(many):
        state = folder / f"node-{number}"
        make_private_folder(state / "secure")
        key = point_of(read_enrolled(state / "secure" / "key").public_key())
        save_device_id(state, device_name(key))
        roster.add(Enrolled(key, number + 1, 1))  # as nodes in one process are counted
    logs["here"] = roster.content()
    return roster


def asking(nodes: Nodes, roster: Roster, servers: dict[int, str] | None = None) -> Nodes:
    """The same federation, whose devices know the server's signer and whom to ask for its log."""
    for number, context in nodes.grid.contexts.items():
        server = (servers or {}).get(number, "here")
        context.node_config |= {"signer": roster.public.hex(), "server": server, "authority": "ca.crt"}
    return nodes


@pytest.mark.parametrize("case", list(ALGORITHMS))
def test_all_take_part_by_one_log(case: str, tmp_path: Path, logs: dict[str, bytes]) -> None:
    roster = enrolled(tmp_path, logs)
    nodes = asking(federation(case, tmp_path, roster=roster), roster)
    nodes.run()
    assert not nodes.strategy.progress.rejections.counts
    assert nodes.strategy.progress.history[-1].num_clients == USERS
    copies = [path.read_bytes() for path in tmp_path.glob("*/secure/roster.jsonl")]
    assert copies == [roster.content()] * USERS


def test_one_that_is_shown_another_log_takes_no_part(
    tmp_path: Path, logs: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    roster = enrolled(tmp_path, logs)
    forked = Roster(tmp_path / "forked", roster.signer)
    for one in [*roster.entries()[1:], roster.entries()[0]]:
        forked.add(one)
    logs["lied"] = forked.content()
    nodes = asking(federation("paper", tmp_path, roster=roster), roster, {3: "lied"})
    with caplog.at_level(logging.WARNING, "fairfold"):
        nodes.run()
    assert "another roster than its invitation names" in caplog.text
    assert nodes.strategy.progress.rejections.counts == {"no keys or shares": 3}, "two rounds, and an evaluation"
    assert nodes.strategy.progress.history[-1].num_clients == USERS - 1


def test_no_device_goes_back_to_an_invitation_without_the_log(
    tmp_path: Path, logs: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    roster = enrolled(tmp_path, logs)
    nodes = asking(federation("gradient", tmp_path, tries=1), roster)
    with pytest.raises(InvalidState), caplog.at_level(logging.WARNING, "fairfold"):
        nodes.run()
    assert caplog.text.count("an invitation without the roster") >= USERS


def test_a_node_without_a_line_is_left_out_and_the_others_go_on(tmp_path: Path, logs: dict[str, bytes]) -> None:
    roster = enrolled(tmp_path, logs, USERS - 1)
    roster.add(Enrolled(new_key(), 100, 1))  # of a device that is not connected
    logs["here"] = roster.content()
    nodes = asking(federation("gradient", tmp_path, roster=roster), roster)
    nodes.run()
    assert nodes.strategy.nodes.left_out == {USERS: NOT_ENROLLED}
    assert nodes.strategy.progress.history[-1].num_clients == USERS - 1


def test_a_device_with_another_key_than_it_enrolled_costs_itself_alone(
    tmp_path: Path, logs: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """All others would refuse the cohort: the server leaves it out before."""
    roster = enrolled(tmp_path, logs)
    nodes = asking(federation("gradient", tmp_path, roster=roster), roster)
    (tmp_path / "node-2" / "secure" / "key").unlink()  # it gets a new one
    nodes.grid.contexts[3].node_config.pop("signer")  # and asks for no log
    with caplog.at_level(logging.WARNING, "fairfold"):
        nodes.run()
    assert "node 3 left out of a secure sum: another key than it has in the roster" in caplog.text
    assert nodes.strategy.progress.history[-1].num_clients == USERS - 1
