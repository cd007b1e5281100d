"""Callbacks, also of ``fairfold train --track``, that log metrics to TensorBoard, MLflow or Weights & Biases."""

import logging
import math
import re
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from fairfold.atomic_io import write_atomically
from fairfold.config import Settings
from fairfold.errors import InvalidSettings, did_you_mean, install_hint
from fairfold.federation.evaluation import Callback, Result, RoundReport
from fairfold.subspace import Capacity

log = logging.getLogger("fairfold.runs.trackers")
SettingValue = str | int | float | bool


class Tracker(Callback):
    """Base of trackers: logs settings, seconds and bytes of every round, quality, and the result.

    A subclass implements ``start_run``, ``log_metrics`` and ``end_run``. An error at the start ends the run; a service
    that fails later loses its metrics, and the run goes on. ``id_file`` stores the service's id of the run, so that a
    resumed run stays one run.
    """

    TITLE: ClassVar[str]
    MODULE: ClassVar[str]
    EXTRA: ClassVar[str]

    def __init__(self, id_file: Path | None = None) -> None:
        self.require_installed()
        self._id_file = id_file
        self._own = True  # whether this tracker opened the run
        self._sizes: list[str] = []
        self._working = self._ended = False
        self._round = 0

    @classmethod
    def for_folder(cls, folder: Path) -> Self:
        """Make the tracker of ``fairfold train`` for a run's folder."""
        raise NotImplementedError

    def start_run(self, settings: Mapping[str, SettingValue], first_round: int, run_id: str | None) -> str | None:
        """Start a run, or resume the one with this id; return its id."""
        raise NotImplementedError

    def log_metrics(self, values: Mapping[str, float], round_number: int) -> None:
        """Log metrics of a round by their names."""
        raise NotImplementedError

    def end_run(self, *, finished: bool) -> None:
        """End the run, which is finished or failed."""
        raise NotImplementedError

    @classmethod
    def require_installed(cls) -> None:
        """Refuse the tracker if its package is not installed."""
        try:
            import_module(cls.MODULE)
        except ImportError:
            given = f"{cls.TITLE}, which is not installed"
            raise InvalidSettings(given, cls.TITLE, install_hint(cls.EXTRA)) from None

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:
        self._sizes = list(map(str, capacities))
        self._ended = False
        self._round = first_round - 1
        run_id = None
        if first_round > 1 and self._id_file is not None and self._id_file.exists():
            run_id = self._id_file.read_text(encoding="utf-8").strip()
        run_id = self.start_run(flat_settings(settings), first_round, run_id)
        self._working = True
        if run_id is not None and self._id_file is not None:
            write_atomically(self._id_file, run_id.encode())

    def on_round(self, report: RoundReport) -> None:
        metrics: dict[str, float | None] = {"round/seconds": report.seconds, "round/clients": report.num_clients}
        metrics |= {"round/bytes_down": report.bytes_down, "round/bytes_up": report.bytes_up}
        if report.quality is not None:
            values = (report.quality.server, *report.quality.groups)
            metrics |= {f"quality/{size}": value for size, value in zip(["server", *self._sizes], values, strict=True)}
        self._log_finite(metrics, report.round_number)

    def on_end(self, result: Result) -> None:
        metrics: dict[str, float | None] = {"end/server": result.quality}
        for group in result.groups:
            metrics[f"end/{group.capacity}"] = group.comparable_quality
            metrics[f"bytes_held/{group.capacity}"] = group.bytes_held
        metrics |= {f"baseline/{name}": value for name, value in result.baselines.items()}
        self._log_finite(metrics, self._round)
        self._ended = True

    def close(self) -> None:
        if self._working:
            self._call_guarded("close", self.end_run, finished=self._ended)
        self._working = False

    def _log_finite(self, metrics: Mapping[str, float | None], round_number: int) -> None:
        self._round = round_number
        if self._working:
            items = [(metric_name(name), value) for name, value in metrics.items()]
            finite = {name: float(value) for name, value in items if value is not None and math.isfinite(value)}
            self._call_guarded(f"round {round_number}", self.log_metrics, finite, round_number)

    def _call_guarded(self, what: str, call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            log.warning("%s failed at %s and is not used any more; the run goes on: %s", self.TITLE, what, error)
            self._working = False

    def _refusal(self, error: Exception, remedy: str, where: str = "") -> InvalidSettings:
        given = f"{self.TITLE}{where}: {error}".rstrip(".")
        return InvalidSettings(given, "a run that can be opened there", remedy)


def flat_settings(settings: Settings) -> dict[str, SettingValue]:
    """Settings by ``table.key``; values that are no text or number as text."""
    from fairfold.runs.checkpoint import flat_keys

    values = flat_keys(settings.plain())
    return {key: value if isinstance(value, str | int | float) else str(value) for key, value in values.items()}


def metric_name(name: str) -> str:
    """Replace the characters of a name that not all services accept."""
    return re.sub(r"[^\w\-. /]", "-", name, flags=re.ASCII)


class TensorBoard(Tracker):
    """Writes event files into a folder: ``tensorboard --logdir FOLDER`` shows them."""

    TITLE = "TensorBoard"
    MODULE = "torch.utils.tensorboard"
    EXTRA = "tensorboard"

    def __init__(self, folder: str | Path = "tensorboard") -> None:
        super().__init__()
        self._folder = Path(folder)
        self._writer: Any = None

    @classmethod
    def for_folder(cls, folder: Path) -> Self:
        return cls(folder / "tensorboard")

    def start_run(self, settings: Mapping[str, SettingValue], first_round: int, run_id: str | None) -> str | None:  # noqa: ARG002
        from torch.utils.tensorboard import SummaryWriter

        # Rounds that a killed process wrote, and that come again, are hidden by TensorBoard.
        self._writer = SummaryWriter(str(self._folder), purge_step=first_round)
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        self._writer.add_text("settings", f"| key | value |\n|---|---|\n{rows}", first_round)
        return None

    def log_metrics(self, values: Mapping[str, float], round_number: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round_number)
        self._writer.flush()

    def end_run(self, *, finished: bool) -> None:  # noqa: ARG002
        self._writer.close()


class MLflow(Tracker):
    """Logs to an MLflow run: the active one, which stays open, or else a new one of this ``name``.

    ``uri`` is the address of the tracking server or database; MLflow's own choice if not given
    (``MLFLOW_TRACKING_URI``). The experiment is created if there is none.
    """

    TITLE = "MLflow"
    MODULE = EXTRA = "mlflow"
    PARAMETERS_AT_ONCE = 100  # of one request, by MLflow's own limit

    def __init__(
        self, experiment: str = "fairfold", uri: str | None = None, name: str | None = None, id_file: Path | None = None
    ) -> None:
        super().__init__(id_file)
        self._experiment = experiment
        self._uri = uri
        self._name = name
        self._client: Any = None
        self._run = ""

    @classmethod
    def for_folder(cls, folder: Path) -> Self:
        return cls(name=folder.name, id_file=folder / "mlflow.txt")

    def start_run(self, settings: Mapping[str, SettingValue], first_round: int, run_id: str | None) -> str | None:  # noqa: ARG002
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient(self._uri)
        active = mlflow.active_run() if self._uri is None else None
        self._own = active is None
        try:
            self._run = run_id or (active.info.run_id if active is not None else self._create_run())
            if run_id is not None:
                self._client.update_run(run_id, "RUNNING")
                return run_id
            parameters = [Param(key, str(value)) for key, value in settings.items()]
            for first in range(0, len(parameters), self.PARAMETERS_AT_ONCE):
                self._client.log_batch(self._run, params=parameters[first : first + self.PARAMETERS_AT_ONCE])
        except mlflow.MlflowException as error:
            remedy = "Check MLFLOW_TRACKING_URI, or name a database: MLflow(uri='sqlite:///mlflow.db')."
            raise self._refusal(error, remedy, f" at {mlflow.get_tracking_uri()}") from error
        return self._run

    def _create_run(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        return str(self._client.create_run(experiment, run_name=self._name).info.run_id)

    def log_metrics(self, values: Mapping[str, float], round_number: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, now, round_number) for name, value in values.items()])

    def end_run(self, *, finished: bool) -> None:
        if self._own:
            self._client.set_terminated(self._run, "FINISHED" if finished else "FAILED")


