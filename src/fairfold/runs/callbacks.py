"""What else wants to know how a run goes: a callback is told when it starts, after every round, and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fairfold.errors import InvalidSettings

if TYPE_CHECKING:
    from pathlib import Path

    from fairfold.settings import Settings
    from fairfold.simulate.result import Result, RoundReport
    from fairfold.subspace import Capacity


class Callback:
    """Base of all callbacks; every method may be left as it is."""

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:
        """Before the first round, or the first after a resume."""

    def on_round(self, report: RoundReport) -> None:
        """After every round."""

    def on_end(self, result: Result) -> None:
        """After the last."""

    def close(self) -> None:
        """When the run is over, however it ended."""


class TensorBoard(Callback):
    """Event files that TensorBoard shows, in a folder; needs the extra ``tensorboard``."""

    def __init__(self, folder: Path) -> None:
        require_tensorboard()
        self._folder = folder
        self._writer: Any = None
        self._names: list[str] = []

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:  # noqa: ARG002
        """Open the event file; what an earlier, killed process wrote of repeated rounds is hidden by TensorBoard."""
        self._names = [str(capacity) for capacity in capacities]
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=first_round)

    def on_round(self, report: RoundReport) -> None:
        """Seconds and bytes of every round, quality where it was evaluated."""
        number = report.round_number
        for name in ("seconds", "clients", "bytes_down", "bytes_up"):
            self._writer.add_scalar(f"round/{name}", getattr(report, name), number)
        if report.quality is not None:
            self._writer.add_scalar("quality/server", report.quality.server, number)
            for name, value in zip(self._names, report.quality.groups, strict=True):
                if value is not None:
                    self._writer.add_scalar(f"quality/{name}", value, number)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()


def require_tensorboard() -> None:
    """Refuse where TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise InvalidSettings(
            "--tensorboard, which is not installed", "TensorBoard", "pip install 'fairfold[tensorboard]'"
        ) from None
