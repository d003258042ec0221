"""Plans of many kinds, simulated and then run: how far the simulated step time and memory are from the measured ones.

Four emulated workers (CPU quotas 0.7, 0.35, 0.35, 0.2 of a core) train a small GPT under one plan after the other: cuts, schedules,
orders that were found, several devices a stage, unequal shares, recompute, pipelines side by side. Each is simulated from one measured
profile, and runs twice, so that one bad minute of the machine does not decide. Beside each run all workers compute for themselves for a
while: their *pace*, seconds over those that the profile has for the same work. What is compared is the step at these paces, as other
benchmarks compare ways side by side; what the profile alone says is told too. Memory is that of the process, as a run reports it, and
what earlier plans have left in it is taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from emulation import UNEQUAL, emulated, worker_arguments
from hand_made import Line, Rig, plan_of, with_best_order
from pace import Pace, at_pace, between
from results import ROOT, Results, arguments
from uneven_pipeline import relative_rates

from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Plan
from heterodyne.processes.heap import give_back_memory

if TYPE_CHECKING:
    import torch

BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained. ``every``: one plan in so many is taken; ``steps`` are measured of each, after as many that warm up, in each of
    the ``rounds``."""

    width: int
    layers: int
    length: int
    every: int
    rounds: int
    steps: int
    budget_s: float


FULL = Size(width=384, layers=8, length=128, every=1, rounds=2, steps=2, budget_s=120)
QUICK = Size(width=128, layers=4, length=64, every=4, rounds=1, steps=2, budget_s=8)


def main() -> int:
    options = arguments(__doc__)
    results = Results("simulator_truth")
    found = emulated(UNEQUAL, [], QUICK if options.quick else FULL, Path(__file__))["plans"]
    errors, margins, alone = [], [], []
    for plan in found:
        measured = plan["measured_s"]
        error = median(s / m for s, m in zip(plan["simulated_at_pace_s"], measured, strict=True)) - 1
        alone.append(abs(plan["simulated_s"] / median(measured) - 1))
        margin = min(s / m for s, m in zip(plan["simulated_bytes"], plan["measured_bytes"], strict=True) if s)
        errors.append(abs(error))
        margins.append(margin)
        results.row(
            plan["name"],
            kind=plan["kind"],
            simulated_s=median(plan["simulated_at_pace_s"]),
            measured_s=median(measured),
            pace=fmean(fmean(paces) for paces in plan["pace"]),
            error=error,
            memory_ratio=margin,
            left_mib=plan["left_mib"],
        )
    results.row("all", plans=len(found), mean_error_of_the_profile_alone=fmean(alone))
    results.bar("mean error of the step time", fmean(errors), "<= 0.05")
    results.bar("largest error of the step time", max(errors), "<= 0.12")
    results.bar("least simulated over measured peak memory", min(margins), ">= 1.0")
    if not options.quick:
        results.bar("plans", len(found), ">= 30")
    return results.write(options.json)


