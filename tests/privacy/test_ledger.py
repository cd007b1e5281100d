"""A device's own account: it refuses to go past its budget, and never takes a damaged file for an empty one."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fairfold import atomic_io as files
from fairfold.checksums import parse_with_checksum, with_checksum
from fairfold.errors import InvalidState, PrivacyBudgetSpent
from fairfold.privacy.accounting import sigma_for, sigma_for_share
from fairfold.privacy.ledger import FILE, Ledger, LedgerEntry


class Killed(BaseException):
    """What a kill looks like from inside."""


class KillingDisk(files.Disk):
    """A disk under a process that is killed at one of its calls."""

    def __init__(self, step: int) -> None:
        self.left = step

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            raise Killed

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def write(self, descriptor: int, piece: memoryview) -> int:
        self._count()
        return super().write(descriptor, piece)

    def fsync(self, descriptor: int) -> None:
        self._count()
        super().fsync(descriptor)

    def replace(self, old: Path, new: Path) -> None:
        self._count()
        super().replace(old, new)


SIGMA = sigma_for(8.0, 1e-5)


def ledger(folder: Path, epsilon: float = 8.0) -> Ledger:
    return Ledger(folder / "state", epsilon, 1e-5, 100)


def entry(share: float, release: str = "counts", run: str = "a", devices: int = 500) -> LedgerEntry:
    return LedgerEntry(run, release, sigma_for_share(SIGMA, share), devices)


def test_a_budget_can_be_spent_once(tmp_path: Path) -> None:
    mine = ledger(tmp_path)
    assert mine.spent() == 0
    assert mine.spend(entry(0.1)) < 8
    assert mine.spend(entry(0.9, "sum")) == pytest.approx(8, rel=1e-6)
    assert ledger(tmp_path).spent() == pytest.approx(8, rel=1e-6)  # another process reads the same
    with pytest.raises(PrivacyBudgetSpent, match=r"would bring ε to 8\.0.*8 at most"):
        mine.spend(entry(0.01, run="b"))
    assert len(mine.entries()) == 2
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o077 == 0


def test_what_was_sent_is_not_sent_again_and_few_are_refused(tmp_path: Path) -> None:
    mine = ledger(tmp_path)
    mine.spend(entry(0.1))
    with pytest.raises(PrivacyBudgetSpent, match="a second time"):
        mine.spend(entry(0.1))
    with pytest.raises(PrivacyBudgetSpent, match="a sum of 99 devices"):
        mine.spend(entry(0.1, "sum", devices=99))
    assert len(mine.entries()) == 1


def test_parts_of_a_sum_cost_what_it_costs_and_each_is_sent_once(tmp_path: Path) -> None:
    mine, whole = ledger(tmp_path), entry(1.0)
    assert mine.require(whole) == pytest.approx(8, rel=1e-6)
    assert not mine.entries()  # nothing was let out
    for part in range(3):
        assert mine.spend(replace(whole, part=part)) == pytest.approx(8, rel=1e-6)
    with pytest.raises(PrivacyBudgetSpent, match="a second time"):
        mine.spend(replace(whole, part=1))
    with pytest.raises(PrivacyBudgetSpent, match="other noise"):
        mine.spend(replace(whole, part=3, sigma=100.0))
    with pytest.raises(PrivacyBudgetSpent, match="would bring"):
        mine.require(replace(whole, part=3, run="b"))
    assert len(mine.entries()) == 3


def test_a_damaged_ledger_lets_nothing_out(tmp_path: Path) -> None:
    mine, path = ledger(tmp_path), tmp_path / "state" / FILE
    mine.spend(entry(0.1))
    whole = path.read_bytes()
    places = range(0, len(whole) - 1, 7)  # of its last byte, the end of the line, nothing depends
    for damaged in [b"", b"[]", whole[:-2], whole + b"x", *(whole[:at] for at in places)]:
        path.write_bytes(damaged)
        with pytest.raises(InvalidState, match="releases nothing more"):
            mine.spend(entry(0.1, "sum"))
    for at in places:
        flipped = bytes([whole[at] ^ 1])
        path.write_bytes(whole[:at] + flipped + whole[at + 1 :])
        with pytest.raises(InvalidState):
            mine.spend(entry(0.1, "sum"))


def test_another_format_or_noise_that_is_none_is_not_read(tmp_path: Path) -> None:
    mine, path = ledger(tmp_path), tmp_path / "state" / FILE
    mine.spend(entry(0.1))
    kept = parse_with_checksum(path.read_bytes())
    others: list[dict[str, Any]] = [{"format": 1}, {"format": 3}]
    others += [{"entries": [asdict(replace(entry(0.1), sigma=none))]} for none in (0.0, -1.0)]
    for other in others:
        path.write_bytes(with_checksum(kept | other))
        with pytest.raises(InvalidState, match="releases nothing more"):
            mine.spent()
    path.write_bytes(with_checksum(kept))
    assert len(mine.entries()) == 1


def test_killed_at_any_moment_it_has_the_entry_or_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 30):
        folder = tmp_path / str(step)
        ledger(folder).spend(entry(0.1))
        with monkeypatch.context() as patch:
            patch.setattr("fairfold.atomic_io.disk", KillingDisk(step))
            try:
                ledger(folder).spend(entry(0.2, "sum"))
            except Killed:
                assert len(ledger(folder).entries()) in (1, 2)
                continue
        assert len(ledger(folder).entries()) == 2
        return
    raise AssertionError("it was killed every time")
