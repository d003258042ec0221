"""The devices as cards, alike ones together if there are many, and the bar of their shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heterodyne.cluster import Device
from heterodyne.cluster.profile import WHOLE
from heterodyne.report.palette import SERIES
from heterodyne.report.plan_shares import has_pipelines, stages_of
from heterodyne.report.run import Run
from heterodyne.report.traffic import flows_of, traffic_picture
from heterodyne.report.words import DASH, byte_size, digits, percent, pipeline_in_words, seconds
from heterodyne.units import format_bandwidth

__all__ = ["cluster_section"]

_CARDS_SHOWN_ONE_BY_ONE = 12


def cluster_section(run: Run) -> dict[str, Any] | None:
    """Cards of the devices, alike ones together if there are many, and the bar of their shares."""
    if run.cluster is None:
        return None
    batch = run.plan.global_batch_size if run.plan is not None else 0
    cards = [_card(run, rank, device) for rank, device in enumerate(run.cluster.devices)]
    if len(cards) > _CARDS_SHOWN_ONE_BY_ONE:
        cards = _together(cards)
    links = [
        f"{' – '.join(dict.fromkeys(link.between))}: {format_bandwidth(link.bandwidth_bytes_per_s)}, {seconds(link.latency_s)} latency"
        for link in run.cluster.links
    ]
    samples = run.profile.links if run.profile is not None else ()
    flows = [] if run.plan is None else flows_of(run.plan, run.cluster, samples)
    return {
        "name": run.cluster.name,
        "cards": cards,
        "shares": _bar(run),
        "batch": batch,
        "links": links,
        "traffic": traffic_picture(flows),
    }


def _bar(run: Run) -> list[dict[str, Any]]:
    """The parts of the global batch: one for each pipeline, in the colour of its first device."""
    if run.plan is None:
        return []
    shares = []
    ranks = {device: rank for rank, device in enumerate(run.devices)}
    for number, pipeline in enumerate(run.plan.pipelines):
        samples = pipeline.micro_batches.samples
        if samples:
            shares.append(
                {
                    "device": " → ".join(" + ".join(devices) for devices in pipeline.places),
                    "samples": samples,
                    "percent": 100 * samples / run.plan.global_batch_size,
                    "colour": ranks.get(pipeline.places[0][0], number) % SERIES,
                }
            )
    return shares


def _card(run: Run, rank: int, device: Device) -> dict[str, Any]:
    taken = run.samples.get(device.id)
    stage = stages_of(run.plan).get(device.id, DASH) if run.plan is not None and has_pipelines(run.plan) else DASH
    needed = run.peak_memory.get(device.id)
    predicted = run.plan.predicted.memory_bytes.get(device.id) if run.plan and run.plan.predicted else None
    used, word = (needed, "measured") if needed is not None else (predicted, "predicted")
    facts = [
        (
            "share",
            DASH
            if taken is None or run.plan is None
            else f"{taken} samples ({percent(taken / run.plan.global_batch_size)})"
            if taken
            else "none",
        ),
        (
            "as",
            next((pipeline_in_words(p) for p in run.plan.pipelines if any(device.id in d for d in p.places)), DASH)
            if run.plan
            else DASH,
        ),
        ("stage", stage),
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
        groups.setdefault((card["kind"], *(f for f in card["facts"] if f[0] in ("share", "as", "stage"))), []).append(
            card
        )
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
