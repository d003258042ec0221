"""The plan in words, and what was weighed against it."""

from __future__ import annotations

from typing import Any

from heterodyne.report.run import Run
from heterodyne.report.words import digits, plan_in_words, ratio, seconds

__all__ = ["plan_section"]


def plan_section(run: Run) -> dict[str, Any] | None:
    """The plan in words and the alternatives as bars of predicted samples/s."""
    if run.plan is None and not run.candidates:
        return None
    best = max((c.samples_per_s for c in run.candidates if c.samples_per_s), default=1.0)
    chosen = next((c.samples_per_s for c in run.candidates if c.chosen), None)
    candidates = [
        {
            "name": c.name,
            "step": seconds(c.step_s),
            "rate": digits(c.samples_per_s),
            "bar": 100 * c.samples_per_s / best if c.samples_per_s else None,
            "against": ratio(c.samples_per_s / chosen if c.samples_per_s and chosen else None),
            "why": c.why,
            "chosen": c.chosen,
        }
        for c in sorted(run.candidates, key=lambda c: -(c.samples_per_s or 0))
    ]
    words = plan_in_words(run.plan) if run.plan is not None else ()
    reason = run.plan.reason if run.plan is not None else ""
    return {"words": words, "reason": reason, "candidates": candidates}
