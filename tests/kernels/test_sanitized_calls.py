"""The 10,000 generated bad calls from Python again, with the library compiled under the address sanitizer.

Torch's own tensors have guarded ends there: a read beyond one ends the process with the sanitizer's report.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairfold.kernels.native import loader

NATIVE = Path(__file__).parents[2] / "native"
TESTS = Path(__file__).parents[1]
FILES = [TESTS / "kernels" / "test_bad_lengths.py", TESTS / "kernels" / "test_bad_input.py"]
FILES += [TESTS / "device" / "test_bad_calls.py"]
DEVICE = ("dispatch", "plan", "ranges", "touched", "active", "chain", "train", "pairs", "packed", "body")
CALLS = """
import sys
import fairfold.kernels.native as package
package.__path__.insert(0, sys.argv[1])
from fairfold.kernels.native import loader
assert sys.argv[1] in loader.status().reason, loader.status()
import fairfold.device
fairfold.device.__path__.insert(0, sys.argv[1])
from fairfold.device import native
assert sys.argv[1] in native.library()._name
import pytest
options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
sys.exit(pytest.main([*options, *sys.argv[2:]]))
"""


@pytest.mark.slow
def test_bad_calls_from_python_under_the_address_sanitizer(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None or loader.library() is None:
        pytest.skip("needs gcc, whose sanitizer is a library of its own")
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")  # the second, or torch's exceptions stop the sanitizer
    ]
    if not all(Path(path).is_file() for path in found):
        pytest.skip("this gcc has no address sanitizer")
    common = [compiler, "-std=gnu11", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-Wno-psabi", "-fsanitize=address"]
    body = tmp_path / "portable.o"
    subprocess.run([*common, "-DFAIRFOLD_BODY=portable", "-c", str(NATIVE / "body.c"), "-o", str(body)], check=True)
    sources = [str(path) for path in sorted(NATIVE.glob("*.c")) if path.name != "body.c"]
    target = str(tmp_path / "fairfold_native.so")
    subprocess.run([*common, "-shared", *sources, str(body), "-lm", "-o", target], check=True)
    of_device = [str(NATIVE / f"{name}.c") for name in DEVICE] + [str(NATIVE / "device" / "fairfold_device.c")]
    device = str(tmp_path / "fairfold_device.so")
    subprocess.run([*common, "-shared", *of_device, "-lm", "-o", device], check=True)
    environment = os.environ | {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", CALLS, str(tmp_path), *FILES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[:4000]
    assert " passed" in result.stdout
