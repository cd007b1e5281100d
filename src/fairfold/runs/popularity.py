"""Where the order of the catalogue came from in a run, and what that cost: as plain values, and in words."""

from collections.abc import Mapping
from typing import Any

from fairfold.federation.settings import Settings
from fairfold.runs.units import human_bytes
from fairfold.simulate.result import Result


def facts_of(result: Result) -> dict[str, Any]:
    """For ``result.json``."""
    counted = result.counted
    if counted is None:
        return {"source": result.settings.popularity}
    return {
        "source": result.settings.popularity,
        "asked": counted.asked,
        "devices": counted.devices,
        "leading": len(counted.leading),
        "bytes_down": counted.bytes_down,
        "bytes_up": counted.bytes_up,
    }


def words_for(settings: Settings, facts: Mapping[str, Any]) -> str | None:
    """For a person; nothing where the order is the catalogue's own, or there is no popularity."""
    if settings.popularity == "none" and not settings.reads_images:
        return f"Popularity: none, so items are hashed (mapping {settings.mapping!r}) and none owns its place."
    if settings.popularity != "counts" or "devices" not in facts:
        return None
    down, up = (human_bytes(facts[key] // facts["asked"]) for key in ("bytes_down", "bytes_up"))
    return (
        f"Popularity: counted once by {facts['devices']} of {facts['asked']} devices, {down} down and {up} up each "
        f"(in the first round's bytes); {facts['leading']:,} items lead."
    )
