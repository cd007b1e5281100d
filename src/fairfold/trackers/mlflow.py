"""Runs of an MLflow experiment."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fairfold.errors import InvalidSettings
from fairfold.trackers.tracker import Plain, Tracker

PARAMETERS_AT_ONCE = 100  # of one request, by MLflow's own limit


class MLflow(Tracker):
    """Logs to an MLflow run: the one that is active, which stays open, or else a new one.

    Args:
        experiment: Name of the experiment; it is made where there is none.
        uri: Address of the tracking server or database; MLflow's own choice if not given (``MLFLOW_TRACKING_URI``).
        name: Name of a new run.
        kept: A file that keeps the run's id, so that a resumed run stays one run.
    """

    TITLE, MODULE, EXTRA = "MLflow", "mlflow", "mlflow"

    def __init__(
        self, experiment: str = "fairfold", uri: str | None = None, name: str | None = None, kept: Path | None = None
    ) -> None:
        super().__init__(kept)
        self._experiment, self._uri, self._name = experiment, uri, name
        self._client: Any = None
        self._run, self._mine = "", True

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """A run of the folder's name."""
        return cls(name=folder.name, kept=folder / "mlflow.txt")

    def open(self, settings: Mapping[str, Plain], first_round: int, known: str | None) -> str | None:  # noqa: ARG002
        """Settings are the run's parameters."""
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient(self._uri)
        active = mlflow.active_run() if self._uri is None else None
        self._mine = active is None
        try:
            self._run = known or (active.info.run_id if active is not None else self._new())
            if known is not None:
                self._client.update_run(known, "RUNNING")
                return known
            parameters = [Param(key, str(value)) for key, value in settings.items()]
            for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
                self._client.log_batch(self._run, params=parameters[first : first + PARAMETERS_AT_ONCE])
        except mlflow.MlflowException as error:
            remedy = "Check MLFLOW_TRACKING_URI, or name a database: MLflow(uri='sqlite:///mlflow.db')."
            said = f"{self.TITLE} at {mlflow.get_tracking_uri()}: {error}".rstrip(".")
            raise InvalidSettings(said, "a run that can be opened there", remedy) from error
        return self._run

    def _new(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        place = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        return str(self._client.create_run(place, run_name=self._name).info.run_id)

    def send(self, values: Mapping[str, float], round_number: int) -> None:
        """A metric each, with the round as its step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, now, round_number) for name, value in values.items()])

    def shut(self, *, ended: bool) -> None:
        """Finished, or failed; a run that somebody else has opened is left to them."""
        if self._mine:
            self._client.set_terminated(self._run, "FINISHED" if ended else "FAILED")
