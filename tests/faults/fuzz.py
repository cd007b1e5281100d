"""Fuzzing that goes on: every fuzzer in turn, with new seeds, until the time is up: ``make fuzz MINUTES=30``.

    python tests/faults/fuzz.py --minutes 30
    python tests/faults/fuzz.py --minutes 5 --seed 7 messages kernels

What it finds is printed with its seed and number, by which the fuzzer that found it does it again. Who mends it
puts the file into ``tests/faults/corpus``, which ``test_fuzz.py`` reads, or writes a test of its own.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUZZERS = {
    "kernels": [
        ["tests/kernels/test_fuzz.py", "address", "20", "{seed}"],
        ["tests/kernels/test_fuzz.py", "thread", "20", "{seed}"],
    ],
    "threads": [["-m", "tests.kernels.fuzz_threads", "--count", "400000", "--seed", "{seed}"]],
    "messages": [
        ["-m", "tests.flower.fuzz_messages", "--count", "100000", "--tasks", ".02", "--seed", "{seed}"],
        ["-m", "tests.flower.fuzz_messages", "--count", "10000", "--seed", "{seed}", "--allocations"],
    ],
    "devices": [["-m", "tests.device.fuzz", "1500", "{seed}"]],
    "updates": [["-m", "tests.faults.fuzz_updates", "--count", "100", "--seed", "{seed}"]],
    "folders": [["tests/faults/fuzz_folders.py", "--count", "1000", "--seed", "{seed}"]],
    "settings": [["tests/faults/fuzz_settings.py", "--count", "100", "--seed", "{seed}"]],
    "data": [["tests/faults/fuzz_data.py", "--count", "1000", "--seed", "{seed}"]],
}  # fmt: skip
"""Each takes about half a minute."""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "fuzzers", nargs="*", default=list(FUZZERS), metavar="FUZZER", help=f"of {', '.join(FUZZERS)}; all"
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the first turn; by the clock if not given"
    )
    given = parser.parse_args()
    end, seed, turns, failed = time.monotonic() + 60 * given.minutes, given.seed, Counter[str](), 0
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    while time.monotonic() < end:
        for name in given.fuzzers:
            for arguments in FUZZERS[name]:
                if time.monotonic() >= end:
                    break
                command = [sys.executable, *(argument.format(seed=seed) for argument in arguments)]
                sys.stdout.write(f"{name}: {' '.join(command[1:])}\n")
                sys.stdout.flush()
                failed += subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0
                turns[name] += 1
        seed += 1
    sys.stdout.write(f"{', '.join(f'{name} {times}' for name, times in turns.items())} turns, {failed} failed\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
