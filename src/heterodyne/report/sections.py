"""The sections of the report as plain texts and places, ready for the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heterodyne.cluster import BlockSample, Device
from heterodyne.cluster.profile import WHOLE
from heterodyne.report.compare import Claim, Comparison
from heterodyne.report.line_chart import LineChart, Series, line_chart, smoothed
from heterodyne.report.palette import SERIES
from heterodyne.report.run import Metrics, Run
from heterodyne.report.step_times import EXPOSED, IDLE, StepTimes, by_rank, in_order, typical
from heterodyne.report.tables import claim_text
from heterodyne.report.words import (
    DASH,
    byte_size,
    change,
    digits,
    kind_name,
    percent,
    pipeline_in_words,
    plan_in_words,
    ratio,
    seconds,
)
from heterodyne.units import format_bandwidth, format_count

__all__ = [
    "cluster_section",
    "curve_charts",
    "efficiency_chart",
    "key_figures",
    "loss_chart",
    "plan_section",
    "prediction_section",
    "status",
    "time_section",
    "training_lead",
]

_CARDS_SHOWN_ONE_BY_ONE = 12


def status(run: Run) -> dict[str, str]:
    """What was trained, on how many devices, and how far the run got."""
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
            "value": percent(efficiency.measured),
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


def cluster_section(run: Run) -> dict[str, Any] | None:
    """Cards of the devices, alike ones together if there are many, and the bar of their shares."""
    if run.cluster is None:
        return None
    samples = run.samples
    batch = sum(samples.values())
    cards = [_card(run, rank, device) for rank, device in enumerate(run.cluster.devices)]
    if len(cards) > _CARDS_SHOWN_ONE_BY_ONE:
        cards = _together(cards)
    shares = [
        {"device": d.id, "samples": samples[d.id], "percent": 100 * samples[d.id] / batch, "colour": rank % SERIES}
        for rank, d in enumerate(run.cluster.devices)
        if samples.get(d.id)
    ]
    links = [
        f"{' – '.join(dict.fromkeys(link.between))}: {format_bandwidth(link.bandwidth_bytes_per_s)}, {seconds(link.latency_s)} latency"
        for link in run.cluster.links
    ]
    return {"name": run.cluster.name, "cards": cards, "shares": shares, "batch": batch, "links": links}


def _card(run: Run, rank: int, device: Device) -> dict[str, Any]:
    samples = run.samples
    taken = samples.get(device.id)
    needed = run.peak_memory.get(device.id)
    predicted = run.plan.predicted.memory_bytes.get(device.id) if run.plan and run.plan.predicted else None
    used, word = (needed, "measured") if needed is not None else (predicted, "predicted")
    facts = [
        (
            "share",
            DASH
            if taken is None
            else f"{taken} samples ({percent(taken / sum(samples.values()))})"
            if taken
            else "none",
        ),
        (
            "as",
            next((pipeline_in_words(p) for p in run.plan.pipelines if device.id in p.stages[0].devices), DASH)
            if run.plan
            else DASH,
        ),
        ("alone", _alone(run, device)),
        (
            "memory",
            f"{byte_size(used)} of {byte_size(device.memory_bytes)}"
            if used is not None
            else byte_size(device.memory_bytes),
        ),
    ]
    return {
        "title": device.id,
        "kind": device.kind if device.kind == device.backend else f"{device.kind} · {device.backend}",
        "rank": f"rank {rank}",
        "colour": rank % SERIES,
        "facts": [(name, text) for name, text in facts if text != DASH],
        "memory": min(100.0, 100 * used / device.memory_bytes) if used is not None and device.memory_bytes else None,
        "memory_note": word,
        "count": 1,
    }  # fmt: skip


def _together(cards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One card for devices whose facts are the same."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for card in cards:
        groups.setdefault((card["kind"], *(f for f in card["facts"] if f[0] in ("share", "as"))), []).append(card)
    return [
        {**group[0], "count": len(group), "rank": f"{group[0]['rank']} and {len(group) - 1} alike" if group[1:] else group[0]["rank"]}
        for group in groups.values()
    ]  # fmt: skip


def _alone(run: Run, device: Device) -> str:
    """Samples per second of the whole model on this device, at the micro-batch size that is fastest there."""
    profile = run.profile.devices.get(device.id) if run.profile else None
    samples = profile.blocks.get(WHOLE, ()) if profile else ()
    rates = [
        s.micro_batch_size / total for s in samples if not s.extrapolated and (total := s.forward_s + s.backward_s) > 0
    ]
    return f"{digits(max(rates))} samples/s" if rates else DASH


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


def time_section(run: Run) -> dict[str, Any] | None:
    """Stacked bars: predicted and measured for each rank, on one scale; of the same steps that the timelines show."""
    predicted, measured = (
        {t.rank: t for t in by_rank(one)} if one else {} for one in (typical(run.simulated), typical(run.measured))
    )
    every = [*predicted.values(), *measured.values()]
    scale_s = max((t.span_s for t in every), default=0.0)
    if scale_s <= 0:
        return None
    kinds = in_order({kind for t in every for kind in t.kinds if kind != "REDUCE_GRAD"})
    parts = (*kinds, EXPOSED, IDLE)
    rows = [
        {
            "rank": rank,
            "device": run.devices[rank] if rank < len(run.devices) else "",
            "bars": [
                {"title": title, "segments": _segments(times[rank], parts, scale_s)}
                for title, times in (("predicted", predicted), ("measured", measured))
                if rank in times
            ],
            "busy": percent(1 - measured[rank].wait_s / measured[rank].span_s) if rank in measured else DASH,
        }
        for rank in sorted({*predicted, *measured})
    ]
    titles = [title for title, times in (("predicted", predicted), ("measured", measured)) if times]
    return {"rows": rows, "parts": [(part, kind_name(part)) for part in parts], "titles": titles}


def _segments(times: StepTimes, parts: Sequence[str], scale_s: float) -> list[dict[str, Any]]:
    shown = [(part, times.seconds(part)) for part in parts]
    return [
        {
            "part": part,
            "percent": 100 * value / scale_s,
            "tip": f"{kind_name(part)} · {seconds(value)} · {percent(value / times.span_s)} of the step",
        }
        for part, value in shown
        if value > 0
    ]  # fmt: skip


def prediction_section(comparison: Comparison) -> dict[str, Any]:
    """The errors of the run and of each device's memory as lines, those of each rank's seconds as a matrix."""
    names = {"step": "Step time", "samples/s": "Samples per second", "efficiency": "Efficiency"}
    ranks = dict.fromkeys(c.rank for c in comparison.seconds if c.rank is not None)
    return {
        "lines": [_claim(c, names.get(c.what, c.what)) for c in comparison.run],
        "memory": [_claim(c, c.device) for c in comparison.memory],
        "kinds": [kind_name(kind) for kind in comparison.kinds],
        "ranks": [
            {"rank": r, "device": comparison.of_rank(r)[0].device, "cells": [_claim(c, c.what) for c in comparison.of_rank(r)]}
            for r in ranks
        ],
    }  # fmt: skip


def _claim(claim: Claim, name: str) -> dict[str, str]:
    return {
        "name": name,
        "predicted": claim_text(claim, claim.predicted),
        "measured": claim_text(claim, claim.measured),
        "error": change(claim.error),
    }


def loss_chart(run: Run, reference: Metrics | None = None) -> LineChart | None:
    """Training loss (each step faint, a running mean strong), validation loss, and the run on one device beside it."""
    series: list[Series] = []
    if reference is not None:
        # Wide and beneath: where the two runs agree, the one on top must not hide the other.
        strong = _loss_of(reference, "one device", 2)[-1]
        points = tuple((float(v.step), v.loss) for v in reference.validations)
        series += [
            Series(name=strong.name, points=strong.points, colour=2, mark="band"),
            Series(name="one device, validation", points=points, colour=2, mark="wide-dots"),
        ]
    series += _loss_of(run.metrics, "training", 0)
    series += [
        Series(
            name="validation",
            points=tuple((float(v.step), v.loss) for v in run.metrics.validations),
            colour=1,
            mark="dots",
        )
    ]
    return line_chart("Loss over steps", series, x_title="step", y_title="loss")


def training_lead(run: Run, reference: Metrics | None = None) -> str:
    """The losses at the end, in a sentence."""
    parts = [
        f"{who}: training {digits(m.steps[-1].loss, 4)}"
        + (f", validation {digits(m.validations[-1].loss, 4)}" if m.validations else "")
        for who, m in (("this run", run.metrics), ("one device on the same batches", reference))
        if m is not None and m.steps
    ]
    return f"Loss at the end. {'; '.join(parts)}.".replace("this run", "This run") if parts else ""


def _loss_of(metrics: Metrics, name: str, colour: int) -> list[Series]:
    points = tuple((float(s.step), s.loss) for s in metrics.steps if s.loss is not None)
    window = max(1, len(points) // 40)
    if window == 1:
        return [Series(name=name, points=points, colour=colour)]
    return [
        Series(name="", points=points, colour=colour, mark="faint"),
        Series(name=f"{name}, mean of {window} steps", points=smoothed(points, window), colour=colour),
    ]


def efficiency_chart(run: Run) -> LineChart | None:
    """Efficiency of each step on an axis from 0, where 100 % is the sum of what the devices reach alone."""
    points = tuple((float(s.step), s.efficiency) for s in run.metrics.steps if s.efficiency is not None)
    predicted = run.plan.predicted.efficiency if run.plan and run.plan.predicted else None
    series = [Series(name="measured", points=points, colour=0)]
    if predicted is not None and points:
        ends = tuple((x, predicted) for x in dict.fromkeys((points[0][0], points[-1][0])))
        series.append(Series(name="predicted", points=ends, colour=1, mark="dashed"))
    return line_chart(
        "Efficiency over steps",
        series if points else [],
        x_title="step",
        y_title="efficiency",
        y_text=percent,
        y_tick=lambda value: f"{100 * value:.0f} %",
        include_y=(0.0, 1.0),
        snug_y=True,
    )


def curve_charts(run: Run) -> list[LineChart]:
    """Seconds of forward plus backward over the micro-batch size, a chart for each kind of block, a line for each device."""
    if run.profile is None:
        return []
    kinds = dict.fromkeys(kind for device in run.profile.devices.values() for kind in device.blocks)
    charts = []
    for kind in sorted(kinds, key=lambda k: k != WHOLE):
        series: list[Series] = []
        sizes: set[int] = set()
        for index, (name, device) in enumerate(run.profile.devices.items()):
            samples = device.blocks.get(kind, ())
            sizes |= {s.micro_batch_size for s in samples}
            series += _curves(name, samples, index % SERIES)
        title = "The whole model" if kind == WHOLE else run.profile.kinds.get(kind, kind)
        charts.append(
            line_chart(
                title,
                series,
                x_title="samples in the micro-batch",
                y_title="forward + backward",
                y_text=seconds,
                y_tick=seconds,
                include_y=(0.0,),
                x_ticks=sorted(sizes),
            )
        )
    return [chart for chart in charts if chart is not None]


def _curves(name: str, samples: Sequence[BlockSample], colour: int) -> list[Series]:
    """What was measured as a line with dots; what was only continued from it dashed."""
    points = [(float(s.micro_batch_size), s.forward_s + s.backward_s) for s in samples]
    known = sum(not s.extrapolated for s in samples)
    return [
        Series(name=name, points=tuple(points[:known]), colour=colour),
        Series(name="", points=tuple(points[:known]), colour=colour, mark="dots"),
        Series(name="", points=tuple(points[max(0, known - 1) :]) if known < len(points) else (), colour=colour, mark="dashed"),
    ]  # fmt: skip
