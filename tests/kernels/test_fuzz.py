"""The C boundary under the address and undefined-behaviour sanitizers, a few seconds of hostile calls."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
DRIVER = Path(__file__).parent / "fuzz" / "fuzz.c"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
LOW = ["-DNEAR_BYTES=64", "-DSTREAM_BYTES=256", "-DFAIRFOLD_WORTH_A_THREAD=8"]  # small jobs go the ways of large ones
COMMON = ["-std=gnu11", "-O0", "-g1", "-ffp-contract=off", "-Wno-psabi", *LOW, *SANITIZE]
BODIES = {"portable": [], "avx2": ["-mavx2", "-mbmi2"]}
BODIES["avx512"] = [*BODIES["avx2"], "-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw"]


def build(folder: Path) -> Path:
    """The driver and all of native/, as CMakeLists.txt builds it but for the sanitizers."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    made = subprocess.run([compiler, *SANITIZE, str(probe), "-o", str(folder / "probe")], capture_output=True)
    if made.returncode or subprocess.run([str(folder / "probe")], capture_output=True).returncode:
        pytest.skip("the compiler has no address and undefined-behaviour sanitizers")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    objects = []
    for name, flags in BODIES.items():
        if name == "portable" or x86:
            objects.append(str(folder / f"{name}.o"))
            body = [f"-DFAIRFOLD_BODY={name}", "-c", str(NATIVE / "body.c"), "-o", objects[-1]]
            subprocess.run([compiler, *COMMON, *flags, *body], check=True)
    sources = [str(path) for path in sorted(NATIVE.glob("*.c")) if path.name != "body.c"]
    defined = ["-DFAIRFOLD_HAS_X86"] if x86 else []
    driver = folder / "fuzz"
    # Without OpenMP, whose own threads the sanitizers would report; parts of a job then run one after another.
    command = [compiler, *COMMON, *defined, str(DRIVER), *sources, *objects, "-lm", "-o", str(driver)]
    subprocess.run(command, check=True)
    return driver


def test_hostile_calls_never_leave_their_buffers(tmp_path: Path) -> None:
    driver = build(tmp_path)
    for seed in ("1", "2"):
        result = subprocess.run([str(driver), "2", seed], capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stdout + result.stderr[-4000:]
        assert "rounds" in result.stdout
