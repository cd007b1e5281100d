"""The table ``[privacy]``: what the server may see of what devices say."""

from typing import Literal

from pydantic import Field

from fairfold.privacy.ledger import USUAL_COHORT
from fairfold.settings.base import Frozen


class PlainPrivacy(Frozen):
    """Answers as they are: the server sees each one, and can read the sender's history from it.

    Attributes:
        level: How answers are protected.
    """

    level: Literal["plain"] = "plain"

    @property
    def sums_alone(self) -> bool:
        """Whether the server sees nothing but sums over many devices."""
        return False

    @property
    def tells_quality(self) -> bool:
        """Whether devices say how well a model serves their users: what they say follows from what these hold back."""
        return True

    def warnings(self) -> list[str]:
        """What whoever reads of a run has to know."""
        return []


class SecurePrivacy(PlainPrivacy):
    """Sums alone: answers become words of 32 bits under masks that cancel in the sum.

    Attributes:
        level: How answers are protected.
        smallest_cohort: The fewest devices of a sum; a sum of fewer is not opened. From exact sums of 20 devices most
            histories can be read; from those of 100 it depends on what devices say (docs/privacy.md).
        bound: Numbers of an answer beyond it are clipped, but for those of which an algorithm knows a bound. The
            smaller it is, the finer are the steps to which numbers are rounded.
    """

    level: Literal["secure"] = "secure"  # type: ignore[assignment]
    smallest_cohort: int = Field(USUAL_COHORT, ge=2, lt=2**17)
    bound: float = Field(16.0, gt=0, lt=2**20)

    @property
    def sums_alone(self) -> bool:
        """See the base class."""
        return True

    def warnings(self) -> list[str]:
        """See the base class: a minimum below the usual one."""
        if self.smallest_cohort >= USUAL_COHORT:
            return []
        lowered = f"privacy.smallest_cohort is {self.smallest_cohort}, below the usual {USUAL_COHORT}"
        return [f"{lowered}: exact sums of so few devices tell what single users have (docs/privacy.md)."]


class PrivatePrivacy(SecurePrivacy):
    """Sums with noise: what comes out is nearly as likely without any one user's whole history.

    Attributes:
        level: How answers are protected.
        epsilon: ε, what all that a run lets out about a user's history costs together.
        delta: δ, which should be well below one over the number of users.
        noise: Who adds the noise. ``"devices"``: every device adds a share under its mask, so that nobody sees a sum
            without noise, even if three in ten drop out. ``"server"``: the server adds it; less is needed, but the
            server sees the exact sum.
    """

    level: Literal["private"] = "private"  # type: ignore[assignment]
    epsilon: float = Field(8.0, gt=0, le=100)
    delta: float = Field(1e-5, gt=0, lt=1)
    noise: Literal["devices", "server"] = "devices"

    def warnings(self) -> list[str]:
        """See the base class."""
        if self.smallest_cohort >= USUAL_COHORT or self.noise == "server":
            return []
        lowered = f"privacy.smallest_cohort is {self.smallest_cohort}, below the usual {USUAL_COHORT}"
        return [f"{lowered}: noise is sized for three in ten that leave or collude, of so few devices one or none."]

    @property
    def tells_quality(self) -> bool:
        """See the base class: nothing is let out beside what ε is spent on."""
        return False


PRIVACY: dict[str, type[PlainPrivacy]] = {"plain": PlainPrivacy, "secure": SecurePrivacy, "private": PrivatePrivacy}
