"""The numbers of `constants.yaml`, checked."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import Field

from heterodyne.documents import Section, read_yaml, validate
from heterodyne.errors import ClusterError

__all__ = ["Constants", "Fitted", "Stated", "constants"]


class Fitted(Section):
    """From published runs; the file says what each is."""

    training: float = Field(gt=0, le=1)
    training_hopper: float = Field(gt=0, le=1)
    flash1: float = Field(gt=0, le=1)
    prologue: float = Field(ge=0)
    written: float = Field(gt=0, le=1)
    around: float = Field(ge=0)
    unfused: float = Field(ge=1)
    score: float = Field(gt=0, le=1)
    launch_us: float = Field(ge=0)
    between: float = Field(gt=0, le=1)
    inside_latency_us: float = Field(ge=0)
    between_latency_us: float = Field(ge=0)


class Stated(Section):
    """Known from elsewhere, counted, or set by hand; the file says which."""

    attention_half: tuple[float, float]
    attention_backward: float = Field(gt=0, le=1)
    attention_backward_flops: float = Field(ge=2)
    memory: float = Field(gt=0, le=1)
    vector: float = Field(gt=0, le=1)
    inside: float = Field(gt=0, le=1)
    pcie: float = Field(gt=0, le=1)
    sockets: float = Field(gt=0, le=1)
    pcie_gb_per_s: float = Field(gt=0)
    nvlink_gb_per_s: float = Field(gt=0)
    host_memory_gb_per_s: float = Field(gt=0)
    tuned: float = Field(ge=1)
    fp8: float = Field(ge=1, le=2)
    fp8_rowwise: float = Field(gt=0, le=1)
    fp8_cast_bytes: float = Field(ge=0)
    score_bytes: tuple[float, float]
    logit_bytes: tuple[float, float]
    launches: tuple[float, float]
    tiles: tuple[tuple[int, int, float], ...]
    least_k: int = Field(gt=0)
    gap_us: float = Field(ge=0)
    ring_shown: float = Field(ge=0, le=1)
    hidden: float = Field(ge=0, le=1)
    returned: float = Field(ge=0, le=1)
    selective: float = Field(ge=0, le=1)
    context_gib: float = Field(ge=0)
    communicator_gib: float = Field(ge=0)
    fragments: float = Field(ge=0)


class Constants(Section):
    fitted: Fitted
    stated: Stated = Field(alias="set")


@cache
def constants() -> Constants:
    """Those of the file beside this one."""
    path = Path(str(files("heterodyne.predictor") / "constants.yaml"))
    content, lines = read_yaml(path, ClusterError)
    return validate(Constants, content, error=ClusterError, path=str(path), lines=lines)
