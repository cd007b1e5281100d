"""Checkpoints: everything a run needs to go on, bit for bit, on disk at every moment.

A checkpoint is two files: ``round-N.safetensors`` holds the tensors, ``round-N.json`` (the manifest) names it, with its
size and checksum, and holds the rest. The manifest is written last, so a checkpoint with a manifest is whole; the one
before is removed only after that. No pickle anywhere: reading a checkpoint cannot run code.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairfold import __version__, atomic_io
from fairfold.checksums import PARSE_ERRORS, Damaged, parse_with_checksum, read_limited, verify_file, with_checksum
from fairfold.config import Settings, read_settings
from fairfold.errors import InvalidCheckpoint
from fairfold.federation.architecture import Storage
from fairfold.federation.evaluation import Quality, RoundReport
from fairfold.federation.randomness import Rejections
from fairfold.federation.simulation import Progress
from fairfold.federation.updates import State
from fairfold.runs.tensors import open_tensors, write_tensors
from fairfold.subspace.stored_table import StoredTable
from fairfold.typing import Shapes

Echo = Callable[[str], None]  # takes messages for the user
STORED = "stored"  # what checkpoints have of tables on disk
FORMAT = 8  # version of checkpoints and run folders; raised whenever their content changes its meaning
NUM_CHECKPOINTS = 2  # checkpoints that stay in a folder
BLOCK_ROWS = 65_536  # rows of local state that are read at a time
# Settings that may change when a run is resumed: when it ends, what is evaluated, what is stored where.
MAY_DIFFER = tuple(
    f"run.{key}"
    for key in ("rounds", "patience", "threshold", "evaluate_every", "baselines", "user_storage", "log_format")
)
MAY_DIFFER_TABLE = "fleet.network."  # settings of this table, timeouts of a server, may change as well


@dataclass(frozen=True)
class Checkpoint:
    """A run's progress and what it was trained with, as read from disk."""

    progress: Progress
    settings: dict[str, Any]  # as plain values
    data: dict[str, Any]  # fingerprint of the data
    versions: dict[str, str]  # of fairfold and torch, which wrote it
    seconds: float  # duration of the run so far


def save(folder: Path, progress: Progress, settings: Settings, data: dict[str, Any], seconds: float) -> int:
    """Write a checkpoint, then remove all but the last two. Returns its size in bytes."""
    number = progress.state.round_number
    stem = _checkpoint_stem(number)
    full, on_disk = progress.state.full, _on_disk(progress.state)
    named = {f"full/{name}": tensor for name, tensor in full.items() if name not in on_disk}
    stored: dict[str, Any] = {}
    for name, table in on_disk.items():
        named |= {f"{STORED}/{name}/{part}": tensor for part, tensor in table.kept.items()}
        stored[name] = table.checkpoint(number)
    for group, state in progress.state.algorithm_state.items():
        named |= {f"algorithm_state/{group}/{name}": tensor for name, tensor in state.items()}
    named |= {f"local_state/{name}": tensor for name, tensor in progress.local_state.items()}
    tensors = {name: tensor.cpu() for name, tensor in named.items()}
    described = write_tensors(folder / f"{stem}.safetensors", tensors, {"round": str(number)})
    content = {
        "format": FORMAT,
        "round": number,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"fairfold": __version__, "torch": torch.__version__},
        "settings": settings.plain(),
        "data": data,
        "tensors": described | {"names": list(tensors)},  # in this order: readers of the file sort them
        STORED: stored,
        "rejections": dict(progress.rejections.counts),
        "seconds": seconds,
        "history": [asdict(report) for report in progress.history],
    }
    text = with_checksum(content)
    atomic_io.write_atomically(folder / f"{stem}.json", text)
    _remove_old(folder, number)
    oldest = min(int(path.stem.partition("-")[2]) for path in manifests(folder))
    for table in on_disk.values():
        table.file.forget(oldest)
    return int(described["bytes"]) + len(text)


