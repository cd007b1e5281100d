"""The status of a run by its folder, finished or not, and its page: an ASGI application.

A damaged file is refused by its reader, which the status reports. Events are appended, so only new ones are read.
"""

import contextlib
import hmac
import json
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import parse_qs

from fairfold.config import Settings
from fairfold.errors import FairfoldError
from fairfold.federation.plan import privacy_notes, privacy_report
from fairfold.runs import folder as files
from fairfold.runs.events import JOINED, LEFT_OUT, NODES, PUSHED, QUALITY, ROUND, Event, parse_event
from fairfold.runs.folder import CHECK, LOG, METRICS, RESULT, ROUND_COLUMNS, SETTINGS

MAX_ROUNDS, MAX_LINES, MAX_NODES = 600, 40, 50  # of a curve, of the log, of a list of nodes
QUIET_SECONDS = 120.0  # without a change, beside three rounds, after which an unfinished run is called quiet
SERVER_SECONDS = 10.0  # after which a server is requested again for its nodes

Status = dict[str, Any]
Labels = Mapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
STATIC = {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d+)?")  # a name or an address, and a port
CSP = b"default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})  # in labels of Prometheus
HEADERS = [(b"content-security-policy", CSP), (b"x-content-type-options", b"nosniff")]
HEADERS += [(b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-store")]


class RunMonitor:
    """The status of a run, read again and again; with ``node_states``, of a server whose run may not have begun."""

    def __init__(self, folder: Path, node_states: Callable[[], dict[str, int]] | None = None) -> None:
        self.folder = folder
        path = folder.absolute()
        self.name = path.name if path.name != "run" else f"{path.parent.name}/run"  # a server's by its folder
        self._node_states, self._requested = node_states, -SERVER_SECONDS
        self._server: Status = {"devices": {}, "problem": ""}
        self._events, self._bytes_read = EventTotals(), 0
        self._cache: dict[str, tuple[float, Any]] = {}

    def status(self) -> Status:
        """All values now; where a file is damaged, the problem in their place."""
        if self._node_states is not None and time.monotonic() - self._requested >= SERVER_SECONDS:
            self._requested = time.monotonic()
            try:
                self._server = {"devices": self._node_states(), "problem": ""}
            except FairfoldError as error:  # it does not respond
                self._server = {"devices": {}, "problem": str(error)}
        begun = self._node_states is None or (self.folder / SETTINGS).exists()
        try:
            status = self._run_status() if begun else {"state": "no run yet", "now": time.time()}
        except FairfoldError as error:
            status = {"state": "damaged", "problem": str(error), "now": time.time()}
        return {"name": self.name} | self._server | status

    def _run_status(self) -> Status:
        settings: Settings = self._read_if_changed(SETTINGS, lambda: files.read_run_settings(self.folder))
        result: Status = self._read_if_changed(RESULT, lambda: files.read_result(self.folder))
        rows: list[dict[str, str]] = self._read_if_changed(METRICS, lambda: files.read_metrics(self.folder, settings))
        self._read_events()
        changed = max(self._modified_at(name) for name in (SETTINGS, METRICS, NODES, LOG, RESULT))
        rounds = [_parse_round(row) for row in rows]
        now = time.time()
        seconds = median(row["seconds"] for row in rounds) if rounds else 0.0
        state = "finished" if result else "running" if now - changed < QUIET_SECONDS + 3 * seconds else "quiet"
        privacy = privacy_report(settings)
        return {
            "state": state, "now": now, "changed": changed,
            "method": settings.subspace.method, "algorithm": settings.algorithm.kind,
            "capacities": settings.fleet.capacities, "metric": settings.metric,
            "smaller_is_better": settings.smaller_is_better, "num_rounds": settings.run.rounds,
            "done": rounds[-1]["round"] if rounds else 0, "rounds": _thin_out(rounds),
            "bytes": {key: sum(row[key] for row in rounds) for key in ("bytes_down", "bytes_up")},
            "updates": sum(row["clients"] for row in rounds), "seconds": seconds,
            "stopped": result.get("stopped", result.get("refused", "")), "notes": result.get("notes", []),
            "privacy": result.get("privacy") or privacy, "privacy_notes": privacy_notes(privacy),
            "log": self._log_tail(), **self._events.values(),
        }  # fmt: skip

    def _modified_at(self, name: str) -> float:
        with contextlib.suppress(OSError):
            return (self.folder / name).stat().st_mtime
        return 0.0

    def _read_if_changed(self, name: str, read: Callable[[], Any]) -> Any:
        """The content of a file, read again when it has changed."""
        changed = self._modified_at(name)
        if name not in self._cache or self._cache[name][0] != changed:
            self._cache[name] = changed, read()
        return self._cache[name][1]

    def _read_events(self) -> None:
        path = self.folder / NODES
        size = path.stat().st_size if path.exists() else 0
        if size < self._bytes_read:  # a run that was resumed from an earlier round
            self._events, self._bytes_read = EventTotals(), 0
        if size == self._bytes_read:
            return
        with path.open("rb") as file:
            file.seek(self._bytes_read)
            content = file.read(size - self._bytes_read)
        end = content.rfind(b"\n") + 1
        for line in content[:end].splitlines():
            self._events.add(parse_event(line, path))
        self._bytes_read += end

    def _log_tail(self) -> list[str]:
        with contextlib.suppress(OSError), (self.folder / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - (1 << 14)))
            return file.read().decode(errors="replace").splitlines()[-MAX_LINES:]
        return []


class EventTotals:
    """Totals of a run's events."""

    def __init__(self) -> None:
        self.sizes, self.refused = dict[int, str](), dict[int, str]()
        self.reasons, self.phases = Counter[str](), Counter[str]()
        self.last_phases = dict[str, float]()
        self.left_out, self.failures = list[Status](), list[Status]()
        self.num_failed = self.num_pushed = self.num_tasks = 0
        self.participants, self.last_used = set[int](), set[int]()

    def add(self, event: Event) -> None:
        """Count one more event."""
        kind = event["event"]
        if kind == JOINED:
            self.sizes[event["node"]] = event["size"]
            self.refused.pop(event["node"], None)
        elif kind == LEFT_OUT:
            self.refused[event["node"]] = event["reason"]
            self.sizes.pop(event["node"], None)
        elif kind == ROUND:
            number, reasons = event["round"], event["left_out"]
            self.num_tasks += event["asked"]
            self.reasons.update(reasons.values())
            self.phases.update(event["phases"])
            self.last_phases, self.last_used = event["phases"], set(event["used"])
            self.participants |= self.last_used
            self.left_out += [{"round": number, "node": node, "why": why} for node, why in reasons.items()]
            del self.left_out[:-MAX_NODES]
            if not event["counted"]:
                self.num_failed += 1
                common = Counter(reasons.values()).most_common(3)
                why = ", ".join(f"{count} × {reason}" for reason, count in common) or "no participating node connected"
                self.failures = [*self.failures, {"round": number, "why": why}][-MAX_NODES:]
        elif kind == PUSHED:
            self.num_pushed = len(event["nodes"])
        elif kind != QUALITY:
            raise ValueError(kind)

    def values(self) -> Status:
        """The totals of all events as plain values, for JSON."""
        return {
            "nodes": {
                "known": len(self.sizes), "replied": len(self.participants), "last_round": len(self.last_used),
                "refused": len(self.refused), "with_model": self.num_pushed,
                "by_size": dict(Counter(self.sizes.values())),
            },
            "tasks": self.num_tasks, "reasons": dict(self.reasons), "phases": dict(self.phases),
            "last_phases": self.last_phases, "failed_rounds": self.num_failed, "failures": self.failures[::-1],
            "left_out": self.left_out[::-1],
            "refused": [{"node": str(node), "why": why} for node, why in list(self.refused.items())[-MAX_NODES:]],
        }  # fmt: skip


def _parse_round(row: dict[str, str]) -> Status:
    numbers = {key: int(row[key]) for key in ("round", "clients", "bytes_down", "bytes_up")}
    sizes = {key: float(value) for key, value in row.items() if key not in (*ROUND_COLUMNS, CHECK) and value}
    quality = float(row["server"]) if row["server"] else None
    return numbers | {"seconds": float(row["seconds"]), "quality": quality, "sizes": sizes}


def _thin_out(rounds: list[Status]) -> list[Status]:
    """Thin out very many rounds to the evaluated ones, some others, and the last."""
    if len(rounds) <= MAX_ROUNDS:
        return rounds
    evaluated = [row for row in rounds if row["quality"] is not None]
    step = -(-len(rounds) // MAX_ROUNDS)
    chosen = {row["round"]: row for row in [*rounds[::step], *evaluated[-MAX_ROUNDS:], rounds[-1]]}
    return [chosen[number] for number in sorted(chosen)]


def without_nan(values: Any) -> Any:
    """A copy of plain values with None for NaN and infinity, which JSON does not have."""
    if isinstance(values, dict):
        return {str(key): without_nan(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [without_nan(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def to_prometheus(status: Status) -> str:
    """A status in Prometheus' text format; of a damaged run only that it cannot be read."""
    lines = list[str]()
    for name, kind, description, samples in _prometheus_metrics(status):
        lines += [f"# HELP fairfold_{name} {description}", f"# TYPE fairfold_{name} {kind}"]
        lines += [f"fairfold_{name}{_format_labels(labels)} {float(value):.10g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _prometheus_metrics(status: Status) -> Iterator[tuple[str, str, str, Sequence[tuple[Labels, float]]]]:
    def labelled(label: str, values: Mapping[str, float]) -> list[tuple[Labels, float]]:
        return [({label: key}, value) for key, value in sorted(values.items())]

    yield "readable", "gauge", "Whether the folder of the run can be read.", [({}, status["state"] != "damaged")]
    if status["devices"]:
        yield "devices", "gauge", "Devices of the server, by their state.", labelled("state", status["devices"])
    if "changed" not in status:  # nothing can be read, or there is no run yet
        return
    yield "finished", "gauge", "Whether the run is finished.", [({}, status["state"] == "finished")]
    yield "last_change_timestamp_seconds", "gauge", "When the run last wrote something.", [({}, status["changed"])]
    yield "rounds_configured", "gauge", "Rounds of the settings.", [({}, status["num_rounds"])]
    yield "rounds_done", "gauge", "Rounds that are done.", [({}, status["done"])]
    yield "failed_rounds_total", "counter", "Rounds that did not count.", [({}, status["failed_rounds"])]
    yield "tasks_total", "counter", "Tasks that were sent to devices.", [({}, status["tasks"])]
    yield "updates_total", "counter", "Updates that were aggregated.", [({}, status["updates"])]
    reasons = labelled("reason", status["reasons"])
    yield "left_out_total", "counter", "Tasks whose update was not aggregated, by reason.", reasons
    sizes = {key.removeprefix("bytes_"): size for key, size in status["bytes"].items()}
    yield "bytes_total", "counter", "Bytes of tensors that were sent.", labelled("direction", sizes)
    yield "phase_seconds_total", "counter", "Seconds of rounds, by phase.", labelled("phase", status["phases"])
    if status["rounds"]:
        last = status["rounds"][-1]
        yield "round_seconds", "gauge", "Duration of the last round.", [({}, last["seconds"])]
        yield "round_updates", "gauge", "Updates aggregated in the last round.", [({}, last["clients"])]
    nodes = labelled("size", status["nodes"]["by_size"])
    yield "nodes", "gauge", "Nodes that take part when they are connected, by size.", nodes
    yield "nodes_refused", "gauge", "Nodes that cannot take part.", [({}, status["nodes"]["refused"])]
    evaluated = next((row for row in reversed(status["rounds"]) if row["quality"] is not None), None)
    if evaluated is not None:
        qualities = {"server": evaluated["quality"]} | evaluated["sizes"]
        description = f"{status['metric']} as last evaluated, of the server's model and of every size."
        yield "quality", "gauge", description, [({"size": size}, value) for size, value in qualities.items()]
    if isinstance(status["privacy"], Mapping):
        spent = [({"what": key}, value) for key, value in status["privacy"].items() if isinstance(value, int | float)]
        yield "privacy", "gauge", "The privacy budget and what was spent of it.", spent


def _format_labels(labels: Labels) -> str:
    pairs = [f'{key}="{str(value).translate(ESCAPES)}"' for key, value in labels.items()]
    return "{" + ",".join(pairs) + "}" if labels else ""


def make_app(run: RunMonitor, token: str | None = None) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The ASGI application of the status page of one run.

    With a token, requests must have it (``Authorization: Bearer``, or ``?token=`` for the page itself); without one,
    they must name a host of the loopback interface, so that no other site can send them from a browser.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            event = ""
            while event != "lifespan.shutdown":
                event = (await receive())["type"]
                await send({"type": f"{event}.complete"})
        elif scope["type"] == "http":
            status, kind, content = _respond(scope, run, token)
            headers = [*HEADERS, (b"content-type", f"{kind}; charset=utf-8".encode())]
            headers.append((b"content-length", str(len(content)).encode()))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})

    return app


def _respond(scope: Scope, run: RunMonitor, token: str | None) -> tuple[int, str, bytes]:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    if scope["method"] not in ("GET", "HEAD"):
        return 405, "text/plain", b"This page is read-only.\n"
    path = scope["path"]
    if token is None:
        host = HOST.fullmatch(headers.get("host", ""))
        if host is None or host[1] not in LOOPBACK:
            return 403, "text/plain", b"Without a token this page is for this machine alone: see --token.\n"
    elif path not in ("/page.js", "/page.css"):  # these show nothing of any run
        query = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        given = headers.get("authorization", "").removeprefix("Bearer ") or query
        if not hmac.compare_digest(given.encode(), token.encode()):
            return 401, "text/plain", b"This page needs its token: ?token=... or Authorization: Bearer.\n"
    if path in STATIC:
        file = resources.files("fairfold.runs") / "static" / (path[1:] or "page.html")
        return 200, STATIC[path], file.read_bytes()
    if path == "/status.json":
        return 200, "application/json", json.dumps(without_nan(run.status()), allow_nan=False).encode()
    if path == "/metrics":
        return 200, "text/plain; version=0.0.4", to_prometheus(run.status()).encode()
    return 404, "text/plain", b"There is /, /status.json and /metrics.\n"
