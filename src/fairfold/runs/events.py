"""Events of a run over a network, ``nodes.jsonl``: who took part, and what became of every round.

Lines are appended, each with its checksum, so that the cost of a round does not depend on the number of nodes known.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairfold import atomic_io, checksums
from fairfold.runs.folder import run_read_errors

NODES = "nodes.jsonl"
# Events: a node takes part, or is left out; a round, failed ones included; its quality; the final model pushed.
JOINED, LEFT_OUT, ROUND, QUALITY, PUSHED = "joined", "left out", "round", "quality", "pushed"
ROUND_EVENTS = (ROUND, QUALITY, PUSHED)  # events of a round, which are dropped if a run resumes before it
Event = dict[str, Any]
_NEW_NODE: Event = {
    "node": 0, "name": "", "capacity": "", "size": "", "number": -1, "rounds": 0, "bytes_down": 0, "bytes_up": 0,
    "first_quality": None, "last_quality": None,
}  # fmt: skip


def _format_line(event: Event) -> bytes:
    return checksums.line_with_checksum(json.dumps(event, ensure_ascii=True, separators=(",", ":"))).encode()


def append(folder: Path, events: Iterable[Event]) -> None:
    """Append events to a run's ``nodes.jsonl``."""
    lines = b"".join(map(_format_line, events))
    with atomic_io.write_errors(folder / NODES), (folder / NODES).open("ab") as file:
        file.write(lines)


def events_until(folder: Path, round_number: int) -> tuple[list[Event], list[str]]:
    """Read the events up to a round, of later ones, which come again, the failed; and what is wrong with lines.

    Only the choice of nodes depends on them, so damage does not stop a run.
    """
    path = folder / NODES
    events, problems = list[Event](), list[str]()
    for number, line in enumerate(_read_content(path).split(b"\n"), start=1):
        try:
            event = _parse_line(line)
            if event["event"] not in ROUND_EVENTS or event["round"] <= round_number or not event.get("counted", True):
                events.append(event)
        except checksums.PARSE_ERRORS as problem:
            problems += [f"{path}, line {number}: {problem}"] if line else []
    return events, problems


def replace_events(folder: Path, events: list[Event]) -> None:
    """Overwrite the file of a run's events with these."""
    content = b"".join(map(_format_line, events))
    if _read_content(folder / NODES) != content:
        atomic_io.write_atomically(folder / NODES, content)


def _read_content(path: Path) -> bytes:
    with run_read_errors(path):
        return checksums.read_limited(path) if path.exists() else b""


def read_events(folder: Path) -> list[Event]:
    """Read all events of a run; none if it is no run over a network."""
    path = folder / NODES
    *lines, _ = _read_content(path).split(b"\n")
    return [parse_event(line, path) for line in lines]


def parse_event(line: bytes, path: Path) -> Event:
    """Parse a line of the file; ``path`` is for the error."""
    with run_read_errors(path):
        return _parse_line(line)


def _parse_line(line: bytes) -> Event:
    text = checksums.parse_line(line)
    if text is None:
        raise checksums.Damaged("a line that is not what was written")
    event = checksums.parse_json_object(text)
    if event.get("event") not in (JOINED, LEFT_OUT, *ROUND_EVENTS):
        raise checksums.Damaged("no event")
    return event


def participants(events: list[Event]) -> tuple[list[Event], dict[int, str]]:
    """Totals of each node that took part, and why nodes were left out."""
    nodes, left_out, held = dict[int, Event](), dict[int, str](), dict[str, int]()
    for event in events:
        kind = event["event"]
        if kind == JOINED:
            before = nodes.get(event["node"], _NEW_NODE)
            nodes[event["node"]] = before | {key: event[key] for key in ("node", "name", "capacity", "size", "number")}
            left_out.pop(event["node"], None)
        elif kind == LEFT_OUT:
            left_out[event["node"]] = event["reason"]
        elif kind == ROUND:
            held |= event["held"]
            for key, part in (("bytes_down", event["down"]), ("bytes_up", event["up"])):
                for node, size in part.items():
                    _totals_of(nodes, node)[key] += size
            for node in event["used"]:
                _totals_of(nodes, str(node))["rounds"] += 1
        elif kind == QUALITY:
            for node, quality in event["nodes"].items():
                totals = _totals_of(nodes, node)
                totals["first_quality"] = totals["first_quality"] or quality
                totals["last_quality"] = quality
    for node in nodes.values():
        node["bytes_held"] = held.get(node["size"], 0)
    return list(nodes.values()), left_out


def _totals_of(nodes: dict[int, Event], node: str) -> Event:
    return nodes.setdefault(int(node), _NEW_NODE | {"node": int(node)})
