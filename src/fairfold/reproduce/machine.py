"""The hardware a cell ran on, by model, and the software."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

from fairfold.version import __version__

ZEN = (
    (23, range(0x30), "Zen"), (23, range(0x30, 0x100), "Zen 2"), (25, range(0x10), "Zen 3"),
    (25, range(0x10, 0x20), "Zen 4"), (25, range(0x20, 0x60), "Zen 3"), (25, range(0x60, 0x100), "Zen 4"),
    (26, range(0x100), "Zen 5"),
)  # fmt: skip
"""AMD's generations by family and model number: virtual machines often say no more than "AMD EPYC"."""


CHANGED = "-changed"
"""Follows the commit where the code differs from it."""


@cache
def machine(*, gpu: bool = False) -> str:
    """E.g. ``2-core Zen 4 (AMD EPYC)``, with the GPU in front of it where that was used."""
    import torch

    name, family, model = _processor(Path("/proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    named = (word for of, models, word in ZEN if "AMD" in name and of == family and model in models)
    generation = next(named, "")
    processor = f"{cores}-core {generation} ({name})" if generation else f"{cores}-core {name}"
    return f"{torch.cuda.get_device_name()}, {processor}" if gpu else processor


def _processor(path: Path) -> tuple[str, int, int]:
    facts: dict[str, str] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    numbers = [int(facts.get(key, "-1") or -1) for key in ("cpu family", "model")]
    return facts.get("model name") or platform.processor() or platform.machine(), numbers[0], numbers[1]


@cache
def software() -> dict[str, str | None]:
    """Versions of fairfold and torch, and the commit where the package is in a checkout of its own."""
    import torch

    return {"fairfold": __version__, "torch": str(torch.__version__), "commit": commit(Path(__file__).parents[3])}


def commit(checkout: Path) -> str | None:
    """The commit that is checked out, with :data:`CHANGED` where the code differs from it; None where there is none."""
    if not (checkout / ".git").exists():  # installed: a repository further up is somebody else's
        return None
    git = ["git", "-C", str(checkout)]
    try:
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        same = subprocess.run(
            [*git, "diff", "--quiet", "HEAD", "--", "src", "native"], capture_output=True, check=False
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found if same.returncode == 0 else f"{found}{CHANGED}"
