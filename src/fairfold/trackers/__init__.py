"""Callbacks, and those that send figures of a run to TensorBoard, MLflow or Weights & Biases.

The same objects serve ``fairfold.fit(..., callbacks=[...])``, ``simulate(..., callbacks=[...])`` and
``fairfold train --track``.
"""

from fairfold.errors import InvalidSettings, nearest
from fairfold.trackers.callback import Callback
from fairfold.trackers.mlflow import MLflow
from fairfold.trackers.tensorboard import TensorBoard
from fairfold.trackers.tracker import Tracker
from fairfold.trackers.wandb import WeightsAndBiases

__all__ = ["Callback", "MLflow", "TensorBoard", "Tracker", "WeightsAndBiases", "tracker"]

KINDS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


def tracker(name: str) -> type[Tracker]:
    """A kind of tracker by its short name; refused at once where its package is missing."""
    if name not in KINDS:
        raise InvalidSettings(
            f"tracker {name!r}{nearest(name, KINDS)}", f"one of {', '.join(KINDS)}", "Give one of these names."
        )
    KINDS[name].require()
    return KINDS[name]
