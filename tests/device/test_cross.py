"""A client in C alone, static, on this processor, on aarch64 and as WebAssembly: the same numbers, in two megabytes."""

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.test_native import FLAGS, NATIVE, SOURCES
from tests.support.pages import ROOT, blocks

EXAMPLE = Path(__file__).with_name("device_example.c")
RUN_WASM = """
const {WASI} = require('wasi');
const wasi = new WASI({version: 'preview1', args: ['example']});
WebAssembly.instantiate(require('fs').readFileSync(process.argv[1]), wasi.getImportObject())
  .then(({instance}) => process.exit(wasi.start(instance)));
"""
MOST_PEAK_KB, MOST_TEXT = 2_000, 120_000


def build(folder: Path, compiler: list[str], *options: str) -> Path:
    """The example, linked with the library's sources."""
    path = folder / "example"
    words = [*compiler, *FLAGS, *options, str(EXAMPLE), *map(str, SOURCES), "-o", str(path), "-lm"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def run(command: list[str]) -> dict[str, list[float]]:
    """What the example printed, by the first word of each line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        name, *numbers = line.split()
        found.setdefault(name, []).extend(map(float, numbers))
    return found


def zig(*options: str) -> list[str]:
    """Zig's C compiler, which comes with every system's library."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no ziglang (pip install ziglang)")
    return [sys.executable, "-m", "ziglang", "cc", *options]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The example's numbers on this machine."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    return run([str(build(tmp_path_factory.mktemp("native"), [compiler], "-Wall", "-Wextra", "-Werror"))])


