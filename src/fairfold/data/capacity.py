"""Whether something fits into this machine's memory, asked before any of it is taken."""

import os

from fairfold.errors import InvalidSettings


def memory() -> int | None:
    """Bytes of memory this machine has, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_memory(what: str, needed: int) -> None:
    """Refuse what would need more than there is; a little less is left to the system, which knows better."""
    there = memory()
    if there is not None and needed > there:
        raise InvalidSettings(
            f"{what} of about {needed / 1e9:,.1f} GB",
            f"at most the {there / 1e9:,.1f} GB of memory of this machine",
            "Ask for fewer users, items, factors or interactions.",
        )
