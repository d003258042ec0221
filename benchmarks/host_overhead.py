"""What the Python of a step takes: CPU time of a step of a model that computes nothing, ours and PyTorch's, in turns in the same processes.

Two workers train eight small blocks: by data parallelism beside DDP, in a pipeline of 16 micro-batches beside Schedule1F1B, with sharded
parameters beside FSDP2, with split weights beside DTensor. Each turn is some steps of one way; the seconds are CPU time, of the main
thread and of the whole process, so that waiting for the other worker is not counted. An accelerator runs ahead of its host only while
that time is shorter than what it computes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from results import Results, arguments, spread
from two_workers import two_workers

if TYPE_CHECKING:
    import torch

BLOCKS, WIDTH, CLASSES, MICRO_BATCHES, SAMPLES = 8, 8, 4, 16, 2
PAIRS = {  # ours, PyTorch's, and how many times as long ours may take
    "data parallel": ("DDP", 1.1),
    "pipeline": ("Schedule1F1B", 1.1),
    "ZeRO-3": ("FSDP2", 0.6),
    "split": ("DTensor", 0.5),
}
ROUNDS, QUICK_ROUNDS, STEPS = 12, 3, 40


def main() -> int:
    options = arguments(__doc__)
    results = Results("host_overhead")
    with TemporaryDirectory() as folder:
        found = run(QUICK_ROUNDS if options.quick else ROUNDS, folder)
    for ours, (theirs, most) in PAIRS.items():
        for clock in ("main thread", "process"):
            for way in (ours, theirs):
                results.row(f"{way}, {clock}", step_us=spread([1e6 * s for s in found[clock][way]]))
            ratio = [a / b for a, b in zip(found[clock][ours], found[clock][theirs], strict=True)]
            results.row(f"{ours} / {theirs}, {clock}", ratio=spread(ratio))
            if clock == "process":
                results.bar(f"CPU time of a step, {ours} / {theirs}", median(ratio), f"<= {most}")
    return results.write(options.json)


def run(rounds: int, folder: str) -> dict[str, dict[str, list[float]]]:
    """CPU seconds of a step, by clock and way; the sum of both workers, one a round."""
    two_workers(str(Path(__file__).resolve()), "--worker", str(rounds), folder, folder=folder)
    of_ranks = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    return {
        clock: {way: [sum(both) for both in zip(*(of[clock][way] for of in of_ranks), strict=True)] for way in ways}
        for clock, ways in of_ranks[0].items()
    }


def worker(rounds: int, folder: str) -> None:
    import torch

    import heterodyne as hd

    torch.manual_seed(0)
    x = torch.randn(MICRO_BATCHES * SAMPLES, WIDTH)
    y = torch.randint(0, CLASSES, (len(x),))
    settings: dict[str, Any] = {"loss": torch.nn.CrossEntropyLoss()}
    with hd.open_session() as session:
        of_data: dict[str, Any] = {**settings, "session": session, "optimizer": sgd}
        first = hd.distribute(model(), (x, y), plan=hd.PlanOptions("equal", rehearsal_s=0, measure_s=4), **of_data)
        plans = plans_for(first.graph, first.plan)
        profile = first.profile
        first.close()
        made = {
            way: hd.distribute(model(), (x, y), plan=hd.PlanOptions(plan, profile=profile), **of_data)
            for way, plan in plans.items()
        }
        ways: dict[str, Callable[[], object]] = {way: (lambda d=d: d.step((x, y))) for way, d in made.items()}
        half = slice(session.rank * len(x) // 2, (session.rank + 1) * len(x) // 2)
        ways |= theirs(session.rank, x, y, half)
        found: dict[str, dict[str, list[float]]] = {c: {w: [] for w in ways} for c in ("main thread", "process")}
        for number in range(rounds + 1):
            for way, step in ways.items():
                session.communicator.barrier()
                thread_s, process_s = time.thread_time(), time.process_time()
                for _ in range(STEPS):
                    step()
                seconds = {"main thread": time.thread_time() - thread_s, "process": time.process_time() - process_s}
                for clock, s in seconds.items():
                    found[clock][way] += [s / STEPS] if number else []
        (Path(folder) / f"rank-{session.rank}.json").write_text(json.dumps(found))
        for trainer in made.values():
            trainer.close()


def model() -> torch.nn.Module:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(parameters, lr=1e-3, foreach=True)


def plans_for(graph: Any, data: Any) -> dict[str, Any]:
    """One micro-batch a device, 16 in a pipeline of two stages, layers gathered one by one, and weights split in two."""
    from fsdp2 import layer_by_layer
    from hand_made import Line, cuts_at

    from heterodyne.plan.micro_batches import MicroBatches
    from heterodyne.plan.plan import Layout, Pipeline, Region, Stage

    samples, devices = MICRO_BATCHES * SAMPLES, data.devices
    (cut, end) = cuts_at(graph, (1.0, 1.0), blocks_only=True)
    alone = Region(layout=Layout(shares=(1,)))
    line = Line(homes=tuple((d,) for d in devices), parts=(1.0, 1.0), micro_batches=(SAMPLES,) * MICRO_BATCHES)
    stages = (
        Stage(ops=(0, cut), devices=line.homes[0], regions=(alone,)),
        Stage(ops=(cut, end), devices=line.homes[1], regions=(alone,)),
    )
    whole = Stage(ops=(0, end), devices=devices, regions=(Region(layout=Layout(kind="split", shares=(1, 1))),))
    replicas = tuple(
        Pipeline(
            micro_batches=MicroBatches((samples // 2,)),
            stages=(Stage(ops=(0, end), devices=(device,), regions=(alone,)),),
        )
        for device in devices
    )
    plain = {"predicted": None, "reason": "", "zero": 0}
    return {
        "data parallel": data.model_copy(update={**plain, "pipelines": replicas}),
        "pipeline": data.model_copy(
            update={
                **plain,
                "schedule": "1F1B",
                "pipelines": (Pipeline(micro_batches=MicroBatches(line.micro_batches), stages=stages),),
            }
        ),
        "ZeRO-3": layer_by_layer(data, graph, samples),
        "split": data.model_copy(
            update={**plain, "pipelines": (Pipeline(micro_batches=MicroBatches((samples,)), stages=(whole,)),)}
        ),
    }


def theirs(rank: int, x: torch.Tensor, y: torch.Tensor, half: slice) -> Mapping[str, Callable[[], object]]:
    """A step of each of PyTorch's ways, with the same optimizer."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")

    def updating(module: torch.nn.Module, backward: Callable[[], object]) -> Callable[[], None]:
        optimizer = sgd(module.parameters())

        def step() -> None:
            optimizer.zero_grad()
            backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()

        return step

    ddp = DistributedDataParallel(model())
    sharded = model()
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for part in sharded.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    split = model()
    for block in split[:BLOCKS]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    whole = model()
    part = whole[: BLOCKS // 2] if rank == 0 else whole[BLOCKS // 2 :]
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=F.cross_entropy)
    of_split = torch.optim.SGD(split.parameters(), lr=1e-3, foreach=False)  # not all of its weights are DTensors

    def dtensor() -> None:
        of_split.zero_grad()
        F.cross_entropy(split(x), y).backward()
        of_split.step()

    return {
        "DDP": updating(ddp, lambda: F.cross_entropy(ddp(x[half]), y[half]).backward()),
        "Schedule1F1B": updating(part, lambda: schedule.step(x) if rank == 0 else schedule.step(target=y)),
        "FSDP2": updating(sharded, lambda: F.cross_entropy(sharded(x[half]), y[half]).backward()),
        "DTensor": dtensor,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
