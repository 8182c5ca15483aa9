"""Other trackers that metrics go to: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from strop.config.run import TrackingSettings
from strop.errors import MissingExtra, UserError
from strop.tracking.metrics import Kind, MetricsSink, first_sentence
from strop.tracking.run_directory import RunDirectory


def check_trackers(settings: TrackingSettings) -> None:
    """See that the trackers that are asked for can be had: packages installed (none is imported), server there.

    Raises:
        MissingExtra: a package is not installed.
        UserError: the MLflow server does not answer. Its client alone would try for minutes.
    """
    if settings.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise MissingExtra("wandb", extra="wandb", needed_for="tracking.wandb_project")
    if settings.mlflow_uri is not None and importlib.util.find_spec("mlflow") is None:
        raise MissingExtra("mlflow", extra="mlflow", needed_for="tracking.mlflow_uri")
    if settings.mlflow_uri is not None:
        _see_server(settings.mlflow_uri)


def open_trackers(
    settings: TrackingSettings,
    run: RunDirectory,
    *,
    config: Mapping[str, Any],
    resumed_at: int | None = None,
) -> list[MetricsSink]:
    """The trackers of a run, for `MetricsWriter`.

    Args:
        settings: which ones.
        run: gives folders and identity; ids that a tracker chooses are kept in its manifest for a resume.
        config: the resolved configuration, a nested mapping of plain values.
        resumed_at: the step that the run goes on from; None for a new run.

    Raises:
        MissingExtra: a package is not installed.
        UserError: a tracker refuses (no login, no such server).
    """
    check_trackers(settings)
    sinks: list[MetricsSink] = []
    try:
        if settings.tensorboard:
            sinks.append(TensorBoard(run.events_folder, resumed_at=resumed_at))
        if settings.wandb_project is not None:
            sinks.append(WeightsAndBiases(settings.wandb_project, run, config=config))
        if settings.mlflow_uri is not None:
            sinks.append(MLflow(settings.mlflow_uri, run, config=config))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _see_server(uri: str, *, timeout: float = 5.0) -> None:
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or getproxies():
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=timeout).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"the MLflow server does not answer: {error}",
            where=f"tracking.mlflow_uri={uri}",
            mend="start it, or train without it: tracking.mlflow_uri=null",
        ) from error


def tagged(metrics: Mapping[str, float], kind: Kind) -> dict[str, float]:
    """Names as other trackers show them: training metrics as they are, others below `eval/` and `warmup/`."""
    if kind == "train":
        return dict(metrics)
    return {f"{kind}/{name.removeprefix(f'{kind}/')}": value for name, value in metrics.items()}


class TensorBoard:
    """Event files in `events/`, those of the warm-up in `events/warmup/`.

    On a resume TensorBoard is told to forget what came after the checkpoint. It forgets by step and not by tag, which
    is why the warm-up, with steps of its own, has a folder of its own.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        self.folder = folder
        self._purge = None if resumed_at is None else resumed_at + 1
        self._writers: dict[str, _Events] = {}

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        # One event for all numbers; `add_scalar` would write one for each.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in tagged(metrics, kind).items()]
        self._writer("warmup" if kind == "warmup" else "").add(step=step, summary=Summary(value=values))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, subfolder: str) -> _Events:
        if subfolder not in self._writers:
            self._writers[subfolder] = _Events(self.folder / subfolder, purge_step=self._purge)
        return self._writers[subfolder]


class _Events:
    """An event file, in which an event is when it was added: a run that is slow or killed shows all of its curves.

    TensorBoard's own writer has a thread for each file, and to wait for that takes as long again as to write.
    """

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        # Never one that is there: in the same second a run may be opened again.
        number = len(list(folder.glob(f"{name}.*")))
        self._records = RecordWriter((folder / f"{name}.{number}").open("xb"))
        self.add(file_version="brain.Event:2")
        if purge_step is not None:
            self.add(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **event).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


class WeightsAndBiases:
    """A run on Weights & Biases with the id of the strop run, so that a resume goes on in the same one.

    `WANDB_MODE=offline` keeps everything in the run folder. Steps that are repeated after a resume appear twice there.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, run: RunDirectory, *, config: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                dir=str(run.path),
                id=run.manifest.id,
                name=run.path.name,
                resume="allow",
                config=dict(config),
            )
        except Exception as error:
            raise UserError(
                f"Weights & Biases cannot start: {first_sentence(error)}",
                where="tracking.wandb_project",
                mend="`wandb login`, or WANDB_MODE=offline in the environment",
            ) from error
        # Warm-up and training count their own steps, which wandb's single counter would refuse.
        for prefix, axis in (("*", "step"), ("eval/*", "step"), ("warmup/*", "warmup/step")):
            self._run.define_metric(prefix, step_metric=axis)

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        axis = "warmup/step" if kind == "warmup" else "step"
        self._run.log({**tagged(metrics, kind), axis: step})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run in the MLflow experiment "strop"; its id is kept in the manifest, so that a resume goes on in the same one.

    Args:
        uri: tracking address, such as `http://host:5000`, `sqlite:///mlflow.db` (needs the whole `mlflow` package) or a
            folder (current MLflow takes one only with `MLFLOW_ALLOW_FILE_STORE=true` in the environment).
    """

    name = "MLflow"

    def __init__(self, uri: str, run: RunDirectory, *, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        try:
            self._client = MlflowClient(tracking_uri=uri)
            known = run.manifest.trackers.get("mlflow")
            self._run_id = known or self._start(run, config)
            self._client.update_run(self._run_id, status="RUNNING")
        except Exception as error:
            raise UserError(
                f"MLflow cannot start: {first_sentence(error)}",
                where=f"tracking.mlflow_uri={uri}",
                mend="give the address of a server that runs, or a folder with MLFLOW_ALLOW_FILE_STORE=true set",
            ) from error
        run.update(trackers={**run.manifest.trackers, "mlflow": self._run_id})

    def _start(self, run: RunDirectory, config: Mapping[str, Any]) -> str:
        experiment = self._client.get_experiment_by_name("strop")
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment("strop")
        tags = {"strop.run": str(run.path), "strop.id": run.manifest.id}
        run_id: str = self._client.create_run(experiment_id, run_name=run.path.name, tags=tags).info.run_id
        for key, value in flattened(config).items():
            # MLflow refuses longer values; the whole of it is in config.yaml.
            self._client.log_param(run_id, key, str(value)[:500])
        return run_id

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        at = int(time.time() * 1000)
        rows = [
            self._metric(re.sub(r"[^\w./ -]", "_", name), float(value), at, step)
            for name, value in tagged(metrics, kind).items()
        ]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one with dotted keys: `{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{path}."))
        else:
            flat[path] = value
    return flat
