"""A device's part in secure sums over Flower: each message is answered by a new process, from what lies on its disk.

Its enrolled key (``key``), the roster (``roster``), the smallest cohort it takes part in (``smallest-cohort``, 100 if
not given), the least privacy it asks for (``privacy``: ``"secure"`` refuses whatever is not summed under masks,
``"private"`` also sums without noise) and what all noisy sums of its lifetime may cost (``epsilon`` and ``delta``, 8
and 1e-5 if not given) are the device's own to say, in ``--node-config``. What is refused is told in its log, and to the
server, with the reason.

A noisy sum is entered in the device's ledger before its words leave. Whether there is room for it is looked up when the
device is invited, so that those who take no part are not counted on for noise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, RecordDict

from fairfold.errors import InvalidSettings, InvalidState
from fairfold.flower.client import name_of
from fairfold.flower.protocol import KEYS, REVEAL, SHARES, SIGN, WINDOW
from fairfold.flower.secure_wire import has_secure, pack_masked, pack_secure, secure_in
from fairfold.privacy.ledger import LEDGER, USUAL_COHORT, USUAL_DELTA, USUAL_EPSILON, Entry, Ledger
from fairfold.secure.device import Device as Machine
from fairfold.secure.folder import SecureFolder
from fairfold.secure.keys import refuse
from fairfold.secure.messages import Session, opened

if TYPE_CHECKING:
    from fairfold.flower.client import Device
    from fairfold.privacy.encoding import Encoding, Heard
    from fairfold.secure.masks import Words
    from fairfold.settings import Settings

log = logging.getLogger("fairfold.flower")

Say = Callable[[Callable[[int], "Encoding"], "Heard", int], RecordDict]
"""From an encoding by the number of devices, what is said, and a size, to an answer under masks."""

LEVELS = ("plain", "secure", "private")
SURVEY_PURPOSE = "survey"


def secure_folder(device: Device, context: Context) -> SecureFolder:
    """Where this device keeps what secure sums need."""
    config, folder, smallest = context.node_config, device.folder(context), smallest_cohort(context)
    key, roster = (None if name not in config else Path(str(config[name])) for name in ("key", "roster"))
    return SecureFolder(folder / "secure", name_of(folder), key, roster, smallest)


def smallest_cohort(context: Context) -> int:
    """Of the sums that this device takes part in."""
    found = context.node_config.get("smallest-cohort", USUAL_COHORT)
    if type(found) is not int or found < 2:
        raise InvalidSettings(f"smallest-cohort={found!r}", "2 or more devices", "Correct it in --node-config.")
    return found


def least_privacy(context: Context) -> str:
    """That this device asks for."""
    found = str(context.node_config.get("privacy", "plain"))
    if found not in LEVELS:
        raise InvalidSettings(f"privacy={found!r}", " or ".join(LEVELS), "Correct it in --node-config.")
    return found


def ledger(device: Device, context: Context) -> Ledger:
    """What this device has let out with noise, and may."""
    config, found = context.node_config, dict[str, float]()
    for key, usual, most in (("epsilon", USUAL_EPSILON, 1e3), ("delta", USUAL_DELTA, 1.0)):
        given = config.get(key, usual)
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < most:
            raise InvalidSettings(
                f"{key}={given!r}", f"a number above 0 and below {most:g}", "Correct it in --node-config."
            )
        found[key] = float(given)
    return Ledger(device.folder(context) / LEDGER, found["epsilon"], found["delta"], smallest_cohort(context))


def entry_of(session: Session, devices: int) -> Entry:
    """What a noisy sum is in the ledger. A survey is said in windows of items, which are parts of one sum."""
    part = session.purpose == SURVEY_PURPOSE
    release = session.purpose if part else f"{session.purpose} {session.round}"
    return Entry(f"{session.run:x}", release, session.sigma, devices, session.round if part else 0)


def begin(device: Device, content: RecordDict, context: Context) -> RecordDict:
    """Answer an invitation to a sum; refused where it has less noise than this device wants, or costs too much."""
    invitation = secure_in(content)
    session = opened(Session, invitation, None)
    if session.sigma:
        ledger(device, context).require(entry_of(session, 0))
    elif least_privacy(context) == "private":
        raise refuse("an invitation to a sum without noise", "noisy sums alone (privacy='private')")
    return pack_secure(secure_folder(device, context).begin(invitation))


def _stepping(step: Callable[[Machine, bytes], bytes]) -> Callable[[Device, RecordDict, Context], RecordDict]:
    def stepped(device: Device, content: RecordDict, context: Context) -> RecordDict:
        message = secure_in(content)
        with secure_folder(device, context).going_on(message) as machine:
            answer = step(machine, message)
        return pack_secure(answer)

    return stepped


STEPS = {
    KEYS: begin,
    SHARES: _stepping(Machine.share),
    SIGN: _stepping(Machine.sign),
    REVEAL: _stepping(Machine.reveal),
}


@contextlib.contextmanager
def speaking(
    device: Device,
    content: RecordDict,
    context: Context,
    settings: Settings,
    purpose: str,
    number: int,
    run: int | None,
) -> Iterator[Say | None]:
    """How this device answers: under masks, or, with None, as it is; refused where that is less than it wants.

    Who gave shares is checked before anything is computed; the vector is masked within this block, once. The sum must
    be that of the question: one of another purpose, round or run would be a second one to the same question.
    """
    from fairfold.settings.privacy import PrivatePrivacy, SecurePrivacy  # steps do without settings, and torch

    least, chosen = least_privacy(context), settings.privacy
    if chosen.sums_alone != has_secure(content):
        raise refuse("settings and a message that contradict each other", "a secure sum, or none")
    if not isinstance(chosen, SecurePrivacy):
        if least != "plain":
            raise refuse("a question to be answered without masks", f"secure sums alone (privacy={least!r})")
        yield None
        return
    message = secure_in(content)
    with secure_folder(device, context).going_on(message) as machine:
        session = machine.session
        if (session.purpose, session.round) != (purpose, number) or run not in (None, session.run):
            given = f"a sum for {session.purpose} {session.round} with the question {purpose} {number}"
            raise refuse(given, "the sum of the question")
        if session.smallest < chosen.smallest_cohort:
            given = f"a sum over {session.smallest} devices where settings say {chosen.smallest_cohort}"
            raise refuse(given, "the minimum of the settings")
        noisy = isinstance(chosen, PrivatePrivacy)
        if noisy != bool(session.sigma) or (least == "private" and not noisy):
            raise refuse("a sum that has noise, or has none, unlike its settings", "what this device was invited to")
        machine.receive(message)

        def say(encoding: Callable[[int], Encoding], said: Heard, size: int) -> RecordDict:
            made = encoding(len(machine.cohort.members))
            words = made.encode(said, size)
            if noisy:
                add_share(machine, ledger(device, context), settings, made, said, size, words)
            return pack_masked(machine.mask(words))

        yield say


def add_share(
    machine: Machine, account: Ledger, settings: Settings, made: Encoding, said: Heard, size: int, words: Words
) -> None:
    """Enter a sum in the ledger, and add this device's share of its noise to its words, in place.

    Noise is sized for the owners of each segment, as the cohort has them; they are not told how much anybody drew. The
    sum is opened if enough of them stay (:attr:`Session.staying`).
    """
    from fairfold.privacy.noise import STAYING, secret
    from fairfold.protocol.noising import add_noise, sigma_of

    session, layout = machine.session, machine.session.layout
    wanted = sigma_of(settings, made.layout.shapes[size])
    if session.sigma != wanted or session.staying < STAYING:
        given = f"noise of {session.sigma:.6g} for {session.staying} % of devices"
        raise refuse(given, f"{wanted:.6g} for {STAYING} %, by the settings")
    if session.purpose == SURVEY_PURPOSE and session.round % WINDOW:
        raise refuse(f"a survey from item {session.round} on", "windows that do not overlap")
    owners = layout.owners(machine.cohort.by_size)
    places = [(where, len(owners[segment])) for segment, where in layout.places(machine.size)]
    spent = account.spend(entry_of(session, min(many for _, many in places)))
    log.info("run %x, %s: ε is now %.3f of %g", session.run, session.purpose, spent, account.epsilon)
    add_noise(settings, made, size, places, said.answer.weight, words, secret)


def usable(problem: str | None) -> None:
    """Refuse to say what the server would refuse: under masks it cannot look."""
    if problem is not None:
        raise InvalidState(f"an answer with {problem}", "one that can be used", "Nothing was sent.")
