"""Damaged files of runs, devices and exports: each is refused in words, or read as what was written.

    python tests/faults/fuzz_folders.py --count 10000 --seed 1
    python tests/faults/fuzz_folders.py --seed 1 --case 1234      # one of them again

One file of a real folder is damaged, and everything that reads it is asked. What is read must be what was written;
where a checkpoint is damaged, the one before it must still be found, and now and then the run goes on to its end.
"""

import argparse
import logging
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs as a program as well

import torch
from torch import Tensor

from fairfold.device.store import load_device_id
from fairfold.errors import FairfoldError
from fairfold.flower.client_store import ClientState, ClientStore, RememberedUpdate
from fairfold.runs import checkpoint
from fairfold.runs.device_model import DeviceModel, device_model, read_device_model, write_device_model
from fairfold.runs.events import read_events
from fairfold.runs.folder import read_metrics, read_result, read_run_settings
from fairfold.runs.loaded import load_run
from fairfold.runs.report import RunSummary, read_run
from fairfold.runs.tensors import read_checked_tensors
from fairfold.subspace import Capacity
from tests.faults.data_files import mutate
from tests.faults.kinds import KINDS, Device, Run, Server, files_in_memory
from tests.support.runs import assert_same_end

Reader = Callable[[Path], Any]
GOES_ON = 12
"""One case in so many goes on with the run."""


def _checkpoints(folder: Path) -> Any:
    """The newest round that can be read; of the last two one at least is whole, for only one file is damaged."""
    found = checkpoint.load_newest(folder / "run" / "checkpoints")
    assert found.progress.state.round_number in (2, 3)
    progress = found.progress
    return found.progress.state.round_number, {**progress.state.full, **progress.local_state}, progress.history


def _opened(folder: Path) -> Any:
    return load_run(folder / "run").progress.state.round_number


def _report(folder: Path) -> Any:
    return read_run(folder / "run")


RUN: dict[str, list[Reader]] = {
    "settings.toml": [lambda folder: read_run_settings(folder / "run"), _report],
    "result.json": [lambda folder: read_result(folder / "run"), _report],
    "metrics.csv": [lambda folder: read_metrics(folder / "run", read_run_settings(folder / "run"), 3), _report],
    "nodes.jsonl": [lambda folder: read_events(folder / "run")],
    "model.safetensors": [lambda folder: read_checked_tensors(folder / "run" / "model.safetensors", "Restore it.")],
}
DEVICE: dict[str, list[Reader]] = {
    "name": [lambda folder: load_device_id(folder / "above" / "state")],
    "local_state.safetensors": [lambda folder: ClientStore(folder / "above" / "state").load()],
}


