"""What the page says first: what was trained, how far it got, and the five numbers."""

from __future__ import annotations

from typing import Any

from heterodyne.plan.order import is_asynchronous
from heterodyne.report.compare import Comparison
from heterodyne.report.run import Run
from heterodyne.report.words import change, digits, efficiency_text, percent, plan_in_words, ratio, seconds
from heterodyne.units import format_count

__all__ = ["key_figures", "plan_section", "status"]


def status(run: Run) -> dict[str, str]:
    """Return what was trained, on how many devices, and how far the run got."""
    steps = run.metrics.steps
    facts = []
    model = run.summary.get("model") or (run.job.model.factory or run.job.model.directory if run.job else None)
    if model:
        count = run.summary.get("parameters")
        facts.append(f"{model}, {format_count(count)} parameters" if isinstance(count, int) else str(model))
    if run.devices:
        facts.append(f"{len(run.devices)} {'device' if len(run.devices) == 1 else 'devices'}")
    if steps:
        of = f" of {run.job.training.steps}" if run.job else ""
        facts.append(f"step {steps[-1].step}{of}")
    if run.job is not None and (sync := run.job.training.sync) is not None:
        facts.append(f"site {sync.site} of {len(sync.shares)}: inexact, as asked for")
    if run.plan is not None and is_asynchronous(run.plan):
        facts.append("predicted weights: inexact, as asked for")
    duration = run.summary.get("seconds")
    if isinstance(duration, int | float):
        facts.append(seconds(float(duration)))
    return {"facts": " · ".join(facts), "state": "" if _complete(run) else "cut short"}


def _complete(run: Run) -> bool:
    if run.summary:
        return not run.summary.get("interrupted", False)
    last = run.metrics.steps[-1].step if run.metrics.steps else -1
    return run.job is not None and last + run.job.metrics.every > run.job.training.steps


def key_figures(run: Run, comparison: Comparison) -> list[dict[str, str]]:
    """The five numbers at the top, each with what it means."""
    metrics, (step, _, efficiency) = run.metrics, comparison.run
    trained = metrics.steps[-1].loss if metrics.steps else None
    validated = metrics.validations[-1].loss if metrics.validations else None
    tokens = metrics.median("tokens_per_s")
    speed_up = run.speed_up_over_equal
    return [
        {
            "name": "Efficiency",
            "value": efficiency_text(efficiency.measured),
            "note": f"of what the devices reach without communicating; {percent(efficiency.predicted)} predicted",
        },
        {
            "name": "Prediction error",
            "value": change(step.error),
            "note": f"step time: {seconds(step.predicted)} predicted, {seconds(step.measured)} measured",
        },
        {
            "name": "Samples per second",
            "value": digits(metrics.median("samples_per_s")),
            "note": f"{format_count(tokens)} tokens/s, median over the steps" if tokens else "median over the steps",
        },
        {
            "name": "Final loss",
            "value": digits(validated if validated is not None else trained, 4),
            "note": f"validation; {digits(trained, 4)} training"
            if validated is not None
            else "training; none validated",
        },
        {
            "name": "Over equal shares",
            "value": ratio(speed_up),
            "note": "samples/s, predicted" if speed_up else "not known: equal shares were not weighed",
        },
    ]


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
