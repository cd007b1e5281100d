"""A run's figures in the text format of Prometheus."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Labels = Mapping[str, Any]


def exposition(told: Mapping[str, Any]) -> str:
    """All figures of a run; one that cannot be read says so, and nothing else."""
    lines = list[str]()
    for name, kind, words, samples in _families(told):
        lines += [f"# HELP fairfold_{name} {words}", f"# TYPE fairfold_{name} {kind}"]
        lines += [f"fairfold_{name}{_labels(labels)} {float(value):.10g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _families(told: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Sequence[tuple[Labels, float]]]]:
    readable = told["state"] != "damaged"
    yield "readable", "gauge", "Whether the folder of the run can be read.", [({}, readable)]
    devices = [({"state": state}, many) for state, many in sorted(told["devices"].items())]
    if devices:
        yield "devices", "gauge", "Devices of the server, by their state.", devices
    if "changed" not in told:  # nothing can be read, or there is no run yet
        return
    yield "finished", "gauge", "Whether the run is finished.", [({}, told["state"] == "finished")]
    yield "last_change_timestamp_seconds", "gauge", "When the run last wrote something.", [({}, told["changed"])]
    yield "rounds_wanted", "gauge", "Rounds that the settings ask for.", [({}, told["wanted"])]
    yield "rounds_done", "gauge", "Rounds that are done.", [({}, told["done"])]
    yield "empty_rounds_total", "counter", "Rounds that were tried in vain.", [({}, told["empty_rounds"])]
    yield "orders_total", "counter", "Orders that were sent to devices.", [({}, told["asked"])]
    yield "answers_total", "counter", "Answers that were used.", [({}, told["answers"])]
    left = [({"reason": reason}, many) for reason, many in sorted(told["reasons"].items())]
    yield "left_out_total", "counter", "Orders whose answer was not used, by reason.", left
    moved = [({"direction": key.removeprefix("bytes_")}, size) for key, size in sorted(told["bytes"].items())]
    yield "bytes_total", "counter", "Bytes of tensors that were sent.", moved
    phases = [({"phase": name}, seconds) for name, seconds in sorted(told["phases"].items())]
    yield "phase_seconds_total", "counter", "Seconds of rounds, by what was done.", phases
    if told["rounds"]:
        last = told["rounds"][-1]
        yield "round_seconds", "gauge", "How long the last round took.", [({}, last["seconds"])]
        yield "round_answers", "gauge", "Answers used in the last round.", [({}, last["clients"])]
    nodes = [({"size": size}, many) for size, many in sorted(told["nodes"]["by_size"].items())]
    yield "nodes", "gauge", "Nodes that take part when they are connected, by size.", nodes
    yield "nodes_refused", "gauge", "Nodes that cannot take part.", [({}, told["nodes"]["refused"])]
    judged = next((row for row in reversed(told["rounds"]) if row["quality"] is not None), None)
    if judged is not None:
        of = {"server": judged["quality"]} | judged["sizes"]
        words = f"{told['metric']} as last evaluated, of the server's model and of every size."
        yield "quality", "gauge", words, [({"size": size}, value) for size, value in of.items()]
    if isinstance(told["privacy"], Mapping):
        spent = [({"what": key}, value) for key, value in told["privacy"].items() if isinstance(value, int | float)]
        yield "privacy", "gauge", "What was spent of the privacy budget.", spent


def _labels(labels: Labels) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{key}="{quoted(str(value))}"' for key, value in labels.items()) + "}" if labels else ""
