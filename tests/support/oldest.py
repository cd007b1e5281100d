"""The oldest versions that pyproject.toml allows, as pins for pip: ``make test-oldest`` installs them for the tests.

python tests/support/oldest.py [EXTRA ...] [--torch 2.13.0]    # another version than the oldest torch, which is large
"""

import argparse
import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<extras>[^\]]*)\])?\s*>=\s*(?P<oldest>[\d.]+)")


def pins(project: dict[str, object], extras: list[str]) -> list[str]:
    """``name==lower bound`` of what the package needs, and of what its extras need, those of other extras included."""
    found, wanted = list(_strings(project["dependencies"])), list(extras)
    optional = project["optional-dependencies"]
    assert isinstance(optional, dict)
    for extra in wanted:
        for line in _strings(optional[extra]):
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", line)
            if own is not None:
                wanted += [name for name in own[1].split(",") if name not in wanted]
            else:
                found.append(line)
    lines = []
    for line in found:
        match = REQUIREMENT.match(line)
        if match is None:
            raise SystemExit(f"{line!r} in pyproject.toml has no lower bound: write {line}>=SOMETHING.")
        lines.append(f"{match['name']}=={match['oldest']}")
    return list(dict.fromkeys(lines))


def _strings(given: object) -> list[str]:
    assert isinstance(given, list)
    return [str(line) for line in given]


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("extras", nargs="*")
    options.add_argument("--torch", default="")
    given = options.parse_args()
    for pin in pins(tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"], given.extras):
        print(f"torch=={given.torch}" if given.torch and pin.startswith("torch==") else pin)  # noqa: T201
