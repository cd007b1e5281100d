"""Small files for tests."""

from pathlib import Path


def written(path: Path, content: str | bytes) -> Path:
    """Write a file, with its folder, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
