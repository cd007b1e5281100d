"""Strange settings: ``fairfold train`` refuses each with a message, or trains by it; never with a traceback.

    python tests/faults/fuzz_settings.py --count 1000 --seed 1
    python tests/faults/fuzz_settings.py --seed 1 --case 123      # one of them again

A case is a recipe of a tiny world with one to three values changed, or its file damaged, given to the real command in a
child of this process. What would run for long is ended after some seconds: then it was taken, and that is well.
"""

import argparse
import logging
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process with threads of its own cannot be forked
sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs as a program as well

import tomli_w

from fairfold.cli import app
from fairfold.config import Settings
from fairfold.config.files import load_settings, recipes, to_toml
from fairfold.config.settings import nested
from fairfold.runs.checkpoint import flat_keys
from fairfold.runs.train import run
from tests.faults.data_files import mutate
from tests.faults.kinds import files_in_memory

SECONDS = 8
MOST_BYTES = 2 << 30
"""Of address space that a case may add: beyond it memory has run out, which is to be refused."""

TINY = {
    "data.users": 8, "data.items": 60, "data.interactions_per_user": 8, "fleet.clients_per_round": 4, "run.rounds": 2,
}  # fmt: skip
STRANGE: list[Any] = [
    0, 1, -1, 2, 3, 7, 100, 2**31, 2**53, 2**63 - 1, -(2**63), 10**9, 10**14, 0.0, -0.0, 0.5, 1.0, -1.5, 1e-300, 1e22,
    1e308, float("nan"), float("inf"), -float("inf"), True, False, "", "none", "auto", "x", "1x", "1x-2x", "64x-1x",
    "1x-1x", "0x", "1e9x", "4kB", "-4MB", "x" * 5000, "é\u2028", "/dev/null", "..", "a:b", "os:system", "mlp", "neumf",
    "gradient", "ratings", "central", "chunk", "element", "fedhm", "disk", "sequential", "cuda", [], [1], ["a"], [[1]],
    [1e308, 1e308, 1e308], [0.5, 0.5], [float("nan")], {}, {"a": 1}, {"drop": 2.0}, {"late": 0.5}, {"nan": -1},
]  # fmt: skip
MORE = (
    "data.name", "data.top_users", "data.resplit", "data.kind", "data.clients", "model.kind", "subspace.chunk",
    "subspace.method", "subspace.expansion", "fleet.faults", "fleet.faults.nan", "algorithm.kind",
    "algorithm.server_lr", "algorithm.server_optimizer", "run.metric", "run", "model", "more", "run.more",
)  # fmt: skip


def text_of(chance: random.Random) -> bytes:
    """Settings as a file."""
    values = flat_keys(
        load_settings(None, TINY, chance.choice([name for name in recipes() if name != "ratings"])).plain()
    )
    values = {key: "none" if value is None else value for key, value in values.items()}
    for _ in range(chance.choice([1, 1, 2, 3])):
        key = chance.choice([*values, *MORE] if chance.random() < 0.3 else list(values))
        fitting = [value for value in STRANGE if type(value) is type(values.get(key))]
        values[key] = chance.choice(fitting if fitting and chance.random() < 0.8 else STRANGE)
    try:
        text = tomli_w.dumps(nested(values)).encode()
    except (TypeError, ValueError, AttributeError, UnicodeError):  # a table and a value of the same name
        text = to_toml(Settings()).encode()
    return mutate(text, chance) if chance.random() < 0.15 else text


def case(seed: int, number: int, folder: Path) -> tuple[str, str]:
    """Train by strange settings; return the outcome and the output."""
    (folder / "settings.toml").write_bytes(text_of(random.Random(f"{seed} {number}")))
    return trained(folder)


def trained(folder: Path) -> tuple[str, str]:
    """The same by the settings in a folder; AssertionError where it ends in neither a result nor a message."""
    path, log_file = folder / "settings.toml", folder / "said"
    child = os.fork()
    if not child:
        try:
            out = os.open(log_file, os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES,) * 2)
            signal.alarm(SECONDS)
            os.chdir(folder)
            sys.argv = ["fairfold", "train", str(path), "--out", str(folder / "run")]
            app()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        except BaseException:
            traceback.print_exc()
        os._exit(99)
    _, ended = os.waitpid(child, 0)
    status, text = os.waitstatus_to_exitcode(ended), log_file.read_text(errors="replace")
    if status == -signal.SIGALRM:
        return "taken, and ended by the clock", text
    if status in (0, 2) and "Traceback" not in text:
        return ("trained" if status == 0 else "refused"), text
    raise AssertionError(f"status {status}: {text[-1500:]}")


def fuzz(seed: int, count: int, first: int = 0, files: Sequence[Path] = ()) -> tuple[int, str]:
    """Run cases, and train by some files; return the number of failures and the output."""
    outcomes, failures, output = Counter[str](), 0, ""
    with files_in_memory() as folder:
        for name in ("default", "paper"):  # everything is loaded
            run(load_settings(None, TINY, name), folder / name)
    for number in [*files, *range(first, first + count)]:
        with files_in_memory() as folder:
            try:
                if isinstance(number, Path):
                    shutil.copy(number, folder / "settings.toml")
                outcome, text = trained(folder) if isinstance(number, Path) else case(seed, number, folder)
                outcomes[outcome] += 1
                if count == 1:
                    output += text
            except AssertionError as error:
                failures += 1
                output += f"case {number} of seed {seed}: {error}\n"
    counts = ", ".join(f"{outcome} {times}" for outcome, times in sorted(outcomes.items()))
    return failures, f"{output}{count} settings, seed {seed}: {failures} failures ({counts})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--files", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    logging.getLogger("fairfold").propagate = False
    began = time.monotonic()
    many, start = (given.count, 0) if given.case is None else (1, given.case)
    failed, report = fuzz(given.seed, many, start, given.files)
    sys.stdout.write(f"{report}, {time.monotonic() - began:.0f} s\n")
    sys.exit(failed > 0)
