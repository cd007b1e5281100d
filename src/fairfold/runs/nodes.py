"""Who took part in a run over a network, and what became of every round: ``nodes.jsonl``, a line per event.

Lines are appended, each with a checksum of itself, so that a round costs what its own devices do, however many others
are known. What is told of a device is the sum of its events. A line that a kill cut short is no line.
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairfold import files
from fairfold.errors import InvalidSettings
from fairfold.sealed import SENSELESS, Damaged, content_of, line_in, reading, sealed_line, table_in

NODES = "nodes.jsonl"
JOINED, LEFT_OUT, ROUND, QUALITY, PUSHED = "joined", "left out", "round", "quality", "pushed"
"""Events: a node takes part, or does not; a round, empty ones included; how well the model serves; the last model."""

OF_ROUNDS = (ROUND, QUALITY, PUSHED)
"""Events of a round, which are no longer so where a run goes on from before it."""

Event = dict[str, Any]


def line_of(event: Event) -> bytes:
    """An event with its checksum."""
    return sealed_line(json.dumps(event, ensure_ascii=True, separators=(",", ":"))).encode()


def append(folder: Path, events: Iterable[Event]) -> None:
    """Write events down."""
    lines = b"".join(line_of(event) for event in events)
    with files.saying(folder / NODES), (folder / NODES).open("ab") as file:
        file.write(lines)


def whole_events(folder: Path, round_number: int) -> tuple[list[Event], list[str]]:
    """What is known where a run goes on after a round, and what is wrong with lines that are dropped.

    Nothing but who is asked again depends on it, so damage is no reason not to go on. Of rounds that come again only
    those stay that did not count.
    """
    path = folder / NODES
    kept, problems = list[Event](), list[str]()
    for number, line in enumerate(_content(path).split(b"\n"), start=1):
        try:
            event = _event(line)
            if event["event"] not in OF_ROUNDS or event["round"] <= round_number or not event.get("counted", True):
                kept.append(event)
        except SENSELESS as problem:
            problems += [f"{path}, line {number}: {problem}"] if line else []
    return kept, problems


def begin(folder: Path, events: list[Event]) -> None:
    """Go on after some events: what else is there is of no run any more."""
    content = b"".join(map(line_of, events))
    if _content(folder / NODES) != content:
        files.write_atomically(folder / NODES, content)


def _content(path: Path) -> bytes:
    with _reading(path):
        return content_of(path) if path.exists() else b""


def _reading(path: Path) -> contextlib.AbstractContextManager[None]:
    remedy = "Restore it, or let the run write it anew with --resume."
    return reading(path, InvalidSettings, "what the run wrote", remedy)


def read_events(folder: Path) -> list[Event]:
    """All events of a run, in their order; none where it is no run over a network."""
    path = folder / NODES
    *lines, _ = _content(path).split(b"\n")
    return [event_of(line, path) for line in lines]


def event_of(line: bytes, path: Path) -> Event:
    """An event from its line in a file."""
    with _reading(path):
        return _event(line)


def _event(line: bytes) -> Event:
    text = line_in(line)
    if text is None:
        raise Damaged("a line that is not what was written")
    event = table_in(text)
    if event.get("event") not in (JOINED, LEFT_OUT, *OF_ROUNDS):
        raise Damaged("no event")
    return event


def who_took_part(events: list[Event]) -> tuple[list[Event], dict[int, str]]:
    """The devices of a run with the sum of what they did, and why others, or these at times, were left out."""
    nodes, left_out, held = dict[int, Event](), dict[int, str](), dict[str, int]()
    for event in events:
        kind = event["event"]
        if kind == JOINED:
            before = nodes.get(event["node"], _NOTHING)
            nodes[event["node"]] = before | {key: event[key] for key in ("node", "name", "capacity", "size", "number")}
            left_out.pop(event["node"], None)
        elif kind == LEFT_OUT:
            left_out[event["node"]] = event["reason"]
        elif kind == ROUND:
            held |= event["held"]
            for key, part in (("bytes_down", event["down"]), ("bytes_up", event["up"])):
                for node, size in part.items():
                    _of(nodes, node)[key] += size
            for node in event["used"]:
                _of(nodes, str(node))["rounds"] += 1
        elif kind == QUALITY:
            for node, quality in event["nodes"].items():
                found = _of(nodes, node)
                found["first_quality"] = found["first_quality"] or quality
                found["last_quality"] = quality
    for node in nodes.values():
        node["bytes_held"] = held.get(node["size"], 0)
    return list(nodes.values()), left_out


_NOTHING: Event = {
    "node": 0, "name": "", "capacity": "", "size": "", "number": -1, "rounds": 0, "bytes_down": 0, "bytes_up": 0,
    "first_quality": None, "last_quality": None,
}  # fmt: skip


def _of(nodes: dict[int, Event], node: str) -> Event:
    return nodes.setdefault(int(node), _NOTHING | {"node": int(node)})
