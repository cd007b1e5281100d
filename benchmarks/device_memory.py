"""Memory, processor time, bytes and disk of devices over TLS: ``python -m benchmarks.device_memory [CASE ...]``.

Each fleet is real: a server, and nodes started by ``fairfold node start``. PSS is of the first reading after a node has
connected, before it has replied; the peak is VmHWM, as the node's status file has it; processor time counts from the
start of the command, and bytes are those of vectors and files by the server's record, per device and round. All go to
``benchmarks/results/device.csv``, the most of the nodes each.
"""

import csv
import json
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from deploy.device_wheel import files
from fairfold.config import Settings, read_settings
from fairfold.config.files import load_settings
from fairfold.flower.fleet.local_fleet import LocalFleet, make_local_fleet

DATA = {"name": "synthetic", "users": 12, "items": 8_000, "interactions_per_user": 60}
MEGABYTE = 10**6
RESULTS = Path(__file__).with_name("results") / "device.csv"
BESIDE = ("cryptography", "cffi", "pycparser", "tomli_w")  # packages that pip installs beside the small wheel


def cases() -> dict[str, Settings]:
    """Settings by what devices do."""
    all_items = {"kind": "co_occurrence", "min_item_users": 0, "support": 1}  # though few of them have many users here
    base = {"data": DATA, "run": {"rounds": 4, "evaluate_every": 4}, "algorithm": all_items}
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
            one["start_cpu"] = status["start_cpu"]
            one["round_cpu"] = (status["cpu"] - one["start_cpu"]) / settings.run.rounds
        rounds = list(csv.DictReader((fleet.run_folder / "metrics.csv").read_text().splitlines()))
        replies = sum(int(row["clients"]) for row in rounds)
        for way in ("down", "up"):
            found[0][f"bytes_{way}"] = sum(int(row[f"bytes_{way}"]) for row in rounds) / replies
        return found


def disk() -> int:
    """Bytes of what a device installs beside Python, without compiled files: the small wheel and what it requires."""
    listed = [path.locate() for name in BESIDE for path in metadata.files(name) or ()]
    packages = sum(Path(str(path)).stat().st_size for path in listed if not str(path).endswith(".pyc"))
    return packages + sum(len(content) for content in files().values())


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
    """Print a table, and write it."""
    chosen, rows = sys.argv[1:], list[dict[str, Any]]()
    for name, settings in cases().items():
        if chosen and name not in chosen:
            continue
        nodes = measure(settings)
        most = {key: max(one.get(key, 0) for one in nodes) for key in ("idle", "peak", "start_cpu", "round_cpu")}
        total = {key: sum(one.get(key, 0) for one in nodes) for key in ("replies", "failures", "workers")}
        rows.append({
            "devices": name,
            "idle PSS, MB": f"{most['idle'] / MEGABYTE:.1f}", "peak, MB": f"{most['peak'] / MEGABYTE:.1f}",
            "CPU to connected, s": f"{most['start_cpu']:.2f}", "CPU a round, s": f"{most['round_cpu']:.2f}",
            "received a round, kB": f"{nodes[0]['bytes_down'] / 1000:.1f}",
            "sent a round, kB": f"{nodes[0]['bytes_up'] / 1000:.1f}",
            "disk, MB": f"{disk() / MEGABYTE:.1f}", **total,
        })  # fmt: skip
        print(", ".join(f"{key}: {value}" for key, value in rows[-1].items()), flush=True)
    if not chosen:
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
