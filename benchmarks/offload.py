"""Offload to the memory of hosts: steps under copies that take as long as they like, and whether the planner takes it where it pays.

No GPU is needed: the accelerator of the tests (`tests/device`) runs in host memory, where copies between device and host wait in streams
as on a GPU; here they are done by a thread, each of them after a delay drawn at random, and what reads too early sees rubbish.

1. A GPT-2 is trained with the activations of its blocks and the optimizer's state on the host, half of their copies delayed at random;
   each step has to have loss and norm of the gradient of one device without a host, in all bits. A step that differs is wrong. All of a
   micro-batch begins to come back one pass ahead of its backward (OFFLOAD and RELOAD in the program).
2. Ten cases in which the planner takes hosts, or does not: its choice and the other way, both run (`offload_choices`, which says what
   their seconds are).

``--parts 1,2,3`` runs these cases alone, ``--parts delays`` the steps; with ``--json`` the others stay as they were written before.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

from results import ROOT, Results, arguments, spread

sys.path.insert(0, str(ROOT / "tests"))

import torch
from offload_choices import CASES, choices, tell_worst

from device.slow_copies import SlowCopies
from device.test_exactness import A
from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime.stages import host_link
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World, accelerator
from multiprocess.test_training_pipelines import SAMPLES, Spread, worker_under
from multiprocess.work import PipelineOf, StageOf

MODEL = "gpt2"
MOST_S = 0.003


@dataclass(frozen=True, kw_only=True)
class Size:
    steps: int
    share: float  # of the copies that are delayed; the others take what they take


FULL = Size(steps=1000, share=0.5)
QUICK = Size(steps=20, share=0.5)


PARTS = ("delays", *map(str, range(1, 1 + len(CASES))))


def main() -> int:
    options = arguments(__doc__, names=("--parts", PARTS))
    results = Results("offload")
    pool = Pool()
    try:
        if "delays" in options.parts:
            under_delays(results, pool, QUICK if options.quick else FULL)
        choices(results, pool, options.parts, rounds=3 if options.quick else 7)
    finally:
        pool.close()
    if options.json is not None and options.parts != PARTS:
        results.take_over(options.json, options.parts)
    tell_worst(results)
    return results.write(options.json)


def under_delays(results: Results, pool: Pool, size: Size) -> None:
    graph = captured(MODEL)
    (alone,) = pool.run(1, trained, graph, size, False, devices=(A,), timeout_s=900.0)
    (hosted,) = pool.run(1, trained, graph, size, True, devices=(A,), timeout_s=900.0)
    wrong = sum(mine != its for mine, its in zip(hosted["steps"], alone["steps"], strict=True))
    results.row(
        f"{MODEL}, activations and optimizer state on the host",
        part="delays",
        steps=size.steps,
        step_s=spread(hosted["seconds"]),
        alone_s=spread(alone["seconds"]),
        copies=hosted["copies"],
        delayed=hosted["delayed"],
        most_delay_s=MOST_S,
    )
    results.bar("steps that were wrong", wrong, "<= 0")
    results.bar("ends of copies that were let go of too early", hosted["lost"], "<= 0")
    results.bar("copies of a step that may be delayed", hosted["copies"] / size.steps, ">= 50")


def trained(world: World, graph: ModelGraph, size: Size, hosted: bool) -> dict[str, Any]:
    """Loss and norm of each step; with ``hosted``, under delayed copies."""
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, spread_of(graph, hosted=hosted))
    device = torch.device(world.device, 0)
    slow = SlowCopies(accelerator(world.device), device, seed=0, most_s=MOST_S, share=size.share)
    steps, seconds = [], []
    with mock.patch.object(host_link, "copy", slow.copy):
        for number in range(size.steps):
            batch = {name: tensor.roll(number, 0) for name, tensor in case.batch.items()}
            started_s = time.perf_counter()
            result = worker.step(batch)
            seconds.append(time.perf_counter() - started_s)
            steps.append((result.loss, result.grad_norm))
            if number % 10 == 9:  # or the device of the tests would know of every copy that ever was
                torch.accelerator.synchronize(device)
    torch.accelerator.synchronize(device)
    slow.close()
    worker.close()
    return {"steps": steps, "seconds": seconds, "copies": slow.done, "delayed": slow.delayed, "lost": slow.lost}


def spread_of(graph: ModelGraph, *, hosted: bool) -> Spread:
    """Two micro-batches on one device; hosted, the optimizer's state and the activations of all blocks but one, which is run again."""
    ops = len(graph.ops)
    if not hosted:
        return "GPipe", (PipelineOf((5, 4), (StageOf(ops, (0,), (1,)),)),)
    blocks = tuple(block.index for block in graph.blocks)
    stage = StageOf(ops, (0,), (1,), hosted=(blocks[0], *blocks[2:]), recompute=blocks[1:2], offload=True, reload=1)
    return "GPipe", (PipelineOf((5, 4), (stage,)),)


if __name__ == "__main__":
    sys.exit(main())
