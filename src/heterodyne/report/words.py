"""Numbers and plans in the words of people: the one place that decides how many digits a reader sees.

A number that is not known is a dash, never a zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from heterodyne.plan import Pipeline, Plan
from heterodyne.plan.precision import in_words
from heterodyne.report.plan_shares import order_of
from heterodyne.units import format_bytes, format_seconds

__all__ = [
    "DASH",
    "byte_size",
    "change",
    "digits",
    "efficiency_text",
    "kind_name",
    "percent",
    "pipeline_in_words",
    "plan_in_words",
    "ratio",
    "seconds",
    "unbroken",
    "unsteady",
]

DASH = "–"
_STEADY = 1.05  # as far above what devices reach alone as noise may bring a run

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mun]?s|[kMGTP]i?B|B)(?![A-Za-z]))")
_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
    "REDUCE_GRAD": "reduce gradients",
    "SCATTER": "reduce-scatter gradients",
    "GATHER": "all-gather weights",
    "UNSHARD": "all-gather weights",
    "OFFLOAD": "activations to the host",
    "RELOAD": "activations back",
    "CLIP": "clip",
    "STEP": "optimizer step",
    "SEND_F": "send activations",
    "RECV_F": "wait for activations",
    "SEND_B": "send gradients",
    "RECV_B": "wait for gradients",
    "wait": "wait",
    "exposed": "reduce, not hidden",
    "idle": "idle",
}


def kind_name(kind: str) -> str:
    """``backward`` for ``B``; a kind without a name of its own is its own name."""
    return _KINDS.get(kind, kind.lower().replace("_", " "))


def seconds(value: float | None) -> str:
    """``12.3 ms``."""
    return DASH if value is None or not math.isfinite(value) else format_seconds(value)


def byte_size(value: float | None) -> str:
    """``1.5 GiB``."""
    return DASH if value is None or not math.isfinite(value) else format_bytes(value)


def efficiency_text(value: float | None) -> str:
    """``93.1 %``; above 105 %, where devices were slower while they were measured than in the run, that it is not known."""
    return "not known: measuring was unsteady" if value is not None and unsteady(value) else percent(value)


def unsteady(efficiency: float) -> bool:
    """Return whether devices were slower while they were measured than in the run, so that its efficiency says nothing."""
    return efficiency > _STEADY


def percent(value: float | None) -> str:
    """``93.1 %`` of 0.931."""
    return DASH if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def change(value: float | None) -> str:
    """``+2.3 %`` of 0.023, always with its sign."""
    if value is None or not math.isfinite(value):
        return DASH
    shown = f"{100 * value:+.1f}" if abs(value) < 10 else f"{100 * value:+.0f}"
    return f"{'±0.0' if float(shown) == 0 else shown.replace('-', '−')} %"


def ratio(value: float | None) -> str:
    """``1.92×``."""
    return DASH if value is None or not math.isfinite(value) else f"{value:.2f}×"


def digits(value: float | None, significant: int = 3) -> str:
    """Three significant digits without an exponent while that is readable: ``152``, ``3.04``, ``1,230``."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0 or not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{significant}g}"
    after = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{after}f}"


def unbroken(text: str) -> str:
    """The text with no line break between a number and its unit."""
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)


def pipeline_in_words(pipeline: Pipeline) -> str:
    """``7 micro-batches of 4``, ``3 micro-batches of 4, then 1 of 2``, ``no samples``."""
    text = str(pipeline.micro_batches)
    if text == "0":
        return "no samples"
    runs = [run.split("x") for run in text.split("+")]
    first, *rest = runs
    noun = "micro-batch" if first[0] == "1" else "micro-batches"
    return ", then ".join([f"{first[0]} {noun} of {first[1]}", *(f"{count} of {size}" for count, size in rest)])


def plan_in_words(plan: Plan) -> tuple[str, ...]:
    """The plan as sentences: one for the whole, one for pipelines with the same share, one for the idle devices."""
    batch, bucket = plan.global_batch_size, format_bytes(plan.bucket_bytes)
    copies = len(plan.pipelines)
    sentences = [
        f"Each step trains on a global batch of {batch} samples, "
        + (f"divided among {copies} copies of the model; " if copies > 1 else "by one copy of the model; ")
        + (f"gradients are reduced in buckets of about {bucket}, " if copies > 1 else "all ")
        + f"in {in_words(plan.precision)}."
    ]
    sentences += _schedule_in_words(plan)
    alike: dict[str, list[Pipeline]] = {}
    for pipeline in plan.pipelines:
        alike.setdefault(str(pipeline.micro_batches), []).append(pipeline)
    for group in alike.values():
        samples = group[0].micro_batches.samples
        who = _listed([" → ".join(" + ".join(devices) for devices in p.places) for p in group])
        verb, each = ("takes", "") if len(group) == 1 else ("take", " each")
        share = f"{samples} {'sample' if samples == 1 else 'samples'}{each} ({percent(samples / batch)})"
        sentences.append(
            f"{who} {verb} {share if samples else 'no sample'}{f' as {pipeline_in_words(group[0])}' if samples else ''}."
        )
    if plan.idle:
        sentences.append(f"{_listed(plan.idle)} {'takes' if len(plan.idle) == 1 else 'take'} no part.")
    return tuple(sentences)


def _schedule_in_words(plan: Plan) -> list[str]:
    """Return how pipelines order their work, if any has more than one stage."""
    deep = [pipeline for pipeline in plan.pipelines if len(pipeline.stages) > 1]
    if not deep:
        return []
    depths = " and ".join(map(str, sorted({len(pipeline.stages) for pipeline in deep})))
    return [f"{'A pipeline' if len(deep) == 1 else f'{len(deep)} pipelines'} of {depths} stages: {order_of(plan)}."]


def _listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and 14 more``."""
    if len(names) > 5:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
