"""The C boundary under the sanitizers: hostile calls for a few seconds, and several threads at once.

For longer, or with another seed: ``python tests/kernels/test_fuzz.py address|thread SECONDS [SEED]``.
"""

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
DRIVER = Path(__file__).parent / "fuzz" / "fuzz.c"
THREADS = Path(__file__).parent / "fuzz" / "parallel.c"
SANITIZE = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
CALLERS = {"address": "1", "thread": "4"}
LOW = [
    "-DNEAR_BYTES=64",
    "-DSTREAM_BYTES=256",
    "-DFAIRFOLD_WORTH_A_THREAD=8",
    "-DPAIRS_AT_ONCE=16",
]  # small jobs go the ways of large ones
COMMON = ["-std=gnu11", "-O0", "-g1", "-ffp-contract=off", "-Wno-psabi", "-fno-sanitize-recover=all", *LOW]
BODIES = {"portable": [], "avx2": ["-mavx2", "-mbmi2"]}
BODIES["avx512"] = [*BODIES["avx2"], "-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw"]


class CannotSanitize(Exception):
    """There is no compiler, or it has no such sanitizer."""


def build(folder: Path, sanitizer: str) -> Path:
    """The driver and all of native/, as CMakeLists.txt builds it but for the sanitizers."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CannotSanitize("no C compiler")
    common = [*COMMON, SANITIZE[sanitizer], "-pthread"]
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    made = subprocess.run([compiler, *common, str(probe), "-o", str(folder / "probe")], capture_output=True)
    if made.returncode or subprocess.run([str(folder / "probe")], capture_output=True).returncode:
        raise CannotSanitize(f"the compiler has no {SANITIZE[sanitizer]} that runs here")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    objects = []
    for name, flags in BODIES.items():
        if name == "portable" or x86:
            objects.append(str(folder / f"{name}.o"))
            body = [f"-DFAIRFOLD_BODY={name}", "-c", str(NATIVE / "body.c"), "-o", objects[-1]]
            subprocess.run([compiler, *common, *flags, *body], check=True)
    defined = ["-DFAIRFOLD_HAS_X86"] if x86 else []
    # Without OpenMP, whose own threads the sanitizers would report: parts of a job then run one after another, or, for
    # the thread sanitizer, on threads that it understands.
    renamed = ["-Dfairfold_parallel=fairfold_one_after_another"] if sanitizer == "thread" else []
    objects.append(str(folder / "dispatch.o"))
    dispatch = ["-c", str(NATIVE / "dispatch.c"), "-o", objects[-1]]
    subprocess.run([compiler, *common, *defined, *renamed, *dispatch], check=True)
    sources = [str(path) for path in sorted(NATIVE.glob("*.c")) if path.name not in ("body.c", "dispatch.c")]
    sources += [str(DRIVER), *([str(THREADS)] if renamed else [])]
    driver = folder / "fuzz"
    subprocess.run([compiler, *common, *defined, *sources, *objects, "-lm", "-o", str(driver)], check=True)
    return driver


def run(driver: Path, sanitizer: str, seconds: str, seed: str) -> "subprocess.CompletedProcess[str]":
    command = [str(driver), seconds, seed, CALLERS[sanitizer]]
    return subprocess.run(command, capture_output=True, text=True, timeout=120 + float(seconds), check=False)


@pytest.mark.parametrize("sanitizer", ["address", pytest.param("thread", marks=pytest.mark.slow)])
def test_hostile_calls_never_leave_their_buffers_nor_race(sanitizer: str, tmp_path: Path) -> None:
    try:
        driver = build(tmp_path, sanitizer)
    except CannotSanitize as error:
        pytest.skip(str(error))
    for seed in ("1", "2", "3")[: 2 if sanitizer == "address" else 3]:  # several threads share the set of their seed
        result = run(driver, sanitizer, "2", seed)
        assert result.returncode == 0, result.stdout + result.stderr[-4000:]
        assert "rounds" in result.stdout


if __name__ == "__main__":
    kind, for_seconds, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made:
        outcome = run(build(Path(made), kind), kind, for_seconds, rest[0] if rest else "1")
    sys.stdout.write(outcome.stdout + outcome.stderr[-20_000:])
    sys.exit(outcome.returncode)
