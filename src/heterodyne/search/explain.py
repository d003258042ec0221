"""The result of a search in sentences and rows, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterodyne.cost.position import worked_on
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Strategy
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.order import is_asynchronous
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.plan.schedules.asynchronous import IN_WORDS
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.plan.weights import PlannedWeights
from heterodyne.search.planned import Candidate, Planned, serves
from heterodyne.search.result import AlternativeRow, PlanningResult
from heterodyne.units import format_bytes, format_seconds

__all__ = ["ShareRow", "alternatives", "paragraph", "ratio_in_words", "reason", "result_of", "shares"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareRow:
    """What one device does under the plan; an idle one has no samples and needs no memory.

    Args:
        samples: what passes through it in a step; of a stage of several devices its slices.
        part: the stages that it runs, by the names of their first and last blocks; empty for the whole model.
        micro_batches: as in the plan, ``3x4+1x2``.
        wait_s: seconds of a step in which the device waits for others.
        memory_bytes, headroom_bytes: the predicted peak, and what is left above it.
    """

    device: str
    samples: int
    micro_batches: str
    wait_s: float
    memory_bytes: int
    headroom_bytes: int
    part: str = ""


def result_of(planned: Planned) -> PlanningResult:
    """Return the result in the form that every search returns."""
    return PlanningResult(
        plan=planned.plan,
        alternatives=alternatives(planned),
        words=(paragraph(planned),),
        timeline=lambda: planned.simulation.timeline([device.id for device in planned.cluster.devices]),
    )


def alternatives(planned: Planned) -> tuple[AlternativeRow, ...]:
    """Return every candidate, the fastest first, infeasible ones last."""
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


def ratio_in_words(ratio: float) -> str:
    """``1.034`` as "3.4% longer", ``1.9`` as "1.90x as long", ``0.97`` as "3.0% shorter"."""
    if abs(ratio - 1) < 0.0005:
        return "just as long"
    if ratio > 1.25:
        return f"{ratio:.2f}x as long"
    return f"{abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'shorter'}"


def reason(chosen: Candidate, candidates: Sequence[Candidate], strategy: Strategy) -> str:
    """A sentence on why this plan: against the best of each other kind, the nearest first."""
    others = sorted(
        (c for c in candidates if c is not chosen and c.step_s is not None), key=lambda c: (c.step_s or 0.0, c.name)
    )
    asked = {"equal": "equal shares were asked for", "fastest": "one device was asked for"}.get(strategy)
    among = {
        "data": " with the whole model on each device",
        "pipeline": " with the model cut into stages",
        "split": " with layers split",
        "context": " with sequences split",
    }.get(strategy, "")
    asked = {"given": "it was given", "marked": "its TaskGraphs ask for it"}.get(chosen.kind, asked)
    if chosen.step_s is None or chosen.step_s <= 0 or not others:
        alone = (
            "only one device, so only one plan" if chosen.name == "the only device" else f"{chosen.name}: the only plan"
        )
        return f"{chosen.name}: {asked}" if asked else alone
    compared = [f"{c.name} would take {ratio_in_words(_over(c, chosen))}" for c in _telling(others)]
    weighed = sum(serves(c.kind, strategy) for c in others) + 1
    rehearsed = sum(c.rehearsed_s is not None for c in candidates)
    if rehearsed > 1 and chosen.rehearsed_s is not None:
        asked = (
            asked
            or f"fastest of the {rehearsed} closest contenders, which were run for a few seconds, of {weighed} candidates"
        )
    why = asked or (f"fastest of {weighed} candidates{among}" if weighed > 1 else f"the only candidate{among}")
    return f"{chosen.name}: {why}; " + ", ".join(compared)


def _over(other: Candidate, chosen: Candidate) -> float:
    """How much longer a step is: as rehearsed, where both were, else as predicted."""
    if other.rehearsed_s is not None and chosen.rehearsed_s is not None:
        return other.rehearsed_s / chosen.rehearsed_s
    return (other.step_s or 0.0) / (chosen.step_s or 1.0)


def _telling(others: Sequence[Candidate]) -> list[Candidate]:
    """The best of each kind: no more than a sentence can bear."""
    best: dict[str, Candidate] = {}
    for candidate in others:
        best.setdefault(candidate.kind, candidate)
    return list(best.values())


def shares(planned: Planned) -> tuple[ShareRow, ...]:
    """A row for each device of the cluster, in the order of ranks."""
    running = _running(planned.plan)
    rows = []
    for rank, device in enumerate(planned.cluster.devices):
        micro_batches = running.get(device.id)
        used = planned.simulation.peak_bytes[rank]
        samples = micro_batches.samples if micro_batches is not None else 0
        rows.append(
            ShareRow(
                device=device.id,
                samples=samples,
                micro_batches="idle" if micro_batches is None else str(micro_batches),
                wait_s=planned.simulation.wait_s[rank],
                memory_bytes=used,
                headroom_bytes=device.memory_bytes - used,
                part=_part(planned.plan, planned.graph, device.id),
            )
        )
    return tuple(rows)


def _running(plan: Plan) -> dict[str, MicroBatches]:
    """For each device what it gets of each micro-batch."""
    running = {}
    for pipeline in plan.pipelines:
        for number in range(len(pipeline.stages)):
            for device, sizes in worked_on(pipeline, number).items():
                running[device] = MicroBatches(tuple(size for size in sizes if size))
    return running


def _part(plan: Plan, graph: ModelGraph, device: str) -> str:
    """The stages of a device in words; nothing for the whole model."""
    parts = []
    for pipeline in plan.pipelines:
        if _in_turn(pipeline):
            continue
        for number, stage in enumerate(pipeline.stages):
            if device not in stage.devices or (len(pipeline.stages) == 1 and not stage.sharded):
                continue
            within = stage.of_row.shares
            part = within[stage.devices.index(device) % len(within)] / sum(within)
            own = f"{part:.0%} of " if stage.sharded else ""
            but = f" but for {', '.join(stage.keep)}" if stage.keep else ""
            again = f", recomputing {len(stage.recompute)} blocks{but}" if stage.recompute else ""
            if stage.offload_activations:
                again += f", with activations of {len(stage.offload_activations)} blocks on the host"
                again += "" if stage.reload_ahead is None else ", brought back ahead of the backward"
            what = f"stage {number} ({_span(graph, stage.ops)}{again})" if len(pipeline.stages) > 1 else "the model"
            parts.append(own + what)
    return ", ".join(parts)


def _in_turn(pipeline: Pipeline) -> bool:
    """Whether all of its devices run all of its stages, one after the other."""
    return len(pipeline.stages) > 1 and len(pipeline.places) == 1


def _span(graph: ModelGraph, ops: tuple[int, int]) -> str:
    """From which block to which; "part of" where a block is cut."""
    inside = [block for block in graph.blocks if block.start < ops[1] and ops[0] < block.stop]
    names = [
        block.name if ops[0] <= block.start and block.stop <= ops[1] else f"part of {block.name}"
        for block in (inside[0], inside[-1])
    ]
    return names[0] if len(inside) == 1 else " to ".join(names)


def paragraph(planned: Planned) -> str:
    """The chosen plan in a few sentences."""
    plan, predicted = planned.plan, planned.plan.predicted
    working = [row for row in shares(planned) if row.samples]
    parts = ", ".join(f"{row.device} {row.samples} ({row.micro_batches})" for row in working if not row.part)
    text = [
        f"{plan.global_batch_size} samples a step over {len(working)} of {len(planned.cluster.devices)} devices"
        + (f": {parts}." if parts else ".")
    ]
    cut = [pipeline for pipeline in plan.pipelines if len(pipeline.stages) > 1]
    text += [_turns(pipeline) if _in_turn(pipeline) else _line(planned, pipeline, working) for pipeline in cut]
    text.append(_sharded(plan, planned.graph))
    text += [_in_parts(planned, pipeline) for pipeline in plan.pipelines if len(pipeline.stages) == 1]
    if predicted is not None:
        text.append(
            f"A step should take {format_seconds(predicted.step_s)}: {predicted.samples_per_s:.4g} samples/s, "
            f"{predicted.efficiency:.0%} of what the devices reach when each computes for itself."
        )
    if planned.chosen.rehearsed_s is not None and planned.chosen.step_s:
        text.append(
            f"In rehearsal it took {format_seconds(planned.chosen.rehearsed_s)}: the prediction is off by "
            f"{planned.chosen.step_s / planned.chosen.rehearsed_s - 1:+.1%}."
        )
    tight = min(working, key=lambda row: row.headroom_bytes)
    text.append(
        f"Memory is tightest on {tight.device}: {format_bytes(tight.memory_bytes)} of "
        f"{format_bytes(tight.memory_bytes + tight.headroom_bytes)}."
    )
    text.append(f"Why: {plan.reason}.")
    text += [f"Idle: {why}." for why in planned.unfit.values()]
    text += [
        f"Idle: {device}, since it is faster without."
        for device in planned.chosen.left_out
        if device not in planned.unfit and any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    ]
    return " ".join(sentence for sentence in text if sentence)


def _in_parts(planned: Planned, pipeline: Pipeline) -> str:
    """A model that is sharded over several devices; nothing for one that does not."""
    (stage,) = pipeline.stages
    sharding = shard_stage(planned.graph, pipeline, 0)
    if sharding is None:
        return ""
    within = stage.of_row.shares
    widths = "; ".join(
        ", ".join(f"{d} {share / sum(within):.0%}" for d, share in zip(row, within, strict=True)) for row in stage.rows
    )
    cut = sum(p.bytes for p in planned.graph.parameters if any(sharding.boxes(p.name)))
    exchanges = [exchange for axis in sharding.axes for exchange in axis.exchanges]
    meetings = sum(bool(e.steps.forward) + bool(e.steps.backward) for e in exchanges)
    rows = f" on each of {len(stage.rows)} rows" if len(stage.rows) > 1 else ""
    once = " A token goes once to each host that has experts of its choice." if stage.hierarchical else ""
    return (
        f"{' + '.join(stage.devices)} hold the model in parts{rows} ({widths}) for {pipeline.micro_batches.samples} samples "
        f"({pipeline.micro_batches}): {cut / max(1, planned.graph.parameter_bytes):.0%} of its weights are cut, and they exchange tensors "
        f"{meetings} times a micro-batch.{once}"
    )


def _turns(pipeline: Pipeline) -> str:
    again = sum(len(stage.recompute) for stage in pipeline.stages)
    return f"All devices run the {len(pipeline.stages)} stages one after the other" + (
        f", recomputing {again} blocks." if again else "."
    )


def _sharded(plan: Plan, graph: ModelGraph) -> str:
    """What devices with the same weights share out, and the part that each keeps; nothing where they share out nothing."""
    own = PlannedWeights.of(plan, graph).state_parts
    parts = ", ".join(f"{device} {part:.0%}" for device, part in own.items() if round(part, 2) < 1)
    if not parts:
        return ""
    what = {
        1: "Optimizer state is",
        2: "Optimizer state and gradients are",
        3: "Parameters, gradients and optimizer state are",
    }
    return f"{what[plan.zero]} sharded over the devices that run the same stages (ZeRO-{plan.zero}): {parts}."


def _line(planned: Planned, pipeline: Pipeline, rows: Sequence[ShareRow]) -> str:
    """One pipeline: its stages, its micro-batches, its schedule, and how much of a step its devices wait."""
    own = {device for place in pipeline.places for device in place}
    parts = ", ".join(f"{row.device} {row.part}" for row in rows if row.device in own)
    order = "an order of its own" if pipeline.order else planned.plan.schedule
    if is_asynchronous(planned.plan):
        order = f"{planned.plan.schedule}, {IN_WORDS}"
    step_s = planned.simulation.step_s
    waits = [row.wait_s / step_s if step_s > 0 else 0.0 for row in rows if row.device in own]
    return (
        f"A pipeline of {len(pipeline.stages)} stages takes {pipeline.micro_batches.samples} samples "
        f"({pipeline.micro_batches}) with {order}: {parts}; its devices wait {sum(waits) / len(waits):.0%} of a step."
    )
