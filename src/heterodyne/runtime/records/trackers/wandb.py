"""Weights & Biases, online and offline."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from heterodyne.runtime.records.trackers.tracker import Opening, Record

__all__ = ["REMEDY", "Wandb", "open_tracker"]

REMEDY = "log in ('wandb login'), or set its option mode: offline and send the run later ('wandb sync')"


class Wandb:
    """A run of W&B, the same one again after a resume. Files are in ``wandb/`` of the run directory."""

    def __init__(self, opening: Opening) -> None:
        import wandb

        options = {"name": opening.run, **opening.options}
        self._run: Any = wandb.init(
            dir=str(opening.directory),
            id=opening.kept_id("wandb", uuid.uuid4().hex[:12]),
            resume="allow",
            config=dict(opening.config),
            **options,
        )
        # W&B refuses steps that do not grow; as a metric of its own a step may also come twice, with a validation.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.place = self._run.url or str(self._run.dir).removesuffix("/files")

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({"step": record.step, **record.values, "time_s": record.time_s})

    def close(self) -> None:
        self._run.finish()


def open_tracker(opening: Opening) -> Wandb:
    return Wandb(opening)
