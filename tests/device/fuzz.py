"""Messages of recorded runs, spoiled in every way, read by the small device: refused with an error, or harmless.

    python -m tests.device.fuzz 20000 1    # as many, from seed 1

Whatever is refused changes nothing that the device has stored.
"""

import base64
import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from fairfold.checksums import PARSE_ERRORS, line_with_checksum
from fairfold.config.files import load_settings
from fairfold.device.records import pack_records, parse_records
from fairfold.device.requests import NeedsWorker
from fairfold.device.store import FILE
from fairfold.device.tasks import SmallDevice
from fairfold.errors import FairfoldError
from fairfold.flower import LocalFile
from tests.support.settings import make_settings
from tests.vectors.make import FOLDER
from tests.vectors.sessions import file_of, prepare, record

ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63 - 1, -(2**63), 0.0, -1.0, 1e308, float("nan"), float("inf"), "", "x", "ff" * 8,
    "0", b"", b"\xff" * 9, [], [1.0], [float("nan")] * 3, {}, {"kind": "x"}, "9" * 70_000, [[]], "é\0",
]  # fmt: skip


def gradient_session() -> dict[str, Any]:
    """A short run of the paper's recipe, recorded."""
    settings = make_settings(
        load_settings(None, {}, "paper"),
        rounds=2, evaluate_every=1, clients_per_round=None, capacities="1x-4x", factors=2, local_epochs=1,
    )  # fmt: skip
    return record(settings, [file_of(number, 2) for number in range(2)], (1,), ("1x", "4x"))


def rating_session() -> dict[str, Any]:
    """A short run of ratings, recorded."""
    settings = make_settings(
        load_settings(None, {}, "ratings"),
        rounds=2, evaluate_every=1, clients_per_round=None, capacities="1x-4x", factors=4,
    )  # fmt: skip
    return record(settings, [rated_file(number) for number in range(2)], (1,), ("1x", "4x"))


def rated_file(number: int) -> str:
    """Ratings of two users."""
    draw = random.Random(number)
    rows = [f"u{user},{item},{draw.randint(1, 5)}" for user in range(2) for item in sorted(draw.sample(range(40), 12))]
    return "\n".join(["user,item,rating", *rows, ""])


def spoil_value(draw: random.Random, value: Any) -> Any:
    """Another value in the place of one."""
    if isinstance(value, str) and value[:1] == "{" and draw.random() < 0.9:  # a table in JSON
        table = json.loads(value)
        spoil_table(draw, table)
        return json.dumps(table, default=str)
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.random() < 0.5:
        return draw.choice([value + 1, value - 1, -value, value * 2, value * 2**20, float(value), str(value)])
    if isinstance(value, bytes) and value and draw.random() < 0.8:
        spoiled = bytearray(value)
        for _ in range(draw.randint(1, 3)):
            spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
        return bytes(spoiled[: draw.choice([len(spoiled), draw.randrange(len(spoiled))])])
    return draw.choice(ODD)


def spoil_table(draw: random.Random, table: Any) -> None:
    """Another value somewhere in nested tables."""
    keys = list(table) if isinstance(table, dict) else list(range(len(table)))
    if not keys:
        return
    key = draw.choice(keys)
    inner = table[key]
    if isinstance(inner, dict | list) and inner and draw.random() < 0.85:
        spoil_table(draw, inner)
    elif isinstance(table, dict) and draw.random() < 0.2:
        del table[key]
    else:
        table[key] = spoil_value(draw, inner)


