"""A step with sharded parameters (ZeRO-3), ours and that of PyTorch's FSDP2 over gloo, in the same processes and in turns.

Both shard each layer for itself and gather it once for its forward and once for its backward; equal workers, equal shares, AdamW, the
norm of the gradient clipped. gloo has no averaging reduce-scatter, so FSDP2 is told to sum, and divides by the number of workers itself:
its gradients are those of the mean, as ours are. Our step returns the loss of the global batch besides; FSDP2's has that of its own part.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulation import in_rounds
from results import ROOT

if TYPE_CHECKING:
    import torch

    from heterodyne.api.session import Session
    from heterodyne.graph.ir import ModelGraph
    from heterodyne.plan.plan import Plan

__all__ = ["FSDP2", "OURS", "Steps", "against_fsdp2"]

OURS, FSDP2 = "ours, ZeRO-3", "FSDP2"
CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A GPT of ``layers`` and ``width``; each worker takes ``samples`` of ``length`` tokens."""

    layers: int
    width: int
    length: int
    samples: int
    rounds: int
    steps: int


def against_fsdp2(size: Steps, out: Path) -> None:
    """On each worker: seconds of a step, one a round, by way; and how far the two are apart after the first steps."""
    import torch

    import heterodyne as hd

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    def model() -> Any:
        torch.manual_seed(0)
        return build(length=size.length, width=size.width, layers=size.layers, heads=4)

    with hd.open_session() as session:
        ranks = session.world_size
        tokens = torch.randint(0, 256, (ranks * size.samples, size.length), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": tokens, "labels": tokens}
        settings: dict[str, Any] = {"optimizer": adamw, "clip_grad_norm": CLIP}
        first = hd.distribute(
            model(), batch, plan=hd.PlanOptions("equal", measure_s=4, rehearsal_s=0), session=session, **settings
        )
        plan = layer_by_layer(first.plan, first.graph, ranks * size.samples)
        profile = first.profile
        first.close()
        ours = hd.distribute(model(), batch, plan=hd.PlanOptions(plan, profile=profile), session=session, **settings)
        theirs, backward = fsdp2(session, model(), batch, size)
        apart = difference(ours, theirs, batch, backward)
        run: dict[str, Callable[[], object]] = {OURS: lambda: ours.step(batch), FSDP2: updating(theirs, backward)}
        found = in_rounds(run, session.communicator, rounds=size.rounds, steps=size.steps)
        if session.rank == 0:
            out.write_text(json.dumps({**found.seconds, "apart": apart}))
        ours.close()


def layer_by_layer(plan: Plan, graph: ModelGraph, samples: int) -> Plan:
    """Every block a stage, all of them on all devices, one micro-batch."""
    from heterodyne.plan.micro_batches import MicroBatches
    from heterodyne.plan.plan import Layout, Pipeline, Region, Stage
    from heterodyne.search.points import points_of

    devices = plan.devices
    layout = Layout(shares=(1,) * len(devices))
    stages = tuple(
        Stage(ops=cut, devices=devices, regions=(Region(layout=layout),))
        for cut in pairwise(points_of(graph).positions)
    )
    pipeline = Pipeline(micro_batches=MicroBatches((samples,)), stages=stages)
    return plan.model_copy(
        update={"zero": 3, "schedule": "GPipe", "pipelines": (pipeline,), "predicted": None, "reason": ""}
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)


def fsdp2(
    session: Session, module: Any, batch: dict[str, torch.Tensor], size: Steps
) -> tuple[Any, Callable[[], object]]:
    """The sharded module, and what makes its gradients."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    own = {name: t[session.rank * size.samples : (session.rank + 1) * size.samples] for name, t in batch.items()}
    return module, lambda: module(**own).backward()


def updating(module: Any, backward: Callable[[], object]) -> Callable[[], object]:
    """A whole step of PyTorch's."""
    import torch

    optimizer = adamw(module.parameters())

    def step() -> None:
        optimizer.zero_grad()
        backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()

    return step


def difference(ours: Any, theirs: Any, batch: dict[str, torch.Tensor], backward: Callable[[], object]) -> float:
    """The largest relative difference of a gradient. Collective."""
    from heterodyne.runtime.exact.verify import compare

    _, gradients = ours._worker.gradients(batch)
    backward()
    whole = {name: p.grad.full_tensor() for name, p in theirs.named_parameters()}
    return compare(0.0, gradients, 0.0, whole).largest
