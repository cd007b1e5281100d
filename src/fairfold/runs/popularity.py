"""Where the order of the catalogue came from in a run, and what that cost: as plain values, and in words."""

from collections.abc import Mapping
from typing import Any

from fairfold.runs.units import human_bytes
from fairfold.settings import Settings
from fairfold.simulate.result import Result


def facts_of(result: Result) -> dict[str, Any]:
    """For ``result.json``."""
    counted, source = result.counted, result.settings.subspace.effective().get("popularity")
    if counted is None:
        return {"source": source}
    return {
        "source": source,
        "asked": counted.asked,
        "devices": counted.devices,
        "leading": len(counted.leading),
        "bytes_down": counted.bytes_down,
        "bytes_up": counted.bytes_up,
    }


def words_for(settings: Settings, facts: Mapping[str, Any]) -> str | None:
    """For a person; nothing where the order is the catalogue's own, or there is no popularity."""
    if facts.get("source") == "none" and not settings.model.reads_images:
        return "Popularity: none, so items are hashed and none owns its place."
    if "devices" not in facts:
        return None
    down, up = (human_bytes(facts[key] // facts["asked"]) for key in ("bytes_down", "bytes_up"))
    return (
        f"Popularity: counted once by {facts['devices']} of {facts['asked']} devices, {down} down and {up} up each "
        f"(in the first round's bytes); {facts['leading']:,} items lead."
    )
