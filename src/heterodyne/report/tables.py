"""The tables of the command line: devices, plans, shares, verification, prediction against measurement, a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from heterodyne.cluster import Cluster
from heterodyne.cluster.catalog import Accelerator
from heterodyne.cluster.profile import WHOLE, Profile
from heterodyne.report.compare import Claim, Comparison
from heterodyne.report.rows import Column, Rows, columns
from heterodyne.report.run import Run
from heterodyne.report.sections.sites import sites_facts, took_part
from heterodyne.report.step_times import EXPOSED, IDLE, by_rank, in_order
from heterodyne.report.words import (
    DASH,
    byte_size,
    change,
    digits,
    efficiency_text,
    kind_name,
    percent,
    ratio,
    seconds,
)
from heterodyne.timeline import Timeline
from heterodyne.units import format_bandwidth, format_bytes

__all__ = [
    "Verified",
    "claim_text",
    "device_rows",
    "kind_rows",
    "prediction_rows",
    "profile_rows",
    "step_rows",
    "summary_rows",
    "verified_rows",
    "verify_rows",
]


def device_rows(cluster: Cluster, sources: Mapping[str, str] | None = None) -> Rows:
    """The devices in order of rank, the links as notes; ``sources`` adds a remark for each device id."""
    notes = tuple(
        f"link {' – '.join(dict.fromkeys(link.between))}: {format_bandwidth(link.bandwidth_bytes_per_s)}, {seconds(link.latency_s)}"
        for link in cluster.links
    )
    remark = ("remark",) if sources else ()
    return Rows(
        title=f"Cluster {cluster.name}: {len(cluster.devices)} {'device' if len(cluster.devices) == 1 else 'devices'}",
        columns=columns(">rank", "device", "kind", "node", "backend", ">memory", *remark),
        rows=tuple(
            (
                str(rank),
                device.id,
                device.kind,
                device.node,
                device.backend,
                byte_size(device.memory_bytes),
                *((sources.get(device.id, ""),) if sources else ()),
            )
            for rank, device in enumerate(cluster.devices)
        ),
        notes=notes,
    )


def kind_rows(kinds: Sequence[Accelerator]) -> Rows:
    """Return what datasheets say of kinds of devices, each as its driver shows it."""

    def tflops(kind: Accelerator, precision: str) -> str:
        peak = kind.peak_flops.get(precision)
        return DASH if peak is None else digits(peak / 1e12)

    def link(kind: Accelerator) -> str:
        speed = kind.link_bandwidth_bytes_per_s
        return " ".join(filter(None, (kind.link_type, None if speed is None else format_bandwidth(speed)))) or DASH

    return Rows(
        title=f"Kinds of devices: {len(kinds)}",
        columns=columns("kind", ">memory", ">of it /s", ">fp32", ">fp16", ">bf16", ">fp8", "link", ">W", ">USD/h"),
        rows=tuple(
            (
                kind.kind,
                DASH if kind.memory_bytes is None else f"{kind.memory_bytes / 1e9:g} GB",
                DASH
                if kind.memory_bandwidth_bytes_per_s is None
                else format_bandwidth(kind.memory_bandwidth_bytes_per_s),
                *(tflops(kind, precision) for precision in ("fp32", "fp16", "bf16", "fp8")),
                link(kind),
                DASH if kind.tdp_w is None else f"{kind.tdp_w:g}",
                f"{min(price.usd_per_hour for price in kind.prices):.2f}" if kind.prices else DASH,
            )
            for kind in kinds
        ),
        notes=(
            "Dense peaks in TFLOP/s; links in one direction; the cheapest price of the sources. A card with two devices counts as two.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Verified:
    """One batch: what it is, and the relative errors of its loss and gradients against one device."""

    words: str
    loss: float
    gradients: Mapping[str, float]

    @property
    def largest(self) -> float:
        """Not a number counts as infinite."""
        return max(map(_badness, (self.loss, *self.gradients.values())))


def verified_rows(batches: Sequence[Verified], *, bar: float) -> Rows:
    """Each batch with the errors of its loss and of its worst gradient."""
    return Rows(
        title="Relative errors against one device, batch by batch",
        columns=columns("batch", ">loss", ">worst gradient", "of", "within the bar"),
        rows=tuple(
            (each.words, f"{each.loss:.2e}", f"{error:.2e}", name, "yes" if each.largest <= bar else "NO")
            for each in batches
            for name, error in [max(each.gradients.items(), key=lambda item: _badness(item[1]))]
        ),
    )


def verify_rows(loss_error: float, gradient_errors: Mapping[str, float], *, bar: float, worst: int = 10) -> Rows:
    """Relative errors of loss and gradients against one device: the ``worst`` of them, and whether all are within the bar."""
    ordered = sorted(gradient_errors.items(), key=lambda item: (-_badness(item[1]), item[0]))
    rows = [("loss", loss_error), *ordered[:worst]]
    beyond = sum(not error <= bar for error in (loss_error, *gradient_errors.values()))
    verdict = (
        f"exact: loss and all {len(ordered)} gradients are within {bar:g} of one device"
        if beyond == 0
        else f"NOT exact: {beyond} of {len(ordered) + 1} are beyond {bar:g}"
    )
    hidden = len(ordered) - worst
    return Rows(
        title="The worst of them: relative errors of the loss, then of the gradients, the largest first",
        columns=columns("of", ">relative error", "within the bar"),
        rows=tuple((name, f"{error:.2e}", "yes" if error <= bar else "NO") for name, error in rows),
        notes=(*((f"{hidden} more gradients have smaller errors",) if hidden > 0 else ()), verdict),
    )


def _badness(error: float) -> float:
    return error if error == error else float("inf")


def claim_text(claim: Claim, value: float | None) -> str:
    """A value of a claim with its unit."""
    if claim.unit == "s":
        return seconds(value)
    if claim.unit == "bytes":
        return byte_size(value)
    if claim.what == "efficiency":
        return efficiency_text(value)
    return digits(value) if claim.unit == "1/s" else percent(value)


def prediction_rows(comparison: Comparison) -> Rows:
    """Predicted beside measured, for the run and for the memory of each device."""
    names = {"step": "step time", "samples/s": "samples/s", "efficiency": "efficiency"}
    return Rows(
        title="Predicted and measured",
        columns=columns("", ">predicted", ">measured", ">error"),
        rows=tuple(
            (
                names.get(claim.what, f"{claim.what} {claim.device}"),
                claim_text(claim, claim.predicted),
                claim_text(claim, claim.measured),
                change(claim.error),
            )
            for claim in (*comparison.run, *comparison.memory)
        ),
        notes=("error = (predicted − measured) / measured; measured values are medians over the steps",),
    )


def step_rows(timeline: Timeline) -> Rows:
    """Return what each rank of one step does in how much of it, in percent that add up to the whole."""
    computed = in_order({event.kind for event in timeline.events if event.lane == "compute"})
    parts = {kind: kind_name(kind) for kind in computed} | {EXPOSED: "exposed communication", IDLE: "idle"}
    return Rows(
        title="Where that step goes",
        columns=columns(">rank", "device", *(f">{name}" for name in parts.values())),
        rows=tuple(
            (
                str(times.rank),
                timeline.devices[times.rank],
                *(percent(times.seconds(kind) / times.span_s) for kind in parts),
            )
            for times in by_rank(timeline)
        ),
    )


def summary_rows(run: Run, comparison: Comparison) -> Rows:
    """The key figures of a run, one a row; the prediction error is always among them."""
    metrics, step = run.metrics, comparison.step
    last = metrics.steps[-1] if metrics.steps else None
    of = f" of {run.job.training.steps}" if run.job is not None else ""
    facts: Iterable[tuple[str, str]] = (
        ("steps", f"{len(metrics.steps)} recorded, the last is {last.step}{of}" if last else "none"),
        ("final loss", digits(last.loss, 4) if last else DASH),
        ("validation loss", digits(metrics.validations[-1].loss, 4) if metrics.validations else DASH),
        ("samples/s", digits(metrics.median("samples_per_s"))),
        ("tokens/s", digits(metrics.median("tokens_per_s"))),
        ("efficiency", efficiency_text(metrics.median("efficiency"))),
        ("step time", f"{seconds(step.measured)} measured, {seconds(step.predicted)} predicted"),
        ("prediction error", change(step.error)),
        ("speed-up over equal shares", f"{ratio(run.speed_up_over_equal)} predicted"),
        *(("sites", fact) for fact in sites_facts(run)),
        *(("outer steps", f"site {name} took part in {count}") for name, count in took_part(run).items()),
    )
    return Rows(title=f"Run {run.name}", columns=columns("", ""), rows=tuple(facts), notes=run.missing)


def profile_rows(profile: Profile, model: str) -> tuple[Rows, ...]:
    """One table of the blocks, one of the links."""
    return _block_rows(profile, model), _link_rows(profile)


def _block_rows(profile: Profile, model: str) -> Rows:
    rows = []
    for device, measured in profile.devices.items():
        for kind, samples in measured.blocks.items():
            rows += [
                (
                    device,
                    "the whole model" if kind == WHOLE else profile.kinds.get(kind, kind),
                    str(sample.micro_batch_size),
                    seconds(sample.forward_s),
                    seconds(sample.backward_s),
                    "extrapolated" if sample.extrapolated else percent(sample.spread),
                    format_bytes(sample.saved_bytes),
                )
                for sample in samples
            ]
    return Rows(
        title=f"{model}: forward and backward of each distinct block",
        columns=(
            Column(title="device"),
            Column(title="block"),
            Column(title="samples", align="right"),
            Column(title="forward", align="right"),
            Column(title="backward", align="right"),
            Column(title="spread", align="right"),
            Column(title="kept", align="right"),
        ),
        rows=tuple(rows),
        notes=(
            "times are medians while all devices compute; spread is the distance of the quartiles over the median; "
            "extrapolated: too large, or too long, to measure, or nothing to gain by it; from the smaller sizes",
            *(
                f"{device} was measured while others had {percent(own.taken_by_others)} of its host's cores"
                for device, own in profile.devices.items()
                if own.taken_by_others
            ),
        ),
    )


def _link_rows(profile: Profile) -> Rows:
    return Rows(
        title="Links",
        columns=(
            Column(title="what"),
            Column(title="between"),
            Column(title="message", align="right"),
            Column(title="time", align="right"),
            Column(title="spread", align="right"),
            Column(title="rate", align="right"),
        ),
        rows=tuple(
            (
                link.op,
                " ".join(link.devices) if len(link.devices) < 3 else f"{len(link.devices)} devices",
                format_bytes(link.bytes),
                seconds(link.seconds),
                percent(link.spread),
                format_bandwidth(link.bytes / link.seconds) if link.seconds else "",
            )
            for link in profile.links
        ),
    )
