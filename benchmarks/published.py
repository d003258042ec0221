"""What was published and measured, predicted: given the plan and the cluster of each row, its step, its memory, and the best of its plans.

``zero-shot``: nothing is known of the source. ``calibrated``: one factor for each source and kind of device, from its three smallest rows;
the others are compared. Rows of a table of which some do more operations than their devices can, by datasheet, are not as they are
described, and in no bar. ``naive``: 55% of the peak and a pipeline bubble, calibrated in the same way. The sources are split into those
that the predictor's constants are fitted to and those that judge it (`published_rows`); those that came later are reported apart. Memory is
compared with what the source has read: what its allocator has given out, or all that the device is short of.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean, median

from published_plan import evaluated
from published_rows import FIT, LATER, TEST, Run, left_out, refuted_bytes, runs, unknown_frameworks
from results import DATA, ROOT, Results
from scatter import Predicted, scatter_picture

ROWS = DATA / "measured_runs.jsonl"
_SMALLEST = 3
_NAIVE = 0.55
_SET_BY_HAND = "T4"
"""Of these no source is on the fitting side."""
_TOO_FEW = 0.97
"""Of the bytes measured: a prediction of fewer is one that a plan could fail by."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A row and what was predicted for it: seconds over those measured, both ways, and bytes over those measured."""

    run: Run
    ratio: float
    naive: float
    memory: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every eighth row")
    parser.add_argument("--json", type=Path, help="where the rows and bars are written")
    parser.add_argument("--data", type=Path, default=ROWS, help="the published rows, one JSON a line")
    options = parser.parse_args()
    if not options.data.is_file():
        print(f"there are no published rows at {options.data}; give them with --data FILE", file=sys.stderr)
        return 2
    results = Results("published")
    chosen = runs(options.data)[:: 8 if options.quick else 1]
    impossible = refuted_bytes(chosen)
    for identifier, why in left_out(options.data).items():
        results.row(f"left out, of another run than it tells of: {identifier}", why=why)
    for framework, rows in unknown_frameworks(options.data).items():
        results.row(f"taken for PyTorch of today, since nothing is known of it: {framework}", rows=rows)
    everything = []
    for run in chosen:
        row = judge(run)
        if run.id in impossible:
            results.row(f"bytes that are less with larger micro-batches; in no bar: {run.id}", ratio=row.memory)
            row = replace(row, memory=None)
        everything.append(row)
    refuted = {told_of(row.run) for row in everything if row.run.flops_per_s > peak_of(row.run)}
    found = [row for row in everything if told_of(row.run) not in refuted]
    apart = [row for row in everything if told_of(row.run) in refuted]
    if apart:
        most = max(apart, key=lambda row: row.run.flops_per_s / peak_of(row.run)).run
        results.row(
            "not as described: some do more operations than their devices can; in no bar",
            **figures(apart),
            most_tflops=most.flops_per_s / 1e12,
            of_tflops=peak_of(most) / 1e12,
            device=most.device.kind,
            precision=most.plan.precision,
        )
        results.row("all of the test half, those too", **figures([row for row in everything if row.run.side == TEST]))
    for group, rows in grouped(found).items():
        results.row(group, side=rows[0].run.side, **figures(rows))
    for kind in sorted({kind_of(row.run) for row in found}):
        results.row(f"plans: {kind}", **figures([row for row in found if kind_of(row.run) == kind]))
    others = [row for row in found if row.run.side == TEST and row.run.device.kind != _SET_BY_HAND]
    results.row(f"all of the test half but the {_SET_BY_HAND}s", **figures(others))
    for side in (FIT, TEST, LATER):
        rows = [row for row in found if row.run.side == side]
        results.row(f"all of the {side} {'sources' if side == LATER else 'half'}", side=side, **figures(rows))
    bars(results, found)
    if not options.quick:
        draw(found)
    for side in (TEST, LATER):
        far = sorted((row for row in found if row.run.side == side), key=lambda row: -abs(log(row.ratio)))
        for row in far[:12]:
            run = row.run
            results.row(f"far off: {run.id}", side=side, ratio=row.ratio, model=run.model_name, device=run.device.kind)
    return results.write(options.json)


def bars(results: Results, found: Sequence[Judged]) -> None:
    """The judging half is judged; order and memory, of which there is less, on both halves; the later sources apart."""
    tested, later = ([row for row in found if row.run.side == side] for side in (TEST, LATER))
    halves = [row for row in found if row.run.side != LATER]
    errors = [abs(row.ratio - 1) for row in tested]
    results.bar("zero-shot, test half: median error", median(errors), "<= 0.15")
    results.bar("zero-shot, test half: 90th percentile", percentile(errors, 0.9), "<= 0.4")
    kept = calibrated(tested, lambda row: row.ratio)
    results.bar("calibrated, test half: mean error", fmean(kept), "<= 0.1")
    results.bar("calibrated, test half: 90th percentile", percentile(kept, 0.9), "<= 0.2")
    right, asked = order(halves)
    results.row("order", asked=asked, right=right)
    results.bar("the best plan by prediction is the best, or within 5%", right / asked, ">= 0.85")
    for side in (FIT, TEST, LATER):
        results.row(f"memory, {side}", **bytes_figures([row for row in found if row.run.side == side]))
    memory = bytes_figures(halves)
    results.row("memory", **memory)
    results.bar("memory: least of predicted over measured", float(memory["least"]), f">= {_TOO_FEW}")
    results.bar("memory: mean over-estimate", float(memory["mean_over"]), "<= 0.15")
    errors = [abs(row.ratio - 1) for row in later]
    results.bar("zero-shot, later sources: median error", median(errors), "<= 0.12")
    results.bar("zero-shot, later sources: 90th percentile", percentile(errors, 0.9), "<= 0.3")
    right, asked = order(later)
    results.row("order, later sources", asked=asked, right=right)


