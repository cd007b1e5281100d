"""Format bytes, durations and differences for people, and describe where a run's order of items comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fairfold.config import Settings
    from fairfold.federation.evaluation import Result


def human_bytes(count: float) -> str:
    """Format bytes: 40 MB, 1.61 GB."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 999.5 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """Format a duration: 0.35 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_difference(difference: Sequence[float]) -> str:
    """Format a mean over users and its standard error."""
    return f"{difference[0]:+.4f} ± {difference[1]:.4f}"


def popularity_facts(result: Result) -> dict[str, Any]:
    """Source of the items' popularity, and the cost of counting it, for ``result.json``."""
    facts: dict[str, Any] = {"source": result.settings.subspace.effective().get("popularity")}
    counts = result.counted
    if counts is not None:
        facts |= {"leading": len(counts.leading), "asked": counts.asked, "devices": counts.devices}
        facts |= {"bytes_down": counts.bytes_down, "bytes_up": counts.bytes_up}
    return facts


def describe_popularity(settings: Settings, facts: Mapping[str, Any]) -> str | None:
    """Describe the facts of :func:`popularity_facts`; None if the order is the catalog's own."""
    if facts.get("source") == "none" and not settings.model.reads_images:
        return "Popularity: none, so items are hashed and none owns its place."
    if "devices" not in facts:
        return None
    down, up = (human_bytes(facts[key] // facts["asked"]) for key in ("bytes_down", "bytes_up"))
    return (
        f"Popularity: counted once by {facts['devices']} of {facts['asked']} devices, {down} down and {up} up each "
        f"(in the first round's bytes); {facts['leading']:,} items lead."
    )