def spoil_vector(draw: random.Random, vector: Any) -> Any:
    """Other numbers, another length or type."""
    content = bytearray(vector.tobytes())
    for _ in range(draw.randint(0, 4) if content else 0):
        content[draw.randrange(len(content))] = draw.choice([0, 127, 128, 255, draw.randrange(256)])
    code = draw.choice("fdqiB") if draw.random() < 0.2 else vector.typecode
    content = content[: len(content) // 8 * 8]
    if draw.random() < 0.2:
        content = content[: draw.randrange(len(content) + 1) // 8 * 8] * draw.choice([1, 2])
    return array(code, bytes(content))


def spoiled(draw: random.Random, records: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A message with one to three faults."""
    found = deepcopy(records)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if not found:
            break
        record_name = draw.choice(list(found))
        part = found[record_name]
        if draw.random() < 0.03 or not part:
            del found[record_name]
            continue
        key = draw.choice(list(part))
        if draw.random() < 0.1:
            part[draw.choice([key, "other"])] = part.pop(key)
        elif isinstance(part[key], array):
            part[key] = spoil_vector(draw, part[key])
        else:
            part[key] = spoil_value(draw, part[key])
    return found


def replayed(folder: Path, given: dict[str, Any]) -> list[tuple[str, dict[str, Any], Path]]:
    """Every step's kind, message, and the state that the device had before it."""
    state, file = folder / "state", folder / "mine.csv"
    state.mkdir(parents=True)
    (state / "name").write_text(line_with_checksum(given["name"]))
    prepare(state, given.get("identity"))
    found = []
    for number, step in enumerate(given["steps"]):
        if "file" in step:
            file.write_text(step["file"])
        before = folder / f"before-{number}"
        shutil.copytree(state, before)
        shutil.copy(file, before.with_suffix(".csv"))
        objects = {name: base64.b64decode(one) for name, one in step["message"]["objects"].items()}
        records = parse_records(step["message"]["id"], objects)
        found.append((step["kind"], records, before))
        try:
            SmallDevice(LocalFile(file, holdout=0.2), given["capacity"], state, rules_of(given)).reply(
                step["kind"], deepcopy(records)
            )
        except (FairfoldError, NeedsWorker):
            continue  # keys of secure sums are drawn anew: what follows of this sum is refused, before it is spoiled
    return found


def rules_of(given: dict[str, Any]) -> dict[str, Any]:
    """What a recorded device's owner allows."""
    return {"min-cohort": given["min_cohort"], "privacy": "secure"} if "identity" in given else {}


def fuzz(count: int, seed: int, *, gradient: bool = True) -> Counter[str]:
    """Give a device ``count`` spoiled messages; the outcomes by kind of message."""
    draw, outcomes = random.Random(seed), Counter[str]()
    sessions = [json.loads((FOLDER / f"{name}.json").read_text()) for name in ("session", "secure_session")]
    sessions += [rating_session(), *([gradient_session()] if gradient else [])]
    with tempfile.TemporaryDirectory() as folder:
        steps = []
        for number, one in enumerate(sessions):
            given = one["devices"][0]
            steps += [(given, *step) for step in replayed(Path(folder) / str(number), given)]
        work = Path(folder) / "work"
        for _ in range(count):
            given, kind, records, before = draw.choice(steps)
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(before, work)
            message = spoiled(draw, records)
            file = LocalFile(before.with_suffix(".csv"), holdout=0.2)
            stored = (work / FILE).read_bytes() if (work / FILE).exists() else b""
            outcome = "replied"
            try:
                SmallDevice(file, given["capacity"], work, rules_of(given)).reply(kind, message)
            except (FairfoldError, NeedsWorker) as error:
                outcome = type(error).__name__
            after = (work / FILE).read_bytes() if (work / FILE).exists() else b""
            assert after == stored or outcome == "replied", f"{kind}: {outcome}, and changed"
            outcomes[f"{kind}: {outcome}"] += 1
    return outcomes


def fuzz_objects(count: int, seed: int) -> Counter[str]:
    """Objects with other bytes are refused with one of the errors that the device catches."""
    draw, outcomes = random.Random(seed), Counter[str]()
    steps = json.loads((FOLDER / "session.json").read_text())["devices"][0]["steps"]
    for _ in range(count):
        message = draw.choice(steps)["message"]
        objects = {name: bytearray(base64.b64decode(one)) for name, one in message["objects"].items()}
        one = objects[draw.choice(list(objects))]
        for _ in range(draw.randint(1, 4)):
            one[draw.randrange(len(one))] = draw.randrange(256)
        if draw.random() < 0.2:
            del one[draw.randrange(len(one)) :]
        try:
            parse_records(message["id"], {name: bytes(content) for name, content in objects.items()})
            outcomes["read"] += 1
        except (FairfoldError, *PARSE_ERRORS):
            outcomes["refused"] += 1
    return outcomes


def spoiled_objects(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Spoiled messages of the default algorithm as objects that are whole, for a device in another language."""
    draw, made = random.Random(seed), 0
    sessions = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in ("session", "secure_session")}
    while made < count:
        session = draw.choice(list(sessions))
        steps = sessions[session]["devices"][0]["steps"]
        number = draw.randrange(len(steps))
        given, objects = steps[number]["message"], dict[str, bytes]()
        records = parse_records(given["id"], {name: base64.b64decode(one) for name, one in given["objects"].items()})
        try:
            tree = pack_records(spoiled(draw, records), objects)
        except (*PARSE_ERRORS, ArithmeticError, AttributeError, TypeError, struct.error):
            continue  # nothing that could be sent
        made += 1
        named = {name: base64.b64encode(one).decode() for name, one in objects.items()}
        yield {
            "session": session,
            "step": number,
            "kind": steps[number]["kind"],
            "id": tree.object_id,
            "objects": named,
        }


def fuzz_browser(count: int, seed: int) -> Counter[str]:
    """Give them to the browser device under node, which ends with an error where one is taken that should not be."""
    here = Path(__file__).parent
    command = ["node", str(here / "browser_fuzz.mjs"), str(here / "browser_parts.js"), str(FOLDER)]
    lines = "".join(json.dumps(one) + "\n" for one in spoiled_objects(count, seed))
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Counter(json.loads(done.stdout))


def main() -> None:
    """Print the outcomes."""
    count, seed = (int(word) for word in (*sys.argv[1:], "2000", "1")[:2])
    outcomes = fuzz(count, seed) + fuzz_objects(count, seed)
    if shutil.which("node"):
        outcomes += Counter({f"browser, {what}": times for what, times in fuzz_browser(count, seed).items()})
    for what, times in sorted(outcomes.items()):
        sys.stdout.write(f"{times:9} {what}\n")


if __name__ == "__main__":
    main()
