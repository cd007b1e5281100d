"""Data for tests of commands."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in the cache of the user who runs the tests."""
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def ratings_folder(tmp_path: Path) -> Path:
    """A small folder in the form of MovieLens 100K: ids of its own, titles, some with odd characters."""
    folder = tmp_path / "ml-tiny"
    folder.mkdir()
    lines = [f"u{user}0\t{100 + item}\t{1 + (user * item) % 5}\t0" for user in range(9) for item in range(20)
             if (user + 2 * item) % 3]  # fmt: skip
    (folder / "u.data").write_text("\n".join(lines).replace("u", "") + "\n")
    titles = [f"{100 + item}|The [bold] Film {item} (1990)|||" for item in range(20)]
    (folder / "u.item").write_text("\n".join(titles) + "\n")
    return folder