class WeightsAndBiases(Tracker):
    """Logs to a run of Weights & Biases: the active one, which stays open, or else a new one.

    With ``WANDB_MODE=offline`` nothing leaves the machine; ``wandb sync`` sends it later. ``folder`` is where wandb
    stores its files, by its own choice if not given.
    """

    TITLE = "Weights & Biases"
    MODULE = EXTRA = "wandb"

    def __init__(
        self,
        project: str = "fairfold",
        name: str | None = None,
        folder: str | Path | None = None,
        id_file: Path | None = None,
    ) -> None:
        super().__init__(id_file)
        self._options = {"project": project, "name": name, "dir": folder}
        self._run: Any = None

    @classmethod
    def for_folder(cls, folder: Path) -> Self:
        return cls(name=folder.name, folder=folder, id_file=folder / "wandb.txt")

    def start_run(self, settings: Mapping[str, SettingValue], first_round: int, run_id: str | None) -> str | None:  # noqa: ARG002
        import wandb

        self._own = wandb.run is None
        try:
            self._run = wandb.run or wandb.init(**self._options, id=run_id, resume="allow" if run_id else None)
        except wandb.Error as error:
            remedy = "Run `wandb login`, or set WANDB_MODE=offline, which keeps everything on this machine."
            raise self._refusal(error, remedy) from error
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.define_metric("*", step_metric="round")
        return str(self._run.id)

    def log_metrics(self, values: Mapping[str, float], round_number: int) -> None:
        self._run.log({**values, "round": round_number})

    def end_run(self, *, finished: bool) -> None:
        if self._own:
            self._run.finish(exit_code=0 if finished else 1)


KINDS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


def find_tracker(name: str) -> type[Tracker]:
    """Find a kind of tracker by its short name; refused if its package is missing."""
    if name not in KINDS:
        given = f"tracker {name!r}{did_you_mean(name, KINDS)}"
        raise InvalidSettings(given, f"one of {', '.join(KINDS)}", "Give one of these names.")
    KINDS[name].require_installed()
    return KINDS[name]
