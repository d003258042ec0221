"""The predicted step of a fleet plan as a timeline of representative ranks: one per pipeline rank of each template."""

from __future__ import annotations

from collections.abc import Iterator

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.times import Read
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan, mix_of
from heterodyne.search.fleet.plan import TemplateGroup
from heterodyne.search.fleet.predict import Predictor
from heterodyne.timeline import Event, Timeline

__all__ = ["fleet_timeline"]


def fleet_timeline(predictor: Predictor, weighed: EvaluatedPlan) -> Timeline:
    """Pipelines as played, then gradient sync, then the update. A rank stands for all that do the same."""
    events: list[Event] = []
    names: list[str] = []
    predicted = weighed.predicted
    for group in weighed.plan.groups:
        first = len(names)
        events += _played(predictor, weighed, group, first)
        for number, home in enumerate(group.template.homes):
            width = f", {home.devices} devices each ({home.widths.in_words})" if home.devices > 1 else ""
            own = ", ".join(map(str, range(number, len(group.template.stages), group.template.places)))
            stages = f"stage{'s' * (group.template.chunks > 1)} {own}"
            names.append(f"{home.pool} {stages} of {group.replicas} pipelines{width}")
    done = predicted.pipelines_s
    for rank in range(len(names)):
        spans = (
            ("REDUCE_GRAD", done, done + predicted.sync_s),
            ("STEP", done + predicted.sync_s, done + predicted.sync_s + predicted.update_s),
        )
        for kind, start, end in spans:
            if end > start:
                lane = "comm" if kind == "REDUCE_GRAD" else "compute"
                events.append(Event(rank=rank, lane=lane, kind=kind, name=kind, step=0, start_s=start, end_s=end))  # type: ignore[arg-type]
    return Timeline.of("simulated", names, events)


def _played(predictor: Predictor, weighed: EvaluatedPlan, group: TemplateGroup, first: int) -> Iterator[Event]:
    plan = weighed.plan
    mix = mix_of((own.template, own.replicas) for own in plan.groups)
    makespans = predictor.played(mix, plan.schedule, plan.layout, plan.zero)[group.template]
    reads = [
        Read(source=number, reader=number + 1, forward_s=send_s, backward_s=send_s)
        for number, send_s in enumerate(makespans.sends)
    ]
    schedule = SCHEDULES[weighed.plan.schedule]
    orders = schedule.orders(makespans.places, makespans.chunks, group.num_microbatches)
    told = play(orders, makespans.stages, reads=reads)
    for place, (row, starts, ends) in enumerate(zip(orders, told.starts, told.ends, strict=True)):
        for action, start, end in zip(row, starts, ends, strict=True):
            yield Event(
                rank=first + place, lane="compute", kind=action.kind, name=str(action), step=0, start_s=start, end_s=end
            )
