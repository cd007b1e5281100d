"""Memory of devices' processes over TLS: idle, and at the peak of rounds: ``python -m benchmarks.device_memory``.

Each fleet is real: a server, and nodes started by ``fairfold node start``. PSS is of the first reading after a node has
connected, before it has replied; the peak is VmHWM, as the node's status file has it.
"""

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fairfold.config import Settings, read_settings
from fairfold.config.files import load_settings
from fairfold.flower.fleet.local_fleet import LocalFleet, make_local_fleet

DATA = {"name": "synthetic", "users": 12, "items": 8_000, "interactions_per_user": 60}
MEGABYTE = 10**6


def cases() -> dict[str, Settings]:
    """Settings by what devices do."""
    base = {"data": DATA, "run": {"rounds": 4, "evaluate_every": 4}}
    secure = {"privacy": {"level": "secure", "min_cohort": 3}}
    paper = load_settings(None, {}, "paper").plain() | {"data": DATA, "run": {"rounds": 2, "evaluate_every": 2}}
    return {"plain": read_settings(base), "secure": read_settings(base | secure), "paper": read_settings(paper)}


def measure(settings: Settings, nodes: str = "1x,4x,16x") -> list[dict[str, Any]]:
    """Train a fleet; what each of its nodes held, in bytes, and how long it took to connect."""
    with tempfile.TemporaryDirectory() as folder:
        fleet, data = make_local_fleet(settings, nodes, Path(folder))
        fleet.prepare(data)
        found: list[dict[str, Any]] = [{} for _ in fleet.capacities]
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(fleet, found, done))
        watcher.start()
        try:
            fleet.run(lambda _text: None)
        finally:
            done.set()
            watcher.join()
        for number, one in enumerate(found):
            status = json.loads((fleet.node(number) / "status.json").read_text())
            one |= {"replies": status["replies"], "failures": status["failures"]}
            one["peak"] = max(one.get("peak", 0), status["last"]["peak"])
        return found


def _watch(fleet: LocalFleet, found: list[dict[str, Any]], done: threading.Event) -> None:
    while not done.is_set():
        for number, one in enumerate(found):
            try:
                status = json.loads((fleet.node(number) / "status.json").read_text())
                rollup = Path(f"/proc/{status['pid']}/smaps_rollup").read_text().splitlines()
            except (OSError, ValueError):
                continue
            if not status["replies"]:
                one["idle"] = 1024 * next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
            one["workers"] = one.get("workers", 0) + _children(status["pid"])
        time.sleep(0.2)


def _children(pid: int) -> int:
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def main() -> None:
    """Print a table."""
    print(f"{'devices':8} {'idle, PSS':>10} {'peak':>8} {'replies':>8} {'failures':>9} {'workers':>8}")
    chosen = sys.argv[1:]
    for name, settings in cases().items():
        if chosen and name not in chosen:
            continue
        nodes = measure(settings)
        idle, peak = (max(one.get(key, 0) for one in nodes) / MEGABYTE for key in ("idle", "peak"))
        replies, failures, workers = (
            sum(one.get(key, 0) for one in nodes) for key in ("replies", "failures", "workers")
        )
        print(f"{name:8} {idle:10.1f} {peak:8.1f} {replies:8} {failures:9} {workers:8}", flush=True)


if __name__ == "__main__":
    main()
