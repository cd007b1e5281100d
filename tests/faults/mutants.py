"""Draw mutants of the library, one changed place each, and run the tests that reach them.

    python tests/faults/mutants.py --count 300 [--seed 1] [--only secure] [--minutes 8] [--workers 2] [--out FOLDER]

The library is loaded once with a switch at every drawn place, and so are the tests. Each test file runs once
unchanged, which shows what its tests reach and cost. Then each mutant is switched on in a process forked from there, in
which the tests that reach it run, near and fast ones first, up to the first that fails and that passes without the
mutant. So a mutant that survives passed every test that reaches it (at most ``--seconds`` of processor time of them),
or no test reaches it. Slow tests, and tests in processes of their own, do not see a mutant. No file is changed. What
the folder given with ``--out`` holds is not run again; a change of the library or of the draw needs another one.
"""

import argparse
import ast
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "fairfold"
LEFT_OUT = ("cli/", "kernels/gpu/", "runs/plots", "runs/report", "runs/trackers", "backends/cuda_graph")
SWITCH = "__fairfold_mutant__"  # a built-in name while mutants run
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
    """A changed place: at a line and column of a file, one piece of code becomes another."""

    path: str
    line: int
    column: int
    before: str
    text: str

    @property
    def name(self) -> str:
        """How it is listed."""
        return f"{self.path}:{self.line}:{self.column}: {self.before[:80]!r} -> {self.text!r}"


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


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is inside it, without annotations, patterns and f-strings, which can have no switch."""
    if not isinstance(node, ast.JoinedStr | ast.pattern):
        yield node
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from _inside(child)


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Places in the bodies of functions, with other code for each."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in _inside(statement):
                    yield from _changes(node)


def _where(lines: list[bytes], place: Any) -> tuple[int, int, str]:
    """Line, column and code of a place."""
    if place.lineno == place.end_lineno:
        code = lines[place.lineno - 1][place.col_offset : place.end_col_offset]
    else:
        between = lines[place.lineno : place.end_lineno - 1]
        last = lines[place.end_lineno - 1][: place.end_col_offset]
        code = b"".join([lines[place.lineno - 1][place.col_offset :], *between, last])
    return place.lineno, place.col_offset, code.decode()


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file."""
    text, found = path.read_bytes(), set[Mutant]()
    lines = text.splitlines(keepends=True)
    for place, other in _places(ast.parse(text)):
        line, column, before = _where(lines, place)
        if " ".join(before.split()) != other:
            found.add(Mutant(path.relative_to(SOURCE).as_posix(), line, column, before, other))
    return sorted(found, key=lambda one: (one.line, one.column, one.before, one.text))


def draw(count: int, seed: int, only: str) -> list[Mutant]:
    """Mutants drawn by a seed, as many of a file as it has places."""
    every = [
        one
        for path in sorted(SOURCE.rglob("*.py"))
        if only in (name := path.relative_to(SOURCE).as_posix()) and not name.startswith(LEFT_OUT)
        for one in mutants_of(path)
    ]
    return random.Random(seed).sample(every, min(count, len(every)))


class _Switches:
    """Puts a switch at each drawn place of a module: the other code where it is on, else its own."""

    def __init__(self, text: bytes, tree: ast.AST, numbers: dict[tuple[int, int, str, str], int]) -> None:
        self.at: dict[int, dict[int, str]] = {}
        lines = text.splitlines(keepends=True)
        for place, other in _places(tree):
            if (key := (*_where(lines, place), other)) in numbers:
                self.at.setdefault(id(place), {})[numbers[key]] = other

    def put(self, node: Any) -> Any:
        """A node with the switches of what is inside it, and its own around them; else the value as it is."""
        if isinstance(node, list):
            return [self.put(one) for one in node]
        if not isinstance(node, ast.AST):
            return node
        drawn, switched = self.at.get(id(node), {}), node
        for name, inner in ast.iter_fields(node):
            setattr(node, name, self.put(inner))
        for number, other in drawn.items():
            on = ast.parse(f"{SWITCH}({number})", mode="eval").body
            if isinstance(switched, ast.expr):
                changed = ast.parse(f"({other})", mode="eval").body
                switched = ast.copy_location(ast.IfExp(test=on, body=changed, orelse=switched), node)
            else:
                (statement,) = ast.parse(f"def _():\n {other}").body[0].body  # type: ignore[attr-defined]
                assert isinstance(switched, ast.stmt)
                switched = ast.copy_location(ast.If(test=on, body=[statement], orelse=[switched]), node)
        return switched


def switched(path: str, mutants: dict[int, Mutant]) -> ast.Module:
    """A file of the library with switches at the places of its mutants, which have numbers."""
    text = (SOURCE / path).read_bytes()
    tree = ast.parse(text)
    numbers = {(one.line, one.column, one.before, one.text): number for number, one in mutants.items()}
    _Switches(text, tree, numbers).put(tree)
    return ast.fix_missing_locations(tree)


def report(mutants: Sequence[Mutant], states: dict[str, str]) -> str:
    """The counts, with the interval that a draw leaves (Wilson, 95 %), and what survived."""
    known = [(one.name, states[one.name]) for one in mutants if one.name in states]
    left = [f"{state}: {name}" for name, state in sorted(known) if not state.startswith("killed")]
    count, share, z = max(len(known), 1), 1 - len(left) / max(len(known), 1), 1.96
    middle, width = share + z * z / 2 / count, z * (share * (1 - share) / count + z * z / 4 / count**2) ** 0.5
    low, high = ((middle + sign * width) / (1 + z * z / count) for sign in (-1, 1))
    words = f"{len(known)} of {len(mutants)} mutants, {len(known) - len(left)} killed: {share:.1%}"
    return "\n".join([f"{words} ({low:.1%} to {high:.1%})", *left])


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw and run mutants until all are done, or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders of tests")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seconds", type=float, default=60, help="of unchanged tests for each mutant")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--list", action="store_true", help="only list them")
    given = parser.parse_args(arguments)
    mutants = draw(given.count, given.seed, given.only)
    if given.list:
        print("\n".join(one.name for one in mutants))  # noqa: T201
        return
    from tests.faults.mutant_runs import run

    states = run(mutants, given.tests, given.out, given.workers, given.minutes, given.seconds)
    print(report(mutants, states))  # noqa: T201


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
