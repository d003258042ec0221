"""The run directory of a pipeline of three unequal stages, a simulated step and measured ones that are a little slower."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Prediction, Region, Stage
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.times import StageTimes, chain
from heterodyne.timeline import Event, Timeline
from report.synthetic_run import device_names, write_run

STAGES = 3
MICRO_BATCHES = 6
SEND_S = 0.004
TIMES = tuple(StageTimes(forward_s=f, input_s=f, weight_s=0.8 * f) for f in (0.02, 0.03, 0.025))


def plan(schedule: str = "ZBH1") -> Plan:
    names = device_names(STAGES + 1)
    return Plan(
        model="0123456789abcdef",
        cluster="fedcba9876543210",
        global_batch_size=4 * MICRO_BATCHES,
        schedule=schedule,
        pipelines=(
            Pipeline(
                micro_batches=MicroBatches.of_samples(4 * MICRO_BATCHES, 4),
                stages=tuple(
                    Stage(ops=(10 * n, 10 * n + 10), devices=(names[n],), regions=(Region(layout=Layout(shares=(1,))),))
                    for n in range(STAGES)
                ),
            ),
        ),
        idle=names[STAGES:],
        predicted=Prediction(step_s=0.5, samples_per_s=48.0, efficiency=0.8, memory_bytes={}),
    )


def step(schedule: str = "ZBH1") -> list[Event]:
    """What each rank computes, and its messages: what goes down after a forward, and up after the gradients of the inputs."""
    orders = SCHEDULES[schedule].orders(STAGES, 1, MICRO_BATCHES)
    played = play(orders, TIMES, reads=chain(STAGES, SEND_S))
    events = []
    for place, row in enumerate(orders):
        reached = 0.0
        for action, start_s, end_s in zip(row, played.starts[place], played.ends[place], strict=True):
            events.append(_event(place, "compute", action.kind, str(action), start_s, end_s))
            direction = "F" if action.kind == "F" else "B" if action.kind in ("B", "I") else ""
            comes_from, goes_to = (place - 1, place + 1) if direction == "F" else (place + 1, place - 1)
            if direction and 0 <= comes_from < STAGES:
                name = f"{place}RECV_{direction}{action.index}"
                events.append(_event(place, "comm", f"RECV_{direction}", name, reached, start_s))
            if direction and 0 <= goes_to < STAGES:
                name = f"{place}SEND_{direction}{action.index}"
                events.append(_event(place, "comm", f"SEND_{direction}", name, end_s, end_s + SEND_S))
            reached = end_s
        events.append(_event(place, "compute", "STEP", "0STEP", reached, reached + 0.01))
    return events


def _event(rank: int, lane: str, kind: str, name: str, start_s: float, end_s: float) -> Event:
    return Event(rank=rank, lane=lane, kind=kind, name=name, step=0, start_s=start_s, end_s=end_s)  # type: ignore[arg-type]


def write_pipeline_run(directory: Path) -> Path:
    """A run directory like that of `write_run`, of a pipeline on three of its four devices."""
    write_run(directory, steps=10)
    names = device_names(STAGES + 1)
    plan().save(directory / "plan.json")
    (directory / "candidates.json").write_text("[]", encoding="utf-8")
    Timeline.of("simulated", names, step()).save(directory / "timeline-simulated.jsonl")
    noise = random.Random(5)
    slower = [(number, noise.uniform(1.0, 1.1)) for number in range(5)]
    measured = [
        replace(event, step=number, start_s=number + event.start_s * factor, end_s=number + event.end_s * factor)
        for number, factor in slower
        for event in step()
    ]
    Timeline.of("measured", names, measured).save(directory / "timeline-measured.jsonl")
    return directory
