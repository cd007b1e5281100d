"""Checkpoints: everything a run needs to go on, bit for bit, on disk at every moment.

A checkpoint is two files: ``round-N.safetensors`` holds the tensors, ``round-N.json`` (the manifest) names it, with its
size and checksum, and holds the rest. The manifest comes last, so whoever finds one finds a whole checkpoint; the one
before is removed only after that. No pickle anywhere: reading a checkpoint cannot run code.
"""

import hashlib
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairfold import files
from fairfold.data import Dataset, Interactions
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidCheckpoint
from fairfold.federation.aggregate import ServerState
from fairfold.federation.replies import Rejections
from fairfold.federation.sampling import hash_seed
from fairfold.federation.settings import Settings
from fairfold.federation.storage import Storage
from fairfold.runs.settings import in_full
from fairfold.runs.tensors import bytes_of, checksum_of, write_tensors
from fairfold.simulate.result import Quality, RoundReport
from fairfold.simulate.run import Progress
from fairfold.version import __version__

FORMAT = 1
"""Raised whenever what is in a checkpoint changes its meaning."""

KEPT = 2
PRIVATE = "private/"
BLOCK_ROWS = 65_536
"""Users whose vectors are read at a time."""

MAY_DIFFER = ("rounds", "patience", "threshold", "evaluate_every", "user_storage")
"""Settings that may change when a run goes on: when it ends, what is looked at and what is kept where."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read.

    Attributes:
        progress: Where the run stood.
        settings: Of the run, as plain values: those that the version which wrote it knew.
        data: Facts of the data it was trained on.
        versions: Of fairfold and torch, which wrote it.
        seconds: How long the run had taken.
    """

    progress: Progress
    settings: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class Found:
    """What a folder of checkpoints holds: the newest whole one, if any, and why newer ones were passed over."""

    checkpoint: Checkpoint | None
    damaged: list[str]


def save(folder: Path, progress: Progress, settings: Settings, data: dict[str, Any], seconds: float) -> int:
    """Write a checkpoint, then remove all but the last two. Returns its size in bytes."""
    number = progress.state.round_number
    stem = f"round-{number:08d}"
    tensors = _tensors(progress)
    described = write_tensors(folder / f"{stem}.safetensors", tensors, {"round": str(number)})
    content = {
        "format": FORMAT,
        "round": number,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"fairfold": __version__, "torch": torch.__version__},
        "settings": settings.model_dump(mode="json"),
        "hash": {
            "seed": hash_seed(settings, max(number - 1, 0)),
            "mapping": settings.mapping,
            "chunk": settings.chunk,
            "sign": settings.sign,
            "size_rule": settings.size_rule,
            "capacities": settings.capacities,
        },
        "data": data,
        "tensors": described | {"names": list(tensors)},  # in this order: readers of the file sort them
        "rejections": dict(progress.rejections.counts),
        "seconds": seconds,
        "history": [asdict(report) for report in progress.history],
    }
    content["checksum"] = _checksum(content)
    text = json.dumps(content).encode()
    files.write_atomically(folder / f"{stem}.json", text)
    _remove_old(folder)
    return int(described["bytes"]) + len(text)


def newest(folder: Path, storage: Storage | None = None) -> Found:
    """The newest whole checkpoint of a folder; an error for one written in another format.

    Args:
        folder: Of checkpoints.
        storage: Where private vectors are read to; in memory if not given.
    """
    damaged: list[str] = []
    for path in _manifests(folder):
        try:
            return Found(_read(path, storage or Storage()), damaged)
        except _Damaged as problem:
            damaged.append(f"{path.name}: {problem}")
        except (KeyError, TypeError, ValueError) as problem:
            damaged.append(f"{path.name}: not all that a checkpoint needs ({problem!r})")
    return Found(None, damaged)


def require(folder: Path) -> Checkpoint:
    """The newest whole checkpoint; an error where there is none."""
    found = newest(folder)
    if found.checkpoint is None:
        reasons = "; ".join(found.damaged) or "there is none"
        raise InvalidCheckpoint(
            f"{folder}: no whole checkpoint ({reasons})", "the checkpoint of a run", "Check the folder, or train anew."
        )
    return found.checkpoint


def remove_strays(folder: Path) -> None:
    """Remove what a killed run left half-done: temporary and old files, and tensors whose manifest was not written."""
    files.remove_leftovers(folder)
    _remove_old(folder)
    for path in folder.glob("round-*.safetensors"):
        if not path.with_suffix(".json").exists():
            files.disk.remove(path)


def refuse_other_run(checkpoint: Checkpoint, settings: Settings, where: Path) -> None:
    """Refuse a checkpoint of other settings, with the keys that differ."""
    saved, wanted = _flat(in_full(checkpoint.settings)), _flat(settings.model_dump(mode="json"))
    differing = [key for key in sorted(saved.keys() | wanted.keys()) if saved.get(key) != wanted.get(key)]
    differing = [key for key in differing if key not in MAY_DIFFER]
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


