"""Who wants to know how an experiment goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairfold.reproduce.experiment import Cell
    from fairfold.reproduce.records import Outcome


class Watcher:
    """Told how an experiment goes; every method may be left as it is."""

    def on_plan(self, kept: int, lacking: int, to_run: list[Cell]) -> None:
        """Before the first cell: how many are kept, how many have no data, and what is to be run."""

    def on_share(self, cell: Cell, share: float) -> None:
        """How much of a cell is done."""

    def on_cell(self, cell: Cell, outcome: Outcome) -> None:
        """A cell is over."""

    def on_note(self, text: str) -> None:
        """Something a person should know."""
