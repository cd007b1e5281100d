"""Draw mutants of the library, one changed place each, and run the tests that concern the changed module.

    python tests/faults/mutants.py --count 300 [--seed 1] [--only secure] [--minutes 8] [--workers 4] [--out FILE]

A mutant that every chosen test passes survives: a test is missing, or the change means nothing. The chosen tests are
the files that import the module, whose folder and name are its own, or that name the changed function or one that uses
it; for what the first of these let pass, more of them and the laws. Slow tests, and tests in processes of their own, do
not see a mutant. No file is changed: each mutant is loaded in a process of its own. Results are added to the file given
with ``--out``, and what it holds is not run again.
"""

import argparse
import ast
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "fairfold"
LEFT_OUT = ("cli/", "kernels/gpu/", "runs/plots", "runs/report", "runs/trackers", "backends/cuda_graph")
TEST_FOLDERS = ("slow", "faults", "experiments")
LAWS = sorted(map(str, (ROOT / "tests" / "laws").glob("test_*.py")))
MAX_FILES, MORE_FILES = 5, 12
COMMON = 25  # a name in more files than that says little
CPU_SECONDS, WALL_SECONDS = 240, 1_800  # of the tests of a mutant: a busy machine kills none, a loop without end ends
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
    ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """A changed place: the bytes from ``start`` to ``stop`` of a file become another text."""

    path: str
    line: int
    start: int
    stop: int
    text: str
    before: str
    content: bytes = field(default=b"", repr=False, compare=False)  # of the file when it was drawn

    @property
    def name(self) -> str:
        """How it is listed."""
        return f"{self.path}:{self.line}: {self.before!r} -> {self.text!r}"


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Nodes to replace within one, with other code."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARISONS[type(node.ops[0])]
        yield node, f"({ast.unparse(node.left)} {other} {ast.unparse(node.comparators[0])})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not isinstance(node.left, ast.Constant):
        yield node, f"({ast.unparse(node.left)} {OPERATORS[type(node.op)]} {ast.unparse(node.right)})"
    elif isinstance(node, ast.BoolOp):
        other = " or " if isinstance(node.op, ast.And) else " and "
        yield node, "(" + other.join(f"({ast.unparse(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) <= 1e6:
        yield node, repr(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield node, f"({ast.unparse(node.body)})"
        yield node, f"({ast.unparse(node.orelse)})"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield node.func, CALLS[node.func.id]
    elif isinstance(node, ast.Return) and node.value is not None:
        yield node, "return None"
    elif isinstance(node, ast.AugAssign | ast.Raise) or _is_statement(node):
        yield node, "pass"


def _is_statement(node: ast.AST) -> bool:
    """Whether a node is a call whose value is not used."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _inside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of the bodies of functions, without what is only declared."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from ast.walk(statement)


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    content, found = text.encode(), set[Mutant]()
    for node in _inside_functions(ast.parse(text)):
        for place, other in _changes(node):
            line, end = getattr(place, "lineno"), getattr(place, "end_lineno")  # noqa: B009
            start = starts[line - 1] + getattr(place, "col_offset")  # noqa: B009
            stop = starts[end - 1] + getattr(place, "end_col_offset")  # noqa: B009
            before = content[start:stop].decode()
            if " ".join(before.split()) != other:
                found.add(Mutant(str(path.relative_to(SOURCE)), line, start, stop, other, before[:80], content))
    return sorted(found, key=lambda one: (one.start, one.stop, one.text))


def draw(count: int, seed: int, only: str) -> list[Mutant]:
    """Mutants drawn by a seed, as many of a file as it has places."""
    every = [
        one
        for path in sorted(SOURCE.rglob("*.py"))
        if only in (name := str(path.relative_to(SOURCE))) and not name.startswith(LEFT_OUT)
        for one in mutants_of(path)
    ]
    return random.Random(seed).sample(every, min(count, len(every)))


def module_of(path: str) -> str:
    """The module of a file."""
    return "fairfold." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def users_of(text: str, line: int) -> set[str]:
    """Names of the functions and classes around a line of a module, and of those of the module that use them."""
    scopes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    named = {id(node): {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} for node in scopes}
    called = {id(node): {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)} for node in scopes}
    around = [node for node in scopes if node.lineno <= line <= (node.end_lineno or 0)]
    found = {max(around, key=lambda node: node.lineno).name} if around else set[str]()
    grown = set[str]()
    while grown != found:
        grown = set(found)
        found |= {node.name for node in scopes if (named[id(node)] | called[id(node)]) & grown}
    return {name for name in found if not name.startswith("__")}


def _test_files() -> list[Path]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if file.relative_to(ROOT / "tests").parts[0] not in TEST_FOLDERS]


def tests_of(path: str, line: int) -> list[str]:
    """The test files that concern a line of a file, the nearest first."""
    module, stem = module_of(path), Path(path).stem
    package, _, last = module.rpartition(".")
    folders = [part for part in Path(path).parent.parts if part]
    tests = {test.relative_to(ROOT / "tests"): test.read_text(encoding="utf-8") for test in _test_files()}
    words = {test: set(re.findall(r"\w+", text)) for test, text in tests.items()}
    names = users_of((SOURCE / path).read_text(encoding="utf-8"), line)
    rare = {name for name in names if sum(name in every for every in words.values()) <= COMMON}
    ranked = []
    for relative, text in tests.items():
        test = ROOT / "tests" / relative
        score = 4 * (f"{module} import" in text or f"{package} import {last}" in text or f"import {module}" in text)
        score += 3 * (stem in test.stem or test.stem.removeprefix("test_") in stem)
        score += 2 * sum(part in relative.parts for part in folders)
        score += 3 * min(2, len(words[relative] & rare))
        score -= "pytestmark = pytest.mark.slow" in text and 10
        if score > 1:
            ranked.append((-score, len(text), str(test)))
    return [name for _, _, name in sorted(ranked)]


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its file, with one place changed."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self.mutant = mutant

    def get_code(self, fullname: str) -> Any:
        content = self.mutant.content
        changed = content[: self.mutant.start] + self.mutant.text.encode() + content[self.mutant.stop :]
        return compile(changed, self.path, "exec", dont_inherit=True)


class _Finder:
    """Finds the changed module before all others do."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.mutant = module_of(mutant.path), mutant

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """The specification of the changed module; None of any other."""
        if name != self.name:
            return None
        path = SOURCE / self.mutant.path
        inside = [str(path.parent)] if path.name == "__init__.py" else None
        loader = _Loader(name, str(path), self.mutant)
        return importlib.util.spec_from_file_location(name, path, loader=loader, submodule_search_locations=inside)


def _test(mutant: Mutant | None, files: list[str]) -> None:
    """Run the tests of a mutant in this process, which ends with pytest's status."""
    import pytest

    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if mutant is not None:
        sys.meta_path.insert(0, _Finder(mutant))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=0"]
    os._exit(pytest.main([*options, *files]))


def run(mutant: Mutant | None, files: list[str]) -> str:
    """``killed`` or ``survived``; a mutant that hangs is killed. None is the library as it is, which has to survive."""
    process = multiprocessing.get_context("fork").Process(target=_test, args=(mutant, files))
    process.start()
    process.join(WALL_SECONDS)
    if process.is_alive():
        os.killpg(process.pid or 0, 9)
        process.join()
        return "killed"
    return "survived" if process.exitcode == 0 else "killed"


def _work(mutants: list[Mutant], sound: dict[str, bool], ends: float, done: Any) -> None:
    """Run a worker's mutants, and put each with its state into a queue; None when all are done, or the time is over."""

    def passing(files: list[str]) -> list[str]:
        """Those of some files whose tests pass with the library as it is."""
        if (unknown := [file for file in files if file not in sound]) and run(None, unknown) == "survived":
            sound.update(dict.fromkeys(unknown, True))
        for file in files:  # else each for itself
            sound[file] = sound[file] if file in sound else run(None, [file]) == "survived"
        return [file for file in files if sound[file]]

    for one in mutants:
        if time.monotonic() >= ends:
            break
        every = tests_of(one.path, one.line)
        state = "no tests that pass"
        for files in (every[:MAX_FILES], [*every[MAX_FILES:MORE_FILES], *(law for law in LAWS if law not in every)]):
            if state != "killed" and (chosen := passing(files)):
                state = run(one, chosen)
        done.put((one.name, state))
    done.put(None)


def report(results: dict[str, str]) -> str:
    """The counts, and what survived."""
    survivors = sorted(name for name, state in results.items() if state != "killed")
    share = 1 - len(survivors) / max(len(results), 1)
    lines = [f"{len(results)} mutants, {len(results) - len(survivors)} killed ({share:.0%})"]
    return "\n".join([*lines, *(f"{results[name]}: {name}" for name in survivors)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw and run mutants until all are done, or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json")
    parser.add_argument("--list", action="store_true", help="only list them")
    given = parser.parse_args(arguments)
    mutants = draw(given.count, given.seed, given.only)
    if given.list:
        print("\n".join(one.name for one in mutants))  # noqa: T201
        return
    import torch  # once; fairfold is imported anew for each mutant

    torch.set_num_threads(1)
    results: dict[str, str] = json.loads(given.out.read_text()) if given.out.exists() else {}
    left = [one for one in mutants if one.name not in results]
    context, ends = multiprocessing.get_context("fork"), time.monotonic() + 60 * given.minutes
    done: Any = context.Queue()
    for worker in range(given.workers):
        context.Process(target=_work, args=(left[worker :: given.workers], {}, ends, done)).start()
    working = given.workers
    given.out.parent.mkdir(parents=True, exist_ok=True)
    while working:
        if (found := done.get()) is None:
            working -= 1
            continue
        results[found[0]] = found[1]
        given.out.write_text(json.dumps(results, indent=1))
        print(f"{found[1]}: {found[0]}", flush=True)  # noqa: T201
    known = {one.name for one in mutants}
    print(report({name: state for name, state in results.items() if name in known}))  # noqa: T201


if __name__ == "__main__":
    main()
