"""A device's part in secure sums over Flower: each message is answered by a new process, from what lies on its disk.

Its enrolled key (``key``), the roster (``roster``), the smallest cohort it takes part in (``smallest-cohort``, 100 if
not given) and the least privacy it asks for (``privacy``: ``"secure"`` refuses whatever is not summed under masks) are
the device's own to say, in ``--node-config``. What is refused is told in its log, with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, RecordDict

from fairfold.errors import InvalidSettings, InvalidState
from fairfold.flower.client import name_of
from fairfold.flower.protocol import KEYS, REVEAL, SHARES, SIGN
from fairfold.flower.secure_wire import has_secure, pack_masked, pack_secure, secure_in
from fairfold.secure.device import Device as Machine
from fairfold.secure.folder import SecureFolder
from fairfold.secure.keys import refuse

if TYPE_CHECKING:
    from fairfold.flower.client import Device
    from fairfold.privacy.encoding import Encoding, Heard
    from fairfold.settings import Settings

Say = Callable[[Callable[[int], "Encoding"], "Heard", int], RecordDict]
"""From an encoding by the number of devices, what is said, and a size, to an answer under masks."""

USUAL_COHORT = 100
LEVELS = ("plain", "secure")


def secure_folder(device: Device, context: Context) -> SecureFolder:
    """Where this device keeps what secure sums need."""
    config, folder = context.node_config, device.folder(context)
    smallest = config.get("smallest-cohort", USUAL_COHORT)
    if type(smallest) is not int or smallest < 2:
        raise InvalidSettings(f"smallest-cohort={smallest!r}", "2 or more devices", "See --node-config.")
    key, roster = (None if name not in config else Path(str(config[name])) for name in ("key", "roster"))
    return SecureFolder(folder / "secure", name_of(folder), key, roster, smallest)


def begin(device: Device, content: RecordDict, context: Context) -> RecordDict:
    """Answer an invitation to a sum."""
    return pack_secure(secure_folder(device, context).begin(secure_in(content)))


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
    from fairfold.settings.privacy import SecurePrivacy  # who only takes a step does without settings, and torch

    least = str(context.node_config.get("privacy", "plain"))
    if least not in LEVELS:
        raise InvalidSettings(f"privacy={least!r}", " or ".join(LEVELS), "See --node-config.")
    chosen = settings.privacy
    if chosen.sums_alone != has_secure(content):
        raise refuse("settings and a message that contradict each other", "a secure sum, or none")
    if not isinstance(chosen, SecurePrivacy):
        if least != "plain":
            raise refuse("a question to be answered without masks", "secure sums alone (privacy='secure')")
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
        machine.receive(message)

        def say(encoding: Callable[[int], Encoding], said: Heard, size: int) -> RecordDict:
            words = encoding(len(machine.cohort.members)).encode(said, size)
            return pack_masked(machine.mask(words))

        yield say


def usable(problem: str | None) -> None:
    """Refuse to say what the server would refuse: under masks it cannot look."""
    if problem is not None:
        raise InvalidState(f"an answer with {problem}", "one that can be used", "Nothing was sent.")