def draw(found: Sequence[Judged]) -> None:
    points = [
        Predicted(kind=kind_of(row.run), simulated_s=row.ratio * row.run.measured_s, measured_s=row.run.measured_s)
        for row in sorted(found, key=lambda row: kind_of(row.run))
    ]
    picture = ROOT / "docs" / "pictures" / "published.png"
    scatter_picture(points, picture, title="Published steps, predicted without knowing the source", band=0.15)


def kind_of(run: Run) -> str:
    """Of plan."""
    s = run.plan
    if run.model.experts:
        return "experts"
    names = [name for name, degree in (("data", s.dp), ("tensor", s.tp), ("pipeline", s.pp)) if degree > 1]
    return "sharded data" if s.zero == 3 else " + ".join(names) or "one device"


def judge(run: Run) -> Judged:
    told = evaluated(run)
    needed = told.allocated_bytes if run.allocated else told.needed_bytes
    return Judged(
        run=run,
        ratio=told.step_s / run.measured_s,
        naive=naive_s(run) / run.measured_s,
        memory=None if run.measured_bytes is None else needed / run.measured_bytes,
    )


def told_of(run: Run) -> tuple[str, str, int]:
    """What one table of a source says of: its rows are right or wrong together."""
    return run.source, run.model_name, run.model.seq


def peak_of(run: Run) -> float:
    """FLOP/s of a device by its datasheet."""
    peaks, precision = run.device.peak_flops, run.plan.precision
    if precision == "tf32" and "tf32" not in peaks:
        return peaks["fp32"]
    return peaks.get(precision) or peaks.get("bf16") or peaks["fp16"]


def naive_s(run: Run) -> float:
    """A constant part of the peak, and a bubble."""
    s, peak = run.plan, peak_of(run)
    flops = run.model.forward_flops_a_token() * run.model.seq * s.global_batch * (4 if s.recompute == "full" else 3)
    return flops / (run.devices * peak * _NAIVE) * (1 + (s.pp - 1) / (s.micro_batches * s.vpp))


def grouped(found: Iterable[Judged]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = {}
    for row in found:
        groups.setdefault(row.run.group, []).append(row)
    return groups


def calibrated(found: Iterable[Judged], ratio: Callable[[Judged], float]) -> list[float]:
    """Errors of the rows of each group besides its smallest: those on fewest devices, the shortest first."""
    errors = []
    for rows in grouped(found).values():
        smallest = sorted(rows, key=lambda row: (row.run.devices, row.run.measured_s, row.run.id))[:_SMALLEST]
        factor = exp(fmean(log(ratio(row)) for row in smallest))
        errors += [abs(ratio(row) / factor - 1) for row in rows if row not in smallest]
    return errors


def order(found: Iterable[Judged]) -> tuple[int, int]:
    """Of choices between plans for one model and cluster: how often the predicted best is the best or within 5%, of how many."""
    choices: dict[tuple[object, ...], list[Judged]] = {}
    for row in found:
        run = row.run
        choices.setdefault((run.source, run.model_name, run.model, run.device.kind, run.devices), []).append(row)
    right = asked = 0
    for rows in choices.values():
        if len({row.run.plan for row in rows}) < 2:
            continue
        asked += 1
        chosen = min(rows, key=lambda row: row.ratio * _a_sample(row.run))
        right += _a_sample(chosen.run) <= 1.05 * min(_a_sample(row.run) for row in rows)
    return right, asked


def _a_sample(run: Run) -> float:
    return run.measured_s / run.plan.global_batch


def figures(rows: Sequence[Judged]) -> Mapping[str, object]:
    errors = [abs(row.ratio - 1) for row in rows]
    kept, naive = calibrated(rows, lambda row: row.ratio), calibrated(rows, lambda row: row.naive)
    told: dict[str, object] = {
        "rows": len(rows),
        "ratio": median(row.ratio for row in rows),
        "median_error": median(errors),
        "p90_error": percentile(errors, 0.9),
        "worst_error": max(errors),
    }
    if kept:
        told |= {"calibrated_mean": fmean(kept), "calibrated_p90": percentile(kept, 0.9)}
        told |= {"naive_calibrated_mean": fmean(naive), "naive_calibrated_p90": percentile(naive, 0.9)}
    memory = [row.memory for row in rows if row.memory is not None]
    if memory:
        told |= {"memory_least": min(memory), "memory_mean": fmean(memory)}
    return told


def bytes_figures(rows: Sequence[Judged]) -> dict[str, float]:
    ratios = [row.memory for row in rows if row.memory is not None]
    if not ratios:
        return {"rows": 0}
    return {
        "rows": len(ratios),
        "too_few": sum(ratio < _TOO_FEW for ratio in ratios),
        "under": sum(ratio < 1 for ratio in ratios),
        "least": min(ratios),
        "mean_over": fmean(max(0.0, ratio - 1) for ratio in ratios),
        "most": max(ratios),
    }


def percentile(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


if __name__ == "__main__":
    sys.exit(main())
