"""A client's part in secure aggregation over Flower: each message is handled by a new process, from state on disk.

The device's owner decides in ``--node-config``: its enrolled ``key``, the ``roster``, the smallest cohort it takes part
in (``min-cohort``, by default 100), the least ``privacy`` (``"secure"`` refuses requests without masks, ``"private"``
also sums without noise) and the privacy budget of its lifetime (``epsilon`` and ``delta``, by default 8 and 1e-5).
A device that has taken part in a secure or noisy sum refuses less from then on, whatever it was enrolled for: a server
that asks for the same in plain would undo it. Refusals are logged, and sent to the server with the reason. A noisy sum
is entered in the client's ledger before its vector is sent; the invitation checks the budget, so that clients that take
no part are not counted on for noise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, RecordDict

from fairfold.device.store import load_device_id
from fairfold.errors import InvalidSettings
from fairfold.flower.messages import facts_in, pack_masked, pack_secure, secure_in
from fairfold.flower.protocol import KEYS, REVEAL, SECURE, SHARES, SIGN, STATISTICS_PURPOSE, WINDOW
from fairfold.privacy.ledger import (
    DEFAULT_DELTA,
    DEFAULT_EPSILON,
    DEFAULT_MIN_COHORT,
    LEDGER,
    LEVELS,
    Ledger,
    LedgerEntry,
    remember_privacy,
    served_privacy,
)
from fairfold.privacy.secure.client import SecureClient
from fairfold.privacy.secure.folder import SecureFolder
from fairfold.privacy.secure.keys import refuse
from fairfold.privacy.secure.messages import Session, parse_message

if TYPE_CHECKING:
    from fairfold.config import Settings
    from fairfold.flower.client import ClientRuntime
    from fairfold.privacy.fixed_point import Encoding, MeasuredUpdate
    from fairfold.privacy.secure.masking import FixedPointVector

log = logging.getLogger("fairfold.flower")

# Encodes, masks and packs an update: from the encoding by number of clients, the update, and its size.
MaskedReply = Callable[[Callable[[int], "Encoding"], "MeasuredUpdate", int], RecordDict]
Step = Callable[[SecureClient, bytes], bytes]
RequestKey = tuple[str, int, int | None]  # purpose and round of a request, and its run if it names one


def secure_folder(runtime: ClientRuntime, context: Context) -> SecureFolder:
    """Return the folder of the client's state of secure aggregation."""
    folder = runtime.folder(context)
    config = context.node_config
    key, roster = (None if name not in config else Path(str(config[name])) for name in ("key", "roster"))
    return SecureFolder(folder / "secure", load_device_id(folder), key, roster, min_cohort(context))


def min_cohort(context: Context) -> int:
    """Return the smallest cohort that this client takes part in."""
    cohort = context.node_config.get("min-cohort", DEFAULT_MIN_COHORT)
    if type(cohort) is not int or cohort < 2:
        raise _invalid_config("min-cohort", cohort, "2 or more devices")
    return cohort


def min_privacy(context: Context) -> str:
    """Return the least level of privacy that this client accepts."""
    level = str(context.node_config.get("privacy", "plain"))
    if level not in LEVELS:
        raise _invalid_config("privacy", level, " or ".join(LEVELS))
    return level


def accepted_privacy(runtime: ClientRuntime, context: Context) -> str:
    """Return the least level that this client accepts now: its owner's choice, or the highest that it took part in."""
    return max(min_privacy(context), served_privacy(runtime.folder(context)), key=LEVELS.index)


def ledger(runtime: ClientRuntime, context: Context) -> Ledger:
    """Return the client's ledger of noisy sums, with its privacy budget."""
    budget = {}
    for key, default, most in (("epsilon", DEFAULT_EPSILON, 1e3), ("delta", DEFAULT_DELTA, 1.0)):
        value = context.node_config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < most:
            raise _invalid_config(key, value, f"a number above 0 and below {most:g}")
        budget[key] = float(value)
    return Ledger(runtime.folder(context) / LEDGER, budget["epsilon"], budget["delta"], min_cohort(context))


def _invalid_config(key: str, value: object, needed: str) -> InvalidSettings:
    return InvalidSettings(f"{key}={value!r}", needed, "Correct it in --node-config.")


def ledger_entry(session: Session, num_clients: int) -> LedgerEntry:
    """Return the ledger's entry of a noisy sum; the windows of statistics are parts of one."""
    is_part = session.purpose == STATISTICS_PURPOSE
    release = session.purpose if is_part else f"{session.purpose} {session.round}"
    return LedgerEntry(f"{session.run:x}", release, session.sigma, num_clients, session.round if is_part else 0)


