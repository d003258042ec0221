"""MLflow, with a server or without."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from heterodyne.runtime.records.trackers.tracker import Opening, Record

__all__ = ["REMEDY", "MLflow", "open_tracker"]

REMEDY = "see its option tracking_uri (or MLFLOW_TRACKING_URI), and whether the server answers"

_A_REQUEST = 1000  # metrics in a request, and 100 parameters: the limits of MLflow's servers
_PARAMETERS = 100
_VALUE = 500  # characters of a parameter's value, the lowest limit of MLflow's versions


class MLflow:
    """A run of MLflow, the same one again after a resume. Many records go in one request, so that a slow server keeps up."""

    def __init__(self, opening: Opening) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        options = dict(opening.options)
        self._client: Any = MlflowClient(tracking_uri=options.get("tracking_uri"))
        self._metric: Any = Metric
        path = opening.id_file("mlflow")
        if opening.done and path.is_file():
            self._id = path.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, status="RUNNING")
        else:
            run = self._client.create_run(
                self._experiment(options.get("experiment") or "Default"),
                run_name=options.get("run_name") or opening.run,
                tags=options.get("tags"),
            )
            self._id = opening.kept_id("mlflow", run.info.run_id)
            parameters = [Param(name, value[:_VALUE]) for name, value in _flat(opening.config)]
            for first in range(0, len(parameters), _PARAMETERS):
                self._client.log_batch(self._id, params=parameters[first : first + _PARAMETERS])
        self.place = f"run {self._id} at {self._client.tracking_uri}"

    def write(self, records: Sequence[Record]) -> None:
        metrics = [
            self._metric(name, value, round(record.time_s * 1000), record.step)
            for record in records
            for name, value in record.values.items()
        ]
        for first in range(0, len(metrics), _A_REQUEST):
            self._client.log_batch(self._id, metrics=metrics[first : first + _A_REQUEST])

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """``training.steps`` and its value as text, for each value in a nested mapping."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value if isinstance(value, str) else json.dumps(value)


def open_tracker(opening: Opening) -> MLflow:
    return MLflow(opening)
