"""Checkpoints: everything a run needs to go on, bit for bit, on disk at every moment.

A checkpoint is two files: ``round-N.safetensors`` holds the tensors, ``round-N.json`` (the manifest) names it, with its
size and checksum, and holds the rest. The manifest comes last, so whoever finds one finds a whole checkpoint; the one
before is removed only after that. No pickle anywhere: reading a checkpoint cannot run code.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairfold import files
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidCheckpoint
from fairfold.protocol.faults import Rejections
from fairfold.protocol.storage import Storage
from fairfold.protocol.words import State
from fairfold.runs.tensors import bytes_of, open_tensors, write_tensors
from fairfold.sealed import SENSELESS, Damaged, content_of, require_same, sealed_values, values_in
from fairfold.settings import Settings, read_settings
from fairfold.simulate.result import Quality, RoundReport
from fairfold.simulate.run import Progress
from fairfold.values import Shapes
from fairfold.version import __version__

FORMAT = 6
"""Raised whenever what is in a checkpoint, or in a run's folder, changes its meaning."""

KEPT = 2
PRIVATE = "private/"
BLOCK_ROWS = 65_536
"""Users whose vectors are read at a time."""

MAY_DIFFER = tuple(
    f"run.{key}"
    for key in ("rounds", "patience", "threshold", "evaluate_every", "references", "user_storage", "log_format")
)
"""Settings that may change when a run goes on: when it ends, what is looked at and what is kept where."""

WAITING = "fleet.network."
"""Of settings that say how long a server waits: they may change as well."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read."""

    progress: Progress  # where the run stood
    settings: dict[str, Any]  # of the run, as plain values
    data: dict[str, Any]  # facts of what it was trained on
    versions: dict[str, str]  # of fairfold and torch, which wrote it
    seconds: float  # how long the run had taken


def save(folder: Path, progress: Progress, settings: Settings, data: dict[str, Any], seconds: float) -> int:
    """Write a checkpoint, then remove all but the last two. Returns its size in bytes; attributes as there."""
    number = progress.state.round_number
    stem = _stem(number)
    tensors = _tensors(progress)
    described = write_tensors(folder / f"{stem}.safetensors", tensors, {"round": str(number)})
    content = {
        "format": FORMAT,
        "round": number,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"fairfold": __version__, "torch": torch.__version__},
        "settings": settings.plain(),
        "data": data,
        "tensors": described | {"names": list(tensors)},  # in this order: readers of the file sort them
        "rejections": dict(progress.rejections.counts),
        "seconds": seconds,
        "beside": {},  # nothing any more; part of the format
        "history": [asdict(report) for report in progress.history],
    }
    text = sealed_values(content)
    files.write_atomically(folder / f"{stem}.json", text)
    _remove_old(folder, number)
    return int(described["bytes"]) + len(text)