def plans(rig: Rig, rates: list[float]) -> Iterator[tuple[str, str, Plan]]:
    """(kind, name, plan) of every kind."""
    graph, cluster = rig.captured.graph, rig.session.cluster
    one, two, three, four = (device.id for device in cluster.devices)
    all_four = ((one,), (two,), (three,), (four,))
    even, fast = (1.0,) * 4, tuple(rates)
    sizes = {
        1: (1,) * BATCH,
        2: (2,) * (BATCH // 2),
        4: (4,) * (BATCH // 4),
        3: MicroBatches.of_samples(BATCH, 3).sizes,
    }

    def made(lines: list[Line], schedule: str = "1F1B") -> Plan:
        return plan_of(graph, cluster, lines, schedule)

    def samples(share: int, size: int) -> tuple[int, ...]:
        return MicroBatches.of_samples(share, size).sizes

    for name, shares, size in (
        ("by speed", (7, 4, 3, 2), 2),
        ("equal", (4, 4, 4, 4), 4),
        ("on three", (8, 4, 4, 0), 1),
    ):
        lines = [
            Line(homes=(home,), parts=(1.0,), micro_batches=samples(share, size))
            for home, share in zip(all_four, shares, strict=True)
            if share
        ]
        yield "replicas", f"replicas {name}", made(lines)
    for schedule in ("GPipe", "1F1B", "ZBH1", "ZBH2"):
        for told, parts in (("even", even), ("by speed", fast)):
            for size in (1, 2) if schedule in ("1F1B", "ZBH1") else (2,):
                line = Line(homes=all_four, parts=parts, micro_batches=sizes[size])
                yield "named", f"{schedule}, {told}, by {size}", made([line], schedule)
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        line = Line(homes=all_four * 2, parts=fast * 2, micro_batches=sizes[2])
        yield "two stages each", f"{schedule}, by speed", made([line], schedule)
    for schedule in ("ZBVZeroBubble", "DualPipeV"):
        line = Line(homes=all_four + all_four[::-1], parts=fast + fast[::-1], micro_batches=sizes[1])
        yield "two stages each", f"{schedule}, by speed", made([line], schedule)
    for told, parts, size in (("by speed", fast, 1), ("by speed", fast, 3), ("even", even, 2)):
        line = Line(homes=all_four, parts=parts, micro_batches=sizes[size])
        yield "found", f"found, {told}, by {size}", with_best_order(made([line]), rig.costs)
    line = Line(homes=all_four + all_four[::-1], parts=fast + fast[::-1], micro_batches=sizes[2])
    yield "found", "found, two stages each", with_best_order(made([line]), rig.costs)
    for schedule, again in (
        ("1F1B", (0,)),
        ("1F1B", (0, 1, 2, 3)),
        ("ShiftedCriticalPath", (0, 1, 2)),
        ("ZBH1", (0, 1)),
    ):
        line = Line(homes=all_four, parts=fast, micro_batches=sizes[2], recompute=again)
        yield "recompute", f"{schedule}, recompute on {len(again)} stages", made([line], schedule)
    wide = ((one,), (two, three), (four,))
    parts = (rates[0], rates[1] + rates[2], rates[3])
    for schedule in ("1F1B", "ZBH1"):
        for size in (2, 4):
            line = Line(homes=wide, parts=parts, micro_batches=sizes[size], shares=((1,), (1, 1), (1,)))
            yield "wide", f"{schedule}, a stage on two devices, by {size}", made([line], schedule)
    pairs = Line(
        homes=((one, four), (two, three)),
        parts=(rates[0] + rates[3], rates[1] + rates[2]),
        micro_batches=sizes[4],
        shares=((3, 1), (1, 1)),
    )
    yield "wide", "1F1B, two stages on two devices each", made([pairs])
    for schedule, deep, size in (("1F1B", 9, 1), ("ZBH2", 9, 1), ("GPipe", 8, 2)):
        lines = [
            Line(homes=((one,), (four,)), parts=(rates[0], rates[3]), micro_batches=samples(deep, size)),
            Line(homes=((two,), (three,)), parts=(rates[1], rates[2]), micro_batches=samples(BATCH - deep, size)),
        ]
        yield (
            "pipelines side by side",
            f"{schedule}, two pipelines, {deep} and {BATCH - deep} samples",
            made(lines, schedule),
        )
    lines = [
        Line(homes=((two,), (three,), (four,)), parts=tuple(rates[1:]), micro_batches=samples(9, 1)),
        Line(homes=((one,),), parts=(1.0,), micro_batches=samples(7, 1)),
    ]
    yield "pipelines side by side", "1F1B, three stages beside one device", made(lines)


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch
    import torch.distributed as dist

    import heterodyne as hd
    from heterodyne.runtime.records.peak_memory import forget_peak_memory, peak_memory_bytes

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return build(length=size.length, width=size.width, layers=size.layers, heads=4)

    tokens = torch.randint(0, 256, (BATCH, size.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    with hd.open_session() as session:
        rig, _ = Rig.of(session, model(), batch, (1, 2, 4), size.budget_s).planned()
        pace = Pace(rig, model(), {name: of[:2] for name, of in batch.items()})
        drafts = [
            (kind, name, rig.agreed(plan))
            for kind, name, plan in list(plans(rig, relative_rates(rig, 2)))[:: size.every]
        ]
        simulated = [rig.predicted(plan) for _, _, plan in drafts]
        found = [
            {"kind": kind, "name": name, "simulated_s": s.step_s, "simulated_bytes": s.peak_bytes}
            | {"measured_s": [], "pace": [], "measured_bytes": [0] * session.world_size, "left_mib": 0}
            for (kind, name, _), s in zip(drafts, simulated, strict=True)
        ]
        give_back_memory()
        before = _resident_bytes()
        for row, (_, name, plan) in [*zip(found, drafts, strict=True)] * size.rounds:
            give_back_memory()
            left = max(0, _resident_bytes() - before)  # caches of the process, no need of this plan
            pace_before = pace()
            made = rig.worker(plan, model())
            forget_peak_memory(session.device)
            for _ in range(size.steps):  # memory of the first ones is new
                made.step(batch)
            seconds = []
            for _ in range(size.steps):
                dist.barrier()
                started = time.perf_counter()
                made.step(batch)
                dist.barrier()
                seconds.append(time.perf_counter() - started)
            used = peak_memory_bytes(session.device) - made.borrowed_bytes - pace.bytes - left
            made.close()
            del made
            gathered = session.communicator.all_gather_object((used, left))
            row["measured_s"] += seconds
            row["pace"] += [between(pace_before, pace())] * size.steps
            row["measured_bytes"] = [max(a, b) for a, (b, _) in zip(row["measured_bytes"], gathered, strict=True)]
            row["left_mib"] = max([row["left_mib"], *(number >> 20 for _, number in gathered)])
            if session.rank == 0:
                told = f"simulated {row['simulated_s']:.3f} s, measured {median(seconds):.3f} s"
                paces = ", ".join(f"{own:.2f}" for own in row["pace"][-1])
                print(f"{name}: {told} at paces of {paces}", flush=True)
        if session.rank == 0:
            for row, (_, _, plan) in zip(found, drafts, strict=True):
                row["simulated_at_pace_s"] = [at_pace(rig, plan, paces) for paces in row["pace"]]
            options.out.write_text(json.dumps({"plans": found}))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    given = worker_arguments()
    sys.exit(main() if given is None else worker(given, Size(**given.size)))
