"""Run the tests that reach each mutant, in processes forked from one that has loaded the library and its tests."""

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.faults.mutants import ROOT, SOURCE, SWITCH, Mutant, switched

# Pages, wheels and programs of their own reach no place of the library in the process that has the switches.
PAGES = [path.name for path in (ROOT / "tests").glob("test_*.py") if path.name != "test_doctests.py"]
NOT_TRIED = ("experiments", "faults", *PAGES)
FILE_SECONDS = 40  # of processor time for a file's tests, unchanged: what comes later is not used
TIMES, AT_LEAST = 5, 5.0  # a test may take so many times its processor time, and so many seconds more
PATIENCE = 20  # times that of the clock, on a busy machine
NEAR = 0.1  # a test near the mutant goes first even if it costs ten times as much


class _Switch:
    """Says at a place whether its mutant is on, and remembers that the place was reached."""

    def __init__(self) -> None:
        self.on = -1
        self.reached = set[int]()

    def __call__(self, number: int) -> bool:
        self.reached.add(number)
        return number == self.on


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with its switches."""

    def __init__(self, name: str, path: str, mutants: dict[int, Mutant]) -> None:
        super().__init__(name, path)
        self.mutants = mutants

    def get_code(self, fullname: str) -> CodeType:
        relative = Path(self.path).relative_to(SOURCE).as_posix()
        return compile(switched(relative, self.mutants), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules that have mutants before all others do."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self.modules: dict[str, dict[int, Mutant]] = {}
        for number, one in enumerate(mutants):
            module = "fairfold." + one.path.removesuffix(".py").replace("/", ".")
            self.modules.setdefault(module.removesuffix(".__init__"), {})[number] = one

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name not in self.modules:
            return None
        path = SOURCE / next(iter(self.modules[name].values())).path
        inside = [str(path.parent)] if path.name == "__init__.py" else None
        loader = _Loader(name, str(path), self.modules[name])
        return importlib.util.spec_from_file_location(name, path, loader=loader, submodule_search_locations=inside)


class _Runs:
    """A pytest plugin that, where pytest would run its tests, maps them and then runs the mutants."""

    def __init__(
        self, mutants: Sequence[Mutant], folder: Path, workers: int, ends: float, seconds: float, switch: _Switch
    ) -> None:
        self.mutants, self.folder, self.workers, self.ends, self.seconds = mutants, folder, workers, ends, seconds
        self.switch = switch
        self.failed = self.skipped = False
        self.states: dict[str, str] = _read(folder / "states.json")
        self.costs: dict[str, float] = {}
        self.reaching: dict[int, list[str]] = {}
        self.sound: dict[str, bool] = {}

    def pytest_collection(self) -> None:
        """Let hypothesis only look for a failing example, and not for a small one."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings.default, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed
        self.skipped |= report.skipped

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Map what is not mapped, then run what has not been run."""
        self.items = {item.nodeid: item for item in session.items}
        files: dict[str, list[str]] = {}
        for name in self.items:
            files.setdefault(name.partition("::")[0], []).append(name)
        maps: dict[str, Any] = _read(self.folder / "map.json")

        def mapped(file: str, lines: list[Any]) -> None:
            maps[file] = lines
            _write(self.folder / "map.json", maps)
            print(f"{len(maps)} of {len(files)} test files", flush=True)  # noqa: T201

        self._work((file for file in files if file not in maps), lambda file: self._map(files[file]), mapped)
        for name, cost, reached in (line for file in files for line in maps.get(file, [])):
            self.costs[name] = cost
            for number in reached:
                self.reaching.setdefault(number, []).append(name)
        left = (number for number, one in enumerate(self.mutants) if one.name not in self.states)
        self._work(left, self._try, self._tried)
        return True

    def _work(self, jobs: Iterable[Any], do: Callable[[Any], None], done: Callable[[Any, Any], None]) -> None:
        """Do jobs in so many processes at a time, each of which leaves lines of JSON."""
        waiting, at_work = iter(jobs), dict[int, tuple[Any, Path]]()
        while True:
            while len(at_work) < self.workers and time.monotonic() < self.ends:
                if (job := next(waiting, None)) is None:
                    break
                place = Path(tempfile.mkdtemp(prefix="fairfold-mutant-"))
                if not (process := os.fork()):
                    self._enter(place)
                    do(job)
                    os._exit(0)
                at_work[process] = job, place
            if not at_work:
                return
            process, _ = os.wait()
            if process in at_work:
                job, place = at_work.pop(process)
                written = (place / "lines").read_text() if (place / "lines").exists() else ""
                done(job, [json.loads(line) for line in written.splitlines()])
                shutil.rmtree(place, ignore_errors=True)

    def _enter(self, place: Path) -> None:
        """Give a process places of its own for files."""
        self.place = place
        os.environ["FAIRFOLD_CACHE"] = str(place / "cache")
        tempfile.tempdir = os.environ["TMPDIR"] = str(place)
        quiet = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(quiet, standard)

    def _say(self, line: Any) -> None:
        with (self.place / "lines").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _tests(self, names: list[str], number: int, place: str, after: Callable[[str, float], None]) -> str:
        """Run tests in a process with a mutant on: the name of the first that fails, else nothing."""
        read, write = os.pipe()
        wall = 0.0 if number < 0 else AT_LEAST + TIMES * sum(self.costs.get(name, 0) for name in names)
        if not (process := os.fork()):
            os.setsid()
            if names:
                factory = getattr(self.items[names[0]].config, "_tmp_path_factory")  # noqa: B009
                factory._given_basetemp = self.place / place
            signal.alarm(int(PATIENCE * wall) or 900)
            self.switch.on = number
            if number < 0:
                _limit(FILE_SECONDS)
            for name, following in zip(names, [*names[1:], None], strict=True):
                os.write(write, f"{name}\n".encode())
                if number >= 0:
                    _limit(AT_LEAST + TIMES * self.costs[name])
                self.failed = self.skipped = False
                self.switch.reached.clear()
                started, item = time.process_time(), self.items[name]
                later = self.items[following] if following else None
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=later)
                if self.failed and number >= 0:
                    os._exit(1)
                if not (self.failed or self.skipped):
                    after(name, time.process_time() - started)
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(process, 0)
        with os.fdopen(read) as pipe:
            begun = pipe.read().splitlines() if status else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        return begun[-1] + (" by time" if os.WIFSIGNALED(status) else "") if begun else ""

    def _map(self, names: list[str]) -> None:
        """Say of each test of a file what it costs and reaches."""
        self._tests(names, -1, "map", lambda name, cost: self._say([name, cost, sorted(self.switch.reached)]))

    def _chosen(self, number: int) -> list[str]:
        """The tests that reach a mutant, near and cheap files first, within the processor time of a mutant."""
        files: dict[str, list[str]] = {}
        for name in self.reaching.get(number, []):
            files.setdefault(name.partition("::")[0], []).append(name)
        parts = Path(self.mutants[number].path)

        def order(file: str) -> float:
            path = Path(file)
            near = parts.stem in path.stem or path.stem.removeprefix("test_") in parts.stem
            weight = NEAR if near else 1.0
            weight *= NEAR ** len(set(parts.parent.parts) & set(path.parts)) if parts.parent.parts else 1.0
            return weight * sum(self.costs[name] for name in files[file])

        chosen, spent = list[str](), 0.0
        for file in sorted(files, key=order):
            cheap = sorted(files[file], key=self.costs.__getitem__)
            for name in cheap:
                if spent + self.costs[name] <= self.seconds:
                    chosen.append(name)
                    spent += self.costs[name]
        return chosen

    def _try(self, number: int) -> None:
        """Say whether a test notices a mutant that passes without it."""
        left = self._chosen(number)
        count = len(left)
        while left:
            failed = self._tests(left, number, f"on-{len(left)}", lambda *_: None)
            if not failed:
                break
            name = failed.removesuffix(" by time")
            unchanged = self._tests([name], len(self.mutants), f"off-{len(left)}", lambda *_: None)
            if not unchanged:
                self._say(f"killed by {failed}")
                return
            left = left[left.index(name) + 1 :]
        reach = len(self.reaching.get(number, []))
        self._say(f"survived {count} of {reach} tests" if reach else "no test reaches it")

    def _tried(self, number: int, lines: list[str]) -> None:
        name = self.mutants[number].name
        self.states[name] = lines[-1] if lines else "the run itself ended"
        _write(self.folder / "states.json", self.states)
        print(f"{len(self.states)}. {self.states[name]}: {name}", flush=True)  # noqa: T201


def _limit(seconds: float) -> None:
    """End this process when it has computed for so many seconds more."""
    used = time.process_time()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1, hard))


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.with_suffix(".new").write_text(json.dumps(content, indent=0))
    path.with_suffix(".new").replace(path)


def run(
    mutants: Sequence[Mutant], tests: list[str], folder: Path, workers: int, minutes: float, seconds: float
) -> dict[str, str]:
    """Map the tests and run the mutants: of each how it ended, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    repeated = [name for name, count in Counter(one.name for one in mutants).items() if count > 1]
    assert not repeated, repeated
    switch = _Switch()
    setattr(builtins, SWITCH, switch)
    sys.meta_path.insert(0, _Finder(mutants))
    import torch

    torch.set_num_threads(1)
    left_out = [f"--ignore={ROOT / 'tests' / name}" for name in NOT_TRIED]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:terminalreporter", "--timeout=0", "--capture=sys", *left_out]
    runs = _Runs(mutants, folder, workers, time.monotonic() + 60 * minutes, seconds, switch)
    if status := pytest.main([*options, *tests], plugins=[runs]):
        raise SystemExit(f"pytest ended with {status!r}")
    return runs.states