def newest(folder: Path, storage: Storage | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a folder, if any, and why newer ones were passed over.

    One written in another format is an error. Private vectors are read to ``storage``, to memory if not given.
    """
    damaged: list[str] = []
    for path in manifests(folder):
        try:
            return _read(path, storage or Storage()), damaged
        except Damaged as problem:
            damaged.append(f"{path.name}: {problem}")
        except (OSError, *SENSELESS) as problem:
            damaged.append(f"{path.name}: not all that a checkpoint needs ({problem!r})")
    return None, damaged


def require(
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
    *,
    newest_only: bool = False,
    storage: Storage | None = None,
) -> Checkpoint:
    """The newest whole checkpoint; an error where there is none, or with ``newest_only`` where a newer one is damaged.

    Of every newer one that is damaged and was passed over something is said. ``storage`` as for :func:`newest`.
    """
    found, damaged = newest(folder, storage)
    reasons = "; ".join(damaged) or "there is none"
    if found is None:
        given, remedy = f"{folder}: no whole checkpoint ({reasons})", "Check the folder, or train anew."
        raise InvalidCheckpoint(given, "the checkpoint of a run", remedy)
    if newest_only and damaged:
        remedy = "Check the folder, or train anew, or take the older one by leaving out --newest."
        raise InvalidCheckpoint(f"{folder}: the newest is damaged ({reasons})", "the checkpoint of a run", remedy)
    for problem in damaged:
        say(f"Passed over a damaged checkpoint, {problem}: this is round {found.progress.state.round_number}.")
    return found


def remove_strays(folder: Path, number: int) -> None:
    """Remove what a killed run left half-done: temporary and old files, and tensors whose manifest was not written.

    ``number`` is the round it goes on from: whatever is there of later ones is damaged, and keeps nothing alive.
    """
    files.remove_leftovers(folder)
    _remove_old(folder, number)
    for path in folder.glob("round-*.safetensors"):
        if not path.with_suffix(".json").exists():
            files.remove(path)


def refuse_other_run(checkpoint: Checkpoint, settings: Settings, where: Path) -> None:
    """Refuse a checkpoint of other settings, with the keys that differ."""
    saved, wanted = flat_keys(read_settings(checkpoint.settings).plain()), flat_keys(settings.plain())
    differing = [key for key in sorted(saved.keys() | wanted.keys()) if saved.get(key) != wanted.get(key)]
    differing = [key for key in differing if key not in MAY_DIFFER and not key.startswith(WAITING)]
    if differing:
        changes = ", ".join(f"{key} = {saved.get(key)!r}, now {wanted.get(key)!r}" for key in differing)
        raise InvalidCheckpoint(
            f"{where} was trained with {changes}",
            f"the same settings (only {', '.join(MAY_DIFFER)} may change)",
            "Leave these as they were, or train anew with another --out.",
        )


def refuse_other_data(checkpoint: Checkpoint, data: dict[str, Any], where: Path) -> None:
    """Refuse a checkpoint of another data set, even one of the same name."""
    differing = [name for name, value in data.items() if checkpoint.data.get(name) != value]
    if differing:
        changes = ", ".join(f"{name} {checkpoint.data.get(name)}, now {data[name]}" for name in differing)
        raise InvalidCheckpoint(
            f"{where} was trained on other data: {changes}", "the same data", "Prepare it as it was, or train anew."
        )


def refuse_other_shapes(checkpoint: Checkpoint, wanted: Shapes, where: Path) -> None:
    """Refuse a checkpoint whose tensors are not those of the model."""
    shapes = {name: prod(shape) for name, shape in wanted.items()}
    saved = {name: tensor.numel() for name, tensor in checkpoint.progress.state.full.items()}
    if saved != shapes:
        names = sorted(name for name in saved.keys() | shapes.keys() if saved.get(name) != shapes.get(name))
        sizes = ", ".join(f"{name} of {saved.get(name, 0)} numbers, now {shapes.get(name, 0)}" for name in names)
        raise InvalidCheckpoint(f"{where} is of another model: {sizes}", "the same tensors", "Train anew.")


def data_facts(data: Dataset | ImageDataset) -> dict[str, Any]:
    """What identifies a data set: its counts, and a checksum of what is trained on and asked for."""
    if isinstance(data, ImageDataset):
        counts, names = data.counts(), ("images", "labels", "writers")
    else:
        counts = {"users": data.num_users, "items": data.num_items, "interactions": len(data.train)}
        names = ("offsets", "items", "ratings")
    checksum = hashlib.sha256()
    for part in (data.train, data.test):
        for name in names:
            if (tensor := getattr(part, name)) is not None:
                checksum.update(bytes_of(tensor))
    return {"name": data.name, **counts, "sha256": checksum.hexdigest()}


# -- inside ------------------------------------------------------------------------------------------------------------


def _tensors(progress: Progress) -> dict[str, Tensor]:
    tensors = {f"full/{name}": tensor for name, tensor in progress.state.full.items()}
    for moment, of in progress.state.moments.items():
        tensors |= {f"moment/{moment}/{name}": tensor for name, tensor in of.items()}
    tensors |= {f"{PRIVATE}{name}": tensor for name, tensor in progress.private.items()}
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _progress(tensors: dict[str, Tensor], manifest: dict[str, Any]) -> Progress:
    full, private, moments = {}, {}, dict[str, dict[str, Tensor]]()
    for key, tensor in tensors.items():
        kind, name = key.split("/", 1)
        if kind == "full":
            full[name] = tensor
        elif kind == "private":
            private[name] = tensor
        else:
            moment, name = name.split("/", 1)
            moments.setdefault(moment, {})[name] = tensor
    history = [_report(values) for values in manifest["history"]]
    rejections = Rejections(Counter(manifest["rejections"]))
    return Progress(State(full, manifest["round"], moments), private, history, rejections)


def _report(values: dict[str, Any]) -> RoundReport:
    quality = values["quality"]
    if quality is not None:
        quality = Quality(quality["server"], tuple(quality["groups"]))
    return RoundReport(**values | {"quality": quality})


def _read(path: Path, storage: Storage) -> Checkpoint:
    manifest = _manifest(path)
    described = manifest["tensors"]
    beside = path.with_name(described["file"])
    require_same(beside, described["bytes"], described["sha256"])
    with open_tensors(beside) as opened:
        # Copies: memory of one's own is aligned as in a run that was never interrupted, and outlives the file.
        tensors = {
            name: _private(opened, name, storage) if name.startswith(PRIVATE) else opened.get_tensor(name).clone()
            for name in described["names"]
        }
    told = (manifest[key] for key in ("settings", "data", "versions", "seconds"))
    return Checkpoint(_progress(tensors, manifest), *told)


def _private(opened: Any, name: str, storage: Storage) -> Tensor:
    """A table of users' vectors, read a block at a time to where it is kept; else all of a tensor."""
    part = opened.get_slice(name)
    shape = tuple(part.get_shape())
    if len(shape) != 2 or not shape[0]:
        whole: Tensor = opened.get_tensor(name).clone()
        return whole
    first = part[:BLOCK_ROWS]
    table = storage.empty(name.replace("/", "-"), shape, first.dtype)
    table[:BLOCK_ROWS] = first
    for start in range(BLOCK_ROWS, shape[0], BLOCK_ROWS):
        table[start : start + BLOCK_ROWS] = part[start : start + BLOCK_ROWS]
    return table


def _manifest(path: Path) -> dict[str, Any]:
    """What a manifest says; damage is told from another format by the checksum, which all formats have."""
    manifest = values_in(content_of(path))
    if manifest["format"] != FORMAT:
        raise other_format(path, manifest["format"])
    return manifest


def other_format(path: Path, found: object) -> InvalidCheckpoint:
    """The refusal of what another version of fairfold wrote."""
    return InvalidCheckpoint(
        f"{path}: of format {found}, written by another version of fairfold",
        f"format {FORMAT}",
        "Use it with the version that wrote it, or train anew.",
    )


def manifests(folder: Path) -> list[Path]:
    """Of all checkpoints, the newest first."""
    return sorted(folder.glob("round-*.json"), reverse=True)


def _remove_old(folder: Path, number: int) -> None:
    """Remove all but the last two up to a round that is whole: later ones are damaged, and do not count."""
    whole = [path for path in manifests(folder) if path.stem <= _stem(number)]
    for path in whole[KEPT:]:
        files.remove(path)  # first, so that no manifest stands without its tensors
        files.remove(path.with_suffix(".safetensors"))


def _stem(number: int) -> str:
    return f"round-{number:08d}"


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables as one, by ``table.key``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flat_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
