"""What a verb prints on rank 0: tables on standard output, plain where it is no terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from heterodyne.cluster.fleet import Fleet
from heterodyne.cluster.spec import Cluster
from heterodyne.plan.plan import Plan
from heterodyne.plan.short import in_short
from heterodyne.printable import printable
from heterodyne.report import rows
from heterodyne.report.plan_shares import has_pipelines
from heterodyne.report.plan_tables import candidate_rows, fleet_rows, plan_rows
from heterodyne.report.rows import Rows
from heterodyne.report.run import Candidate
from heterodyne.report.step_text import step_text
from heterodyne.report.step_times import step_spans
from heterodyne.report.tables import device_rows, step_rows
from heterodyne.report.traffic import flows_of, traffic_rows
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.result import AlternativeRow, PlanningResult
from heterodyne.terminal import console_on
from heterodyne.timeline import Timeline
from heterodyne.units import format_seconds

__all__ = ["candidate_lines", "result_json", "show", "show_result", "show_step", "terminal_width"]

_DRAWN = 16
"""Ranks of a step that is drawn: more say nothing at a glance; `--timeline` has them all."""


def show(*tables: Rows) -> None:
    """Print tables."""
    console = console_on(sys.stdout)
    for table in tables:
        rows.show(table, console)


def terminal_width() -> int:
    """Characters in a line of the terminal; what rich takes for granted where there is none."""
    return console_on(sys.stdout).width


def show_step(timeline: Timeline) -> None:
    """Draw the last step of a timeline as a grid: a row for each rank, in colour on a terminal."""
    spans = step_spans(timeline)
    if not spans:
        return
    console = console_on(sys.stdout)
    drawn = step_text(timeline.of_step(max(spans)), console.width, title="One step, as simulated")
    if console.is_terminal:
        console.print(drawn)
    else:
        console.file.write(drawn.text() + "\n")


def candidate_lines(result: PlanningResult) -> list[dict[str, object]]:
    """The alternatives as a run directory keeps them (``candidates.json``)."""
    samples = result.plan.global_batch_size
    return [
        {
            "name": row.name,
            "step_s": row.step_s,
            "samples_per_s": None if not row.step_s else samples / row.step_s,
            "chosen": row.chosen,
            "why": row.note,
            "devices": None if row.plan is None else row.plan.device_count,
        }
        for row in result.alternatives
    ]


def result_json(
    result: PlanningResult,
    devices: Cluster | Fleet,
    *,
    objective: Objective | None = None,
    export: Mapping[str, object] | None = None,
) -> str:
    """For programs: plans as their files have them, each with what is predicted of it.

    ``objective``: by default the fastest step; ``export``: what was written for another framework, where that was asked for.
    """
    count = devices.devices if isinstance(devices, Fleet) else len(devices.devices)
    content = {
        "kind": "plans",
        "cluster": devices.name,
        "devices": count,
        "objective": asdict(objective or Objective()),
        "plan": _as_file(result.plan),
        "bound_s": result.bound_s,
        "alternatives": [_row(row) for row in result.alternatives],
        "families": [_row(row) for row in result.families],
        "frontier": [_as_file(plan) for plan in result.frontier],
        "stopped": result.stopped,
        "export": export,
    }
    return json.dumps(content, indent=1) + "\n"


def _row(row: AlternativeRow) -> dict[str, object]:
    return {"name": row.name, "chosen": row.chosen, "why": row.note, "plan": row.plan and _as_file(row.plan)}


def _as_file(plan: Plan) -> object:
    return json.loads(plan.dump())


def show_result(
    result: PlanningResult, devices: Cluster | Fleet, *, seq: int | None = None, frontier: bool = False
) -> None:
    """The devices, the chosen plan, the alternatives, a step of it, what else was asked for, and why.

    ``seq``: tokens of a sample, where samples have some. ``frontier``: whether to show it.
    """
    show(
        device_rows(devices) if isinstance(devices, Cluster) else fleet_rows(devices),
        plan_rows(result.plan, devices),
        *_traffic(result.plan, devices),
        candidate_rows(_candidates(result.alternatives), seq=seq),
    )
    if has_pipelines(result.plan):  # else every rank does all of its share, one after another
        step = result.timeline()
        if len(step.devices) <= _DRAWN:
            show_step(step)
            show(step_rows(step.of_step(max(step_spans(step), default=0))))
    if frontier:
        rows = tuple(AlternativeRow(name=in_short(plan), plan=plan) for plan in result.frontier)
        title = "Time, money and devices: of the plans found none is better in one without being worse in another"
        show(candidate_rows(_candidates(rows), seq=seq, title=title))
    if result.families:
        show(candidate_rows(_candidates(result.families), title="The best of each kind of plan"))
    words = [*result.words, *_of_many_tokens(result.plan, seq)]
    sys.stdout.write(printable("\n".join(words)) + "\n\n")
    sys.stdout.flush()


def _traffic(plan: Plan, devices: Cluster | Fleet) -> list[Rows]:
    flows = flows_of(plan, devices) if isinstance(devices, Cluster) else []
    return [traffic_rows(flows)] if flows else []


def _of_many_tokens(plan: Plan, seq: int | None) -> Sequence[str]:
    """Return what 1e9 tokens take under a plan, and cost where prices are known; nothing without a prediction or without tokens."""
    predicted = plan.predicted
    if not seq or predicted is None:
        return ()
    steps = 1e9 / (seq * plan.global_batch_size)
    cost = "" if predicted.usd is None else f" and cost {steps * predicted.usd:,.2f} usd"
    return (f"1e9 tokens take {format_seconds(steps * predicted.step_s)}{cost}.",)


def _candidates(rows: Sequence[AlternativeRow]) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(
            name=row.name,
            step_s=row.step_s,
            samples_per_s=None if row.plan is None or row.plan.predicted is None else row.plan.predicted.samples_per_s,
            chosen=row.chosen,
            why=row.note,
            plan=row.plan,
        )
        for row in rows
    )
