"""All devices of a sum are shown one log of enrolled keys, which only grows, and refuse members that are not in it."""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fairfold.errors import InvalidMessage, InvalidState, RequestRefused
from fairfold.flower.roster import Roster
from fairfold.privacy.secure.folder import SecureFolder
from fairfold.privacy.secure.keys import Identity, read_enrolled
from fairfold.privacy.secure.log import Enrolled, LogCopy
from fairfold.privacy.secure.messages import MAGIC, NO_LOG, Cohort, LogHead, Session, parse_message
from fairfold.privacy.secure.server import Phase, SecureServer
from tests.support.secure import Play, a_session, identity

SIGNER = Ed25519PrivateKey.generate()
MANY = 4


def roster_of(path: Path, *devices: int, signer: Ed25519PrivateKey = SIGNER) -> Roster:
    roster = Roster(path, signer)
    for number in devices:
        roster.add(Enrolled(identity(number).enrolled, 1 + number, 1))
    return roster


@dataclass
class Shown:
    """What a server shows one device, and from which bytes on the device has asked."""

    roster: Roster
    asked: list[int] = field(default_factory=list)

    def __call__(self, start: int) -> Generator[bytes]:
        """The log in pieces that do not end with its lines."""
        self.asked.append(start)
        content = self.roster.content()
        yield from (content[at : at + 250] for at in range(start, len(content), 250))


def copies(folder: Path, shown: Shown, many: int = MANY) -> list[LogCopy]:
    return [
        LogCopy(folder / str(number) / "log", SIGNER.public_key().public_bytes_raw(), shown) for number in range(many)
    ]


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(roster_of(tmp_path / "roster", *range(MANY)))


def test_a_log_that_grows_is_followed_and_only_its_new_lines_are_fetched(tmp_path: Path, shown: Shown) -> None:
    logs = copies(tmp_path, shown)
    assert Play(a_session(4, log=shown.roster.head()), MANY, logs=logs).exact()
    assert shown.asked == [0] * MANY
    again = a_session(4, number=1, log=shown.roster.head())
    assert Play(again, MANY, logs=logs).exact()
    assert shown.asked == [0] * MANY, "nothing is new"
    size = len(shown.roster.content())
    roster_of(tmp_path / "roster", 5, 6)
    assert Play(a_session(4, number=2, log=shown.roster.head()), MANY, logs=logs).exact()
    assert shown.asked == [0] * MANY + [size] * MANY
    assert {log.path.read_bytes() for log in logs} == {shown.roster.content()}
    roster_of(tmp_path / "roster", 7)  # it has grown since the invitation
    head = shown.roster.head()
    roster_of(tmp_path / "roster", 8)
    assert Play(a_session(4, number=3, log=head), MANY, logs=logs).exact()
    assert {log.head() for log in logs} == {head}, "as far as the invitation names it: the next one may name no more"


def test_devices_that_are_shown_different_logs_take_no_part_together(tmp_path: Path, shown: Shown) -> None:
    """The server lies as it likes: it invents devices in the log of one device, and shows the others another log."""
    forked = Shown(roster_of(tmp_path / "forked", *range(MANY), 9))
    logs = copies(tmp_path, shown)
    honest = Play(a_session(4, log=shown.roster.head()), MANY, logs=logs).until(Phase.SHARES)
    victim = LogCopy(tmp_path / "victim" / "log", logs[0].signer, forked)
    mine = Play(a_session(4, log=forked.roster.head()), 1, logs=[victim])[0]
    mine.advertise()
    mine.memory.min_cohort = 2
    members = (mine.advert, *(honest[number].advert for number in range(1, MANY)))
    cohort = Cohort(members, (0,) * MANY).packed(mine.session_digest)
    with pytest.raises(RequestRefused, match="did not sign for this round"):
        mine.share(cohort)
    for_others = Cohort(members, (0,) * MANY).packed(honest.server.session_digest)
    with pytest.raises(RequestRefused, match="did not sign for this round"):
        honest[1].share(for_others)


def test_a_member_that_is_not_in_the_log_is_refused_by_all(tmp_path: Path, shown: Shown) -> None:
    logs = copies(tmp_path, shown, MANY + 1)
    session = a_session(4, log=shown.roster.head())
    play = Play(session, MANY + 1, logs=[*logs[:MANY], logs[0]])
    play.devices[1000 + MANY].memory.log = None  # an invented device asks nobody
    play.until(Phase.SHARES)
    for number in range(MANY):
        with pytest.raises(
            RequestRefused, match=f"device {1000 + MANY:x}, whose key is not in the server's roster of 4"
        ):
            play[number].share(play.messages[1000 + number])


def test_a_member_of_later_lines_than_are_named_is_refused(tmp_path: Path, shown: Shown) -> None:
    """The copy may grow between two messages of a sum, whose devices compared the lines before."""
    logs = copies(tmp_path, shown, MANY + 1)
    play = Play(a_session(4, log=shown.roster.head()), MANY + 1, logs=logs)
    play.devices[1000 + MANY].memory.log = None
    play.until(Phase.SHARES)
    roster_of(tmp_path / "roster", MANY)
    logs[0].follow(shown.roster.head(), identity(0).enrolled)
    with pytest.raises(RequestRefused, match="whose key is not in the server's roster of 4"):
        play[0].share(play.messages[1000])


def test_an_honest_server_leaves_out_who_has_another_key(shown: Shown) -> None:
    """One hostile device must not have the cohort refused by all others."""
    play = Play(a_session(4, log=shown.roster.head()), MANY)
    keys = {one.name: one.enrolled for one in play.clients}
    keys |= {1002: identity(3).enrolled}
    del keys[1003]
    play.server.enrolled = keys
    for number in (0, 1):
        play.server.receive(1000 + number, play[number].advertise())
    for number in (2, 3):
        with pytest.raises(InvalidMessage, match="another key than it has in the roster"):
            play.server.receive(1000 + number, play[number].advertise())


