"""The roster is a signed log that only grows, and binds names and users to enrolled keys."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key

from fairfold.errors import InvalidState
from fairfold.flower.roster import Roster, make_signer, openssh_line
from fairfold.privacy.secure.keys import point_of, read_roster
from fairfold.privacy.secure.log import Enrolled, device_name, line_of, read_log, signed_entry
from fairfold.privacy.secure.messages import NO_LOG


def new_key() -> bytes:
    return point_of(generate_private_key(SECP384R1()).public_key())


def roster_of(folder: Path, users: tuple[int, ...] = (1, 50, 2)) -> Roster:
    roster = Roster(folder / "roster.jsonl", make_signer(folder / "signer"))
    for node, number in enumerate(users, 7):
        roster.add(Enrolled(new_key(), node, number))
    return roster


def test_entries_come_back_and_a_key_comes_once(tmp_path: Path) -> None:
    roster = roster_of(tmp_path)
    first = roster.entries()[0]
    assert roster.add(first._replace(users=1000)) == first, "an answer that was lost changes nothing"
    again = Roster(roster.path, make_signer(tmp_path / "signer"))
    assert [(one.node, one.users) for one in again.entries()] == [(7, 1), (8, 50), (9, 2)]
    assert (again.users_of(8), again.users_of(99)) == (50, 1)
    before = again.head()
    added = roster.add(Enrolled(new_key(), 11, 3))
    assert again.of_node(11) == added, "what another process has enrolled"
    assert (before.lines, again.head()) == (3, before.after(roster.content().splitlines()[-1]))


def test_the_operators_file_is_what_devices_take(tmp_path: Path) -> None:
    roster = roster_of(tmp_path)
    (tmp_path / "file").write_text("# head\n" + "".join(f"{openssh_line(one)}\n" for one in roster.entries()))
    assert read_roster(tmp_path / "file") == {one.key for one in roster.entries()}


def test_no_line_can_be_changed_left_out_moved_or_added(tmp_path: Path) -> None:
    roster = roster_of(tmp_path)
    lines = roster.content().splitlines()
    public = roster.public
    entries, heads = read_log(roster.content(), public)
    assert (len(entries), heads[0], heads[-1]) == (3, NO_LOG, roster.head())
    more = json.loads(lines[1]) | {"users": 1000}
    forged = [
        [lines[0], json.dumps(more).encode(), lines[2]], lines[1:], [lines[1], lines[0], lines[2]],
        [lines[0], lines[2]], [*lines, lines[2]], [*lines, b"{}"], [*lines, b"\xff"], [*lines, b"[" * 9000],
        [*lines, json.dumps({"key": "00" * 49, "node": "1", "users": 1, "previous": heads[-1].hash}).encode()],
        [lines[0].replace(b": ", b":"), *lines[1:]],  # the same values, in other bytes
    ]  # fmt: skip
    for wrong in forged:
        with pytest.raises(InvalidState, match=r"line \d of the roster"):
            read_log(b"\n".join(wrong), public)
    (tmp_path / "other").mkdir()
    other = roster_of(tmp_path / "other")
    with pytest.raises(InvalidState, match="did not sign"):
        read_log(other.content(), public)
    twice = line_of(entries[0], heads[-1], roster.signer.sign(signed_entry(entries[0], heads[-1])))
    with pytest.raises(InvalidState, match="a key that comes twice"):
        read_log(roster.content() + twice, public)


def test_a_name_is_its_keys_alone(tmp_path: Path) -> None:
    roster = roster_of(tmp_path)
    first, second, _ = roster.entries()
    assert roster.allows(first.node, device_name(first.key))
    assert not roster.allows(first.node, second.name)
    assert not roster.allows(99, second.name), "a node without an invitation takes no other's name"
    assert roster.allows(99, 5)
