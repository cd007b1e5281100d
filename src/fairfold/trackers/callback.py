"""What else wants to know how a run goes: a callback is told when it starts, after every round, and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairfold.settings import Settings
    from fairfold.simulate.result import Result, RoundReport
    from fairfold.subspace import Capacity


class Callback:
    """Base of all callbacks; every method may be left as it is. What one raises ends the run."""

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:
        """Before the first round, or the first after a resume."""

    def on_round(self, report: RoundReport) -> None:
        """After every round."""

    def on_end(self, result: Result) -> None:
        """After the last."""

    def close(self) -> None:
        """When the run is over, however it ended."""
