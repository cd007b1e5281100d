"""Numbers as people say them."""


def human_bytes(count: float) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    for unit, label in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.{1 if count < 100 * unit else 0}f} {label}"
    return f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """A duration: 0.35 s, 12 s, 3 min 20 s, 2 h 5 min."""
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
