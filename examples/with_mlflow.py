"""A run of MLflow with settings, quality per round, and the picture of quality by memory.

python examples/with_mlflow.py [FILE]    # needs the extras mlflow and report; without a file, a synthetic world
"""

import sys
from typing import Any

import mlflow

import fairfold
from fairfold.runs.trackers import MLflow

WORLD = {"data.users": 100, "data.items": 300, "data.interactions_per_user": 30}


def main(interactions: Any = "synthetic", **options: Any) -> str:
    """Fit within a run of MLflow, put the picture beside its figures, and return the run's id."""
    settings = WORLD if isinstance(interactions, str) and interactions == "synthetic" else {}
    with mlflow.start_run() as run:
        model = fairfold.fit(interactions, "1x-4x-16x", settings=settings, callbacks=[MLflow()], **options)
        mlflow.log_figure(model.plot(), "quality.png")
    return str(run.info.run_id)


if __name__ == "__main__":
    print(f"Run {main(*sys.argv[1:2])}: `mlflow ui` shows it, with the picture among its artifacts.")
