"""The programs of a fleet: a server with Flower's SuperLink behind a gateway, and the nodes of devices.

Nothing heavy is imported here: a node's process that waits for work loads neither torch nor Flower.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from fairfold.atomic_io import write_atomically
from fairfold.errors import InvalidState

Echo = Callable[[str], None]  # shows a line of text to the operator

FORMAT = 2  # of server.toml and node.toml


@dataclass(frozen=True)
class PathInside:
    """An attribute of a class whose instances have a folder: a path inside it."""

    name: str

    def __get__(self, instance: Any, _owner: type) -> Path:
        return Path(instance.folder, self.name)


@dataclass(frozen=True)
class FleetFolder:
    """A folder of a server or a node; its TOML file holds the fields of the dataclass."""

    FILE: ClassVar[str]
    WRITTEN_BY: ClassVar[str]  # the command that makes such a folder

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read a folder; refused where it holds no such file, or one with unknown content."""
        import tomllib

        path = folder / cls.FILE
        known = {field.name for field in fields(cls)} - {"folder"}
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            if content.pop("format", None) != FORMAT or not content.keys() <= known:
                raise ValueError(f"another format than {FORMAT}, or an unknown key")
            return cls(folder.absolute(), **content)
        except FileNotFoundError:
            given = f"{folder.absolute()}, which holds no {cls.FILE}"
            raise InvalidState(given, f"a folder of `{cls.WRITTEN_BY}`", f"Run `{cls.WRITTEN_BY}` first.") from None
        except (OSError, ValueError, TypeError) as error:
            remedy = f"Correct the file, or run `{cls.WRITTEN_BY}` for a new folder."
            raise InvalidState(f"{path}: {error}", f"what `{cls.WRITTEN_BY}` wrote", remedy) from None

    def save(self) -> None:
        """Write the TOML file; fields that are empty or zero are left out."""
        import tomli_w

        content = {key: value for key, value in asdict(self).items() if key != "folder" and value}
        write_atomically(self.folder / self.FILE, tomli_w.dumps({"format": FORMAT, **content}).encode(), private=True)
