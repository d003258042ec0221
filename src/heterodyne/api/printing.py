"""What a verb prints on rank 0: tables on standard output, plain where it is no terminal."""

from __future__ import annotations

import sys

from rich.console import Console

from heterodyne.report import rows
from heterodyne.report.rows import Rows
from heterodyne.report.run import Candidate, candidates_from
from heterodyne.report.tables import candidate_rows, device_rows, share_rows
from heterodyne.search.explain import alternatives, paragraph
from heterodyne.search.planned import Planned

__all__ = ["candidate_lines", "candidates_of", "show", "show_planned"]


def show(*tables: Rows) -> None:
    """Print tables."""
    console = Console(file=sys.stdout)
    for table in tables:
        rows.show(table, console)


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
    sys.stdout.write(paragraph(planned) + "\n\n")
    sys.stdout.flush()
