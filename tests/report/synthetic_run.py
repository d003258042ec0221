"""Run directories as a run would leave them: unequal ranks, real file formats, noise from a fixed seed."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path

from heterodyne.cluster import BlockSample, Cluster, Device, DeviceProfile, Link, LinkSample, Profile
from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Prediction, Region, Stage
from heterodyne.timeline import Event, Timeline

JOB = """\
model:
  factory: examples/gpt.py:gpt
  arguments: {width: 256, layers: 6}
data:
  sequence_length: 128
training:
  steps: 200
  global_batch_size: 64
  validate_every: 20
"""
SPEEDS = (0.7, 0.35, 0.35, 0.2)
SHARES = (28, 14, 14, 8)
BUCKETS = 4
FORWARD_S, BACKWARD_S = 0.0071, 0.0142  # of one sample on a device of speed 1


def device_names(count: int) -> tuple[str, ...]:
    return tuple(f"laptop/cpu:{i}" for i in range(count))


def step_events(
    step: int, start_s: float, shares: tuple[int, ...], speeds: tuple[float, ...], noise: random.Random | None
) -> list[Event]:
    """One step of data parallelism: F and B of each micro-batch, buckets reduced from the last B on, then CLIP and STEP."""

    def about(seconds: float) -> float:
        return seconds * (1 if noise is None else noise.lognormvariate(0, 0.03))

    events: list[Event] = []
    ready: list[list[float]] = [[] for _ in range(BUCKETS)]
    clock = {}
    for rank, (samples, speed) in enumerate(zip(shares, speeds, strict=True)):
        now = start_s
        for index, size in enumerate(MicroBatches.of_samples(samples, 4).sizes):
            for kind, cost in (("F", FORWARD_S), ("B", BACKWARD_S)):
                end = now + about((0.4 + size) * cost / speed * 0.9)
                events.append(
                    Event(
                        rank=rank, lane="compute", kind=kind, name=f"0{kind}{index}", step=step, start_s=now, end_s=end
                    )
                )
                begin, now = now, end
        for bucket in range(BUCKETS):
            ready[bucket].append(begin + (now - begin) * (bucket + 1) / BUCKETS)
        clock[rank] = now
    reached = 0.0
    for bucket in range(BUCKETS):
        reached = max(reached, *ready[bucket]) + about(0.011)
        for rank in clock:
            begin = max(ready[bucket][rank], events_end(events, rank, "comm"))
            events.append(
                Event(
                    rank=rank,
                    lane="comm",
                    kind="REDUCE_GRAD",
                    name=f"0REDUCE_GRAD{bucket}",
                    step=step,
                    start_s=begin,
                    end_s=reached,
                )
            )
    for rank, speed in enumerate(speeds):
        now = max(clock[rank], reached)
        for kind, seconds in (("CLIP", 0.0015), ("STEP", 0.006)):
            end = now + about(seconds / speed)
            events.append(
                Event(rank=rank, lane="compute", kind=kind, name=f"0{kind}", step=step, start_s=now, end_s=end)
            )
            now = end
    return events


def events_end(events: list[Event], rank: int, lane: str) -> float:
    return max((e.end_s for e in events if e.rank == rank and e.lane == lane), default=0.0)


def cluster(ranks: int = 4) -> Cluster:
    devices = tuple(
        Device(id=name, kind="cpu", node="laptop", memory_bytes=(4 - i % 4) * 2**30)
        for i, name in enumerate(device_names(ranks))
    )
    return Cluster(
        name="four unequal workers",
        devices=devices,
        links=(Link(between=("laptop", "laptop"), bandwidth_bytes_per_s=3.1e9, latency_s=4e-5),),
    )


def plan(ranks: int = 4, step_s: float = 0.93) -> Plan:
    shares = [SHARES[i % 4] for i in range(ranks)]
    names = device_names(ranks)
    pipelines = tuple(
        Pipeline(
            micro_batches=MicroBatches.of_samples(samples, 4),
            stages=(Stage(ops=(0, 100), devices=(name,), regions=(Region(layout=Layout(shares=(1,))),)),),
        )
        for name, samples in zip(names, shares, strict=True)
    )
    memory = {name: int((0.35 + 0.02 * s) * 2**30) for name, s in zip(names, shares, strict=True)}
    return Plan(
        model="0123456789abcdef",
        cluster="fedcba9876543210",
        global_batch_size=sum(shares),
        pipelines=pipelines,
        predicted=Prediction(step_s=step_s, samples_per_s=sum(shares) / step_s, efficiency=0.957, memory_bytes=memory),
        reason="All four devices together are 1.93 times as fast as equal shares; no device waits more than 4 % of the step.",
    )


def write_run(directory: Path, *, steps: int = 200, ranks: int = 4, seed: int = 7) -> Path:
    """A complete run directory of ``ranks`` unequal devices."""
    noise = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    names = device_names(ranks)
    shares = tuple(SHARES[i % 4] for i in range(ranks))
    speeds = tuple(SPEEDS[i % 4] for i in range(ranks))
    batch = sum(shares)

    simulated = Timeline.of("simulated", names, step_events(0, 0.0, shares, speeds, None))
    events: list[Event] = []
    for step in range(0, steps, max(1, steps // 10)):
        events += step_events(step, step * 1.0 + 0.003, shares, speeds, noise)
    Timeline.of("measured", names, events).save(directory / "timeline-measured.jsonl")
    simulated.save(directory / "timeline-simulated.jsonl")

    (directory / "job.yaml").write_text(JOB.replace("steps: 200", f"steps: {steps}"), encoding="utf-8")
    (directory / "cluster.json").write_text(json.dumps(asdict(cluster(ranks))), encoding="utf-8")
    plan(ranks, simulated.span_s).save(directory / "plan.json")
    rate = batch / simulated.span_s
    candidates = [
        {
            "name": "unequal shares",
            "step_s": simulated.span_s,
            "samples_per_s": rate,
            "chosen": True,
            "why": "fastest predicted step",
        },
        {
            "name": "without laptop/cpu:3",
            "step_s": 0.995,
            "samples_per_s": rate * 0.89,
            "chosen": False,
            "why": "12 % slower: the smallest device still pays for its reduction",
        },
        {
            "name": "equal shares",
            "step_s": 1.79,
            "samples_per_s": rate * 0.519,
            "chosen": False,
            "why": "every step waits for laptop/cpu:3",
        },
        {
            "name": "fastest device alone",
            "step_s": 2.06,
            "samples_per_s": rate * 0.451,
            "chosen": False,
            "why": "the other three stand idle",
        },
        {
            "name": "one micro-batch each",
            "step_s": None,
            "samples_per_s": None,
            "chosen": False,
            "why": "laptop/cpu:0 lacks 1.2 GiB",
        },
    ]
    (directory / "candidates.json").write_text(json.dumps(candidates), encoding="utf-8")
    profile(ranks, noise).save(directory / "profile.json")

    write_metrics(directory / "metrics.jsonl", steps, batch, simulated.span_s * 1.021, noise)
    summary = {
        "model": "GPT",
        "parameters": 10_740_000,
        "seconds": steps * simulated.span_s * 1.03,
        "peak_memory_bytes": {name: (0.36 + 0.0195 * s) * 2**30 for name, s in zip(names, shares, strict=True)},
        "environment": {
            "torch": "2.13.0",
            "python": "3.11.9",
            "heterodyne": "0.1.0",
            "machine": "x86_64, 2 cores, 8 GiB",
            "backend": "gloo",
        },
    }
    (directory / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return directory


def write_metrics(
    path: Path, steps: int, batch: int, step_s: float, noise: random.Random, *, slower: float = 1.0
) -> None:
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            seconds = step_s * slower * noise.lognormvariate(0, 0.025) * (1.35 if step == 1 else 1)
            loss = 1.9 + 3.6 * math.exp(-step / 35) + noise.gauss(0, 0.035)
            line = {
                "step": step, "loss": loss, "grad_norm": 1.2 + noise.random(), "lr": 3e-4, "step_s": seconds,
                "samples_per_s": batch / seconds, "tokens_per_s": 128 * batch / seconds, "efficiency": 0.957 * step_s / seconds,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
            if step % 20 == 0:
                file.write(json.dumps({"step": step, "validation_loss": loss + 0.06}) + "\n")


def profile(ranks: int, noise: random.Random) -> Profile:
    def samples(scale: float) -> tuple[BlockSample, ...]:
        return tuple(
            BlockSample(
                micro_batch_size=size,
                forward_s=scale * FORWARD_S * (0.4 + size) * noise.lognormvariate(0, 0.02),
                backward_s=scale * BACKWARD_S * (0.4 + size) * noise.lognormvariate(0, 0.02),
                spread=0.03,
                saved_bytes=size * 9_000_000,
                extrapolated=size == 8 and scale > 4,
            )
            for size in (1, 2, 4, 8)
        )

    devices = {
        name: DeviceProfile(
            blocks={
                "*": samples(1 / SPEEDS[i % 4]),
                "embedding": samples(0.1 / SPEEDS[i % 4]),
                "layer": samples(0.13 / SPEEDS[i % 4]),
                "head": samples(0.12 / SPEEDS[i % 4]),
            },
            optimizer_s_per_byte=2e-10,
        )
        for i, name in enumerate(device_names(ranks))
    }
    links = tuple(
        LinkSample(op="all_reduce", devices=device_names(ranks), bytes=size, seconds=1e-4 + size / 1.5e9, spread=0.05)
        for size in (2**16, 2**20, 2**22)
    )
    return Profile(key="synthetic", devices=devices, links=links)
