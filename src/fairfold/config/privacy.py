"""The table ``[privacy]``: what the server may see of clients' updates."""

from typing import ClassVar, Literal

from pydantic import Field

from fairfold.config.base import FrozenSettings
from fairfold.privacy.ledger import DEFAULT_MIN_COHORT


class PlainPrivacy(FrozenSettings):
    """No protection: the server sees each update, and can read the client's history from it.

    Attributes:
        uses_secure_aggregation: Whether the server sees only sums over many clients.
        reports_quality: Whether clients report how well a model serves their users, computed on held-out data.
    """

    level: Literal["plain"] = "plain"
    uses_secure_aggregation: ClassVar[bool] = False
    reports_quality: ClassVar[bool] = True

    def warnings(self) -> list[str]:
        """Sentences about weak settings, for the reader of a run."""
        return []


class SecurePrivacy(PlainPrivacy):
    """Secure aggregation: updates become 32-bit integers under masks that cancel in the sum.

    Attributes:
        min_cohort: The fewest clients of a sum; a sum of fewer is not opened. From exact sums of 20 clients most
            histories can be read; from those of 100 it depends on the updates (docs/privacy.md).
        clip: Numbers of an update beyond it are clipped, but for those of which an algorithm knows a bound. The
            smaller it is, the finer are the steps to which numbers are rounded.
    """

    level: Literal["secure"] = "secure"  # type: ignore[assignment]
    min_cohort: int = Field(DEFAULT_MIN_COHORT, ge=2, lt=2**17)
    clip: float = Field(16.0, gt=0, lt=2**20)
    uses_secure_aggregation: ClassVar[bool] = True
    SMALL_COHORT: ClassVar = "exact sums of so few clients reveal what single users have (docs/privacy.md)"

    def warnings(self) -> list[str]:
        if self.min_cohort >= DEFAULT_MIN_COHORT:
            return []
        return [f"privacy.min_cohort is {self.min_cohort}, below the usual {DEFAULT_MIN_COHORT}: {self.SMALL_COHORT}."]


class DifferentialPrivacy(SecurePrivacy):
    """Differential privacy: sums with noise, nearly as likely without any one user's whole history.

    Attributes:
        epsilon: ε, the privacy budget of a whole run for a user's history.
        delta: δ, which should be well below one over the number of users.
        noise: Who adds the noise. ``"devices"``: every device adds a share under its mask, so that there is no sum
            without noise, even if three in ten drop out. ``"server"``: the server adds it; less is needed, but the
            server sees the exact sum.
    """

    level: Literal["private"] = "private"  # type: ignore[assignment]
    epsilon: float = Field(8.0, gt=0, le=100)
    delta: float = Field(1e-5, gt=0, lt=1)
    noise: Literal["devices", "server"] = "devices"
    reports_quality: ClassVar[bool] = False
    SMALL_COHORT: ClassVar = "noise is sized for three in ten that leave or collude, of so few clients one or none"

    def warnings(self) -> list[str]:
        return [] if self.noise == "server" else super().warnings()


PRIVACY: dict[str, type[PlainPrivacy]] = {
    "plain": PlainPrivacy,
    "secure": SecurePrivacy,
    "private": DifferentialPrivacy,
}
