"""What a device refuses, each with its reason, in its log; and what a server does with devices that lie."""

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fairfold.errors import AggregationFailed, FairfoldError, InvalidMessage, RequestRefused
from fairfold.privacy.secure.client import Memory, SecureClient
from fairfold.privacy.secure.keys import Identity, Trust
from fairfold.privacy.secure.masking import Ring
from fairfold.privacy.secure.messages import (
    SEALED,
    Cohort,
    Delivery,
    Revealed,
    Shares,
    Signatures,
    Survivors,
    parse_message,
)
from fairfold.privacy.secure.server import Phase
from tests.support.secure import Play, a_session, identity


def refused(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """The last thing that the device's log says is why it refused."""
    assert reason in caplog.records[-1].getMessage()
    assert caplog.records[-1].name == "fairfold.privacy.secure"


@contextmanager
def refuses(caplog: pytest.LogCaptureFixture, reason: str) -> Iterator[None]:
    """A device refuses, and its own log has the reason."""
    with pytest.raises(RequestRefused, match=reason) as found:
        yield
    refused(caplog, str(found.value))


@pytest.fixture(autouse=True)
def _capture_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fairfold.privacy.secure")


def cohort_of(play: Play) -> Cohort:
    return parse_message(Cohort, next(iter(play.messages.values())), play.server.session_digest)


def test_too_small_a_cohort(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.SHARES)
    play[0].memory.min_cohort = 7  # the device's own minimum, whatever the server says
    with refuses(caplog, "a cohort of 6 devices; needed: at least 7"):
        play[0].share(play.messages[1000])
    refused(caplog, "a cohort of 6 devices")


def test_a_thin_segment(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4, 9, min_cohort=4), 6).until(Phase.SHARES)
    cohort = cohort_of(play)
    lying = replace(cohort, sizes=(1, 1, 1, 0, 0, 0)).packed(play.server.session_digest)
    with refuses(caplog, r"a segment \(1\) that 3 devices have"):
        play[0].share(lying)
    refused(caplog, "at least 4")


def test_keys_that_nobody_enrolled(caplog: pytest.LogCaptureFixture) -> None:
    roster = frozenset(identity(number).enrolled for number in range(5))
    play = Play(a_session(4), 6, roster=roster).until(Phase.SHARES)
    with refuses(caplog, "not on the roster"):
        play[0].share(play.messages[1000])
    refused(caplog, "device 3ed")  # the sixth, 1005


def test_a_name_that_comes_with_another_key(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.SHARES)
    play[0].memory.trust.seen[1003] = identity(9).enrolled
    with refuses(caplog, "another key than before"):
        play[0].share(play.messages[1000])
    refused(caplog, "device 3eb")


def test_devices_of_the_servers_invention_are_not_believed_when_they_lack_a_certificate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play = Play(a_session(4), 6).until(Phase.SHARES)
    cohort, stranger = cohort_of(play), Identity.create(1005, ec.generate_private_key(ec.SECP384R1()))
    claimed = Identity(1005, identity(5).enrolled, stranger.signer, stranger.certificate)  # another's enrolled key
    forged = claimed.advert(play.server.session_digest, os.urandom(32), os.urandom(32))
    lying = replace(cohort, members=(*cohort.members[:5], forged)).packed(play.server.session_digest)
    with refuses(caplog, "whose enrolled key did not sign"):
        play[0].share(lying)


def test_replayed_keys(caplog: pytest.LogCaptureFixture) -> None:
    before = Play(a_session(4, number=1), 6).until(Phase.SHARES)
    play = Play(a_session(4, number=2), 6).until(Phase.SHARES)
    old, new = cohort_of(before), cohort_of(play)
    lying = replace(new, members=(*new.members[:5], old.members[5])).packed(play.server.session_digest)
    with refuses(caplog, "did not sign for this round"):
        play[0].share(lying)
    refused(caplog, "keys of this round, and not of another")
    with pytest.raises(InvalidMessage, match="another run, round or sum"):  # nor a whole message of another round
        play[1].share(before.messages[1001])
    other_run = Play(a_session(4, number=2, run=8), 6).until(Phase.SHARES)
    with pytest.raises(InvalidMessage, match="another run, round or sum"):
        play[2].share(other_run.messages[1002])


def test_one_device_that_is_in_the_cohort_twice(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.SHARES)
    cohort = cohort_of(play)
    twin = identity(5).advert(play.server.session_digest, os.urandom(32), os.urandom(32))
    lying = Cohort((*cohort.members, replace(twin, name=77)), (*cohort.sizes, 0)).packed(play.server.session_digest)
    with refuses(caplog, "comes twice"):
        play[0].share(lying)


