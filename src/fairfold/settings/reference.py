"""All keys, from the classes: ``python -m fairfold.settings.reference docs/settings.md`` keeps the head of the page."""

import inspect
import json
import re
import sys
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from fairfold.algorithms import ALGORITHMS
from fairfold.methods import METHODS
from fairfold.settings.base import Frozen
from fairfold.settings.pace import ClockSettings, PaceSettings
from fairfold.settings.parts import DATA, FaultSettings, FleetSettings, ModelSettings, NetworkSettings, RunSettings
from fairfold.settings.privacy import PRIVACY
from fairfold.settings.settings import TAGS

MARK = "<!-- Below: python -m fairfold.settings.reference docs/settings.md -->\n"
WORDS = {bool: "`true`, `false`", int: "a whole number", float: "a number", str: "text", NoneType: '`"none"`'}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """All tables, in Markdown."""
    tables: dict[str, Any] = {"data": DATA.values(), "model": [ModelSettings], "algorithm": ALGORITHMS}
    tables |= {"subspace": METHODS, "fleet": [FleetSettings], "fleet.faults": [FaultSettings]}
    tables |= {"fleet.network": [NetworkSettings], "fleet.pace": [PaceSettings], "fleet.clock": [ClockSettings]}
    tables["run"] = [RunSettings]
    tables["privacy"] = PRIVACY.values()
    parts, seen = list[str](), dict[str, str]()
    for table, kinds in tables.items():
        parts.append(f"## `[{table}]`")
        for kind in kinds:
            tag = TAGS[table] if len(kinds) > 1 else ""  # the key that says which others there are
            name = f"`{tag} = {_toml(kind.model_fields[tag].default)}`" if tag else ""
            keys, brought = _keys(kind, tag), getattr(kind, "DEFAULTS", {}).items()
            others = ", ".join(f"`{of}.{key} = {_toml(value)}`" for of, them in brought for key, value in them.items())
            parts += [f"### {name}"] if name else []
            parts.append(_said(inspect.cleandoc(kind.__doc__ or "").split("\n\nAttributes:")[0]))
            parts += [f"With it other tables have these defaults: {others}."] if others else []
            again = seen.setdefault(keys, name) != name and "|" in keys
            parts.append(f"Its keys are those of {seen[keys]}." if again else keys)
    return "\n\n".join(parts) + "\n"


def _keys(kind: type[Frozen], tag: str) -> str:
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for key, field in kind.model_fields.items():
        if key not in (tag, "faults", "network", "pace", "clock"):
            default = "needed" if field.is_required() else f"`{_toml(field.default)}`"
            other, values = kind.NEEDS.get(key, ("", ()))
            needs = f" Only with `{other}` at {' or '.join(f'`{_toml(value)}`' for value in values)}." if other else ""
            rows.append(f"| `{key}` | {default} | {_range(field)} | {_said(_meaning(kind, key))}{needs} |")
    return "\n".join(rows) if len(rows) > 2 else "It has no other keys."


def _toml(value: Any) -> str:
    return '"none"' if value is None else json.dumps(value)


def _range(field: Any) -> str:
    kinds = [field.annotation] if get_origin(field.annotation) in (None, Literal) else get_args(field.annotation)
    known = [WORDS.get(kind, "a list of numbers") for kind in kinds if get_origin(kind) is not Literal]
    named = [f"`{_toml(value)}`" for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    limits = [(sign, getattr(one, name, None)) for one in field.metadata for name, sign in SIGNS.items()]
    return ", ".join(named + known + [f"{sign} {at:g}" for sign, at in limits if at is not None and at < 2**31])


def _meaning(kind: type[Frozen], key: str) -> str:
    texts = (inspect.cleandoc(of.__dict__.get("__doc__") or "") for of in kind.__mro__)
    found = (re.search(rf"^    {key}: (.*?)(?=^    \w+: |\Z)", text, re.MULTILINE | re.DOTALL) for text in texts)
    return next((one[1] for one in found if one), "")


def _said(text: str) -> str:
    text = re.sub(r"docs/(\w+(?:/\w+)*\.md)", r"[\1](\1)", " ".join(text.split())).replace("|", "\\|")
    return re.sub(r"``(.*?)``", r"`\1`", re.sub(r":\w+:`~?(.*?)`", r"`\1`", text)).replace("None", '`"none"`')


if __name__ == "__main__":
    head = Path(sys.argv[1]).read_text(encoding="utf-8").partition(MARK)[0]
    Path(sys.argv[1]).write_text(f"{head}{MARK}\n{page()}", encoding="utf-8")
