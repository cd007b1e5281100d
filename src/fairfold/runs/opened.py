"""A run opened again: its settings, its data and its newest checkpoint, for recommendations and exports."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidSettings
from fairfold.federation.image_task import task_of
from fairfold.federation.settings import Settings, read_settings
from fairfold.federation.task import Weights
from fairfold.metrics.ranking import Scorer
from fairfold.models import scorer
from fairfold.runs import checkpoint
from fairfold.runs.folder import SETTINGS, RunFolder
from fairfold.simulate.federation import Federation
from fairfold.simulate.result import closed_form_scorer
from fairfold.simulate.run import Progress, load_data


@dataclass(frozen=True)
class OpenRun:
    """What a run has learned, beside what it learned from.

    Attributes:
        path: Of its folder.
        federation: Settings, task and capacities.
        progress: The newest whole checkpoint.
        data: What it was trained on.
        facts: Those of the data.
    """

    path: Path
    federation: Federation
    progress: Progress
    data: Dataset | ImageDataset
    facts: dict[str, Any]

    @property
    def settings(self) -> Settings:
        """As run."""
        return self.federation.settings

    @property
    def interactions(self) -> Dataset:
        """The data of a recommender; refused where the run is none."""
        if isinstance(self.data, ImageDataset):
            raise InvalidSettings(
                f"{self.path}, a run of model={self.settings.model!r} on images",
                "a run of a recommender",
                "A network that reads images has nothing to recommend; see `fairfold export` for its device models.",
            )
        return self.data

    def scorer(self, full: Weights) -> Scorer:
        """Scores of all items by a model: the server's tensors, or those a device's stand for."""
        task, settings = self.federation.task, self.settings
        if settings.solver == "closed_form":
            return closed_form_scorer(full, task, settings)
        return scorer(task.model_of(full, self.progress.private))


def open_run(path: Path) -> OpenRun:
    """Open a run's folder; refused where it holds no whole checkpoint, or the data is no longer what it was."""
    folder = RunFolder(path)
    if not folder.holds_a_run():
        raise InvalidSettings(
            f"{path}, which holds no {SETTINGS}", "the folder of a run", "Name what `fairfold train` wrote."
        )
    found = checkpoint.require(folder.checkpoints)
    settings = read_settings(found.settings)
    data, _ = load_data(settings)
    task = task_of(data, settings)
    facts = checkpoint.data_facts(data)
    checkpoint.refuse_other_data(found, facts, path)
    checkpoint.refuse_other_shapes(found, {name: prod(shape) for name, shape in task.shapes.items()}, path)
    return OpenRun(path, Federation.of(settings, task), found.progress, data, facts)


def find_user(data: Dataset, wanted: str) -> int:
    """The number of a user, given by the id of the source file, or as ``#number``."""
    text = wanted.strip()
    if data.user_ids is not None and not text.startswith("#"):
        try:
            return data.user_ids.index(text)
        except ValueError:
            some = ", ".join(data.user_ids[:3])
            raise InvalidSettings(
                f"user {wanted!r}",
                f"an id of {data.name} (such as {some}), or #0 to #{data.num_users - 1}",
                "Check it.",
            ) from None
    digits = text.removeprefix("#")
    if not digits.isdecimal() or int(digits) >= data.num_users:
        raise InvalidSettings(f"user {wanted!r}", f"#0 to #{data.num_users - 1}", "Check the number.")
    return int(digits)
