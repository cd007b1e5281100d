"""A run that is to be audited: its settings, and the data with which it can be replayed."""

from collections.abc import Callable
from pathlib import Path

from fairfold.data import Dataset
from fairfold.errors import InvalidSettings
from fairfold.runs import checkpoint
from fairfold.runs.folder import RunFolder
from fairfold.runs.read import DATA, SETTINGS, require_run
from fairfold.settings import Settings, read_settings
from fairfold.settings.files import read_toml
from fairfold.settings.parts import SYNTHETIC
from fairfold.simulate.world import load_interactions

ON_DEVICES = "devices"
"""What a federation's run says where a simulation's names its data."""


def run_folder(path: Path) -> Path:
    """The folder of a run; a server leaves it inside its own, and `fairfold federate` that inside its own."""
    found = [path / inside for inside in ("run", "server/run") if (path / inside / SETTINGS).is_file()]
    return found[0] if found and not (path / SETTINGS).is_file() else path


def replayable(
    path: Path, data: str | None = None, say: Callable[[str], None] = lambda _: None
) -> tuple[Settings, Dataset]:
    """Settings and data of a run; refused where it cannot be replayed, with what would help."""
    require_run(path)
    found = checkpoint.require(RunFolder(path).checkpoints, say)
    settings = read_settings(found.settings)
    if settings.model.reads_images:
        raise InvalidSettings(
            f"{path}, a run of model.kind={settings.model.kind!r} on images", "a run of a recommender",
            "There are no attacks on answers about images here, which does not mean that there are none.",
        )  # fmt: skip
    if settings.algorithm.pooled:
        raise InvalidSettings(
            f"{path}, trained with all data in one place", "a federation's run", "Its server has everybody's data."
        )
    tried = path.absolute().parent.parent / DATA
    if data is None and found.data.get("name") == ON_DEVICES and tried.is_file():
        say(f"Replayed with the data that {tried} names; each of its users is taken to be a device of their own.")
        settings = settings.with_changes({"data": read_toml(tried)})
        return settings, load_interactions(settings)[0]
    if data is None and found.data.get("name") == ON_DEVICES:
        raise InvalidSettings(
            f"{path}, a federation's run, whose data lies on its devices",
            "data to replay it with",
            "Name it with --data (a name or a folder); each of its users is taken to be a device of their own.",
        )
    if data is None:
        loaded, _ = load_interactions(settings)
        checkpoint.refuse_other_data(found, checkpoint.data_facts(loaded), path)
        return settings, loaded
    known = {"data.kind": SYNTHETIC} if data == SYNTHETIC else {"data.kind": "interactions", "data.name": data}
    settings = settings.with_changes(known)
    loaded, _ = load_interactions(settings)
    items = found.data.get("items", loaded.num_items)
    if loaded.num_items != items:
        raise InvalidSettings(
            f"--data {data}, with {loaded.num_items:,} items", f"the {items:,} of {path}", "Name the data of the run."
        )
    return settings, loaded
