"""Tables of a plan, of those weighed beside it, and of the fleet that it is for, whether it names devices or only kinds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from heterodyne.cluster.fleet import Fleet, Wire
from heterodyne.cluster.spec import Cluster
from heterodyne.plan.plan import Pipeline, Plan, Prediction, Stage
from heterodyne.plan.short import device_labels, widths_in_words
from heterodyne.report.plan_shares import has_pipelines, order_of, samples_of, stages_of
from heterodyne.report.rows import Rows, columns
from heterodyne.report.run import Candidate
from heterodyne.report.words import DASH, byte_size, change, digits, percent, pipeline_in_words, ratio, seconds
from heterodyne.units import counted, format_bandwidth

__all__ = ["candidate_rows", "changed_rows", "fleet_rows", "plan_rows"]

_SHARED = ("", "optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")


def fleet_rows(fleet: Fleet) -> Rows:
    """A row a pool."""
    return Rows(
        title=f"Fleet {fleet.name}: {counted(fleet.devices, 'device')} of {counted(len(fleet.kinds), 'kind')}",
        columns=columns(
            "pool", "kind", ">nodes", ">devices", ">memory", ">inside a node", ">between nodes", ">usd/h each"
        ),
        rows=tuple(
            (
                pool.name,
                pool.kind,
                str(pool.nodes),
                f"{pool.devices:,}",
                byte_size(pool.memory_bytes),
                _speed(pool.inside),
                _speed(fleet.wire(pool, pool)),
                DASH if pool.usd_per_device_hour is None else digits(pool.usd_per_device_hour),
            )
            for pool in fleet.pools
        ),
    )


def plan_rows(plan: Plan, devices: Cluster | Fleet | None = None) -> Rows:
    """Return who does what: a row a device, or a row for each run of alike stages of pipelines on so many devices of a kind."""
    count = sum(pipeline.replicas for pipeline in plan.pipelines)
    title = f"The plan: {counted(plan.global_batch_size, 'sample')} a step, {counted(count, 'pipeline')}"
    title += f", {order_of(plan)}" if has_pipelines(plan) else ""
    if plan.zero:
        title += f", {_SHARED[plan.zero]} sharded over replicas (ZeRO-{plan.zero})"
    if plan.bound:
        return _device_rows(plan, title, devices if isinstance(devices, Cluster) else None)
    return _group_rows(plan, title, devices if isinstance(devices, Fleet) else None)


def _device_rows(plan: Plan, title: str, cluster: Cluster | None) -> Rows:
    """Return what each device takes of the global batch, and the memory that it is predicted to need."""
    predicted = plan.predicted.memory_bytes if plan.predicted else {}
    limits = {d.id: d.memory_bytes for d in cluster.devices} if cluster else {}
    samples, stages, staged = samples_of(plan), stages_of(plan), has_pipelines(plan)
    rows = [
        (
            device,
            *([stages[device]] if staged else []),
            str(samples[device]),
            percent(samples[device] / plan.global_batch_size),
            pipeline_in_words(pipeline),
            byte_size(predicted.get(device)),
            byte_size(limits.get(device)),
        )
        for pipeline in plan.pipelines
        for place in pipeline.places
        for device in place
    ]
    none = (*([DASH] if staged else []), "0", percent(0.0), "takes no part", DASH)
    rows += [(d, *none, byte_size(limits.get(d))) for d in plan.idle]
    return Rows(
        title=title,
        columns=columns(
            "device", *(["stage"] if staged else []), ">samples", ">share", "micro-batches", ">needs", ">of"
        ),
        rows=tuple(rows),
    )


def _group_rows(plan: Plan, title: str, fleet: Fleet | None) -> Rows:
    """With several stages on each place, a row for each place. Layers are counted from 0."""
    label = device_labels(plan)
    rows: list[tuple[str, ...]] = []
    for _, alike in groupby(plan.pipelines, key=lambda pipeline: pipeline.stages):
        for number, pipeline in enumerate(alike):
            first = (f"{pipeline.replicas:,} x", str(pipeline.micro_batches))
            if number:  # the same stages, other micro-batches
                rows.append((*first, "as above", "", "", "", "", ""))
                continue
            for place, (numbers, layers, home) in enumerate(_stage_runs(pipeline)):
                rows.append(
                    (
                        *(first if not place else ("", "")),
                        numbers,
                        label[home],
                        home.group.kind if home.group else "",
                        _shared_by(home),
                        layers,
                        "all" if home.recompute else "none",
                    )
                )
    idle = [] if fleet is None else _idle(plan, fleet)
    return Rows(
        title=title,
        columns=columns(
            ">pipelines", ">micro-batches", ">stage", "nodes", "kind", ">devices each", ">layers", "recompute"
        ),
        rows=tuple(rows),
        notes=(f"Left out: {', '.join(idle)}.",) if idle else (),
    )


def _idle(plan: Plan, fleet: Fleet) -> list[str]:
    used: dict[tuple[str, str], int] = {}
    for pipeline in plan.pipelines:
        for home, *_ in pipeline.groups:
            if home.group is not None:
                key = (home.group.kind, home.group.node)
                used[key] = used.get(key, 0) + pipeline.replicas * home.group.devices
    left = ((pool.name, pool.devices - used.get((pool.kind, pool.node_name), 0)) for pool in fleet.pools)
    return [f"{count:,} of {name}" for name, count in left if count > 0]


def _stage_runs(pipeline: Pipeline) -> Iterable[tuple[str, str, Stage]]:
    """Numbers, layers and the first of alike stages behind each other; with several stages on each place, of those of a place."""
    if len(pipeline.groups) < len(pipeline.stages):
        numbers: dict[int | None, list[str]] = {}
        for number, stage in enumerate(pipeline.stages):
            numbers.setdefault(stage.group.place if stage.group else None, []).append(str(number))
        for own, stages in zip(numbers.values(), pipeline.groups, strict=True):
            yield ", ".join(own), ", ".join(map(_span, stages)), stages[0]
        return

    def key(entry: tuple[int, Stage]) -> object:
        stage = entry[1]
        return stage.group, stage.layout, _count(stage), bool(stage.recompute)

    for _, run in groupby(enumerate(pipeline.stages), key=key):
        (number, stage), *more = run
        count = _count(stage)
        yield (
            (f"{number} .. {number + len(more)}", f"{count} each", stage) if more else (str(number), str(count), stage)
        )


def _count(stage: Stage) -> int:
    start, stop = stage.blocks or (0, 0)
    return stop - start


def _span(stage: Stage) -> str:
    start, stop = stage.blocks or (0, 0)
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def _shared_by(stage: Stage) -> str:
    """``8: tensor 4 x data 2, experts 8``."""
    if stage.group is None:
        return DASH
    words = [widths_in_words(stage.layout)] if stage.group.devices > 1 else []
    words += [f"experts {stage.group.experts}"] if stage.group.experts else []
    return f"{stage.group.devices}: {', '.join(words)}" if words else "1"


def candidate_rows(
    candidates: Sequence[Candidate], *, seq: int | None = None, title: str = "Plans that were weighed (predicted)"
) -> Rows:
    """Plans with what they take, the chosen one marked; ``against the chosen`` is a ratio of predicted samples/s.

    ``seq``: tokens of a sample, where samples have some. What is known of no plan has no column.
    """
    chosen = next((c.samples_per_s for c in candidates if c.chosen), None)
    tokens = seq or 0
    table = [("plan", [c.name for c in candidates]), (">step", [seconds(c.step_s) for c in candidates])]
    table += [(">samples/s", [digits(c.samples_per_s) for c in candidates])]
    more = [
        (">tokens/s", [f"{c.samples_per_s * tokens:,.0f}" if c.samples_per_s and tokens else DASH for c in candidates]),
        (
            ">against the chosen",
            [ratio(c.samples_per_s / chosen if chosen and c.samples_per_s else None) for c in candidates],
        ),
        (">devices", [DASH if c.plan is None else f"{c.plan.device_count:,}" for c in candidates]),
        *((name, [what(c.plan.predicted if c.plan else None) for c in candidates]) for name, what in _FIGURES.items()),
        ("why", [c.why for c in candidates]),
    ]
    table += [(name, cells) for name, cells in more if set(cells) - {DASH, ""}]
    return Rows(
        title=title,
        columns=columns(*(name for name, _ in table)),
        rows=tuple(zip(*(cells for _, cells in table), strict=True)),
        marked=frozenset(i for i, c in enumerate(candidates) if c.chosen),
    )


_FIGURES: Mapping[str, Callable[[Prediction | None], str]] = {
    ">usd/h": lambda own: digits(own.usd_per_hour if own else None),
    ">usd/step": lambda own: digits(own.usd if own else None),
    ">J/step": lambda own: digits(own.joules if own else None),
    ">most memory": lambda own: byte_size(max(own.memory_bytes.values(), default=None) if own else None),
    ">fullest device": lambda own: percent(own.memory_share if own else None),
}


def changed_rows(today: Plan, then: Plan, what: str) -> Rows:
    """Today's fleet next to the changed one."""
    before, after = today.predicted, then.predicted
    assert before is not None
    assert after is not None
    lines: list[tuple[str, Callable[[Any], str], float | None, float | None]] = [
        ("step", seconds, before.step_s, after.step_s),
        ("samples/s", digits, before.samples_per_s, after.samples_per_s),
        ("devices used", lambda count: f"{count:,}", today.device_count, then.device_count),
        ("usd/h", digits, before.usd_per_hour, after.usd_per_hour),
        ("usd/step", digits, before.usd, after.usd),
    ]
    return Rows(
        title=f"What if: {what}",
        columns=columns("", ">today", ">then", ">change"),
        rows=tuple((name, words(a), words(b), _by(a, b)) for name, words, a, b in lines),
    )


def _speed(wire: Wire | None) -> str:
    return DASH if wire is None else format_bandwidth(wire.bandwidth_bytes_per_s)


def _by(before: float | None, after: float | None) -> str:
    return DASH if not before or after is None else change(after / before - 1)
