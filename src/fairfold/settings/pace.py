"""``[fleet.pace]`` and ``[fleet.clock]``: when the server takes a step, and how long simulated devices take."""

from typing import TYPE_CHECKING

from pydantic import Field

from fairfold.settings.base import Frozen

if TYPE_CHECKING:
    from fairfold.settings import Settings


class PaceSettings(Frozen):
    """When a server takes a step: when all devices that it has asked have answered (the default), or sooner.

    With ``answers`` or ``seconds`` rounds do not wait. ``fleet.clients_per_round`` devices are at work at any time. A
    device that has answered makes room for another; a slow one answers to a model that is some steps old.

    Attributes:
        answers: A step is taken as soon as this many answers that count have come; None waits for all.
        seconds: A step is taken after this many seconds, if an answer has come by then; None waits without a limit.
        staleness: An answer is refused if more than this many steps were taken since it was asked for. Not of
            ``correlations``: what a device says there does not depend on the model that it was sent.
    """

    answers: int | None = Field(None, ge=1, lt=2**31)
    seconds: float | None = Field(None, gt=0)
    staleness: int = Field(8, ge=0, le=10_000)

    @property
    def waits(self) -> bool:
        """Whether rounds wait for all whom they have asked."""
        return self.answers is None and self.seconds is None

    def idle(self, key: str) -> bool:
        """See the base class."""
        return key == "staleness" and self.waits

    def why_idle(self, key: str) -> str:  # noqa: ARG002
        """See the base class."""
        return " where rounds wait for all: it needs fleet.pace.answers or fleet.pace.seconds"

    def late(self, behind: int, *, ages: bool) -> str | None:
        """Why an answer that is so many steps behind is refused, or None: where it ages, by a bound."""
        if not ages or self.waits or behind <= self.staleness:
            return None
        return f"too stale: more than {self.staleness} steps behind"


class ClockSettings(Frozen):
    """How long simulated devices take to answer, by a clock that is simulated as well.

    Attributes:
        seconds: How long a device of usual speed takes for an answer; None: no clock, and rounds take no time.
        spread: How much devices differ: the standard deviation of the logarithm of the seconds that each takes.
        slow: The share of devices that are slow.
        slower: How many times as long as others the slow devices take.
    """

    seconds: float | None = Field(None, gt=0)
    spread: float = Field(0.0, ge=0, le=10)
    slow: float = Field(0.0, ge=0, le=1)
    slower: float = Field(10.0, ge=1)

    def idle(self, key: str) -> bool:
        """See the base class."""
        return (key != "seconds" and self.seconds is None) or (key == "slower" and not self.slow)

    def why_idle(self, key: str) -> str:  # noqa: ARG002
        """See the base class."""
        return f": it needs fleet.clock.{'seconds' if self.seconds is None else 'slow'}"


def problem_of_time(settings: "Settings") -> str | None:
    """Why rounds that do not wait, or a clock, do not go with the other tables, or None."""
    fleet, algorithm, privacy = settings.fleet, settings.algorithm, settings.privacy
    if algorithm.pooled and not (fleet.pace.waits and fleet.clock.seconds is None):
        return "fleet.pace and fleet.clock where all data is in one place: there is nobody to wait for"
    if fleet.pace.waits:
        return None
    if fleet.replacement:
        return "fleet.pace with fleet.replacement: a device is at work on one order at a time"
    if privacy.sums_alone:
        level = f"privacy.level={privacy.level!r}"
        return f"fleet.pace with {level}: masks cancel in the sum of all who were asked, for whom rounds wait"
    if getattr(algorithm, "step_per", "round") == "client":
        return "fleet.pace with algorithm.step_per='client': how many answer is not known before a step"
    return None
