"""Run notebooks and store their outputs, small: `make notebooks`."""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(path: Path) -> None:
    """Run a notebook in an empty folder, and write it back with its outputs."""
    notebook = nbformat.read(path, 4)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place, record_timing=False).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # without the version of this machine's Python
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        execute(Path(name))
        print(name)
