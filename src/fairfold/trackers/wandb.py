"""Runs of Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fairfold.errors import InvalidSettings
from fairfold.trackers.tracker import Plain, Tracker


class WeightsAndBiases(Tracker):
    """Logs to a run of Weights & Biases: the one that is active, which stays open, or else a new one.

    With ``WANDB_MODE=offline`` nothing leaves the machine; ``wandb sync`` sends it later.

    Args:
        project: Name of the project.
        name: Name of a new run.
        folder: Where wandb keeps its files; its own choice if not given.
        kept: A file that keeps the run's id, so that a resumed run stays one run.
    """

    TITLE, MODULE, EXTRA = "Weights & Biases", "wandb", "wandb"

    def __init__(
        self,
        project: str = "fairfold",
        name: str | None = None,
        folder: str | Path | None = None,
        kept: Path | None = None,
    ) -> None:
        super().__init__(kept)
        self._project, self._name, self._folder = project, name, folder
        self._run: Any = None
        self._mine = True

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """A run of the folder's name, with its files there."""
        return cls(name=folder.name, folder=folder, kept=folder / "wandb.txt")

    def open(self, settings: Mapping[str, Plain], first_round: int, known: str | None) -> str | None:  # noqa: ARG002
        """Settings are the run's configuration; rounds are the steps of all figures."""
        import wandb

        self._mine = wandb.run is None
        try:
            self._run = wandb.run or wandb.init(
                project=self._project, name=self._name, dir=self._folder, id=known, resume="allow" if known else None
            )
        except wandb.Error as error:
            remedy = "Run `wandb login`, or set WANDB_MODE=offline, which keeps everything on this machine."
            said = f"{self.TITLE}: {error}".rstrip(".")
            raise InvalidSettings(said, "a run that can be opened there", remedy) from error
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.define_metric("*", step_metric="round")
        return str(self._run.id)

    def send(self, values: Mapping[str, float], round_number: int) -> None:
        """One record per round."""
        self._run.log({**values, "round": round_number})

    def shut(self, *, ended: bool) -> None:
        """Finished, or failed; a run that somebody else has opened is left to them."""
        if self._mine:
            self._run.finish(exit_code=0 if ended else 1)
