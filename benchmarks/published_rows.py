"""Published training runs as the predictor takes them: shape, setup, device, network; and what was measured.

What a row does not say is filled in by `published_facts`. Sources are split into two sides: the predictor's constants are fitted on one,
and judged on the other. Each kind of plan is on both sides (large models sharded or in three dimensions, small ones that launch kernels,
encoders, experts), and no lab's tables are on both. Sources that came when both were settled are a third side, reported apart.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from published_facts import device_of, model_of, network_of_row, plan_of, seconds_of
from row_plan import RowPlan

from heterodyne.cluster.catalog import Accelerator
from heterodyne.predictor.constants import Constants
from heterodyne.predictor.devices import network_of
from heterodyne.predictor.network import Network
from heterodyne.predictor.software import is_known
from heterodyne.predictor.transformer import Transformer

__all__ = ["FIT", "LATER", "TEST", "Run", "left_out", "refuted_bytes", "runs", "unknown_frameworks"]

Side = Literal["fit", "test", "later"]
FIT: Side = "fit"
TEST: Side = "test"
LATER: Side = "later"

SIDES: tuple[tuple[str, Side], ...] = (
    ("MosaicML", FIT),
    ("BigScience", FIT),
    ("vTrain ground truth, multi-node", LATER),
    ("vTrain", FIT),
    ("NVIDIA DeepLearningExamples BERT-Large (TensorFlow 2)", FIT),
    ("Alpa", FIT),
    ("Megatron-LM README 2020", FIT),
    ("Megatron-LM CI golden", FIT),
    ("InternEvo", TEST),
    ("Zero Bubble", TEST),
    ("AMP", TEST),
    ("NVIDIA DeepLearningExamples BERT-Large (PyTorch)", TEST),
    ("llm.q", TEST),
    ("Narayanan", TEST),
    ("Megatron-MoE", TEST),
    ("DeepSpeed SDMA", TEST),
    ("NVIDIA DGX Cloud", LATER),
    ("torchtitan", LATER),
)

_ALLOCATED = ("Megatron-LM CI golden", "Alpa")
"""Sources that read their allocator (`mem-max-allocated-bytes`; XLA's `max_memory_allocated`). BigScience read `nvidia-smi` on the nodes
with the embedding; Zero Bubble does not say, and is taken as such."""
_NO_WORDS = {
    "gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed": "multi-latent attention, multi-token prediction",
    "DeepSeek-V3-671B": "multi-latent attention, multi-token prediction",
}
"""Models whose configuration files have what a `Transformer` cannot say: their rows are of another model, and left out."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row.

    Args:
        measured_s: a step. ``measured_bytes``: of the fullest device, None if the source does not say or cannot have seen it.
        allocated: whether ``measured_bytes`` are what the framework's allocator has given out; else all that the device is short of.
    """

    id: str
    source: str
    side: Side
    device: Accelerator
    devices: int
    model_name: str
    model: Transformer
    plan: RowPlan
    network: Mapping[str, Any]
    measured_s: float
    measured_bytes: float | None
    allocated: bool = False

    @property
    def group(self) -> str:
        """Rows that share what a calibration can learn."""
        return f"{self.source} / {self.device.kind}"

    @property
    def flops_per_s(self) -> float:
        """Of the model, without what is computed again, a device."""
        tokens = self.model.seq * self.plan.global_batch
        return 3 * self.model.forward_flops_a_token() * tokens / self.devices / self.measured_s

    def wires(self, known: Constants | None = None) -> Network:
        return network_of(self.device, known=known, **self.network)


def runs(path: Path, *, quality: str = "A") -> list[Run]:
    """All usable rows of that quality whose plan and rate are complete, in the order of the file."""
    return [run for row in _complete(path, quality) if _other(row) is None and (run := _run(row)) is not None]


def left_out(path: Path, *, quality: str = "A") -> Mapping[str, str]:
    """Ids of complete rows that tell of another run than the one that was measured, and why that is known."""
    return {row["id"]: why for row in _complete(path, quality) if (why := _other(row)) is not None}


def unknown_frameworks(path: Path, *, quality: str = "A") -> Mapping[str, int]:
    """Software of which nothing is known, and so many complete rows of it: they are predicted as PyTorch of today."""
    named = (str(row["parallel"]["framework"]) for row in _complete(path, quality))
    return Counter(name for name in named if not is_known(name))


class _Said(dict[str, Any]):
    """A row or a part of it: what the source does not say is None."""

    def __missing__(self, column: str) -> None:
        return None


def _complete(path: Path, quality: str) -> list[Mapping[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line, object_hook=_Said) for line in lines if line]
    return [row for row in rows if row["quality"] == quality and row["completeness"].startswith("full")]


def _other(row: Mapping[str, Any]) -> str | None:
    plan, devices = row["parallel"], row["cluster"]["gpus"]
    if row["model"]["name"] in _NO_WORDS:
        return f"its model has {_NO_WORDS[row['model']['name']]}"
    asked = math.prod(plan.get(degree) or 1 for degree in ("dp", "tp", "pp", "cp"))
    return f"a plan for {asked} devices on {devices}" if plan.get("dp") and asked != devices else None


def refuted_bytes(found: Iterable[Run]) -> set[str]:
    """Ids of rows whose bytes cannot be of the fullest device of the plan that is stated.

    All that a plan holds grows with its micro-batches or stays. Of two rows alike in all but those, the one with the larger must not have
    less; where it has, one of the two is not as it is described. Which, they do not say: neither counts.
    """
    alike: dict[tuple[object, ...], list[Run]] = {}
    for run in found:
        if run.measured_bytes is not None:
            plan = replace(run.plan, micro_batch=1)
            alike.setdefault((run.source, run.model, run.device.kind, run.devices, plan), []).append(run)
    return {
        run.id
        for rows in alike.values()
        for small in rows
        for large in rows
        if small.plan.micro_batch < large.plan.micro_batch
        and (small.measured_bytes or 0.0) > (large.measured_bytes or 0.0)
        for run in (small, large)
    }


def _run(row: Mapping[str, Any]) -> Run | None:
    side = next((side for name, side in SIDES if row["source"].startswith(name)), None)
    device = device_of(row)
    shape, plan = row["model"], row["parallel"]
    known = all(shape.get(key) for key in ("layers", "hidden", "heads", "seq"))
    if side is None or device is None or not known or not plan.get("global_batch") or not plan.get("micro_batch"):
        return None
    model = model_of(row)
    if model is None:
        return None
    seconds = seconds_of(row, model)
    if seconds is None:
        return None
    peak = row["measured"].get("peak_mem_gb")
    gib = row["measured"].get("peak_mem_gib")
    return Run(
        id=row["id"],
        source=row["source"],
        side=side,
        device=device,
        devices=row["cluster"]["gpus"],
        model_name=shape["name"],
        model=model,
        plan=plan_of(row),
        network=network_of_row(row),
        measured_s=seconds,
        measured_bytes=peak * 1e9 if peak else gib * 2**30 if gib else None,
        allocated=row["source"].startswith(_ALLOCATED),
    )
