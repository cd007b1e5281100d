"""The tables ``[fleet]`` (clients, capacities, waiting, faults) and ``[privacy]`` (what the server sees of them)."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fairfold.config.tables import FrozenSettings
from fairfold.privacy.ledger import DEFAULT_MIN_COHORT
from fairfold.subspace import assign_groups, parse_scheme

FEWEST_GROUPS = 3  # of sums that can be compared with one another
SUBTABLES = ("faults", "network", "asynchronous", "latency")
"""Tables within ``[fleet]``."""


class AsynchronousSettings(FrozenSettings):
    """When the server takes a step: when all updates of a round have come (the default), or sooner.

    With ``buffer_size`` or ``step_seconds`` aggregation is asynchronous: ``fleet.clients_per_round`` clients work at
    any time, one that has replied makes room for another, and a slow one replies to a model some steps old.

    Attributes:
        buffer_size: The server takes a step as soon as this many valid updates have come; None waits for all.
        step_seconds: The server takes a step after this many seconds, if an update has come by then; None: no limit.
        max_staleness: An update is refused if the server has taken more than this many steps since its task was sent.
            Not with ``co_occurrence``, whose updates do not depend on the model.
    """

    buffer_size: int | None = Field(None, ge=1, lt=2**31)
    step_seconds: float | None = Field(None, gt=0)
    max_staleness: int = Field(8, ge=0, le=10_000)

    @property
    def is_synchronous(self) -> bool:
        """Whether a round waits for all its clients."""
        return self.buffer_size is None and self.step_seconds is None

    def is_inactive(self, key: str) -> bool:
        return key == "max_staleness" and self.is_synchronous

    def why_inactive(self, key: str) -> str:  # noqa: ARG002
        return ": it needs fleet.asynchronous.buffer_size or fleet.asynchronous.step_seconds"

    def staleness_problem(self, behind: int, *, depends_on_model: bool) -> str | None:
        """Why an update that is ``behind`` steps old is refused, or None."""
        if not depends_on_model or self.is_synchronous or behind <= self.max_staleness:
            return None
        return f"too stale: more than {self.max_staleness} steps behind"


class LatencySettings(FrozenSettings):
    """How long simulated clients take for a task, in simulated time.

    Attributes:
        median_seconds: How long a client of median speed takes; None: no latency, and rounds take no time.
        log_std: How much clients differ: standard deviation of the logarithm of their seconds.
        slow_share: The share of clients that are slow.
        slow_factor: How many times as long the slow clients take.
    """

    median_seconds: float | None = Field(None, gt=0)
    log_std: float = Field(0.0, ge=0, le=10)
    slow_share: float = Field(0.0, ge=0, le=1)
    slow_factor: float = Field(10.0, ge=1)

    def is_inactive(self, key: str) -> bool:
        return key != "median_seconds" and (
            self.median_seconds is None or (key == "slow_factor" and not self.slow_share)
        )

    def why_inactive(self, key: str) -> str:  # noqa: ARG002
        return f": it needs fleet.latency.{'median_seconds' if self.median_seconds is None else 'slow_share'}"


class FaultSettings(FrozenSettings):
    """Shares of a round's clients that fail in a simulation, each in one way.

    Attributes:
        drop: The share that never replies.
        late: The share that replies when the round is over.
        nan: The share that sends NaN.
        infinite: The share that sends infinity.
        wrong_size: The share that sends a vector of another length.
        out_of_range: The share that sends values far from those of its task.
    """

    drop: float = Field(0.0, ge=0, le=1)
    late: float = Field(0.0, ge=0, le=1)
    nan: float = Field(0.0, ge=0, le=1)
    infinite: float = Field(0.0, ge=0, le=1)
    wrong_size: float = Field(0.0, ge=0, le=1)
    out_of_range: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _require_shares_of_one(self) -> Self:
        total = sum(self.model_dump().values())
        if total > 1 + 1e-9:
            raise ValueError(f"shares of faults that add up to {total:.3g}: at most 1")
        return self


class NetworkSettings(FrozenSettings):
    """How a server waits for real devices; a simulation does not read this.

    Attributes:
        min_nodes: Nodes to wait for before a round.
        wait_timeout: Seconds to wait for them; then those that are connected train.
        round_timeout: Seconds that devices have for a task.
        join_timeout: Seconds that a new device has to report its capacity.
        max_failed_rounds: A round without any update does not count and is tried again. After this many in a row the
            run ends with an error, or with the last good model where what devices sent allows no other, and can be
            resumed; None never ends it.
        push_model: Send every device the final model of its size, so that it can recommend on its own.
    """

    min_nodes: int = Field(1, ge=1, lt=2**31)
    wait_timeout: float = Field(120.0, ge=0)
    round_timeout: float = Field(600.0, ge=0)
    join_timeout: float = Field(60.0, ge=0)
    max_failed_rounds: int | None = Field(10, ge=1, lt=2**31)
    push_model: bool = True


class FleetSettings(FrozenSettings):
    """Which clients take part, and with what capacity.

    Attributes:
        capacities: Capacity scheme; users, ordered by id, are split into as many near-equal groups.
        shares: How large these groups are, in any unit (``[1, 99]``); each has one user at least. None: near-equal.
        group_seed: Draw the users of each group at random, with this seed, instead of by id.
        group_generator: The generator: ``"torch"``, or ``"numpy"`` (``RandomState(seed).shuffle``, the authors' code).
        clients_per_round: K, how many clients are drawn per round, or all where there are fewer; None takes all.
        replacement: Draw clients with replacement, as the authors' code does.
        secure_groups: Groups of clients, each with a secure sum of its own of ``privacy.min_cohort`` clients, which the
            server combines robustly (docs/robustness.md); 1: one sum of all, which any of them can spoil.
        faults: Shares of clients that fail, in a simulation.
        network: How a server waits for real devices.
        asynchronous: When the server takes a step.
        latency: How long clients take, in a simulation.
    """

    capacities: str = "1x-4x-16x"
    shares: tuple[Annotated[float, Field(gt=0, lt=1e12)], ...] | None = None
    group_seed: int | None = Field(None, ge=0, lt=2**62)
    group_generator: Literal["torch", "numpy"] = "torch"
    clients_per_round: int | None = Field(60, ge=1, lt=2**62)
    replacement: bool = False
    secure_groups: int = Field(1, ge=1, lt=2**10)
    faults: FaultSettings = FaultSettings()
    network: NetworkSettings = NetworkSettings()
    asynchronous: AsynchronousSettings = AsynchronousSettings()
    latency: LatencySettings = LatencySettings()

    @field_validator("capacities")
    @classmethod
    def _parse_capacities(cls, scheme: str) -> str:
        parse_scheme(scheme)
        return scheme

    @model_validator(mode="after")
    def _one_share_per_capacity(self) -> Self:
        if self.shares is not None and len(self.shares) != len(parse_scheme(self.capacities)):
            raise ValueError(f"shares = {self.shares} for {self.capacities}: one for each capacity")
        return self

    @field_validator("secure_groups")
    @classmethod
    def _groups_to_compare(cls, groups: int) -> int:
        if 1 < groups < FEWEST_GROUPS:
            raise ValueError(f"{groups} groups, too few to compare: 1, or {FEWEST_GROUPS} or more")
        return groups

    def groups(self, num_clients: int) -> Tensor:
        """The index of each client's capacity in the scheme."""
        num_groups = len(parse_scheme(self.capacities))
        return assign_groups(num_clients, num_groups, self.shares, self.group_seed, self.group_generator)

    def effective(self, *, changed: bool = False) -> dict[str, Any]:
        values = super().effective(changed=changed)
        for name in SUBTABLES:  # with what differs from the defaults only
            part: FrozenSettings = getattr(self, name)
            values.pop(name, None)
            if different := part.effective(changed=True):
                values[name] = different
        return values


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

    def fewest_clients(self, fleet: FleetSettings) -> int:
        """The fewest clients of a round, of which each group has a sum."""
        return self.min_cohort * fleet.secure_groups

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
