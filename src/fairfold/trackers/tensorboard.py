"""Event files that TensorBoard shows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fairfold.trackers.tracker import Plain, Tracker


class TensorBoard(Tracker):
    """Writes event files into a folder: ``tensorboard --logdir FOLDER`` shows them."""

    TITLE, MODULE, EXTRA = "TensorBoard", "torch.utils.tensorboard", "tensorboard"

    def __init__(self, folder: str | Path = "tensorboard") -> None:
        super().__init__()
        self._folder = Path(folder)
        self._writer: Any = None

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """Event files in the run's folder."""
        return cls(folder / "tensorboard")

    def open(self, settings: Mapping[str, Plain], first_round: int, known: str | None) -> str | None:  # noqa: ARG002
        """Open the event file; what an earlier, killed process wrote of repeated rounds is hidden by TensorBoard."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=first_round)
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        self._writer.add_text("settings", f"| key | value |\n|---|---|\n{rows}", first_round)
        return None

    def send(self, values: Mapping[str, float], round_number: int) -> None:
        """A scalar each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round_number)
        self._writer.flush()

    def shut(self, *, ended: bool) -> None:  # noqa: ARG002
        """Flush and close the file."""
        self._writer.close()
