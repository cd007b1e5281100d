"""Kinds of folder that must survive, each with a tiny program that writes it and a check of what is found."""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fairfold import atomic_io as files
from fairfold.config import Settings
from fairfold.config.files import DEFAULT_RECIPE, load_settings
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.device.store import load_device_id
from fairfold.errors import FairfoldError, InvalidSettings
from fairfold.federation.evaluation import Result
from fairfold.federation.federation import Federation, load_federation
from fairfold.federation.updates import State
from fairfold.flower.client_store import FILE, ClientState, ClientStore, RememberedUpdate
from fairfold.runs import checkpoint, train
from fairfold.runs.folder import RunFolder
from fairfold.runs.report import read_run
from tests.support.federations import tiny_data
from tests.support.nodes import assert_same, in_process
from tests.support.pictures import SMALL, pictures
from tests.support.runs import Interrupted, StopAfter, assert_same_end
from tests.support.settings import make_settings

FIRST, ROUNDS = 2, 3
"""Runs are finished after two rounds, and then given one more."""

TINY = {
    "data.users": 8, "data.items": 60, "data.interactions_per_user": 8, "model.factors": 4,
    "fleet.clients_per_round": 4, "run.evaluate_every": 2,
}  # fmt: skip

Promise = Callable[[str], None]
"""Called with what the program has promised by now: it must hold from here on."""


class Kind:
    """One kind of folder. ``watched`` is the part of it whose calls may be refused."""

    watched = ""

    def prepare(self) -> None:
        """What an unbroken program ends with."""

    def work(self, folder: Path, promise: Promise) -> None:
        """The program, in an empty folder."""
        raise NotImplementedError

    def check(self, folder: Path, promised: list[str]) -> None:
        """Look at what was found, go on from it, and compare the end."""
        raise NotImplementedError


def last_of(promised: list[str], kind: str) -> int:
    """Largest number promised of a kind; 0 if none was."""
    return max((int(text.split()[1]) for text in promised if text.startswith(f"{kind} ")), default=0)


class Promising:
    """While open, whatever saves a checkpoint or begins a run says so when it is done."""

    def __init__(self, promise: Promise) -> None:
        self._promise, self._save, self._begin = promise, checkpoint.save, RunFolder.begin

    def __enter__(self) -> None:
        def save(*given: Any) -> int:
            size = self._save(*given)
            self._promise(f"checkpoint {given[1].state.round_number}")
            return size

        def begin(*given: Any) -> None:
            self._begin(*given)
            self._promise("begun")

        setattr(checkpoint, "save", save)  # noqa: B010
        setattr(RunFolder, "begin", begin)  # noqa: B010

    def __exit__(self, *_: object) -> None:
        setattr(checkpoint, "save", self._save)  # noqa: B010
        setattr(RunFolder, "begin", self._begin)  # noqa: B010


def assert_kept(out: Path, promised: list[str]) -> None:
    """What was promised of a run's folder is there before anything mends it; nothing in it is damaged."""
    found, damaged = checkpoint.find_newest(out / "checkpoints")
    assert not damaged, damaged
    number = 0 if found is None else found.progress.state.round_number
    assert number >= last_of(promised, "checkpoint"), f"round {number} is the newest, and not {promised[-1]}"
    if [text for text in promised if text in ("finished", "going on")][-1:] == ["finished"]:
        assert read_run(out).state == "finished"
    try:
        read_run(out)
    except FairfoldError:
        assert "begun" not in promised or (out / "metrics.csv").exists()  # a line that was lost is an error with words


def assert_tidy(out: Path) -> None:
    """Nothing is left but what a run leaves."""
    assert not list(out.rglob(f"*{files.TEMPORARY}"))
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == [f"round-0000000{number}.{end}" for number in (2, 3) for end in ("json", "safetensors")], names
    assert read_run(out).state == "finished"


class Run(Kind):
    """The folder of ``fairfold train``.

    What an algorithm does in a round may depend on how many there are (``planned``): then the first sitting is broken
    off after two of them, not finished.
    """

    def __init__(self, settings: Settings, data: ImageDataset | None = None, *, planned: bool = False) -> None:
        self.settings, self.data, self.planned = settings, data, planned

    def _run(self, out: Path, rounds: int = ROUNDS, **options: Any) -> Result:
        settings = self.settings.with_changes({"run.rounds": rounds})
        data = self.data
        if data is not None:
            setattr(train, "load_federation", lambda settings: (Federation.of(settings, data), {}))  # noqa: B010
        try:
            return train.run(settings, out, checkpoint_every=1, echo=lambda _: None, **options).result
        finally:
            setattr(train, "load_federation", load_federation)  # noqa: B010

    def prepare(self) -> None:
        with files_in_memory() as folder:
            self.unbroken = self._run(folder / "run")

    def work(self, folder: Path, promise: Promise) -> None:
        with Promising(promise):
            if self.planned:
                with suppress(Interrupted):
                    self._run(folder / "run", callbacks=[StopAfter(FIRST)])
            else:
                self._run(folder / "run", FIRST)
                promise("finished")
                promise("going on")
            self._run(folder / "run", resume=True)
        promise("finished")

    def check(self, folder: Path, promised: list[str]) -> None:
        out = folder / "run"
        begun = (out / "settings.toml").exists()
        if begun:
            assert_kept(out, promised)
        else:
            assert not promised, f"no settings, but {promised[-1]}"
            try:
                self._run(out, resume=True)
            except InvalidSettings:
                pass
            else:
                raise AssertionError("what is no run was resumed")
        assert_same_end(self._run(out, resume=begun), self.unbroken)
        assert_tidy(out)


