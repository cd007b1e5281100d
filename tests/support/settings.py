"""Settings for tests in few words: ``make_settings(algorithm="gradient", factors=8, rounds=3)``."""

from typing import Any

from fairfold.config import Settings, merge_tables, read_settings
from fairfold.config.settings import TABLES, TAGS, kinds_of


def make_tables(**keys: Any) -> dict[str, dict[str, Any]]:
    """Settings as tables. A table is given as keys or by its kind (data: by its name), a key without its table."""
    homes = {key: table for table in TABLES for kind in kinds_of(table).values() for key in kind.model_fields}
    found: dict[str, dict[str, Any]] = {}
    for table in TABLES:
        given = keys.pop(table, {})
        tag = "name" if table == "data" else TAGS.get(table, "")
        found[table] = dict(given) if isinstance(given, dict) else {tag: given}
    for key, value in keys.items():
        found[homes[key]][key] = value
    return {table: values for table, values in found.items() if values}


def make_settings(base: Settings | None = None, **keys: Any) -> Settings:
    """Settings with some keys, over others if given."""
    return read_settings(merge_tables({} if base is None else base.plain(), make_tables(**keys)))
