"""DDP's own script, and the same with two changed lines: on unequal devices, on equal ones, on the host, and against one device.

The script makes a DataLoader with a DistributedSampler and a DistributedDataParallel, and steps through its batches with clipping and
AdamW. Two lines change: the class of the model, and the loader, which is passed through `prepare_loader`. Nothing is measured beforehand:
shares follow from the loop's own first steps. Both ways take turns in the same processes; the unequal workers have 0.7, 0.35, 0.35 and 0.2
of a core. Host time is CPU time of a step of a model that computes nothing, summed over two workers. Gradients of two workers with unequal
shares are compared with those of one device on the whole batch, in float32. ``--parts unequal``, ``equal`` or ``host`` runs one of them;
with ``--json`` the others stay as they were written before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from emulation import EQUAL, UNEQUAL, emulated, in_rounds, ratios, worker_arguments
from host_overhead import CLASSES, WIDTH
from host_overhead import model as blocks
from results import ROOT, Results, arguments, spread
from two_workers import two_workers

if TYPE_CHECKING:
    import torch

HERE = Path(__file__)
CLIP = 1.0
STEPS = 40
PARTS = ("unequal", "equal", "host")


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained: ``steps`` of each way in each of the ``rounds``, behind ``first`` steps in which shares are found."""

    width: int
    layers: int
    batch: int  # of a rank under DDP
    length: int
    first: int
    rounds: int
    equal_rounds: int
    steps: int
    host_rounds: int


FULL = Size(width=384, layers=6, batch=16, length=128, first=16, rounds=5, equal_rounds=4, steps=3, host_rounds=24)
QUICK = Size(width=192, layers=4, batch=8, length=64, first=16, rounds=3, equal_rounds=3, steps=3, host_rounds=4)


def main() -> int:
    options = arguments(__doc__, names=("--parts", PARTS))
    results = Results("drop_in")
    size = QUICK if options.quick else FULL
    if "unequal" in options.parts:
        beside_ddp(results, "unequal", UNEQUAL, size, size.rounds, ">= 1.95")
    if "equal" in options.parts:
        beside_ddp(results, "equal", EQUAL, size, size.equal_rounds, ">= 1.0")
    if "host" in options.parts:
        with TemporaryDirectory() as folder:
            two_workers(str(HERE.resolve()), "--host", str(size.host_rounds), folder, folder=folder)
            of_ranks = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        on_the_host(results, [of["host"] for of in of_ranks])
        for what in of_ranks[0]["errors"]:
            results.bar(f"error of gradients, {what}", max(of["errors"][what] for of in of_ranks), "<= 1e-6")
    if options.json is not None and options.parts != PARTS:
        results.take_over(options.json, options.parts)
    return results.write(options.json)


def beside_ddp(results: Results, devices: str, speeds: tuple[float, ...], size: Size, rounds: int, bar: str) -> None:
    found = emulated(speeds, ["DDP", "drop-in", str(rounds)], size, HERE)
    for way in ("DDP", "drop-in"):
        results.row(f"{devices}: {way}", step_s=spread(found[way]), part=devices)
    ratio = ratios([found], "DDP", "drop-in")
    results.row(f"{devices}: DDP / drop-in", step_ratio=spread(ratio), counts=found["counts"], part=devices)
    results.bar(f"speed-up over DDP, {devices} devices", median(ratio), bar)


def on_the_host(results: Results, of_ranks: list[dict[str, list[float]]]) -> None:
    host = {way: [sum(both) for both in zip(*(of[way] for of in of_ranks), strict=True)] for way in of_ranks[0]}
    for way, seconds in host.items():
        results.row(f"host: {way}", step_us=spread([1e6 * s for s in seconds]), part="host")
    for way in ("drop-in", "drop-in, counts added up"):
        ratio = [a / b for a, b in zip(host[way], host["DDP"], strict=True)]
        results.row(f"host: {way} / DDP", ratio=spread(ratio), part="host")
        if way == "drop-in":
            results.bar("CPU time of a step over DDP's", median(ratio), "<= 1.1")


# ---- the script ---------------------------------------------------------------------------------------------------


