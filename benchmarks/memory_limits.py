"""How large a model trains where memory is unequal, under limits that the kernel enforces: a plan for these devices, and equal sharding.

Three workers may keep 4 : 2 : 1 of some memory beside what the framework takes (control groups; who exceeds is killed). A GPT of some
layers, trained with AdamW in fp32: 16 bytes a parameter. The plan is what `heterodyne` chooses by itself. Equal sharding is FSDP2, which
shards weights, gradients and state alike over all, so that the smallest worker stops it. By the closed form all memories together hold
sum(memory) / 16 parameters, and equal shards 3 min(memory) / 16. The closed form has no activations, no vocabulary and no graph, so the
memory is some GiB: what does not grow with the model is then little of it, as on devices of today. The planner is asked for the least
model that passes the bar, and for smaller ones if that one does not train; then what it chose runs again and again, each time in new
processes.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from results import ROOT, Results, arguments

HERE = Path(__file__)
SHARES = (4, 2, 1)
LENGTH, BATCH, HEADS, VOCABULARY = 8, 4, 8, 256
BYTES = 16
STEPS = 3
BAR = 0.95


@dataclass(frozen=True)
class Size:
    """Of a benchmark: MiB of the smallest worker, the width of the model, the part of the closed form that is asked for first, and
    how often what was found runs again, how often equal sharding does there, and of how many workers without a model the median counts."""

    unit: int
    width: int
    first: float
    trials: int
    deaths: int
    bases: int

    @property
    def room(self) -> list[int]:
        return [share * self.unit * 2**20 for share in SHARES]

    @property
    def layer(self) -> int:
        return 12 * self.width**2 + 13 * self.width


class Answers:
    """What each run told, by its question; with a folder, of earlier calls as well. No run begins after so many minutes."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.file, self.until_s = folder, folder / "answers.json", time.monotonic() + 60 * minutes
        self.known: dict[str, int] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def of(self, question: str, ask: Callable[[], int]) -> int:
        if question not in self.known:
            if time.monotonic() > self.until_s:
                raise TimeoutError
            self.known[question] = int(ask())
            self.file.write_text(json.dumps(self.known, indent=1))
        return self.known[question]


def main() -> int:
    options = arguments(__doc__, resumed="runs")
    size = (
        Size(unit=128, width=512, first=0.66, trials=1, deaths=1, bases=1)
        if options.quick
        else Size(unit=768, width=768, first=BAR, trials=30, deaths=2, bases=3)
    )
    with tempfile.TemporaryDirectory() as folder:
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
        results, answers = Results("memory_limits"), Answers(options.keep or Path(folder), options.minutes)
        try:
            asked(results, answers, size)
        except TimeoutError:
            print(f"{len(answers.known)} questions are answered; the same command goes on with the next one")
            return 1
    return results.write(options.json)


def asked(results: Results, answers: Answers, size: Size) -> None:
    bases = {
        way: [answers.of(f"base of {way}, {n}", partial(base_bytes, way, size)) for n in range(size.bases)]
        for way in ("plan", "fsdp")
    }
    base = {way: median(found) for way, found in bases.items()}
    results.row(f"a worker with the framework and no model, bytes, median of {size.bases}", **base, each=bases)
    allowed = sum(size.room) // BYTES // size.layer
    equal = len(SHARES) * min(size.room) // BYTES // size.layer
    results.row("by the closed form, layers", all_memories=allowed, equal_shards=equal)
    folder = str(answers.folder.resolve())

    def run(question: str, way: str, layers: int, *more: str) -> int:
        return answers.of(question, partial(trains, way, base, size, layers, more))

    ours = next((n for n in sizes_from(allowed, size.first) if run(f"plan {n}", "plan", n, "--keep", folder)), 0)
    lives = [run(f"life {n}", "plan", ours, "--use", folder) for n in range(size.trials if ours else 0)]
    deaths = [not run(f"fsdp {ours}, {n}", "fsdp", ours) for n in range(size.deaths)]
    fsdp = largest_of_fsdp(lambda layers: run(f"fsdp {layers}", "fsdp", layers), equal)
    results.row("the largest that trains, layers", plan=ours, fsdp2=fsdp)
    results.row(
        f"at {ours} layers, of {size.trials} further runs of the plan and {size.deaths} of equal sharding",
        plan_trains=sum(lives),
        fsdp2_is_killed=sum(deaths),
    )
    results.bar("largest model: plan over equal sharding", ours / max(1, fsdp), ">= 1.8")
    results.bar("largest model: plan over the closed form", ours / allowed, f">= {BAR}")
    results.bar("runs of that plan that train", sum(lives) / size.trials, ">= 1")
    results.bar("runs of equal sharding that are killed there", sum(deaths) / size.deaths, ">= 1")
    ratios = peaks(results, answers.folder)
    if ratios:
        results.bar("peak predicted over measured, least of a worker", min(ratios), ">= 1")
        results.bar("peak predicted over measured, most of a worker", max(ratios), "<= 1.05")


