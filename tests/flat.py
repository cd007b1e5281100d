"""Settings for tests, from keys without their tables: ``flat(factors=8, rounds=3)``."""

from typing import Any

from fairfold.settings import Settings, merged, nested, read_settings
from fairfold.settings.settings import places

NAMES = {"data": "data.name", "model": "model.kind", "method": "subspace.method"}


def tables(**flat: Any) -> dict[str, Any]:
    """Keys as tables; ``solver``, ``method`` and ``model`` are their kinds, and keys without effect are left out."""
    keys = dict(flat)
    if keys.get("model") == "mf-ratings":
        keys |= {"model": "mf", "solver": "ratings"}
    if keys.get("method") == "central":
        del keys["method"]
        keys["solver"] = "central"
    world = {f"data.{key}": value for key, value in dict(keys.pop("world", {})).items()}
    images = {f"data.{key}": value for key, value in dict(keys.pop("images", {})).items()}
    where = places() | NAMES
    return nested({where[key]: value for key, value in keys.items()} | world | images)


def flat(base: Settings | None = None, **keys: Any) -> Settings:
    """Settings with some keys, over others if given."""
    return read_settings(merged({} if base is None else base.plain(), tables(**keys)))