def require_same(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """The same draws, and the same numbers but for the last digits of another system's exp."""
    assert found["status"] == [0]
    assert found["samples"] == expected["samples"]
    for name in ("user", "score"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)


def test_a_client_needs_two_megabytes(native: dict[str, list[float]]) -> None:
    assert native["status"] == [0]
    assert len(set(native["score"])) == len(native["score"])
    assert native["bytes"][0] < 1 << 20


def test_a_static_program_of_this_machine_s_compiler_is_small(tmp_path: Path, native: dict[str, list[float]]) -> None:
    compiler = shutil.which("gcc") or pytest.skip("no gcc")
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }")
    if subprocess.run([compiler, "-static", str(probe), "-o", str(tmp_path / "probe")], check=False).returncode:
        pytest.skip("no static C library on this machine")
    found = run([str(build(tmp_path, [compiler], "-static", "-Wl,--gc-sections", "-s"))])
    require_same(found, native)
    assert found["peak"][0] <= MOST_PEAK_KB


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    """docs/devices.md has a whole program, whose training raises the score of an item of the history."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    (program,) = (block.body for block in blocks(ROOT / "docs" / "devices.md") if block.kind == "c")
    source = tmp_path / "page.c"
    source.write_text(program)
    words = [compiler, *FLAGS, "-Wall", "-Wextra", "-Werror", f"-I{NATIVE / 'device'}", str(source), *map(str, SOURCES)]
    subprocess.run([*words, "-o", str(tmp_path / "page"), "-lm"], check=True)
    done = subprocess.run([str(tmp_path / "page")], capture_output=True, text=True, check=True)
    numbers = [float(number) for number in re.findall(r"-?\d\.\d+", done.stdout)]
    assert len(numbers) == 2
    assert numbers[0] < numbers[1]


COUNTED = """
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "fairfold_device.h"
static int made;
void *__real_malloc(size_t), *__real_calloc(size_t, size_t);
void *__wrap_malloc(size_t size) { made++; return __real_malloc(size); }
void *__wrap_calloc(size_t count, size_t size) { made++; return __real_calloc(count, size); }
static _Alignas(64) char memory[1 << 16];
#define COUNT(call) do { \\
    made = 0; \\
    const int status = (call); \\
    fprintf(stderr, "%.30s %d %d\\n", #call, status, made); \\
} while (0)
int main(void) {
    float table[400] = {0}, own[4] = {1, 1, 1, 1}, scores[100], pairs[10] = {0}, weight[1] = {1}, sum[4] = {0};
    const fairfold_layout hashed = {400, 0, 400, 1, 5, 1};
    fairfold_device_model model = {
        .form = {.product = 4, .optimizer = 2, .rate = .1}, .tables = {{hashed, table}}, .user = {own, NULL},
    };
    int64_t history[] = {1, 2, 3}, samples[6], ends[] = {3}, slots[3], starts[] = {0}, stops[] = {3};
    int8_t signs[3];
    unsigned char rows[12] = {0};
    const fairfold_packed packed = {rows, 12, 2, 4, 8};
    const fairfold_device_samples round = {samples, 3, 2, NULL, ends, 1};
    const int64_t ids[] = {0, 1};
    COUNT(fairfold_device_sample(history, 3, 100, 1, 1, 1, 7, samples));
    COUNT(fairfold_device_train_bytes(&model, 3, 2) < 0);
    COUNT(fairfold_device_train(&model, &round, memory, sizeof memory));
    COUNT(fairfold_device_add(sum, own, NULL, 2.0, 4));
    COUNT(fairfold_device_scores_bytes(&model) < 0);
    COUNT(fairfold_device_scores(&model, 0, 100, scores, memory, sizeof memory));
    COUNT(fairfold_slots_and_signs(&hashed, history, 3, slots, signs));
    COUNT(fairfold_packed_products(&packed, ids, 2, own, 1, scores, 1));
    COUNT(fairfold_packed_sum(&packed, ids, 2, own, sum));
    COUNT(fairfold_pair_sums(history, 3, starts, stops, 1, 4, weight, 4, pairs, 10, 1));
    fairfold_move move = {.layout = hashed, .real = 4, .compact = table, .size = 400, .values = scores, .threads = 1};
    move.rows = (fairfold_rows){ids, 8, 2, 4};
    COUNT(fairfold_recover_rows(&move));
    return 0;
}
"""


def test_the_header_names_the_functions_that_allocate(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or pytest.skip("no gcc, whose linker counts calls of malloc")
    source = tmp_path / "counted.c"
    source.write_text(COUNTED)
    words = [compiler, *FLAGS, f"-I{NATIVE / 'device'}", str(source), *map(str, SOURCES)]
    words += ["-Wl,--wrap=malloc", "-Wl,--wrap=calloc", "-o", str(tmp_path / "counted"), "-lm"]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a linker that wraps no functions")
    done = subprocess.run([str(tmp_path / "counted")], capture_output=True, text=True, check=True)
    allocate = set()
    for line in done.stderr.splitlines():
        name, _, rest = line.partition("(")
        *_, status, count = rest.split()
        assert int(status) == 0, line
        if int(count):
            allocate.add(name)
    header = (NATIVE / "device" / "fairfold_device.h").read_text()
    listed = set(re.findall(r"fairfold_\w+", header.partition("These allocate")[2].partition(".")[0]))
    assert allocate == listed


@pytest.mark.slow
def test_a_static_program_is_small(tmp_path: Path, native: dict[str, list[float]]) -> None:
    path = build(tmp_path, zig("-target", f"{platform.machine()}-linux-musl"), "-static", "-Wl,--gc-sections", "-s")
    found = run([str(path)])
    require_same(found, native)
    assert found["peak"][0] <= MOST_PEAK_KB


@pytest.mark.slow
def test_it_is_the_same_on_aarch64(tmp_path: Path, native: dict[str, list[float]]) -> None:
    path = build(tmp_path, zig("-target", "aarch64-linux-musl"), "-static", "-Wl,--gc-sections")
    runner = [] if platform.machine() == "aarch64" else [shutil.which("qemu-aarch64") or ""]
    if runner == [""]:
        pytest.skip("built, not run: no qemu-aarch64 (Debian: qemu-user)")
    require_same(run([*runner, str(path)]), native)


@pytest.mark.slow
def test_it_is_the_same_as_webassembly(tmp_path: Path, native: dict[str, list[float]]) -> None:
    path = build(tmp_path, zig("-target", "wasm32-wasi"), "-Wl,--gc-sections", "-s")
    node = shutil.which("node") or pytest.skip("built, not run: no node")
    assert path.stat().st_size <= 2 * MOST_TEXT
    require_same(run([node, "--no-warnings", "-e", RUN_WASM, str(path)]), native)
