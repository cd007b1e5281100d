"""What a device keeps: whole or not at all, for its owner alone, by the name of the user."""

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from fairfold import atomic_io as files
from fairfold.errors import CannotWrite, InvalidState
from fairfold.flower.client_store import FILE, ClientState, ClientStore, RememberedUpdate
from fairfold.runs.tensors import write_checked_tensors, write_tensors


def test_it_is_read_back_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "node")
    assert store.load().acknowledged == RememberedUpdate()
    (tmp_path / "node").mkdir()
    acknowledged, pending = (RememberedUpdate(number, {"user.weight": torch.randn(2, 3)}) for number in (5, 2**63 - 1))
    history = {"offsets": torch.tensor([0, 1, 2]), "items": torch.tensor([3, 4])}
    state = ClientState(acknowledged, pending, ["anna", "böb"], 7, history, 42, 9, {3: 1, 4: 0})
    before = os.umask(0)
    try:
        store.save(state)
    finally:
        os.umask(before)
    found = store.load()
    for mine, theirs in ((found.acknowledged, acknowledged), (found.pending, pending)):
        assert mine is not None
        assert mine.update_id == theirs.update_id
        assert torch.equal(mine.local_state["user.weight"], theirs.local_state["user.weight"])
    assert all(torch.equal(found.history[name], of) for name, of in history.items())
    assert (found.user_names, found.secret, found.run) == (["anna", "böb"], 42, 7)
    assert (found.numbering, found.item_numbers) == (9, {3: 1, 4: 0})
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "node" / FILE).stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "node").iterdir()] == [FILE]


def test_rows_follow_their_users(tmp_path: Path) -> None:
    state = ClientState(RememberedUpdate(1, {"user.weight": torch.tensor([[1.0], [2.0]])}), user_names=["anna", "bob"])
    rows = state.local_state_of(["carl", "bob"], {"user.weight": torch.tensor([[9.0], [8.0]])})
    assert rows["user.weight"].tolist() == [[9.0], [2.0]]
    other = state.local_state_of(["anna"], {"user.weight": torch.zeros(1, 4)})
    assert other["user.weight"].tolist() == [[0.0] * 4], "a model with longer vectors starts anew"


def test_secrets_differ() -> None:
    assert ClientState().secret != ClientState().secret


class FullDisk(files.Disk):
    def write(self, descriptor: int, piece: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClientStore(tmp_path)
    store.save(ClientState(RememberedUpdate(1, {"user.weight": torch.ones(1, 2)}), user_names=["anna"]))
    monkeypatch.setattr(files, "disk", FullDisk())
    with pytest.raises(CannotWrite, match="No space left"):
        store.save(ClientState(RememberedUpdate(2, {"user.weight": torch.zeros(1, 2)}), user_names=["anna"]))
    assert store.load().acknowledged.local_state["user.weight"].tolist() == [[1.0, 1.0]]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04K\x01."])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(InvalidState, match=FILE):
        ClientStore(tmp_path).load()


def test_another_format_is_refused(tmp_path: Path) -> None:
    for write in (write_tensors, write_checked_tensors):
        write(tmp_path / FILE, {"a": torch.ones(1)}, {"format": "99"})
        with pytest.raises(InvalidState, match="format '99'"):
            ClientStore(tmp_path).load()


def test_updates_are_reconciled() -> None:
    acknowledged, pending = RememberedUpdate(5), RememberedUpdate(6)
    state = ClientState(acknowledged, pending, ["anna"], run=3)
    assert state.reconcile(3, 6).acknowledged == pending
    assert state.reconcile(3, 5).acknowledged == acknowledged
    assert state.reconcile(3, 5).pending is state.reconcile(3, 6).pending is None
    assert state.reconcile(4, 0) == ClientState(run=4, secret=state.secret)
    for run, holds in ((3, 7), (3, 0), (4, 5)):
        with pytest.raises(InvalidState, match="a task that builds on"):
            state.reconcile(run, holds)


def test_who_saves_last_finds_that_another_has_saved(tmp_path: Path) -> None:
    first, second = ClientStore(tmp_path), ClientStore(tmp_path)
    first.load()
    second.load()
    second.save(ClientState(RememberedUpdate(1)))
    with pytest.raises(InvalidState, match="another task"):
        first.save(ClientState(RememberedUpdate(2)))
    second.save(ClientState(RememberedUpdate(3)))
    assert first.load().acknowledged.update_id == 3
    first.save(ClientState(RememberedUpdate(4)))
    assert second.load().acknowledged.update_id == 4