def script(
    dataset: Any, module: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], batch_size: int, *, changed: bool
) -> Iterator[Any]:
    """DDP's script, a step each time; ``changed``: with the two lines."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    import heterodyne as hd

    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)
    model = hd.DistributedDataParallel(module) if changed else DistributedDataParallel(module)
    if changed:
        loader = hd.prepare_loader(loader, model)  # type: ignore[arg-type]  # it is ours
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            yield model, batch


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch
    import torch.distributed as dist

    from heterodyne.runtime.comm.communicator import Communicator

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.get_world_size()

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return build(length=size.length, width=size.width, layers=size.layers, heads=6)

    tokens = torch.randint(0, 256, (8 * world * size.batch, size.length), generator=torch.Generator().manual_seed(1))
    runs = {
        way: script(tokens, model(), lambda m, b: m(input_ids=b, labels=b), size.batch, changed=way == "drop-in")
        for way in ("DDP", "drop-in")
    }
    for _ in range(size.first):
        _, batch = next(runs["drop-in"])
    counts: list[Any] = [None] * world
    dist.all_gather_object(counts, len(batch))
    communicator = Communicator(rank=dist.get_rank(), world_size=world, device=torch.device("cpu"))
    ways: dict[str, Callable[[], object]] = {way: (lambda run=run: next(run)) for way, run in runs.items()}
    found = in_rounds(ways, communicator, rounds=int(options.ways[-1]), steps=size.steps)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps({**found.seconds, "counts": counts}))
    dist.destroy_process_group()


def host_worker(rounds: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    import heterodyne as hd

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    samples = 16
    data = TensorDataset(torch.randn(samples * 512, WIDTH), torch.randint(0, CLASSES, (samples * 512,)))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def by_hand() -> Iterator[None]:
        """The step alone, as a loop has it whose batches come from elsewhere."""
        model = hd.DistributedDataParallel(blocks())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        for batch in unchanging_loader():
            optimizer.zero_grad()
            loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            yield

    def unchanging_loader() -> Iterator[Any]:
        from torch.utils.data import DataLoader, DistributedSampler

        while True:
            yield from DataLoader(data, batch_size=samples, sampler=DistributedSampler(data), drop_last=True)

    runs: dict[str, Iterator[Any]] = {
        "DDP": script(data, blocks(), loss, samples, changed=False),
        "drop-in": script(data, blocks(), loss, samples, changed=True),
        "drop-in, counts added up": by_hand(),
    }
    host: dict[str, list[float]] = {way: [] for way in runs}
    for number in range(rounds + 2):
        for way, run in runs.items():
            dist.barrier()
            started = time.process_time()
            for _ in range(STEPS):
                next(run)
            host[way] += [(time.process_time() - started) / STEPS] if number > 1 else []
    rank = dist.get_rank()
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps({"host": host, "errors": errors(rank)}))
    dist.destroy_process_group()


def errors(rank: int) -> dict[str, float]:
    """The largest error of a gradient, relative to its largest entry, on 5 and 11 of 16 samples."""
    import copy

    import torch
    from torch import nn
    from torch.nn import functional as F

    import heterodyne as hd

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, WIDTH, generator=generator), torch.randint(0, CLASSES, (16,), generator=generator)
    labels = torch.randint(0, CLASSES, (16, 6), generator=generator)
    labels[torch.rand(16, 6, generator=generator) < torch.rand(16, 1, generator=generator)] = -100

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, 6 * CLASSES)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.body(x).view(-1, CLASSES), labels.reshape(-1))

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.rare, self.never = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = x[:, :1] > x.new_tensor(1.8)
            return torch.where(chosen, self.rare(x), self.head(x)) if chosen.any() else self.head(x)

    def penalised(model: Any, part: slice) -> torch.Tensor:
        own = x[part].clone().requires_grad_()
        score = model(own).square().sum(1)
        (slope,) = torch.autograd.grad(score.sum(), own, create_graph=True)
        return score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    def classified(model: Any, part: slice) -> torch.Tensor:
        return F.cross_entropy(model(x[part]), y[part])

    cases: dict[str, tuple[nn.Module, Callable[[Any, slice], torch.Tensor], dict[str, Any]]] = {
        "samples": (blocks(), classified, {}),
        "tokens": (Tagger(), lambda model, part: model(x[part], labels=labels[part]), {"loss_count": "tokens"}),
        "GAN with penalty": (blocks(), penalised, {}),
        "unused parameters": (Choosing(), classified, {"find_unused_parameters": True}),
    }
    found = {}
    for what, (module, loss, options) in cases.items():
        model = hd.DistributedDataParallel(module, **options)
        alone = copy.deepcopy(model.module)
        loss(model, slice(0, 5) if rank == 0 else slice(5, 16)).backward()
        loss(alone, slice(0, 16)).backward()
        pairs = [(a.grad, b.grad) for a, b in zip(model.module.parameters(), alone.parameters(), strict=True)]
        assert all((a is None) == (b is None) for a, b in pairs)
        rows = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a is not None and b is not None]
        found[what] = float(torch.tensor(rows).max())  # NaN, if there is one
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--host"]:
        host_worker(int(sys.argv[2]), sys.argv[3])
    else:
        given = worker_arguments()
        sys.exit(main() if given is None else worker(given, Size(**given.size)))
