"""The hardware a cell ran on, by model."""

import os
import platform
from functools import cache
from pathlib import Path

ZEN = (
    (23, range(0x30), "Zen"), (23, range(0x30, 0x100), "Zen 2"), (25, range(0x10), "Zen 3"),
    (25, range(0x10, 0x20), "Zen 4"), (25, range(0x20, 0x60), "Zen 3"), (25, range(0x60, 0x100), "Zen 4"),
    (26, range(0x100), "Zen 5"),
)  # fmt: skip
"""AMD's generations by family and model number: virtual machines often say no more than "AMD EPYC"."""


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
