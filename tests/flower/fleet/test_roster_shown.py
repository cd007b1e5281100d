"""Devices see the server's roster, and compare it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairfold.atomic_io import make_private_folder
from fairfold.cli import app
from fairfold.errors import InvalidState
from fairfold.flower.fleet.connection import read_key
from fairfold.flower.fleet.credentials import make_node_key
from fairfold.flower.fleet.node import NodeFolder, read_server_roster
from fairfold.flower.roster import Roster, make_signer
from fairfold.privacy.secure.keys import point_of, read_roster
from fairfold.privacy.secure.log import Enrolled
from tests.flower.test_roster import new_key
from tests.support.fleet import FakeServer


def test_devices_compare_the_servers_roster(fake_server: tuple[type[FakeServer], str], tmp_path: Path) -> None:
    """It grows for all alike: a line that is left out, other devices for another one, and a missing key are noticed."""
    mine, address = fake_server
    log = Roster(tmp_path / "roster.jsonl", make_signer(tmp_path / "signer"))
    node = NodeFolder(tmp_path / "node", address, "mine.csv", "1x", signer=log.public.hex())
    make_private_folder(node.folder)
    make_node_key(node.key)
    node.save()
    node.authority.write_bytes((tmp_path / "server-keys" / "ca.crt").read_bytes())
    key = point_of(read_key(node.key).public_key())
    log.add(Enrolled(new_key(), 7, 1))
    mine.body = log.content()
    with pytest.raises(InvalidState, match="without this device's key"):
        read_server_roster(node)
    log.add(Enrolled(key, 8, 1))
    mine.body = log.content()
    entries, head, added = read_server_roster(node)
    assert ([one.node for one in entries], head, added) == ([7, 8], log.head(), 2)
    assert read_server_roster(node)[2] == 0, "it was just looked at"
    lied = Roster(tmp_path / "lied.jsonl", log.signer)  # what the same server shows another device
    for number in (3, 4, 5):
        lied.add(Enrolled(key if number == 4 else new_key(), number, 1))
    mine.body = lied.content()
    with pytest.raises(InvalidState, match="does not begin with the 2 lines"):
        read_server_roster(node)
    other = replace(node, folder=tmp_path / "other")
    make_private_folder(other.folder)
    for path in (node.key, node.authority):
        (other.folder / path.name).write_bytes(path.read_bytes())
    os.chmod(other.key, 0o600)
    with pytest.raises(InvalidState, match="different rosters"):
        read_server_roster(other, head)
    with pytest.raises(InvalidState, match="3 lines where the other device was shown 9"):
        read_server_roster(other, (9, head.hash))
    mine.body = log.content()
    assert read_server_roster(other, head) == (entries, head, 2)
    log.add(Enrolled(new_key(), 9, 50))
    mine.body = log.content()
    shown = CliRunner().invoke(app, ["node", "roster", str(node.folder), "--other", f"2:{head.hash}"])
    assert shown.exit_code == 0, shown.output
    _, head, added = read_server_roster(other)
    words = f"# 3 devices, {added} of them new; compare with others: 3:{head.hash}\n"
    assert shown.output.startswith(words)
    (tmp_path / "file").write_text(shown.output)
    assert len(read_roster(tmp_path / "file")) == 3, "what `node enrol --roster` takes"
    node.known_roster.write_text("[]")
    with pytest.raises(InvalidState, match="a number and a hash"):
        read_server_roster(node)
