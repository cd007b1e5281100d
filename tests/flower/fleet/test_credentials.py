"""Certificates, tokens and invitations."""

import stat
import time
from pathlib import Path

import pytest
from cryptography import x509

from fairfold.errors import InvalidSettings
from fairfold.flower.fleet.credentials import (
    RENEWED_BEFORE,
    Invitations,
    Token,
    TokenRefused,
    make_certificates,
    parse_duration,
    renew_certificate,
)
from tests.support.fleet import AUTHORITY, PUBLIC


def test_a_token_is_read_as_it_was_printed_and_a_typing_error_is_noticed() -> None:
    token = Token(b"s" * 16, AUTHORITY)
    assert Token.parse(f" {token}\n") == token
    text = str(token)
    wrong = ["", "ff1-", "ff1-ü", text[:-1], text + "A", text[4:], "x" * len(text)]
    wrong += [text[:place] + ("B" if text[place] != "B" else "C") + text[place + 1 :] for place in range(4, len(text))]
    for one in wrong:
        with pytest.raises(InvalidSettings, match="typing error"):
            Token.parse(one)


def used(folder: Path, secret: bytes, key: bytes = PUBLIC) -> bool:
    with Invitations(folder).use(secret, key) as invitation:
        return invitation.used is None


def test_a_token_serves_one_device_once(tmp_path: Path) -> None:
    token = Invitations(tmp_path).create(AUTHORITY, 60.0)
    assert used(tmp_path, token.secret)
    assert not used(tmp_path, token.secret), "the same device again, whose answer was lost"
    with pytest.raises(TokenRefused, match="used before") as refused:
        used(tmp_path, token.secret, b"another key")
    assert refused.value.status == 410
    with pytest.raises(TokenRefused, match="unknown"):
        used(tmp_path, b"x" * 16)
    assert Invitations(tmp_path).counts() == {"open": 0, "used": 1, "expired": 0}
    kept = b"".join(path.read_bytes() + path.name.encode() for path in tmp_path.iterdir())
    assert token.secret not in kept
    assert token.secret.hex().encode() not in kept, "known by its hash alone"
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())


def test_a_token_that_could_not_be_used_is_given_back(tmp_path: Path) -> None:
    token = Invitations(tmp_path).create(AUTHORITY, 60.0)
    with pytest.raises(ZeroDivisionError), Invitations(tmp_path).use(token.secret, PUBLIC):
        _ = 1 / 0
    assert used(tmp_path, token.secret, b"another key")


def test_a_token_expires_and_is_forgotten_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, now = Invitations(tmp_path).create(AUTHORITY, 60.0), time.time()
    monkeypatch.setattr("fairfold.flower.fleet.credentials.time.time", lambda: now + 7261)
    with pytest.raises(TokenRefused, match="expired 2 h ago"):
        used(tmp_path, token.secret)
    assert Invitations(tmp_path).counts() == {"open": 0, "used": 0, "expired": 1}
    monkeypatch.setattr("fairfold.flower.fleet.credentials.time.time", lambda: now + 31 * 86400)
    Invitations(tmp_path).create(AUTHORITY, 60.0)
    assert Invitations(tmp_path).counts() == {"open": 1, "used": 0, "expired": 0}


DAMAGED = [
    "", "{}", "[]", "null", '{"format": 2}', '{"format": 3, "created": 1.0}', "{" * 99999,
    '{"format": 2, "created": "a", "expires": "z", "used": null, "key": null}',
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_invitation_is_refused_with_a_reason(content: str, tmp_path: Path) -> None:
    token = Invitations(tmp_path).create(AUTHORITY, 60.0)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    with pytest.raises(TokenRefused, match="damaged"):
        used(tmp_path, token.secret)
    Invitations(tmp_path).create(AUTHORITY, 60.0)
    assert Invitations(tmp_path).counts()["open"] == 1


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "0s", "1y", "31d", "1.5h", "999999999d"])
def test_times_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidSettings, match="at most 30 days"):
        parse_duration(text)
    assert (parse_duration("90s"), parse_duration("24h"), parse_duration("7d")) == (90.0, 86400.0, 604800.0)


def names_in(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def test_a_server_is_known_by_its_name_and_at_home(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["server.example.org"])
    assert names_in(tmp_path / "server.pem") == {"server.example.org", "localhost", "127.0.0.1"}
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600


def test_a_certificate_is_made_anew_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca, certificate, _ = make_certificates(tmp_path, ["a.example"])
    before, authority = certificate.read_bytes(), ca.read_bytes()
    assert renew_certificate(tmp_path, ["a.example"]) is None
    assert certificate.read_bytes() == before
    assert "renewed" in str(renew_certificate(tmp_path, ["b.example"]))
    assert "b.example" in names_in(certificate)
    monkeypatch.setattr("fairfold.flower.fleet.credentials.SERVER_DAYS", RENEWED_BEFORE - 1)
    make_certificates(tmp_path / "old", ["a.example"])
    monkeypatch.undo()
    assert "renewed" in str(renew_certificate(tmp_path / "old", ["a.example"]))
    assert renew_certificate(tmp_path / "old", ["a.example"]) is None
    (tmp_path / "ca.key").unlink()
    assert "ca.key" in str(renew_certificate(tmp_path, ["c.example"]))
    assert ca.read_bytes() == authority, "devices pin it"
