"""What a device's owner allows of secure and noisy sums, and the device's part in them, message by message.

The owner gives the enrolled ``key``, the ``roster``, the smallest cohort the device takes part in (``min-cohort``, by
default 100), the least ``privacy`` (``"secure"`` refuses requests without masks, ``"private"`` also sums without noise)
and the privacy budget of its lifetime (``epsilon`` and ``delta``, by default 8 and 1e-5). A device that has taken part
in a secure or noisy sum refuses less from then on, whatever it was enrolled for: a server that asks for the same in
plain would undo it. One that enrolled with a server takes part only with devices in that server's signed log of keys.
Neither torch, Flower nor numpy is needed; ciphers are imported where there is a secure sum, since a device without one
needs five megabytes less.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairfold.errors import InvalidSettings
from fairfold.privacy.ledger import (
    DEFAULT_DELTA,
    DEFAULT_EPSILON,
    DEFAULT_MIN_COHORT,
    LEDGER,
    LEVELS,
    STATISTICS_PURPOSE,
    Ledger,
    LedgerEntry,
    remember_privacy,
    served_privacy,
)
from fairfold.privacy.secure.segments import MIN_STAYING_PERCENT, refuse

if TYPE_CHECKING:
    from fairfold.privacy.secure.client import SecureClient
    from fairfold.privacy.secure.folder import SecureFolder
    from fairfold.privacy.secure.log import Fetch
    from fairfold.privacy.secure.messages import Session

log = logging.getLogger("fairfold.privacy")

LOG_COPY = "secure/roster.jsonl"  # in the device's state: the server's log of enrolled keys, as invitations named it
Step = Callable[["SecureClient", bytes], bytes]
RequestKey = tuple[str, int, int | None]  # purpose and round of a request, and its run if it names one


@dataclass(frozen=True)
class SumRules:
    """What the settings of a request say of its sum."""

    secure: bool
    noisy: bool
    min_cohort: int


@dataclass(frozen=True)
class Participation:
    """One device's part in sums, from state on disk: each message may be handled by a new process."""

    folder: Path  # of the device's state
    name: int
    config: Mapping[str, Any]  # the owner's rules
    fetch_log: Fetch | None = None  # from the server that the device enrolled with; None for one without a gateway

    def __post_init__(self) -> None:
        if type(self.min_cohort) is not int or self.min_cohort < 2:
            raise _invalid_config("min-cohort", self.min_cohort, "2 or more devices")
        if self._least not in LEVELS:
            raise _invalid_config("privacy", self._least, " or ".join(LEVELS))

    @property
    def min_cohort(self) -> int:
        """The smallest cohort that this device takes part in."""
        cohort: int = self.config.get("min-cohort", DEFAULT_MIN_COHORT)
        return cohort

    @property
    def _least(self) -> str:
        return str(self.config.get("privacy", LEVELS[0]))

    @property
    def accepted(self) -> str:
        """The least level that it accepts now: its owner's choice, or the highest that it took part in."""
        return max(self._least, served_privacy(self.folder), key=LEVELS.index)

    @property
    def secure(self) -> SecureFolder:
        """The folder of its state of secure aggregation."""
        from fairfold.privacy.secure.folder import SecureFolder
        from fairfold.privacy.secure.log import LogCopy

        key, roster = (None if name not in self.config else Path(str(self.config[name])) for name in ("key", "roster"))
        log = None
        if self.fetch_log is not None and "signer" in self.config:
            log = LogCopy(self.folder / LOG_COPY, bytes.fromhex(str(self.config["signer"])), self.fetch_log)
        return SecureFolder(self.folder / "secure", self.name, key, roster, self.min_cohort, log)

    @property
    def ledger(self) -> Ledger:
        """Its ledger of noisy sums, with its privacy budget."""
        budget = {}
        for key, default, most in (("epsilon", DEFAULT_EPSILON, 1e3), ("delta", DEFAULT_DELTA, 1.0)):
            value = self.config.get(key, default)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < most:
                raise _invalid_config(key, value, f"a number above 0 and below {most:g}")
            budget[key] = float(value)
        return Ledger(self.folder / LEDGER, budget["epsilon"], budget["delta"], self.min_cohort)

    def begin(self, invitation: bytes) -> bytes:
        """Accept an invitation to a sum; refuse one with too little noise, or beyond the privacy budget."""
        from fairfold.privacy.secure.messages import Session, parse_message

        session = parse_message(Session, invitation, None)
        if session.sigma:
            self.ledger.require(ledger_entry(session, 0))
        elif self.accepted == "private":
            raise refuse("an invitation to a sum without noise", "noisy sums alone (privacy='private')")
        return self.secure.begin(invitation)

    def run_step(self, step: Step, message: bytes) -> bytes:
        """Take one step of the open sum."""
        with self.secure.resume_round(message) as client:
            return step(client, message)

    @contextlib.contextmanager
    def session(self, message: bytes | None, rules: SumRules, request: RequestKey) -> Iterator[SecureClient | None]:
        """The open sum of a request, whose vector is to be masked; None for a reply in plain.

        Refuses less privacy than this device accepts, and a secure sum of another purpose, round or run: that would be
        a second sum for the same request. Shares are checked before anything is computed.
        """
        if rules.secure != (message is not None):
            raise refuse("settings and a message that contradict each other", "a secure sum, or none")
        if message is None:
            if (accepted := self.accepted) != LEVELS[0]:
                raise refuse("a request for a reply without masks", f"secure sums alone (privacy={accepted!r})")
            yield None
            return
        with self.secure.resume_round(message) as client:
            session = client.session
            purpose, number, run = request
            if (session.purpose, session.round) != (purpose, number) or run not in (None, session.run):
                given = f"a sum for {session.purpose} {session.round} with the request {purpose} {number}"
                raise refuse(given, "the sum of the request")
            if session.min_cohort < rules.min_cohort:
                given = f"a sum over {session.min_cohort} devices where settings have {rules.min_cohort}"
                raise refuse(given, "the minimum of the settings")
            if rules.noisy != bool(session.sigma) or (self.accepted == "private" and not rules.noisy):
                raise refuse(
                    "a sum that has noise, or has none, unlike its settings", "what this device was invited to"
                )
            client.receive(message)
            yield client

    def remember(self, rules: SumRules) -> None:
        """Write down which level is served; called before a vector is sent."""
        remember_privacy(self.folder, "private" if rules.noisy else "secure")

    def enter(self, client: SecureClient, sigma: float, window: int) -> list[tuple[slice, int]]:
        """Enter a noisy sum in the ledger, before it is sent; returns its segments, and how many own each."""
        session = client.session
        if session.sigma != sigma or session.staying < MIN_STAYING_PERCENT:
            given = f"noise of {session.sigma:.6g} for {session.staying} % of devices"
            raise refuse(given, f"{sigma:.6g} for {MIN_STAYING_PERCENT} %, by the settings")
        if session.purpose == STATISTICS_PURPOSE and session.round % window:
            raise refuse(f"statistics from item {session.round} on", "windows that do not overlap")
        owners = session.layout.owners(client.cohort.by_size)  # the share is for those of each segment
        slices = [(where, len(owners[segment])) for segment, where in session.layout.slices(client.size)]
        account = self.ledger
        spent = account.spend(ledger_entry(session, min(num_owners for _, num_owners in slices)))
        log.info("run %x, %s: ε is now %.3f of %g", session.run, session.purpose, spent, account.epsilon)
        return slices


def ledger_entry(session: Session, num_clients: int) -> LedgerEntry:
    """The ledger's entry of a noisy sum; the windows of statistics are parts of one."""
    is_part = session.purpose == STATISTICS_PURPOSE
    release = session.purpose if is_part else f"{session.purpose} {session.round}"
    return LedgerEntry(f"{session.run:x}", release, session.sigma, num_clients, session.round if is_part else 0)


def _invalid_config(key: str, value: object, needed: str) -> InvalidSettings:
    return InvalidSettings(f"{key}={value!r}", needed, "Correct it in --node-config.")