def begin(runtime: ClientRuntime, content: RecordDict, context: Context) -> RecordDict:
    """Accept an invitation to a sum; refuse one with too little noise, or beyond the privacy budget."""
    invitation = secure_in(content)
    session = parse_message(Session, invitation, None)
    if session.sigma:
        ledger(runtime, context).require(ledger_entry(session, 0))
    elif accepted_privacy(runtime, context) == "private":
        raise refuse("an invitation to a sum without noise", "noisy sums alone (privacy='private')")
    return pack_secure(secure_folder(runtime, context).begin(invitation))


def _run_step(step: Step, runtime: ClientRuntime, content: RecordDict, context: Context) -> RecordDict:
    message = secure_in(content)
    with secure_folder(runtime, context).resume_round(message) as client:
        reply = step(client, message)
    return pack_secure(reply)


_STEPS = {SHARES: SecureClient.share, SIGN: SecureClient.sign, REVEAL: SecureClient.reveal}
SECURE_HANDLERS = {KEYS: begin} | {kind: partial(_run_step, step) for kind, step in _STEPS.items()}


@contextlib.contextmanager
def reply_session(
    runtime: ClientRuntime, content: RecordDict, context: Context, settings: Settings, request: RequestKey
) -> Iterator[MaskedReply | None]:
    """Yield how to reply to a request: a function that masks the update once, or None for a plain reply.

    Refuses less privacy than this client accepts, and a secure sum of another purpose, round or run: that would be a
    second sum for the same request. Shares are checked before anything is computed.
    """
    from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy  # other handlers need no torch

    accepted, privacy = accepted_privacy(runtime, context), settings.privacy
    if privacy.uses_secure_aggregation != (SECURE in facts_in(content)):
        raise refuse("settings and a message that contradict each other", "a secure sum, or none")
    if not isinstance(privacy, SecurePrivacy):
        if accepted != "plain":
            raise refuse("a request for a reply without masks", f"secure sums alone (privacy={accepted!r})")
        yield None
        return
    message = secure_in(content)
    with secure_folder(runtime, context).resume_round(message) as client:
        session = client.session
        purpose, number, run = request
        if (session.purpose, session.round) != (purpose, number) or run not in (None, session.run):
            given = f"a sum for {session.purpose} {session.round} with the request {purpose} {number}"
            raise refuse(given, "the sum of the request")
        if session.min_cohort < privacy.min_cohort:
            given = f"a sum over {session.min_cohort} devices where settings have {privacy.min_cohort}"
            raise refuse(given, "the minimum of the settings")
        is_noisy = isinstance(privacy, DifferentialPrivacy)
        if is_noisy != bool(session.sigma) or (accepted == "private" and not is_noisy):
            raise refuse("a sum that has noise, or has none, unlike its settings", "what this device was invited to")
        client.receive(message)

        def masked_reply(make_encoding: Callable[[int], Encoding], update: MeasuredUpdate, size: int) -> RecordDict:
            remember_privacy(runtime.folder(context), "private" if is_noisy else "secure")
            encoding = make_encoding(len(client.cohort.members))
            vector = encoding.encode(update, size)
            if is_noisy:
                account = ledger(runtime, context)
                add_noise_share(client, account, settings, encoding, update.update.weight, size, vector)
            return pack_masked(client.mask(vector))

        yield masked_reply


def add_noise_share(
    client: SecureClient,
    account: Ledger,
    settings: Settings,
    encoding: Encoding,
    weight: float,
    size: int,
    vector: FixedPointVector,
) -> None:
    """Enter a sum in the ledger, and add this client's share of its noise to its vector, in place."""
    from fairfold.federation.noise import add_noise, noise_multiplier
    from fairfold.privacy.noise import MIN_STAYING_PERCENT, system_random

    session = client.session
    sigma = noise_multiplier(settings, encoding.layout.shapes[size])
    if session.sigma != sigma or session.staying < MIN_STAYING_PERCENT:
        given = f"noise of {session.sigma:.6g} for {session.staying} % of devices"
        raise refuse(given, f"{sigma:.6g} for {MIN_STAYING_PERCENT} %, by the settings")
    if session.purpose == STATISTICS_PURPOSE and session.round % WINDOW:
        raise refuse(f"statistics from item {session.round} on", "windows that do not overlap")
    owners = session.layout.owners(client.cohort.by_size)  # the share is for those of each segment
    slices = [(where, len(owners[segment])) for segment, where in session.layout.slices(client.size)]
    spent = account.spend(ledger_entry(session, min(num_owners for _, num_owners in slices)))
    log.info("run %x, %s: ε is now %.3f of %g", session.run, session.purpose, spent, account.epsilon)
    add_noise(settings, encoding, size, slices, weight, vector, system_random)