def test_a_cohort_without_the_device_itself(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.SHARES)
    cohort = cohort_of(play)
    lying = Cohort(cohort.members[1:], cohort.sizes[1:]).packed(play.server.session_digest)
    with refuses(caplog, "without this device"):
        play[0].share(lying)


def test_a_second_cohort_for_one_round(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.VECTORS)
    cohort = Cohort(play.server.cohort.members[:5], play.server.cohort.sizes[:5])  # the same without one
    with refuses(caplog, "a second cohort for one round"):
        play[0].share(cohort.packed(play.server.session_digest))
    refused(caplog, "a second cohort for one round")
    again = SecureClient(play.session, identity(0), play[0].memory)  # invited to the same round once more
    with refuses(caplog, "a repeated cohort"):
        again.advertise()
    earlier = SecureClient(a_session(4, number=0), identity(0), Memory(last_turns={(7, "train"): 3}))
    with refuses(caplog, "train 0, turn 0 again, after 3"):
        earlier.advertise()
    assert SecureClient(a_session(4, number=4), identity(0), Memory(last_turns={(7, "train"): 3})).advertise()


# -- shares ------------------------------------------------------------------------------------------------------------


def delivered(play: Play, number: int) -> Delivery:
    return parse_message(Delivery, play.messages[1000 + number], play.server.session_digest)


def test_a_share_that_does_not_decrypt_is_refused_alone(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.VECTORS)
    delivery = delivered(play, 0)
    spoilt = replace(delivery, sealed=delivery.sealed | {3: os.urandom(SEALED)})
    play.messages[1000] = spoilt.packed(play.server.session_digest)
    assert play.exact()  # others have shares enough
    assert any("device 3eb does not decrypt" in record.getMessage() for record in caplog.records)


def test_too_many_shares_that_do_not_decrypt(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.VECTORS)
    delivery = delivered(play, 0)
    junk = dict.fromkeys(delivery.sealed, os.urandom(SEALED))
    with refuses(caplog, "0 shares that decrypt, of 5"):
        play[0].receive(replace(delivery, sealed=junk).packed(play.server.session_digest))
    refused(caplog, "shares that decrypt")


def test_a_share_of_another_cohort_or_for_another_device() -> None:
    play = Play(a_session(4), 6).until(Phase.VECTORS)
    mine, theirs = delivered(play, 0), delivered(play, 1)
    swapped = replace(mine, sealed=mine.sealed | {2: theirs.sealed[2]})
    play[0].receive(swapped.packed(play.server.session_digest))
    assert 2 not in play[0].received


def test_shares_that_are_withheld(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.VECTORS)
    delivery = delivered(play, 0)
    fewer = {member: box for member, box in delivery.sealed.items() if member != 3}
    with refuses(caplog, "shares withheld"):
        play[0].receive(replace(delivery, sealed=fewer).packed(play.server.session_digest))


def test_a_server_that_shrinks_the_cohort_before_vectors_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.VECTORS)
    delivery = delivered(play, 0)
    some = {member: box for member, box in delivery.sealed.items() if member < 3}
    lying = Delivery(frozenset({0, *some}), 6, some).packed(play.server.session_digest)
    with refuses(caplog, "3 of 6 devices left; needed: at least 4"):
        play[0].receive(lying)
    with refuses(caplog, "all at once"):
        play[1].receive(replace(delivered(play, 1), cohort_size=8).packed(play.server.session_digest))


# -- survivors ---------------------------------------------------------------------------------------------------------


def test_a_server_that_calls_a_live_device_dead(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.SIGNATURES)
    with refuses(caplog, "reports this device as dead, though it gave its vector"):
        play[0].sign(Survivors(frozenset({1, 2, 3, 4, 5}), 6).packed(play.server.session_digest))
    refused(caplog, "this device as dead")


def test_a_server_that_asks_for_both_shares(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.SIGNATURES)
    play[0].sign(play.messages[1000])
    with refuses(caplog, "both shares"):
        play[0].sign(Survivors(frozenset({0, 1, 2, 3, 4}), 6).packed(play.server.session_digest))
    refused(caplog, "a second set of survivors")
    play.until(Phase.SIGNATURES)
    for number in range(1, 6):
        play.server.receive(1000 + number, play[number].sign(play.messages[1000 + number]))
    play.messages = play.server.close()
    revealed = parse_message(Revealed, play[1].reveal(play.messages[1001]), play.server.session_digest)
    assert len(revealed.shares) == 5  # one of each neighbor, of one kind
    with refuses(caplog, "a second request for shares"):
        play[1].reveal(play.messages[1001])


def test_survivors_that_are_named_before_a_device_has_uploaded_or_once_more(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.VECTORS)
    everybody = Survivors(frozenset(range(6)), 6).packed(play.server.session_digest)
    with refuses(caplog, "survivors after it has shared"):
        play[0].sign(everybody)
    refused(caplog, "survivors after it has shared")
    play.until(Phase.SIGNATURES)[0].sign(everybody)
    with refuses(caplog, "survivors after it has signed"):
        play[0].sign(everybody)


