"""The model of the jobs of `way_out`: small, and with steps, checkpoints and errors as the environment asks for them."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.runtime.checkpoint import checkpoints
from heterodyne.runtime.engine import Engine
from heterodyne.runtime.step_result import StepResult

PLACE = Path(os.environ["WAY_OUT"])
RANK = int(os.environ.get("RANK", "0"))
AT = int(os.environ.get("WAY_OUT_AT", "-1"))
step, write = Engine.step, checkpoints.write_tensors


def reached(what: str) -> None:
    (PLACE / f"{what}.{RANK}").write_text(str(os.getpid()))


def slow_step(self: Engine, *batch: Any) -> StepResult:
    if self.done == AT:
        reached("step")
        if RANK == 1 and "WAY_OUT_RAISES" in os.environ:
            raise ValueError("an error of the script")
        time.sleep(float(os.environ.get("WAY_OUT_STEP_S", "0")))
    return step(self, *batch)


def slow_write(directory: Path, rank: int, tensors: Any) -> Any:
    reached("write")
    time.sleep(float(os.environ.get("WAY_OUT_WRITE_S", "0")))
    full = int(os.environ.get("WAY_OUT_FULL", "0"))
    tries = len(list(PLACE.glob(f"try-*.{RANK}")))
    reached(f"try-{tries}")
    if tries < full:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(directory, rank, tensors)


if Engine.step.__name__ != slow_step.__name__:  # this file is run whenever the model is built
    Engine.step = slow_step  # type: ignore[method-assign]
    checkpoints.write_tensors = slow_write


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
        self.head = nn.Linear(32, 256)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(input_ids)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()
