"""What a verb prints on rank 0: tables on standard output, plain where it is no terminal."""

from __future__ import annotations

import sys

from heterodyne.report import rows
from heterodyne.report.rows import Rows
from heterodyne.report.run import Candidate, candidates_from
from heterodyne.report.step_text import step_text
from heterodyne.report.step_times import step_spans
from heterodyne.report.tables import candidate_rows, device_rows, share_rows
from heterodyne.search.explain import alternatives, paragraph
from heterodyne.search.planned import Planned
from heterodyne.terminal import console_on
from heterodyne.timeline import Timeline

__all__ = ["candidate_lines", "candidates_of", "show", "show_planned", "show_step", "terminal_width"]


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


def candidate_lines(planned: Planned) -> list[dict[str, object]]:
    """The alternatives as a run directory keeps them (``candidates.json``)."""
    samples = planned.plan.global_batch_size
    return [
        {
            "name": row.name,
            "step_s": row.step_s,
            "samples_per_s": None if not row.step_s else samples / row.step_s,
            "chosen": row.chosen,
            "why": row.note,
        }
        for row in alternatives(planned)
    ]


def candidates_of(planned: Planned) -> tuple[Candidate, ...]:
    return candidates_from(candidate_lines(planned))


def show_planned(planned: Planned) -> None:
    """The devices, the chosen plan, the alternatives, and why."""
    show(
        device_rows(planned.cluster),
        share_rows(planned.plan.model_copy(update={"reason": ""}), planned.cluster),  # the paragraph below says why
        candidate_rows(candidates_of(planned)),
    )
    if any(
        len(pipeline.stages) > 1 for pipeline in planned.plan.pipelines
    ):  # else every rank does all of its share, one after another
        show_step(planned.simulation.timeline([device.id for device in planned.cluster.devices]))
    sys.stdout.write(paragraph(planned) + "\n\n")
    sys.stdout.flush()
