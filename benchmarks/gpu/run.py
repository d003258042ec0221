"""One machine with one accelerator or more, one command: exactness, and speed against PyTorch's own ways.

One process an accelerator, started by torchrun. First each plan that the devices allow is proved: the gradients of a step in fp32 against
plain PyTorch on one device. Then ways take turns in the same processes, in the precision of the devices (bf16 autocast on accelerators):
on one device our loop against plain PyTorch, as it is and compiled; on two or more our plan against DistributedDataParallel, FSDP2 and
PyTorch's 1F1B. ``--device cpu --ranks 2`` runs all of it without an accelerator, to see that it runs; its speeds say little.

Needs torch >= 2.11 and an installed heterodyne: ``python benchmarks/gpu/run.py --json gpu.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from results import Results, spread  # noqa: E402

OURS, COMPILED = "ours", "ours, compiled"
EAGER, TORCH_COMPILED = "PyTorch", "PyTorch, compiled"
DDP, FSDP, PIPELINE = "DDP", "FSDP2", "PyTorch's 1F1B"
STRATEGIES = ("data", "pipeline", "split")
CLIP, MICRO_BATCHES, RATE = 1.0, 8, 2.0**16


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model and of a device's part of a step; how much is timed."""

    width: int
    layers: int
    heads: int
    length: int
    samples: int
    rounds: int
    steps: int
    measure_s: float


