"""A flipped bit anywhere in a file that fairfold wrote: refused in words that name it, or nothing else is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.records import Outcome, Records, new_record
from fairfold.checksums import Damaged, line_with_checksum, parse_lines
from fairfold.data import load, load_images, prepare
from fairfold.data.store import write_images, write_manifest
from fairfold.device.store import load_device_id
from fairfold.errors import FairfoldError
from fairfold.flower.client_store import ClientState, ClientStore, RememberedUpdate
from fairfold.runs import checkpoint
from fairfold.runs import train as references
from fairfold.runs.device_model import device_model, read_device_model, write_device_model
from fairfold.runs.folder import read_metrics, read_result, read_run_settings
from fairfold.runs.loaded import load_run
from fairfold.runs.tensors import read_checked_tensors, write_checked_tensors
from fairfold.runs.train import run
from fairfold.subspace import Capacity
from tests.faults.fuzz_folders import _plain
from tests.support.pictures import pictures
from tests.support.runs import small

Read = Callable[[Path], Any]
"""Reads a folder: plain values, or an error with words."""

SETTINGS = small(data={"users": 5, "items": 12, "interactions_per_user": 4}, clients_per_round=3, rounds=2)


def _run(folder: Path) -> None:
    run(SETTINGS, folder / "run", checkpoint_every=2)


def _export(folder: Path) -> None:
    _run(folder)
    opened = load_run(folder / "run")
    device = device_model(opened, Capacity.parse("4x"))
    write_device_model(opened, device, folder / "device.safetensors", ("NDCG@20", 0.5, 0.5))


def _device(folder: Path) -> None:
    update = RememberedUpdate(1, {"user.weight": torch.ones(1, 2)})
    ClientStore(folder).save(ClientState(update, None, ["anna"], 3, {"items": torch.arange(3)}, 7, 9, {3: 1}))
    load_device_id(folder)


def _references(folder: Path) -> None:
    tensors = {"0": torch.rand(4), "users": torch.arange(4)}
    write_checked_tensors(folder / "kept.safetensors", tensors, {"names": '["EASE"]'})


def _interactions(folder: Path) -> None:
    rows = "".join(f"u{row % 4},i{row % 9},{1 + row % 5}\n" for row in range(36))
    (folder / "own.csv").write_text(f"user,item,rating\n{rows}")
    prepare(folder / "own.csv", cache=folder / "cache", ratings=True).folder.rename(folder / "set")


def _images(folder: Path) -> None:
    dataset = pictures(count=4, side=2)
    write_images(folder, dataset)
    manifest = {
        "name": "few",
        "kind": "images",
        "counts": dataset.counts(),
        "options": {},
        "repairs": {},
        "split": "ours",
    }
    write_manifest(folder, manifest)


def _records(folder: Path) -> None:
    Records(folder).join([new_record("a", "b", {"seed": 1}, Outcome.of_value(0.5, 3))])


def _lines(folder: Path) -> None:
    (folder / "nodes").write_text("".join(line_with_checksum(f'{{"node": {number}}}') for number in range(4)))


def _newest(folder: Path) -> Any:
    found = checkpoint.load_newest(folder / "run" / "checkpoints")
    progress = found.progress
    return {**progress.state.full, **progress.local_state}, progress.history, found.settings, found.data, found.seconds


def _kept(folder: Path) -> Any:
    found = references._read(folder / "kept.safetensors")
    if found is None:
        raise Damaged("kept.safetensors: it is computed again")
    return {name: [row.ndcg, row.users, row.ndcg_by_user] for name, row in found.items()}


def _read_records(folder: Path) -> Any:
    found = Records(folder)
    if found.damaged:
        raise Damaged(found.damaged[0])
    return {label: record["outcome"] for label, record in found.by_label.items()}


def _read_lines(folder: Path) -> Any:
    try:
        return parse_lines((folder / "nodes").read_bytes())
    except ValueError as error:
        raise Damaged(f"nodes: {error}") from None


def _data(folder: Path) -> Any:
    found = load(folder / "set")
    return [vars(part) for part in (found.train, found.test)], found.user_ids, found.item_ids


def _pictures(folder: Path) -> Any:
    found = load_images(folder)
    return [vars(part) for part in (found.train, found.test)], found.num_classes, found.writer_ids


KINDS: dict[str, tuple[Callable[[Path], None], str, Read, str]] = {
    "settings of a run": (_run, "run/settings.toml", lambda at: read_run_settings(at / "run"), ""),
    "result of a run": (_run, "run/result.json", lambda at: read_result(at / "run"), ""),
    "metrics of a finished run": (_run, "run/metrics.csv", lambda at: read_metrics(at / "run", SETTINGS, 2), ""),
    "metrics": (_run, "run/metrics.csv", lambda at: read_metrics(at / "run", SETTINGS), ""),
    "model": (
        _run,
        "run/model.safetensors",
        lambda at: read_checked_tensors(at / "run" / "model.safetensors", "")[0],
        "",
    ),
    "manifest of a checkpoint": (_run, "run/checkpoints/round-00000002.json", _newest, ""),
    "tensors of a checkpoint": (_run, "run/checkpoints/round-00000002.safetensors", _newest, "round-00000002"),
    "exported model": (_export, "device.safetensors", lambda at: read_device_model(at / "device.safetensors"), ""),
    "state of a device": (_device, "local_state.safetensors", lambda at: ClientStore(at).load(), ""),
    "name of a device": (_device, "name", load_device_id, ""),
    "kept references": (_references, "kept.safetensors", _kept, ""),
    "manifest of data": (_interactions, "set/manifest.json", _data, ""),
    "interactions": (_interactions, "set/train-00000.parquet", _data, ""),
    "images": (_images, "train-images.npy", _pictures, ""),
    "records of experiments": (_records, "cells.csv", _read_records, ""),
    "lines that are appended": (_lines, "nodes", _read_lines, ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_found_or_has_no_meaning(kind: str, tmp_path: Path) -> None:
    """White space may be another, and so may what is written in two ways; no value may."""
    make, file, read, named = KINDS[kind]
    make(tmp_path)
    path, right = tmp_path / file, _plain(read(tmp_path))
    content, refused = path.read_bytes(), 0
    for place in range(len(content)):
        flipped = bytes([content[place] ^ 1 << place % 8])
        path.write_bytes(content[:place] + flipped + content[place + 1 :])
        try:
            found = read(tmp_path)
        except (FairfoldError, Damaged) as error:
            assert (named or path.name) in str(error), str(error)  # noqa: PT017
            refused += 1
        else:
            assert _plain(found) == right, f"byte {place} of {len(content)}"
        assert len(path.read_bytes()) == len(content), "what is damaged is left as it is"
    assert refused > len(content) / 2
