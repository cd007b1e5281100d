"""All keys of the settings as Markdown: ``python docs/settings_page.py`` rewrites the end of docs/settings.md."""

import inspect
import json
import re
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from fairfold.algorithms import ALGORITHMS
from fairfold.config.fleet import SUBTABLES, FleetSettings
from fairfold.config.settings import TABLES, TAGS, UNIONS, kinds_of
from fairfold.config.tables import FrozenSettings
from fairfold.federation.algorithm import Algorithm
from fairfold.methods import METHODS

PAGE = Path(__file__).parent / "settings.md"
MARK = "<!-- Below: python docs/settings_page.py -->\n"
WORDS = {bool: "`true`, `false`", int: "a whole number", float: "a number", str: "text", NoneType: '`"none"`'}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """All tables, in Markdown."""
    parts: list[str] = []
    seen: dict[str, str] = {}
    for table, kinds in _tables().items():
        parts.append(f"## `[{table}]`")
        for kind in kinds:
            tag = TAGS[table] if table in UNIONS else ""
            name = f"`{tag} = {_toml(kind.model_fields[tag].default)}`" if tag else ""
            rows = _keys(kind, tag)
            implied = kind.DEFAULTS if issubclass(kind, Algorithm) else {}
            others = ", ".join(
                f"`{of}.{key} = {_toml(value)}`" for of, them in implied.items() for key, value in them.items()
            )
            parts += [f"### {name}"] if name else []
            parts.append(_markdown(inspect.cleandoc(kind.__doc__ or "").split("\n\nAttributes:")[0]))
            parts += [f"With it other tables have these defaults: {others}."] if others else []
            again = seen.setdefault(rows, name) != name and "|" in rows
            parts.append(f"Its keys are those of {seen[rows]}." if again else rows)
    return "\n\n".join(parts) + "\n"


def _tables() -> dict[str, list[type[FrozenSettings]]]:
    """The built-in classes of every table and subtable."""
    tables: dict[str, list[type[FrozenSettings]]] = {}
    for table in TABLES:
        tables[table] = list(kinds_of(table).values())
        if table == "fleet":
            tables |= {f"fleet.{name}": [type(FleetSettings.model_fields[name].default)] for name in SUBTABLES}
    return tables | {"algorithm": list(ALGORITHMS), "subspace": list(METHODS)}


def _keys(kind: type[FrozenSettings], tag: str) -> str:
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for key, field in kind.model_fields.items():
        if key not in (tag, *SUBTABLES):
            default = "needed" if field.is_required() else f"`{_toml(field.default)}`"
            other, values = kind.ACTIVE_WHEN.get(key, ("", ()))
            needs = f" Only with `{other}` at {' or '.join(f'`{_toml(value)}`' for value in values)}." if other else ""
            rows.append(f"| `{key}` | {default} | {_range(field)} | {_markdown(_meaning(kind, key))}{needs} |")
    return "\n".join(rows) if len(rows) > 2 else "It has no other keys."


def _toml(value: Any) -> str:
    return '"none"' if value is None else json.dumps(value)


def _range(field: Any) -> str:
    kinds = [field.annotation] if get_origin(field.annotation) in (None, Literal) else get_args(field.annotation)
    known = [WORDS.get(kind, "a list of numbers") for kind in kinds if get_origin(kind) is not Literal]
    named = [f"`{_toml(value)}`" for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    limits = [(sign, getattr(one, name, None)) for one in field.metadata for name, sign in SIGNS.items()]
    return ", ".join(named + known + [f"{sign} {at:g}" for sign, at in limits if at is not None and at < 2**31])


def _meaning(kind: type[FrozenSettings], key: str) -> str:
    texts = (inspect.cleandoc(of.__dict__.get("__doc__") or "") for of in kind.__mro__)
    found = (re.search(rf"^    {key}: (.*?)(?=^    \w+: |\Z)", text, re.MULTILINE | re.DOTALL) for text in texts)
    return next((one[1] for one in found if one), "")


def _markdown(text: str) -> str:
    text = re.sub(r"docs/(\w+(?:/\w+)*\.md)", r"[\1](\1)", " ".join(text.split())).replace("|", "\\|")
    return re.sub(r"``(.*?)``", r"`\1`", re.sub(r":\w+:`~?(.*?)`", r"`\1`", text)).replace("None", '`"none"`')


if __name__ == "__main__":
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(f"{head}{MARK}\n{page()}", encoding="utf-8")