class Folders:
    """Real folders, one of each kind, to be copied and damaged."""

    def __init__(self, base: Path) -> None:
        self.base, self.kinds, self.right = base, {name: make() for name, make in KINDS.items()}, dict[str, list[Any]]()
        for name, kind in self.kinds.items():
            kind.prepare()
            (base / name).mkdir()
            kind.work(base / name, lambda _: None)
        run = load_run(base / "default" / "run")
        device = device_model(run, Capacity.parse("4x"))
        (base / "export").mkdir()
        write_device_model(run, device, base / "export" / "device.safetensors", ("ndcg", 0.5, 0.5))
        self.files = [
            (name, str(path.relative_to(base / name)))
            for name in (*self.kinds, "export")
            for path in sorted((base / name).rglob("*"))
            if path.is_file() and path.name != "run.log" and self.readers(name, path.name)
        ]
        for name, file in self.files:
            self.right[f"{name}/{file}"] = [_plain(read(base / name)) for read in self.readers(name, file)]

    def readers(self, name: str, file: str) -> list[Reader]:
        """What reads a file; devices of a federation are read as such."""
        if name == "export":
            return [lambda folder: read_device_model(folder / "device.safetensors")]
        if name == "device":
            return DEVICE[Path(file).name]
        if file.startswith("devices/"):
            return []
        if "round-" in file:
            return [_checkpoints, *([_opened] if name in ("default", "paper") else [])]
        return RUN.get(Path(file).name, [])

    def case(self, seed: int, number: int, folder: Path) -> str:
        """Damage a file and read it; return the outcome."""
        chance = random.Random(f"{seed} {number}")
        name, file = chance.choice(self.files)
        shutil.copytree(self.base / name, folder, dirs_exist_ok=True)
        path = folder / file
        content = path.read_bytes()
        changed = self._damaged(content, chance, path)
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)
        outcome = "as it was"
        for read, right in zip(self.readers(name, file), self.right[f"{name}/{file}"], strict=True):
            try:
                found = _plain(read(folder))
            except FairfoldError as error:
                outcome = "refused" if 20 < len(str(error)) < 5000 else f"refused in {len(str(error))} letters"
            else:
                older = "round-" in file and found != right
                shorter = file.endswith(".jsonl") and found == right[: len(found)]  # its last lines may be lost
                assert older or shorter or found == right or changed is None, f"{file}: read as something else"
                outcome = "the one before" if older else outcome
        kind = self.kinds.get(name)
        if isinstance(kind, Run) and number % GOES_ON == 0 and (folder / "run" / "settings.toml").exists():
            assert_same_end(kind._run(folder / "run", resume=True), kind.unbroken)  # whatever is damaged
            outcome += ", goes on"
        if isinstance(kind, Server | Device) and changed is not None:
            left = path.read_bytes()
            assert left == changed, "a damaged file was written over"
        return f"{Path(file).suffix or Path(file).name}: {outcome}"

    def _damaged(self, content: bytes, chance: random.Random, path: Path) -> bytes | None:
        kind = chance.randrange(10)
        if kind == 0:
            return None
        if kind == 1:
            return content[: chance.randrange(len(content))]
        if kind == 2:
            return bytes(len(content))
        if kind == 3:  # another file of the folder in its place
            return chance.choice([other for other in sorted(path.parent.iterdir()) if other.is_file()]).read_bytes()
        if kind <= 6:
            place = chance.randrange(len(content))
            return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
        return mutate(content, chance)


def _plain(value: Any) -> Any:
    """So that two readings can be compared: all digits, and no order where there is none."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return sorted((str(key), _plain(of)) for key, of in value.items())
    if isinstance(value, list | tuple):
        return [_plain(of) for of in value]
    if isinstance(value, RunSummary):
        return _plain(vars(value) | {"path": None})
    return _plain(vars(value)) if isinstance(value, DeviceModel | ClientState | RememberedUpdate) else str(value)


def fuzz(seed: int, count: int, first: int = 0) -> tuple[int, str]:
    """Run cases; return the number of failures and the output."""
    outcomes, failures, output = Counter[str](), 0, ""
    with files_in_memory() as base:
        folders = Folders(base)
        for number in range(first, first + count):
            with files_in_memory() as folder:
                try:
                    outcomes[folders.case(seed, number, folder)] += 1
                except Exception as error:
                    failures += 1
                    output += f"case {number} of seed {seed}: {type(error).__name__}: {str(error)[:300]}\n"
                    output += "".join(traceback.format_exception(error)[-3:]) if failures <= 20 else ""
    counts = ", ".join(f"{outcome} {times}" for outcome, times in sorted(outcomes.items()))
    return failures, f"{output}{count} files, seed {seed}: {failures} failures ({counts})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    given = parser.parse_args()
    logging.getLogger("fairfold").propagate = False
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    began = time.monotonic()
    some = (given.count, 0) if given.case is None else (1, given.case)
    failed, report = fuzz(given.seed, *some)
    sys.stdout.write(f"{report}, {time.monotonic() - began:.0f} s\n")
    sys.exit(failed > 0)