def sizes_from(allowed: int, first: float) -> Iterator[int]:
    """That part of what the closed form allows, and then fewer and fewer layers."""
    most = math.ceil(first * allowed)
    return (layers for layers in range(most, 0, -max(1, allowed // 14)))


def largest_of_fsdp(lives: Callable[[int], int], equal: int) -> int:
    """Layers, by bisection below the closed form."""
    low, high = 0, equal + 1
    while high - low > max(1, equal // 10):
        middle = (low + high) // 2
        low, high = (middle, high) if lives(middle) else (low, middle)
    return low


def peaks(results: Results, kept: Path) -> list[float]:
    """Of each worker of the run in which the plan was found, what was predicted over what was measured."""
    found = [json.loads(file.read_text()) for file in sorted(kept.glob("peak-*.json"))]
    for rank, (predicted, measured) in enumerate(found):
        results.row(f"worker {rank}, bytes", predicted=predicted, measured=measured, ratio=predicted / measured)
    return [predicted / measured for predicted, measured in found]


def base_bytes(way: str, size: Size) -> int:
    """What a worker occupies before there is a model, with all that it loads."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "base.json"
        run(way, size, 1, ["--out", str(out)])
        return int(json.loads(out.read_text()))


def trains(way: str, base: dict[str, int], size: Size, layers: int, more: Sequence[str] = ()) -> bool:
    began_s = time.monotonic()
    memory = ",".join(f"{base[way] + each} B" for each in size.room)
    done = run(way, size, layers, more, memory=memory)
    said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] if done.returncode else []
    verdict = "trains" if done.returncode == 0 else f"does not: {''.join(said)[:200]}"
    print(f"{way} with {layers} layers ({time.monotonic() - began_s:.0f} s): {verdict}", flush=True)
    return done.returncode == 0


def run(
    way: str, size: Size, layers: int, more: Sequence[str], memory: str | None = None
) -> subprocess.CompletedProcess[bytes]:
    emulate = [sys.executable, "-m", "heterodyne", "emulate", "--speeds", "0.6,0.6,0.6"]
    emulate += [] if memory is None else ["--memory", memory]
    worker = [sys.executable, str(HERE), "--worker", "--way", way, "--layers", str(layers), "--width", str(size.width)]
    return subprocess.run([*emulate, "--", *worker, *more], check=False, capture_output=True, timeout=500)


def worker(options: argparse.Namespace) -> None:
    import torch

    import heterodyne as hd
    from heterodyne.job import OptimizerSection

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    with hd.open_session() as session:
        meta = options.way == "fsdp" or session.rank
        with torch.device("meta" if meta else "cpu"):
            model = build(length=LENGTH, width=options.width, layers=options.layers, heads=HEADS)
        if options.way == "fsdp":
            report(options, session.rank, fully_sharded(model, tokens, session))
            return
        section = OptimizerSection(lr=1e-4)
        known: Any = "equal" if options.out else "auto"
        profile = None
        if options.use:
            known, profile = options.use / "plan.json", pickle.loads((options.use / "profile").read_bytes())
        trainer = hd.distribute(
            model,
            batch,
            optimizer=section,
            session=session,
            plan=hd.PlanOptions(
                known, measure_s=3, rehearsal_s=0, micro_batch_sizes=(1, 2), check_s=0, profile=profile
            ),
        )
        if options.keep and session.rank == 0:
            (options.keep / "plan.json").write_text(trainer.plan.dump())
            (options.keep / "profile").write_bytes(pickle.dumps(trainer.profile))
        steps(trainer, batch, options.keep)
        # For the base every worker has all of the model, and the buffers of the others are in its size.
        borrowed = trainer._worker.borrowed_bytes
        report(options, session.rank, borrowed + BYTES * sum(p.numel() for p in model.parameters() if not p.is_meta))


def steps(trainer: Any, batch: dict[str, Any], keep: Path | None) -> None:
    """Trains, and writes into ``keep`` what this rank was predicted to need at most, and what it did."""
    from heterodyne.runtime.records.peak_memory import forget_peak_memory, peak_memory_bytes

    session, planned = trainer._session, trainer._prepared.planned
    forget_peak_memory(session.device)
    for _ in range(STEPS):
        trainer.step(batch)
    measured = peak_memory_bytes(session.device) - trainer._worker.borrowed_bytes
    told = session.communicator.broadcast_object(planned and list(planned.chosen.simulation.peak_bytes), 0)
    if keep:
        (keep / f"peak-{session.rank}.json").write_text(json.dumps([told[session.rank], measured]))


def report(options: argparse.Namespace, rank: int, held: int) -> None:
    """What rank 0 occupies beside ``held`` bytes of weights, gradients and state."""
    import psutil

    if rank == 0 and options.out:
        options.out.write_text(json.dumps(psutil.Process().memory_info().rss - held))


def fully_sharded(model: Any, tokens: Any, session: Any) -> int:
    """FSDP2 with every layer a unit; weights are made shard by shard."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.optim import AdamW

    mesh = init_device_mesh("cpu", (session.world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    share = max(1, BATCH // session.world_size)
    own = tokens[session.rank * share : (session.rank + 1) * share]
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=own, labels=own).backward()
        optimizer.step()
    return BYTES * sum(p.to_local().numel() for p in model.parameters())


if __name__ == "__main__":
    if "--worker" not in sys.argv:
        sys.exit(main())
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--way")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--use", type=Path)
    parser.add_argument("--out", type=Path)
    worker(parser.parse_args())
