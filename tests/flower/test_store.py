"""What a device keeps: whole or not at all, for its owner alone, by the name of the user."""

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from fairfold import files
from fairfold.errors import CannotWrite, InvalidState
from fairfold.flower.store import FILE, DeviceState, DeviceStore
from fairfold.runs.tensors import write_tensors


def test_it_is_read_back_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "node")
    assert store.load().vectors == {}
    state = DeviceState({"user.weight": torch.randn(2, 3)}, ["anna", "böb"], 42, 7)
    before = os.umask(0)
    try:
        store.save(state)
    finally:
        os.umask(before)
    found = store.load()
    assert torch.equal(found.vectors["user.weight"], state.vectors["user.weight"])
    assert (found.names, found.secret, found.round_number) == (["anna", "böb"], 42, 7)
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "node" / FILE).stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "node").iterdir()] == [FILE]


def test_rows_follow_their_users(tmp_path: Path) -> None:
    state = DeviceState({"user.weight": torch.tensor([[1.0], [2.0]])}, ["anna", "bob"])
    rows = state.rows_of(["carl", "bob"], {"user.weight": torch.tensor([[9.0], [8.0]])})
    assert rows["user.weight"].tolist() == [[9.0], [2.0]]
    other = state.rows_of(["anna"], {"user.weight": torch.zeros(1, 4)})
    assert other["user.weight"].tolist() == [[0.0] * 4], "a model with longer vectors starts anew"


def test_secrets_differ() -> None:
    assert DeviceState().secret != DeviceState().secret


class FullDisk(files.Disk):
    def write(self, descriptor: int, piece: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DeviceStore(tmp_path)
    store.save(DeviceState({"user.weight": torch.ones(1, 2)}, ["anna"], 1))
    monkeypatch.setattr(files, "disk", FullDisk())
    with pytest.raises(CannotWrite, match="No space left"):
        store.save(DeviceState({"user.weight": torch.zeros(1, 2)}, ["anna"], 1))
    assert store.load().vectors["user.weight"].tolist() == [[1.0, 1.0]]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04K\x01."])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(InvalidState, match=FILE):
        DeviceStore(tmp_path).load()


def test_another_format_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / FILE, {"a": torch.ones(1)}, {"format": "99"})
    with pytest.raises(InvalidState, match="format '99'"):
        DeviceStore(tmp_path).load()
