"""A client's part in secure aggregation over Flower: :mod:`fairfold.privacy.participation`, by Flower's records.

The device's owner decides in ``--node-config``. Refusals are logged, and sent to the server with the reason. A noisy
sum is entered in the client's ledger before its vector is sent; the invitation checks the budget, so that clients that
take no part are not counted on for noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, RecordDict

from fairfold.device.store import load_device_id
from fairfold.flower.messages import facts_in, pack_masked, pack_secure, secure_in
from fairfold.flower.protocol import KEYS, REVEAL, SECURE, SHARES, SIGN, WINDOW
from fairfold.privacy.participation import Participation, RequestKey, Step, SumRules
from fairfold.privacy.secure.client import SecureClient

if TYPE_CHECKING:
    from fairfold.config import Settings
    from fairfold.flower.client import ClientRuntime
    from fairfold.privacy.fixed_point import Encoding, MeasuredUpdate
    from fairfold.privacy.secure.masking import FixedPointVector

# Encodes, masks and packs an update: from the encoding by number of clients, the update, and its size.
MaskedReply = Callable[[Callable[[int], "Encoding"], "MeasuredUpdate", int], RecordDict]


def participation(runtime: ClientRuntime, context: Context) -> Participation:
    """Return the client's part in sums, with its owner's rules."""
    folder, config = runtime.folder(context), context.node_config
    fetch = None
    if "server" in config:  # as `fairfold node start` has it; under Flower's own SuperNode there is no gateway
        from fairfold.flower.fleet.connection import stream_roster

        fetch = partial(stream_roster, str(config["server"]), Path(str(config["authority"])))
    return Participation(folder, load_device_id(folder), config, fetch)


def begin(runtime: ClientRuntime, content: RecordDict, context: Context) -> RecordDict:
    """Accept an invitation to a sum; refuse one with too little noise, or beyond the privacy budget."""
    return pack_secure(participation(runtime, context).begin(secure_in(content)))


def _run_step(step: Step, runtime: ClientRuntime, content: RecordDict, context: Context) -> RecordDict:
    return pack_secure(participation(runtime, context).run_step(step, secure_in(content)))


_STEPS = {SHARES: SecureClient.share, SIGN: SecureClient.sign, REVEAL: SecureClient.reveal}
SECURE_HANDLERS = {KEYS: begin} | {kind: partial(_run_step, step) for kind, step in _STEPS.items()}


@contextlib.contextmanager
def reply_session(
    runtime: ClientRuntime, content: RecordDict, context: Context, settings: Settings, request: RequestKey
) -> Iterator[MaskedReply | None]:
    """Yield how to reply to a request: a function that masks the update once, or None for a plain reply."""
    from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy  # other handlers need no torch

    mine, privacy = participation(runtime, context), settings.privacy
    cohort = privacy.min_cohort if isinstance(privacy, SecurePrivacy) else 0
    rules = SumRules(privacy.uses_secure_aggregation, isinstance(privacy, DifferentialPrivacy), cohort)
    message = secure_in(content) if SECURE in facts_in(content) else None
    with mine.session(message, rules, request) as client:
        if client is None:
            yield None
            return

        def masked_reply(make_encoding: Callable[[int], Encoding], update: MeasuredUpdate, size: int) -> RecordDict:
            assert client is not None
            mine.remember(rules)
            encoding = make_encoding(len(client.cohort.members))
            vector = encoding.encode(update, size)
            if rules.noisy:
                add_noise_share(client, mine, settings, encoding, update.update.weight, size, vector)
            return pack_masked(client.mask(vector))

        yield masked_reply


def add_noise_share(
    client: SecureClient,
    mine: Participation,
    settings: Settings,
    encoding: Encoding,
    weight: float,
    size: int,
    vector: FixedPointVector,
) -> None:
    """Enter a sum in the ledger, and add this client's share of its noise to its vector, in place."""
    from fairfold.federation.noise import add_noise, noise_multiplier
    from fairfold.privacy.noise import system_random

    slices = mine.enter(client, noise_multiplier(settings, encoding.layout.shapes[size]), WINDOW)
    add_noise(settings, encoding, size, slices, weight, vector, system_random)