def refuse_other_shapes(checkpoint: Checkpoint, shapes: dict[str, int], where: Path) -> None:
    """Refuse a checkpoint whose tensors are not those of the model."""
    saved = {name: tensor.numel() for name, tensor in checkpoint.progress.state.full.items()}
    if saved != shapes:
        names = sorted(name for name in saved.keys() | shapes.keys() if saved.get(name) != shapes.get(name))
        sizes = ", ".join(f"{name} of {saved.get(name, 0)} numbers, now {shapes.get(name, 0)}" for name in names)
        raise InvalidCheckpoint(f"{where} is of another model: {sizes}", "the same tensors", "Train anew.")


def data_facts(data: Dataset | ImageDataset) -> dict[str, Any]:
    """What identifies a data set: its counts, and a checksum of what is trained on and asked for."""
    checksum = hashlib.sha256()
    if isinstance(data, ImageDataset):
        for split in (data.train, data.test):
            for tensor in (split.images, split.labels, split.writers):
                if tensor is not None:
                    checksum.update(bytes_of(tensor))
        return {"name": data.name, **data.counts(), "sha256": checksum.hexdigest()}
    for part in (data.train, data.test):
        for tensor in _columns(part):
            checksum.update(bytes_of(tensor))
    return {
        "name": data.name,
        "users": data.num_users,
        "items": data.num_items,
        "interactions": len(data.train),
        "sha256": checksum.hexdigest(),
    }


class Pace:
    """When a checkpoint is due: every so many rounds, or as often as costs at most a tenth of the time."""

    SHARE = 10

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._cost = 0.0
        self._ended = -float("inf")

    def due(self, round_number: int) -> bool:
        """Whether to write one after this round."""
        if self._every is not None:
            return round_number % self._every == 0
        return time.monotonic() - self._ended >= self.SHARE * self._cost

    def wrote(self, seconds: float) -> None:
        """Note what one has cost."""
        self._cost, self._ended = seconds, time.monotonic()


# -- inside ------------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """Why a checkpoint is not whole."""


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
    state = ServerState(full, manifest["round"], moments)
    return Progress(state, private, history, Rejections(Counter(manifest["rejections"])))


def _report(values: dict[str, Any]) -> RoundReport:
    quality = values["quality"]
    if quality is not None:
        quality = Quality(quality["server"], tuple(quality["groups"]))
    return RoundReport(**values | {"quality": quality})


def _read(path: Path, storage: Storage) -> Checkpoint:
    manifest = _manifest(path)
    described = manifest["tensors"]
    beside = path.with_name(described["file"])
    if not beside.is_file():
        raise _Damaged(f"{beside.name} is missing")
    if beside.stat().st_size != described["bytes"]:
        raise _Damaged(f"{beside.name} has {beside.stat().st_size} of {described['bytes']} bytes")
    if checksum_of(beside) != described["sha256"]:
        raise _Damaged(f"{beside.name} has another checksum")
    try:
        with safe_open(beside, "pt") as opened:
            # Copies: memory of one's own is aligned as in a run that was never interrupted, and outlives the file.
            tensors = {
                name: _private(opened, name, storage) if name.startswith(PRIVATE) else opened.get_tensor(name).clone()
                for name in described["names"]
            }
    except (SafetensorError, OSError) as error:
        raise _Damaged(f"{beside.name}: {error}") from None
    progress = _progress(tensors, manifest)
    return Checkpoint(progress, manifest["settings"], manifest["data"], manifest["versions"], manifest["seconds"])


def _private(opened: Any, name: str, storage: Storage) -> Tensor:
    """A table of users' vectors, read a block at a time to where it is kept."""
    part = opened.get_slice(name)
    rows, columns = part.get_shape()
    table: Tensor | None = None
    for start in range(0, max(rows, 1), BLOCK_ROWS):
        block = part[start : start + BLOCK_ROWS]
        if table is None:
            table = storage.empty(name.removeprefix(PRIVATE), (rows, columns), block.dtype)
        table[start : start + BLOCK_ROWS] = block
    assert table is not None
    return table


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict):
            raise _Damaged("not a manifest")
        found = manifest["format"]
    except KeyError:
        raise _Damaged("not a manifest") from None
    except (OSError, ValueError) as error:
        raise _Damaged(f"unreadable ({error})") from None
    if found != FORMAT:
        raise InvalidCheckpoint(
            f"{path}: a checkpoint of format {found}, written by fairfold {manifest.get('versions', {})!r}",
            f"format {FORMAT}",
            "Go on with the version that wrote it, or train anew.",
        )
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise _Damaged("another checksum than it says")
    return manifest


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _manifests(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.json"), reverse=True)


def _remove_old(folder: Path) -> None:
    for path in _manifests(folder)[KEPT:]:
        files.disk.remove(path)  # first, so that no manifest stands without its tensors
        files.disk.remove(path.with_suffix(".safetensors"))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _columns(part: Interactions) -> list[Tensor]:
    columns = [part.offsets, part.items]
    return columns if part.ratings is None else [*columns, part.ratings]
