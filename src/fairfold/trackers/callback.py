"""What else wants to know how a run goes: a callback is told when it starts, after every round, and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairfold.settings import Settings
    from fairfold.simulate.result import Result, RoundReport
    from fairfold.subspace import Capacity


class Callback:
    """Base of all callbacks: override the methods that you need. If one raises an error, the run ends with it.

    Example:
        >>> from fairfold import Settings, simulate
        >>> class Printer(Callback):
        ...     def on_round(self, report):
        ...         print("round", report.round_number)
        >>> world = {"users": 30, "items": 80, "interactions_per_user": 20}
        >>> result = simulate(Settings(data=world, run={"rounds": 2}), callbacks=[Printer()])
        round 1
        round 2
    """

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:
        """Called before the first round, or before the first one after a resume."""

    def on_round(self, report: RoundReport) -> None:
        """Called after every round."""

    def on_end(self, result: Result) -> None:
        """Called after the last round."""

    def close(self) -> None:
        """Called when the run is over, however it ended."""