SIZES = {
    ("accelerator", False): Size(
        width=1024, layers=12, heads=16, length=1024, samples=16, rounds=8, steps=5, measure_s=60
    ),
    ("accelerator", True): Size(width=768, layers=6, heads=12, length=512, samples=16, rounds=3, steps=3, measure_s=15),
    ("cpu", False): Size(width=128, layers=4, heads=4, length=64, samples=16, rounds=4, steps=2, measure_s=10),
    ("cpu", True): Size(width=64, layers=4, heads=4, length=32, samples=8, rounds=2, steps=1, measure_s=4),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a form of at most two minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as JSON")
    parser.add_argument("--device", choices=("accelerator", "cpu"), default="accelerator")
    parser.add_argument("--ranks", type=int, help="processes; by default one for each accelerator, 2 on a CPU")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        worker(options)
        return 0
    import torch

    there = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if options.device == "accelerator" and there == 0:
        print("PyTorch finds no accelerator here; --device cpu runs all of it on the CPU")
        return 2
    ranks = options.ranks or (there if options.device == "accelerator" else 2)
    if options.device == "accelerator" and ranks > there:
        print(f"--ranks {ranks}: there are {there} accelerators here")
        return 2
    results = Results("gpu/run")
    for count in dict.fromkeys((1, ranks)):
        report(results, count, launched(options, count))
    return results.write(options.json)


def launched(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """What rank 0 of so many processes has found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={count}",
            str(HERE),
        ]
        command += ["--out", str(out), "--device", options.device, *(["--quick"] if options.quick else [])]
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def report(results: Results, count: int, found: Mapping[str, Any]) -> None:
    devices = "1 device" if count == 1 else f"{count} devices"
    results.row(f"{devices}: what they are", **found["devices"])
    for strategy, error in found["errors"].items():
        results.row(f"{devices}: gradients under {strategy}", largest_error=error)
        results.bar(f"error of the gradients, {devices}, {strategy}", error, "<= 1e-5")
    for way, seconds in found["seconds"].items():
        results.row(f"{devices}: {way}", step_s=spread(seconds), tokens_per_s=found["tokens"] / median(seconds))
    for way, why in found["left out"].items():
        results.row(f"{devices}: {way}", left_out=why)
    results.row(
        f"{devices}: prediction of {OURS}",
        step_s=found["predicted"],
        error=found["predicted"] / median(found["seconds"][OURS]) - 1,
    )
    for way, own in ((EAGER, OURS), (TORCH_COMPILED, COMPILED), (DDP, OURS), (FSDP, OURS), (PIPELINE, OURS)):
        if way in found["seconds"] and own in found["seconds"]:
            ratio = median(a / b for a, b in zip(found["seconds"][way], found["seconds"][own], strict=True))
            results.bar(f"{way} / {own}, {devices}", ratio, ">= 0.98" if count == 1 else ">= 1.0")


# ---- in each process ------------------------------------------------------------------------------------------------


def worker(options: argparse.Namespace) -> None:
    import torch
    from gpt import build

    import heterodyne as hd

    size = SIZES[options.device, options.quick]
    if options.device == "cpu":
        torch.set_num_threads(1)

    def model(layers: int = size.layers) -> torch.nn.Module:
        torch.manual_seed(0)
        return build(length=size.length, width=size.width, layers=layers, heads=size.heads)

    with hd.open_session() as session:
        batch = batch_of(size, session.world_size * size.samples)
        errors = {
            strategy: error_under(session, strategy, model(2), size)
            for strategy in (STRATEGIES if session.world_size > 1 else ("data",))
        }
        seconds, predicted, left_out = timed(session, model, batch, size)
        kinds = {device.id: device.kind for device in session.cluster.devices}
        if session.rank == 0:
            found = {
                "devices": {**kinds, "torch": torch.__version__},
                "errors": errors,
                "seconds": seconds,
                "predicted": predicted,
                "tokens": batch["input_ids"].numel(),
                "left out": left_out,
            }
            options.out.write_text(json.dumps(found))


def batch_of(size: Size, samples: int) -> dict[str, Any]:
    import torch

    tokens = torch.randint(0, 256, (samples, size.length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def error_under(session: Any, strategy: str, model: Any, size: Size) -> float:
    """The largest relative error of a gradient: weights before a step of SGD less those after it, over the rate, which is large: what
    is added to a weight loses the digits that the weight has in front of it.
    """
    import copy

    import heterodyne as hd
    from heterodyne.job import OptimizerSection

    batch = batch_of(size, 2 * session.world_size)
    alone = copy.deepcopy(model).to(session.device)
    alone(**{name: tensor.to(session.device) for name, tensor in batch.items()}).backward()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    section = OptimizerSection(name="sgd", lr=RATE, momentum=0.0, weight_decay=0.0, schedule="constant")
    with hd.distribute(
        model,
        batch,
        optimizer=section,
        plan=hd.PlanOptions(strategy, measure_s=size.measure_s / 4, rehearsal_s=0),
        session=session,
    ) as trainer:
        trainer.step(batch)
        after = trainer.state_dict()["model"]
    errors = [
        float(((before[name] - after[name].cpu()) / RATE - parameter.grad.cpu()).norm() / parameter.grad.cpu().norm())
        for name, parameter in alone.named_parameters()
    ]
    return max(errors)


def timed(
    session: Any, model: Callable[[], Any], batch: Mapping[str, Any], size: Size
) -> tuple[dict[str, list[float]], float, dict[str, str]]:
    """Seconds of a step of each way, one a round; the prediction of ours; and what was left out, and why."""
    import heterodyne as hd
    from heterodyne.job import OptimizerSection

    low = session.device.type != "cpu"
    section = OptimizerSection(lr=1e-4)
    run: dict[str, Callable[[], object]] = {}
    left_out: dict[str, str] = {}
    made = []
    for way, compiles in ((OURS, False), *(((COMPILED, True),) if session.world_size == 1 else ())):
        trainer = hd.distribute(
            model(),
            batch,
            optimizer=section,
            clip_grad_norm=CLIP,
            session=session,
            precision="bf16" if low else "fp32",
            plan=hd.PlanOptions(measure_s=size.measure_s),
            compile=compiles,
        )
        made.append(trainer)
        run[way] = lambda trainer=trainer: trainer.step(batch)
    predicted = made[0].plan.predicted
    assert predicted is not None
    if session.rank == 0:
        print(made[0].explain(), flush=True)
    others: dict[str, Callable[[], Callable[[], object]]]
    if session.world_size == 1:
        others = {
            EAGER: lambda: plain(session, model(), batch, size),
            TORCH_COMPILED: lambda: plain(session, model(), batch, size, compiled=True),
        }
    else:
        others = {
            DDP: lambda: data_parallel(session, model(), batch, size, DDP),
            FSDP: lambda: data_parallel(session, model(), batch, size, FSDP),
            PIPELINE: lambda: torch_pipeline(session, model(), batch),
        }
    for way, make in others.items():
        try:
            run[way] = make()
            run[way]()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            run.pop(way, None)
            left_out[way] = str(error).strip().partition("\n")[0]
    seconds = in_rounds(run, session, size)
    for trainer in made:
        trainer.close()
    return seconds, predicted.step_s, left_out


def in_rounds(run: Mapping[str, Callable[[], object]], session: Any, size: Size) -> dict[str, list[float]]:
    """Each way takes some steps in each round, so that what slows the machine down does so for all; the first round warms up."""
    seconds: dict[str, list[float]] = {way: [] for way in run}
    for number in range(size.rounds + 1):
        for way, step in run.items():
            synchronise(session.device)
            session.communicator.barrier()
            started_s = time.perf_counter()
            for _ in range(size.steps):
                step()
            synchronise(session.device)
            session.communicator.barrier()
            if number:
                seconds[way].append((time.perf_counter() - started_s) / size.steps)
    return seconds


def synchronise(device: Any) -> None:
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---- PyTorch's own ways ---------------------------------------------------------------------------------------------


def lowered(device: Any) -> AbstractContextManager[Any]:
    import torch

    return torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu")


def optimizer_of(module: Any) -> Any:
    import torch

    return torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.1, fused=True)


def on_device(session: Any, batch: Mapping[str, Any], first: int, stop: int) -> dict[str, Any]:
    return {name: tensor[first:stop].to(session.device) for name, tensor in batch.items()}


def plain(
    session: Any, module: Any, batch: Mapping[str, Any], size: Size, *, compiled: bool = False
) -> Callable[[], object]:
    """A loop of PyTorch on one device, all samples at once."""
    import torch

    module = module.to(session.device)
    optimizer = optimizer_of(module)
    runs = torch.compile(module) if compiled else module

    def step() -> None:
        optimizer.zero_grad()
        own = on_device(session, batch, 0, size.samples)
        with lowered(session.device):
            loss = runs(**own)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()

    return step


@contextmanager
def group_of(session: Any) -> Iterator[Any]:
    """Of all ranks, for PyTorch's own ways: of the devices' backend."""
    import torch.distributed as dist

    yield dist.new_group(backend=dist.Backend.default_device_backend_map.get(session.device.type, "gloo"))


def data_parallel(session: Any, module: Any, batch: Mapping[str, Any], size: Size, way: str) -> Callable[[], object]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    module = module.to(session.device)
    if way == FSDP and session.device.type == "cpu":
        raise NotImplementedError("gloo has no averaging reduce-scatter, which FSDP2 asks for")
    with group_of(session) as group:
        if way == DDP:
            wrapped = torch.nn.parallel.DistributedDataParallel(module, process_group=group)
        else:
            mesh = DeviceMesh.from_group(group, session.device.type)
            for layer in module.layers:
                fully_shard(layer, mesh=mesh)
            wrapped = fully_shard(module, mesh=mesh)
    optimizer = optimizer_of(module)

    def step() -> None:
        optimizer.zero_grad()
        own = on_device(session, batch, session.rank * size.samples, (session.rank + 1) * size.samples)
        with lowered(session.device):
            loss = wrapped(**own)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()

    return step


def torch_pipeline(session: Any, whole: Any, batch: Mapping[str, Any]) -> Callable[[], object]:
    """torch.distributed.pipelining: as many layers on each rank; the head has weights of its own, and nothing is clipped."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional as F

    rank, ranks, device = session.rank, session.world_size, session.device
    if len(whole.layers) % ranks:
        raise ValueError(f"{len(whole.layers)} layers do not go into {ranks} equal stages")

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            share = len(whole.layers) // ranks
            self.tokens = whole.tokens if rank == 0 else None
            self.positions = whole.positions if rank == 0 else None
            self.layers = nn.ModuleList(whole.layers[rank * share : (rank + 1) * share])
            self.norm = whole.norm if rank == ranks - 1 else None
            self.head = whole.head if rank == ranks - 1 else None

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with lowered(device):
                if self.tokens is not None:
                    hidden = self.tokens(hidden) + self.positions(torch.arange(hidden.shape[1], device=device))
                for layer in self.layers:
                    hidden = layer(hidden)
                return hidden if self.head is None else self.head(self.norm(hidden))

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    part = Part().to(device)
    with group_of(session) as group:
        stage = PipelineStage(part, rank, ranks, device, group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = optimizer_of(part)

    def step() -> None:
        tokens = batch["input_ids"].to(device)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        elif rank == ranks - 1:
            schedule.step(target=tokens)
        else:
            schedule.step()
        optimizer.step()

    return step


if __name__ == "__main__":
    sys.exit(main())
