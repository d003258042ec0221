"""The alternatives of the device search, in the form that every search returns."""

from __future__ import annotations

from heterodyne.search.explain import paragraph, ratio_in_words
from heterodyne.search.planned import Planned
from heterodyne.search.result import AlternativeRow, PlanningResult
from heterodyne.units import format_seconds

__all__ = ["alternatives", "result_of"]


def result_of(planned: Planned) -> PlanningResult:
    """The result in the form that every search returns."""
    return PlanningResult(
        plan=planned.plan,
        alternatives=alternatives(planned),
        words=(paragraph(planned),),
        timeline=lambda: planned.simulation.timeline([device.id for device in planned.cluster.devices]),
    )


def alternatives(planned: Planned) -> tuple[AlternativeRow, ...]:
    """Every candidate, the fastest first, infeasible ones last."""
    base = planned.simulation.step_s
    rows = []
    for candidate in planned.candidates:
        ratio = None if candidate.step_s is None or base <= 0 else candidate.step_s / base
        chosen = candidate is planned.chosen
        note = "chosen" if chosen else candidate.why_not or ("" if ratio is None else ratio_in_words(ratio))
        if candidate.rehearsed_s is not None:
            note += f"; {format_seconds(candidate.rehearsed_s)} in rehearsal"
        elif ratio is not None and ratio < 1 and candidate.weighed_s > planned.chosen.weighed_s:
            note += ", too little to cut the model for"
        plan = planned.plan if chosen else candidate.plan
        rows.append(AlternativeRow(name=candidate.name, chosen=chosen, plan=plan, note=note))
    return tuple(sorted(rows, key=lambda row: (row.step_s is None, row.step_s or 0.0, not row.chosen)))