def test_what_is_no_longer_the_log_that_was_seen_is_refused(tmp_path: Path, shown: Shown) -> None:
    (log,) = copies(tmp_path, shown, 1)
    own, head = identity(0).enrolled, shown.roster.head()
    log.follow(head, own)
    content = log.path.read_bytes()
    cut = roster_of(tmp_path / "cut", *range(MANY - 1))
    other = roster_of(tmp_path / "other", *range(MANY), 6, 7)  # begins alike
    changed = roster_of(tmp_path / "changed", 0, 2, 1, 3, 4)
    grown = roster_of(tmp_path / "grown", *range(MANY), 5, 6)
    foreign = roster_of(tmp_path / "foreign", *range(MANY), 5, signer=Ed25519PrivateKey.generate())
    torn = Roster(tmp_path / "torn", SIGNER)
    torn.path.write_bytes(grown.content()[:-2])
    long = Roster(tmp_path / "long", SIGNER)
    long.path.write_bytes(grown.content() + b" " * 2000)
    far = LogHead(9, "ab" * 32)
    cases: list[tuple[LogHead, Roster, str]] = [
        (NO_LOG, shown.roster, "an invitation without the roster"),
        (cut.head(), cut, "by a roster of 3 lines, after one of 4"),
        (LogHead(4, "ab" * 32), shown.roster, "another roster of 4 lines than before"),
        (changed.head(), changed, "line 5 of the roster .it does not follow"),
        (grown.head(), other, "another roster than its invitation names"),
        (grown.head(), shown.roster, "4 lines where its invitation names 6"),
        (grown.head(), cut, "4 lines where its invitation names 6"),
        (foreign.head(), foreign, "line 5 of the roster .it does not follow"),
        (far, torn, "5 lines where its invitation names 9"),
        (far, long, "a line that does not end"),
    ]
    for named, server, reason in cases:
        with pytest.raises(RequestRefused, match=reason):
            replace(log, fetch=Shown(server)).follow(named, own)
        assert log.path.read_bytes() == content, reason
    with pytest.raises(RequestRefused, match="without this device's key"):
        replace(log, path=tmp_path / "new").follow(head, identity(9).enrolled)
    with pytest.raises(RequestRefused, match=r"line 1 of the roster .the server's signer did not sign"):
        replace(log, path=tmp_path / "new2", fetch=Shown(foreign)).follow(foreign.head(), own)
    replace(log, fetch=Shown(grown)).follow(grown.head(), own)
    assert log.path.read_bytes() == grown.content()


def test_a_copy_that_is_damaged_is_not_taken_for_an_empty_one(tmp_path: Path, shown: Shown) -> None:
    (log,) = copies(tmp_path, shown, 1)
    log.follow(shown.roster.head(), identity(0).enrolled)
    for damaged in (b"?" * 300, log.path.read_bytes().replace(b'"users": 1', b'"users": 9')):
        log.path.write_bytes(damaged)
        with pytest.raises(InvalidState, match=r"damaged \(line \d does not follow .* Remove it to begin anew"):
            log.follow(shown.roster.head(), identity(0).enrolled)


def test_a_folder_keeps_the_log_between_messages(tmp_path: Path, shown: Shown) -> None:
    """Each message may be handled by a new process; and a server cannot go back to an invitation without the log."""
    names = range(1, 4)
    own = {name: Identity.create(name, _key(tmp_path / f"{name}.key")) for name in names}
    roster = Roster(tmp_path / "of folders", SIGNER)
    for name, one in own.items():
        roster.add(Enrolled(one.enrolled, name, 1))
    fetch = Shown(roster)

    def folder(name: int) -> SecureFolder:
        log = LogCopy(tmp_path / str(name) / "log", SIGNER.public_key().public_bytes_raw(), fetch)
        return SecureFolder(tmp_path / str(name), name, tmp_path / f"{name}.key", None, 3, log)

    session = a_session(4, min_cohort=3, log=roster.head())
    server = SecureServer(session, dict.fromkeys(names, 0), enrolled={name: one.enrolled for name, one in own.items()})
    for name in names:
        server.receive(name, folder(name).begin(session.packed(session.digest)))
    assert fetch.asked == [0, 0, 0], "each before its advert"
    for name, message in server.close().items():
        with folder(name).resume_round(message) as client:
            assert client.session.log == roster.head()
            server.receive(name, client.share(message))
    assert len(server.close()) == len(names)
    without = a_session(4, number=1, min_cohort=3)
    with pytest.raises(RequestRefused, match="an invitation without the roster"):
        folder(1).begin(without.packed(without.digest))


def _key(path: Path) -> EllipticCurvePrivateKey:
    return read_enrolled(path)


def test_messages_of_the_version_without_a_log_are_refused_with_words(shown: Shown) -> None:
    session = a_session(4, log=shown.roster.head())
    message = bytearray(session.packed(session.digest))
    assert parse_message(Session, bytes(message), None) == session
    message[len(MAGIC)] -= 1
    with pytest.raises(InvalidMessage, match=r"version 3 where this is version 4; .*the same fairfold"):
        parse_message(Session, bytes(message), None)
    contradictory = replace(session, log=LogHead(0, "ab" * 32))
    with pytest.raises(InvalidMessage, match="the hash of no line"):
        parse_message(Session, contradictory.packed(contradictory.digest), None)
    assert replace(session, log=NO_LOG).digest != session.digest, "adverts are bound to it"