def find_newest(folder: Path, storage: Storage | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Read the newest whole checkpoint of a folder, if any; also return what is wrong with newer ones."""
    damaged: list[str] = []
    for path in manifests(folder):
        try:
            return _read_checkpoint(path, storage or Storage()), damaged
        except Damaged as problem:
            damaged.append(f"{path.name}: {problem}")
        except (OSError, *PARSE_ERRORS) as problem:
            damaged.append(f"{path.name}: incomplete ({problem!r})")
    return None, damaged


def load_newest(
    folder: Path, echo: Echo = lambda _: None, *, newest_only: bool = False, storage: Storage | None = None
) -> Checkpoint:
    """Read the newest whole checkpoint; damaged newer ones are reported by ``echo``, or refused (``newest_only``)."""
    found, damaged = find_newest(folder, storage)
    reasons = "; ".join(damaged) or "there is none"
    needed, remedy = "the checkpoint of a run", "Check the folder, or train again"
    if found is None:
        raise InvalidCheckpoint(f"{folder}: no whole checkpoint ({reasons})", needed, f"{remedy}.")
    if newest_only and damaged:
        remedy += ", or take the older one by leaving out --newest."
        raise InvalidCheckpoint(f"{folder}: the newest is damaged ({reasons})", needed, remedy)
    for problem in damaged:
        echo(f"Passed over a damaged checkpoint, {problem}: this is round {found.progress.state.round_number}.")
    return found


def remove_incomplete(folder: Path, number: int) -> None:
    """Remove what a run killed after round ``number`` left: temporary and old files, tensors without a manifest."""
    atomic_io.remove_temporary_files(folder)
    _remove_old(folder, number)
    for path in folder.glob("round-*.safetensors"):
        if not path.with_suffix(".json").exists():
            atomic_io.remove(path)


def require_same_settings(checkpoint: Checkpoint, settings: Settings, where: Path) -> None:
    """Refuse a checkpoint of other settings; the error names the keys that differ."""
    saved = flat_keys(read_settings(checkpoint.settings).plain())
    wanted = flat_keys(settings.plain())
    differing = [key for key in sorted(saved.keys() | wanted.keys()) if saved.get(key) != wanted.get(key)]
    differing = [key for key in differing if key not in MAY_DIFFER and not key.startswith(MAY_DIFFER_TABLE)]
    if differing:
        changes = ", ".join(f"{key} = {saved.get(key)!r}, now {wanted.get(key)!r}" for key in differing)
        needed = f"the same settings (only {', '.join(MAY_DIFFER)} may change)"
        remedy = "Leave these as they were, or train again with another --out."
        raise InvalidCheckpoint(f"{where} was trained with {changes}", needed, remedy)


def require_same_data(checkpoint: Checkpoint, data: dict[str, Any], where: Path) -> None:
    """Refuse a checkpoint of another data set, even one of the same name."""
    differing = [name for name, value in data.items() if checkpoint.data.get(name) != value]
    if differing:
        changes = ", ".join(f"{name} {checkpoint.data.get(name)}, now {data[name]}" for name in differing)
        given = f"{where} was trained on other data: {changes}"
        raise InvalidCheckpoint(given, "the same data", "Prepare it as it was, or train again.")


def require_same_shapes(checkpoint: Checkpoint, wanted: Shapes, where: Path) -> None:
    """Refuse a checkpoint whose tensors have other sizes than the model's."""
    shapes = {name: prod(shape) for name, shape in wanted.items()}
    saved = {name: tensor.numel() for name, tensor in checkpoint.progress.state.full.items()}
    if saved != shapes:
        names = sorted(name for name in saved.keys() | shapes.keys() if saved.get(name) != shapes.get(name))
        sizes = ", ".join(f"{name} of {saved.get(name, 0)} numbers, now {shapes.get(name, 0)}" for name in names)
        raise InvalidCheckpoint(f"{where} is of another model: {sizes}", "the same tensors", "Train again.")


def _on_disk(state: State) -> dict[str, StoredTable]:
    """Tables whose blocks stay where they are: checkpoints hold what leads back to them."""
    tables = {name: table for name, table in state.full.items() if isinstance(table, StoredTable)}
    return {name: table for name, table in tables.items() if table.file.path is not None}


def _parse_progress(tensors: dict[str, Tensor], manifest: dict[str, Any], stored: dict[str, StoredTable]) -> Progress:
    full, local_state = dict[str, Tensor](), dict[str, Tensor]()
    algorithm_state = dict[str, dict[str, Tensor]]()
    full |= stored
    for key, tensor in tensors.items():
        kind, name = key.split("/", 1)
        if kind == STORED:
            continue
        if kind == "full":
            full[name] = tensor
        elif kind == "local_state":
            local_state[name] = tensor
        else:
            group, name = name.split("/", 1)
            algorithm_state.setdefault(group, {})[name] = tensor
    history = [_parse_report(values) for values in manifest["history"]]
    rejections = Rejections(Counter(manifest["rejections"]))
    return Progress(State(full, manifest["round"], algorithm_state), local_state, history, rejections)


def _parse_report(values: dict[str, Any]) -> RoundReport:
    quality = values["quality"]
    if quality is not None:
        quality = Quality(quality["server"], tuple(quality["groups"]))
    return RoundReport(**values | {"quality": quality})


def _read_checkpoint(path: Path, storage: Storage) -> Checkpoint:
    manifest = parse_with_checksum(read_limited(path))
    if manifest["format"] != FORMAT:
        raise other_format_error(path, manifest["format"])
    described = manifest["tensors"]
    tensor_file = path.with_name(described["file"])
    verify_file(tensor_file, described["bytes"], described["sha256"])
    with open_tensors(tensor_file) as opened:
        # Copies: their memory is aligned as in a run that was never interrupted, and outlives the file.
        tensors = {
            name: _read_local_state(opened, name, storage)
            if name.startswith("local_state/")
            else opened.get_tensor(name).clone()
            for name in described["names"]
        }
    stored = dict[str, StoredTable]()
    for name, facts in manifest.get(STORED, {}).items():  # as they were: what later rounds changed is taken back
        prefix, number = f"{STORED}/{name}/", manifest["round"]
        kept = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        folder, resumes = path.parent.parent, storage.folder is not None
        stored[name] = StoredTable.at_checkpoint(folder, facts, kept, number, resumes=resumes)
    progress = _parse_progress(tensors, manifest, stored)
    return Checkpoint(progress, manifest["settings"], manifest["data"], manifest["versions"], manifest["seconds"])


def _read_local_state(opened: Any, name: str, storage: Storage) -> Tensor:
    """Read local state to ``storage``, a table in blocks of rows."""
    part = opened.get_slice(name)
    shape = tuple(part.get_shape())
    if len(shape) != 2 or not shape[0]:
        whole: Tensor = opened.get_tensor(name).clone()
        return whole
    table = storage.empty(name.replace("/", "-"), shape, part[:1].dtype)
    for start in range(0, shape[0], BLOCK_ROWS):
        table[start : start + BLOCK_ROWS] = part[start : start + BLOCK_ROWS]
    return table


def other_format_error(path: Path, found: object) -> InvalidCheckpoint:
    """Make the error for a file that another version of fairfold wrote."""
    given = f"{path}: of format {found}, written by another version of fairfold"
    return InvalidCheckpoint(given, f"format {FORMAT}", "Use it with the version that wrote it, or train again.")


def manifests(folder: Path) -> list[Path]:
    """List the manifests of all checkpoints, the newest first."""
    return sorted(folder.glob("round-*.json"), reverse=True)


def _remove_old(folder: Path, number: int) -> None:
    """Remove all but the last checkpoints up to a round; later ones are damaged, and do not count."""
    whole = [path for path in manifests(folder) if path.stem <= _checkpoint_stem(number)]
    for path in whole[NUM_CHECKPOINTS:]:
        atomic_io.remove(path)  # first, so that no manifest is left without its tensors
        atomic_io.remove(path.with_suffix(".safetensors"))


def _checkpoint_stem(number: int) -> str:
    return f"round-{number:08d}"


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to one, with keys ``table.key``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flat_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
