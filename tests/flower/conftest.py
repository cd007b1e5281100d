"""What all tests of the network have in common."""

import pytest

from fairfold import atomic_io as files


@pytest.fixture(autouse=True)
def disk_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of devices on one disk: what is written is not waited for. That it is durable is tested elsewhere."""
    monkeypatch.setattr(files.Disk, "fsync", lambda _disk, _descriptor: None)