def test_too_few_survivors_for_the_noise(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(replace(a_session(4), staying=70, sigma=1.0), 10).until(Phase.SIGNATURES)
    with refuses(caplog, "6 devices left in segment 0; needed: at least 7, for which noise is sized"):
        play[0].sign(Survivors(frozenset(range(6)), 10).packed(play.server.session_digest))
    refused(caplog, "for which noise is sized")
    play[1].sign(Survivors(frozenset(range(7)), 10).packed(play.server.session_digest))
    leaving = dict.fromkeys(range(4), Phase.VECTORS)
    with pytest.raises(AggregationFailed, match="6 devices left in segment 0; needed: at least 7"):
        Play(replace(a_session(4), staying=70, sigma=1.0), 10, leaving).until(Phase.SIGNATURES)


def test_a_server_that_shrinks_the_survivors(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 10).until(Phase.SIGNATURES)
    with refuses(caplog, "5 of 10 devices left; needed: at least 6"):
        play[0].sign(Survivors(frozenset(range(5)), 10).packed(play.server.session_digest))
    play = Play(a_session(4, min_cohort=8), 10).until(Phase.SIGNATURES)
    with refuses(caplog, "7 devices left in segment 0; needed: at least 8"):
        play[0].sign(Survivors(frozenset(range(7)), 10).packed(play.server.session_digest))


def test_survivors_who_gave_no_shares(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 10, {9: Phase.SHARES}).until(Phase.SIGNATURES)
    with refuses(caplog, "survivors who gave no shares"):
        play[0].sign(Survivors(frozenset(range(10)), 10).packed(play.server.session_digest))


def test_survivors_that_leave_somebody_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In a ring, which cohorts of so few have not: who is alone in one is tested with the graph."""
    play, asked = Play(a_session(4, 9), 6).until(Phase.SIGNATURES), list[tuple[int, set[int]]]()

    def alone(ring: Ring, survivors: set[int]) -> int | None:
        asked.append((len(ring.order), set(survivors)))
        return 3 if len(ring.order) == 3 else None

    monkeypatch.setattr(Ring, "isolated", alone)
    with refuses(caplog, "survivors that leave device 3eb alone"):
        play[0].sign(play.messages[1000])
    refused(caplog, "enough neighbors of everybody")
    assert asked == [(6, set(range(6))), (3, set(range(6)))]  # in every segment


def test_survivors_that_too_few_have_signed(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 6).until(Phase.REVEALED)
    right = parse_message(Signatures, play.messages[1000], play.server.session_digest).by_member
    few = Signatures({member: right[member] for member in (0, 1, 2)}).packed(play.server.session_digest)
    with refuses(caplog, "survivors that 3 devices have signed; needed: at least 4"):
        play[0].reveal(few)
    refused(caplog, "have signed")
    forged = Signatures(dict.fromkeys(range(6), right[0])).packed(play.server.session_digest)  # one under many names
    with refuses(caplog, "survivors that 1 devices have signed"):
        play[1].reveal(forged)


def test_two_views_of_the_survivors_are_not_both_signed_by_enough(caplog: pytest.LogCaptureFixture) -> None:
    """A server that sends half of the devices one thing and half another gets no shares from either."""
    play = Play(a_session(4), 10).until(Phase.SIGNATURES)
    views = [Survivors(frozenset(range(9)), 10), Survivors(frozenset(range(1, 10)), 10)]
    signed: list[dict[int, bytes]] = [{}, {}]
    for number in range(1, 9):
        message = views[number % 2].packed(play.server.session_digest)
        signed[number % 2][number] = play[number].sign(message)[-64:]
    for number in range(1, 9):
        with refuses(caplog, "4 devices have signed; needed: at least 6"):
            play[number].reveal(Signatures(signed[number % 2]).packed(play.server.session_digest))


# -- devices that lie --------------------------------------------------------------------------------------------------


def test_a_neighbor_that_gives_a_wrong_share_is_named(caplog: pytest.LogCaptureFixture) -> None:
    play = Play(a_session(4), 7, {6: Phase.VECTORS}).until(Phase.REVEALED)
    for name, message in play.messages.items():
        reply = parse_message(Revealed, play.reply(name, message), play.server.session_digest)
        if name == 1000:
            reply = Revealed({member: (kind, os.urandom(33)) for member, (kind, _) in reply.shares.items()})
        play.server.receive(name, reply.packed(play.server.session_digest))
    play.server.close()
    assert play.exact()
    assert "device 3e8 gave a wrong share" in caplog.records[-1].getMessage()


def test_a_device_whose_shares_are_of_something_else_is_named() -> None:
    play = Play(a_session(4), 6)
    play[3].seed = bytes(32)
    play.until(Phase.SHARES)
    for name, message in play.messages.items():
        reply = parse_message(Shares, play.reply(name, message), play.server.session_digest)
        if name == 1003:
            reply = replace(reply, commitment=bytes(32))
        play.server.receive(name, reply.packed(play.server.session_digest))
    play.messages = play.server.close()
    with pytest.raises(AggregationFailed, match="shares of device 3eb that do not give its secret"):
        play.exact()


def test_the_server_refuses_what_is_not_a_members_own() -> None:
    play = Play(a_session(4), 6)
    advert = play[0].advertise()
    with pytest.raises(InvalidMessage, match="not asked"):
        play.server.receive(1001, advert)
    play.server.receive(1000, advert)
    with pytest.raises(InvalidMessage, match="has given them"):
        play.server.receive(1000, advert)
    stolen = Identity(1001, identity(0).enrolled, identity(0).signer, identity(0).certificate)
    theirs = stolen.advert(play.server.session_digest, os.urandom(32), os.urandom(32)).packed(
        play.server.session_digest
    )
    with pytest.raises(InvalidMessage, match="enrolled of another device"):
        play.server.receive(1001, theirs)
    play = Play(a_session(4), 6).until(Phase.VECTORS)
    with pytest.raises(InvalidMessage, match="not asked"):
        play.server.receive(55, b"")
    reply = play.reply(1000, play.messages[1000])
    with pytest.raises(InvalidMessage, match="a vector of 3 numbers"):
        play.server.receive(1000, reply[:-4])
    play.server.receive(1000, reply)
    with pytest.raises(InvalidMessage, match="not asked"):  # nobody is added twice
        play.server.receive(1000, reply)


def test_a_key_on_which_everybody_would_agree() -> None:
    play = Play(a_session(4), 6)
    weak = identity(5).advert(play.server.session_digest, bytes(32), bytes(32))
    for number in range(5):
        play.server.receive(1000 + number, play[number].advertise())
    play.server.receive(1005, weak.packed(play.server.session_digest))
    message = play.server.close()[1000]
    with pytest.raises(RequestRefused, match="no secret"):
        play[0].share(message)


# -- messages that were changed on the way -----------------------------------------------------------------------------


def mutated(data: bytes) -> bytes:
    """A message with a few bytes changed, cut, added, doubled or moved."""
    changed, draw = bytearray(data), int.from_bytes(os.urandom(8), "big")
    for _ in range(1 + draw % 3):
        place, kind = int.from_bytes(os.urandom(4), "big") % (len(changed) + 1), os.urandom(1)[0] % 5
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << draw % 8
        elif kind == 1:
            del changed[place : place + 1 + draw % 40]
        elif kind == 2:
            changed[place:place] = os.urandom(1 + draw % 40)
        elif kind == 3:
            changed[place : place + 4] = [b"\xff\xff\xff\xff", b"\0\0\0\0", os.urandom(4)][draw % 3]
        else:
            changed[place:place] = changed[: draw % 64]
    return bytes(changed)


def survives(many: int) -> int:
    """Feed mutated messages of all kinds to both sides; how many of them were refused."""
    refusals, tried = 0, 0
    for phase in (Phase.KEYS, Phase.SHARES, Phase.VECTORS, Phase.SIGNATURES, Phase.REVEALED):
        play = Play(a_session(4, 6), 5).until(phase)
        state, name = play[0].serialized(), 1000
        message = b"" if phase == Phase.KEYS else play.messages[name]
        invitation = play.session.packed(play.session.digest)
        reply = play.reply(name, message)
        trust = Trust(checked=set(play[0].memory.trust.checked))
        for _ in range(many // 10):
            tried += 2
            memory = Memory(copy.deepcopy(trust), 2)
            device = SecureClient.read(state, identity(0), memory)
            try:
                if phase == Phase.KEYS:
                    parse_message(type(play.session), mutated(invitation), None)
                elif phase == Phase.SHARES:
                    device.share(mutated(message))
                elif phase == Phase.VECTORS:
                    device.receive(mutated(message))
                else:
                    (device.sign if phase == Phase.SIGNATURES else device.reveal)(mutated(message))
            except FairfoldError:
                refusals += 1
            server = copy.deepcopy(play.server)
            try:
                server.receive(name, mutated(reply))
            except FairfoldError:
                refusals += 1
    assert tried == many // 10 * 10
    return refusals


@pytest.mark.usefixtures("quick_signatures")
def test_mutated_messages_are_refused_in_words() -> None:
    assert survives(1_000) > 800  # the rest: a vector whose words were changed is still a vector


@pytest.mark.slow
@pytest.mark.usefixtures("quick_signatures")
def test_a_hundred_thousand_mutated_messages() -> None:
    assert survives(100_000) > 80_000