class Server(Kind):
    """The folder of a federation's server, with its devices' folders as they were at the same moment."""

    watched = "run"
    NODES = 2

    def __init__(self) -> None:
        self.settings = make_settings(
            algorithm="closed_form", support=2, capacities="1x-4x", clients_per_round=None, factors=4, rounds=ROUNDS,
            evaluate_every=2, popularity="counts",
        )  # fmt: skip
        self.data: Dataset = tiny_data(3, 4, 24)

    def _run(self, folder: Path, rounds: int | None = None, **options: Any) -> State:
        devices = folder / "devices"
        nodes = in_process(self.data, self.settings, self.NODES, devices, folder=folder / "run", **options)
        return nodes.run(num_rounds=rounds)

    def prepare(self) -> None:
        with files_in_memory() as folder:
            self.unbroken = self._run(folder)

    def work(self, folder: Path, promise: Promise) -> None:
        with Promising(promise):
            self._run(folder, FIRST)
            promise("finished")
            promise("going on")
            self._run(folder, resume=True)
        promise("finished")

    def check(self, folder: Path, promised: list[str]) -> None:
        out = folder / "run"
        begun = (out / "settings.toml").exists()
        if begun:
            assert_kept(out, promised)
        else:
            assert not promised, f"no settings, but {promised[-1]}"
        found = self._run(folder, resume=begun)
        assert found.round_number == self.unbroken.round_number
        assert_same(found.full, self.unbroken.full)
        for name, moment in self.unbroken.algorithm_state.items():
            if name.startswith("sums"):
                assert_same(found.algorithm_state[name], moment)
        assert len(found.algorithm_state["acknowledged"]["clients"]) == self.NODES, (
            "a device that came back as another one"
        )
        assert_tidy(out)


class Device(Kind):
    """The folder of a device: its name, and the state after each of three updates."""

    UPDATES = 3

    def prepare(self) -> None:
        torch.manual_seed(0)
        self.vectors = [torch.rand(2, 4) for _ in range(self.UPDATES + 1)]

    def _state(self, number: int) -> ClientState:
        """State after so many updates."""
        history = {"items": torch.arange(5)}
        state = ClientState(user_names=["a", "b"], run=7, history=history, secret=11, item_numbers={3: 1})
        updates = [RememberedUpdate(update, {"user": self.vectors[update]}) for update in range(number + 1)]
        return replace(state, acknowledged=updates[max(number - 1, 0)], pending=updates[number] if number else None)

    def work(self, folder: Path, promise: Promise) -> None:
        home = folder / "above" / "state"
        promise(f"name {load_device_id(home)}")
        for number in range(1, self.UPDATES + 1):
            store = ClientStore(home)
            store.load()
            store.save(self._state(number))
            promise(f"update {number}")

    def check(self, folder: Path, promised: list[str]) -> None:
        home = folder / "above" / "state"
        name = last_of(promised, "name")
        assert name == 0 or load_device_id(home) == name, "another name than before"
        store = ClientStore(home)
        found = store.load()
        number = 0 if found.pending is None else found.pending.update_id
        assert number >= last_of(promised, "update"), f"update {number}, but {promised[-1]}"
        if number:
            expected = self._state(number)
            assert (found.user_names, found.secret) == (expected.user_names, expected.secret)
            assert found.item_numbers == expected.item_numbers
            assert torch.equal(found.acknowledged.local_state["user"], expected.acknowledged.local_state["user"])
            assert found.pending is not None
            assert torch.equal(found.pending.local_state["user"], self.vectors[number])
        store.save(self._state(self.UPDATES))
        load_device_id(home)
        assert sorted(path.name for path in home.iterdir()) == sorted(["name", FILE])
        again = ClientStore(home).load()
        assert again.pending is not None
        assert again.pending.update_id == self.UPDATES


KINDS: dict[str, Callable[[], Kind]] = {
    "default": lambda: Run(load_settings(None, TINY, DEFAULT_RECIPE), planned=True),
    "tables": lambda: Run(load_settings(None, TINY | {"algorithm.kind": "closed_form"})),
    "paper": lambda: Run(load_settings(None, TINY, "paper")),
    "images": lambda: Run(make_settings(**SMALL | {"evaluate_every": 2, "local_epochs": 1}), pictures(count=48)),
    "server": Server,
    "device": Device,
}


# -- the shim ----------------------------------------------------------------------------------------------------------

NOTHING, KILL, TEAR, NO_ROOM, BROKEN, FULL_FROM_HERE, BROKEN_FROM_HERE = range(7)


class Shim:
    """The library that was preloaded into this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._arm, self._disarm, self.mark = library.faults_arm, library.faults_disarm, library.faults_mark
        self._arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]
        self._disarm.restype = ctypes.c_long

    def arm(self, folder: Path, mode: int, at: int = 0, trace: int = -1) -> None:
        self._arm(os.fsencode(folder), mode, at, trace)

    def disarm(self) -> int:
        """How many calls there were."""
        return int(self._disarm())


@contextmanager
def files_in_memory() -> Iterator[Path]:
    """A folder for a moment, in memory where there is such a place: no call waits for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder).resolve()
