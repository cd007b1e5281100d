"""A device of a fleet: its folder, and how it enrols. Neither torch nor Flower is imported: an idle device is light."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fairfold.errors import FairfoldError, InvalidSettings, InvalidState
from fairfold.files import locked, make_private, write_atomically
from fairfold.flower.link import Line, Refused, address_of, detail_of, public_form, read_key
from fairfold.flower.tokens import Token

FORMAT = 1
FILE, STATUS = "node.toml", "status.json"
OWN = "/v1/fairfold/"


@dataclass(frozen=True)
class NodeFolder:
    """What a device was given when it enrolled; ``node.toml`` has it in words."""

    folder: Path
    server: str
    data: str
    capacity: str
    test: str = ""  # a file with what the model should guess
    holdout: float = 0.0  # or the share of the data to be kept back for that
    model: str = ""  # a class of one's own that this device trains, package.module:Class
    app: str = ""  # a ClientApp of one's own, package.module:app, in the place of fairfold's
    privacy: str = ""  # "secure": whatever is not to be summed under masks is refused; "private": also without noise
    smallest_cohort: int = 0  # it takes part in no secure sum over fewer devices; the usual minimum if not said
    roster: str = ""  # a file of the enrolled public keys, from somebody who is not the server
    epsilon: float = 0.0  # what all noisy sums of its lifetime may cost; the usual if not said
    delta: float = 0.0

    @property
    def key(self) -> Path:
        """Its private key, which never leaves it."""
        return self.folder / "key"

    @property
    def authority(self) -> Path:
        """The certificate of the authority that it trusts, and no other."""
        return self.folder / "ca.crt"

    @property
    def catalogue(self) -> Path:
        """The names of the items, where they have names."""
        return self.folder / "catalogue.txt"

    @property
    def state(self) -> Path:
        """What it keeps of its users."""
        return self.folder / "state"

    @classmethod
    def open(cls, folder: Path) -> "NodeFolder":
        """The device in a folder."""
        import tomllib

        path, folder = folder / FILE, folder.absolute()
        known = {one.name for one in fields(cls)} - {"folder"}
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            if content.pop("format", None) != FORMAT or not content.keys() <= known:
                raise ValueError(f"another format than {FORMAT}, or an unknown key")
            return cls(folder, **content)
        except FileNotFoundError:
            remedy = "Run `fairfold node enrol TOKEN --server ...` first."
            raise InvalidState(f"{folder}, where no device has enrolled", f"a folder with {FILE}", remedy) from None
        except (OSError, ValueError, TypeError) as error:
            raise InvalidState(
                f"{path}: {error}",
                "what `fairfold node enrol` wrote",
                "Correct the file, or enrol again with a new token.",
            ) from None

    def save(self) -> None:
        """Write it down."""
        import tomli_w

        content = {key: value for key, value in asdict(self).items() if key != "folder" and value not in ("", 0.0, 0)}
        write_atomically(self.folder / FILE, tomli_w.dumps({"format": FORMAT, **content}).encode(), private=True)

    def facts(self) -> dict[str, str | int | float | bool]:
        """What an app of one's own finds in Flower's context."""
        found: dict[str, str | int | float | bool] = {
            "capacity": self.capacity, "data": self.data, "state": str(self.state), "key": str(self.key)
        }  # fmt: skip
        said: dict[str, str | int | float] = {
            "test": self.test, "privacy": self.privacy, "smallest-cohort": self.smallest_cohort, "roster": self.roster,
            "epsilon": self.epsilon, "delta": self.delta,
        }  # fmt: skip
        return found | {key: value for key, value in said.items() if value}

    def running(self) -> bool:
        """Whether the process of this device is there."""
        try:
            with locked(self.folder, wait=False):
                return False
        except BlockingIOError:
            return True

    def status(self) -> dict[str, Any]:
        """What it said last of itself, and which model it keeps."""
        from fairfold.flower.offline import MODEL_FILE

        try:
            found: dict[str, Any] = json.loads((self.folder / STATUS).read_text())
        except (OSError, ValueError):
            found = {}
        if not self.running():
            found |= {"state": "stopped", "words": "its process is not running: fairfold node start"}
        with contextlib.suppress(OSError):
            model = (self.state / MODEL_FILE).stat()
            found["model"] = {"bytes": model.st_size, "at": model.st_mtime}
        known = {"server": self.server, "capacity": self.capacity, "data": self.data, "privacy": self.account()}
        return known | found

    def account(self) -> dict[str, Any]:
        """What it asks of whoever adds up its words, and what sums with noise have cost its users, by its ledger."""
        from fairfold.privacy.ledger import LEDGER, USUAL_COHORT, USUAL_DELTA, USUAL_EPSILON, Ledger

        least, level = self.smallest_cohort or USUAL_COHORT, {"level": self.privacy or "plain"}
        ledger = Ledger(self.state / LEDGER, self.epsilon or USUAL_EPSILON, self.delta or USUAL_DELTA, least)
        try:
            return level | ledger.told()
        except FairfoldError as error:
            return level | {"problem": str(error)}


def enrol(node: NodeFolder, token: Token, patience: float = 0.0) -> int:
    """Make a key, pin the server's authority, register the key; returns the size of the catalogue.

    The token's secret is shown only to a server whose authority is the one that the token names. One that cannot be
    reached may be about to start: it is waited for so many seconds.
    """
    from fairfold.flower.keys import fingerprint, make_node_key
    from fairfold.flower.local import LocalFile

    address_of(node.server)
    if (node.folder / FILE).exists():
        raise InvalidState(f"{node.folder}, where a device has enrolled", "a new folder", "Name another with --folder.")
    for path in [node.data, *([node.test] if node.test else [])]:
        if not node.app and not Path(path).is_file():
            raise InvalidSettings(f"{path}, which is no file", "the device's own CSV or SQLite file", "Check the path.")
        if not node.app:
            LocalFile(path).require_readable()
    make_private(node.folder)
    with _told():
        certificate = _authority(node.server, time.monotonic() + patience)
        if fingerprint(certificate) != token.authority:
            raise Refused("authority", "wrong authority: this is not the server that gave out this token")
        write_atomically(node.authority, certificate)
        if not node.key.exists():  # else an enrolment that broke off is taken up again
            make_node_key(node.key)
        line = Line(node.server, node.authority)
        key = public_form(read_key(node.key)).decode()
        request = {"secret": token.secret.hex(), "key": key, "time": time.time()}
        told = detail_of(line.ask("POST", OWN + "enrol", json.dumps(request).encode()))
        if told.get("catalogue"):
            write_atomically(node.catalogue, line.pieces("GET", OWN + "catalogue"))
        line.close()
    node.save()
    return int(told.get("items", 0))


def _authority(server: str, deadline: float) -> bytes:
    """What a server, whoever it is, calls its authority's certificate."""
    line = Line(server, None)
    while True:
        try:
            found = line.ask("GET", OWN + "authority")
            line.close()
            return found
        except Refused as refused:
            if refused.kind != "unreachable" or time.monotonic() > deadline:
                raise
        time.sleep(1.0)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A refusal as an error of fairfold's."""
    try:
        yield
    except Refused as refused:
        needed = "a server that takes this device"
        raise InvalidState(refused.detail or str(refused), needed, "Nothing was enrolled.") from None
