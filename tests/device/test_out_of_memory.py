"""The memory of an accelerator ends in mid run: the step is applied nowhere, and the run goes on where it was under another plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from device.accelerator import load
from device.strict import register
from heterodyne.api import again, preparation
from heterodyne.api.again import Training, train_here
from heterodyne.api.session import Session
from heterodyne.cli import main
from heterodyne.cluster import BlockSample, Cluster, DeviceProfile, LinkSample, Profile
from heterodyne.graph import Block, ModelGraph
from heterodyne.plan import Plan
from heterodyne.processes import GAVE_UP_ON_A_PEER, OUT_OF_MEMORY
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.worker import StepResult, Worker
from multiprocess.crowd import Crowd

NAME = "npu"  # a backend that a cluster file may name
STEPS = 6

MODEL = """
import itertools
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        return x + self.inner(self.norm(x))

class Tiny(nn.Module):
    def __init__(self, width=32, blocks=4):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

class Samples:
    # Those of the first steps are half as long.
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for number in itertools.count():
            ids = torch.randint(64, (32 if number < 48 else 64,), generator=generator)
            yield {"input_ids": ids, "labels": ids}

def build():
    return Tiny()

def samples():
    return Samples()
"""

JOB = f"""
model: {{factory: "model.py:build"}}
data: {{dataset: "model.py:samples"}}
training: {{steps: {STEPS}, global_batch_size: 16, seed: 3}}
optimizer: {{lr: 1.0e-2, warmup_steps: 2}}
parallelism: {{measure_s: 2, rehearsal_s: 0, check_s: 0}}
metrics: {{tensorboard: false}}
"""

CLUSTER = """
name: some
nodes:
  - name: here
    devices: [{{kind: Test-{name}, backend: {name}, count: {count}, memory: 2 GiB}}]
"""


def predicted(graph: ModelGraph, cluster: Cluster) -> Profile:
    """As if it had been measured: seconds by the number of ops, bytes as the graph has them."""

    def samples(block: Block) -> tuple[BlockSample, ...]:
        ops = graph.ops[block.start : block.stop]
        return tuple(
            BlockSample(
                micro_batch_size=size,
                forward_s=1e-3 * size * len(ops),
                backward_s=2e-3 * size * len(ops),
                spread=0.0,
                saved_bytes=round(sum(op.bytes_saved(size) for op in ops)),
            )
            for size in (1, 2, 4, 8, 16)
        )

    blocks = {kind: samples(block) for kind, block in graph.kinds.items()}
    ids = tuple(device.id for device in cluster.devices)
    links = [LinkSample(op=op, devices=ids, bytes=2**20, seconds=1e-3, spread=0.0) for op in ("all_reduce", "send")]
    return Profile(
        key="predicted",
        devices={name: DeviceProfile(blocks=blocks, optimizer_s_per_byte=1e-9) for name in ids},
        links=tuple(links) if len(ids) > 1 else (),
    )


Limits = Mapping[int, tuple[int, float]]
"""By rank after which step its memory is limited, to so much of its peak until then. It stays so, also for those who come later."""


def work(environment: WorkerEnvironment, folder: str, limits: Limits, arguments: Sequence[str]) -> None:
    accelerator = load(NAME, devices=2)
    register(accelerator)
    os.chdir(folder)
    os.environ.update(
        RANK=str(environment.rank),
        WORLD_SIZE=str(environment.world_size),
        LOCAL_RANK=str(environment.local_rank),
        LOCAL_WORLD_SIZE=str(environment.local_world_size),
        MASTER_ADDR=environment.master_address,
        MASTER_PORT=str(environment.master_port),
    )
    foreign = Path(arguments[-1]) / f"limit-{environment.rank}"
    if foreign.exists():
        accelerator.limit(int(foreign.read_text()))
    step, prepare, home = Worker.step, preparation.prepare, sys.modules["heterodyne.api.train"]

    def limited(worker: Worker, batch: Any) -> StepResult:
        at, part = limits.get(environment.rank, (STEPS, 1.0))
        if worker.steps_done == at:
            foreign.write_text(str(int(part * torch.accelerator.max_memory_allocated(worker.device))))
            accelerator.limit(int(foreign.read_text()))
        return step(worker, batch)

    def prepared(session: Session, captured: Any, *rest: Any, profile: Profile | None, **more: Any) -> Any:
        known = predicted(captured.graph, session.cluster) if profile is None else profile
        return prepare(session, captured, *rest, profile=known, **more)

    with (
        mock.patch.object(Worker, "step", limited),
        mock.patch.object(home, "prepare", prepared),
        mock.patch.object(home, "_summarise"),  # draws a report
    ):
        raise SystemExit(main(arguments))


@dataclass
class Place:
    """A job and its runs; workers are forked in place of the processes that the launcher would start."""

    folder: Path
    limits: list[Limits] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def run_workers(self, count: int, arguments: Sequence[str], _: object) -> int:
        limits = self.limits.pop(0)
        with Crowd() as crowd:
            workers = [
                crowd.start(work, str(self.folder), limits, list(arguments), rank=rank, world_size=count)
                for rank in range(count)
            ]
            statuses = {worker.wait() for worker in workers}
            self.said.append("\n".join(worker.output for worker in workers))
        (own,) = statuses if len(statuses) == 1 else statuses - {GAVE_UP_ON_A_PEER}
        return own

    def train(self, name: str, count: int = 2, **more: Any) -> int:
        how: dict[str, Any] = {"resume": False, "overrides": (), "on_out_of_memory": "replan", "plan": None} | more
        training = Training(
            job=self.folder / "job.yaml", cluster=self.folder / f"{count}.yaml", run_dir=self.folder / name, **how
        )
        with (
            mock.patch.object(again, "run_workers", self.run_workers),
            mock.patch.object(again, "workers_here", return_value=count),
        ):
            return train_here(training, lambda _: 1)

    def losses(self, name: str) -> list[float]:
        """By step, from the first one on, each once."""
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        return [line["loss"] for line in lines]

    def plan(self, name: str) -> Plan:
        return Plan.load(self.folder / name / "plan.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("job")
    (folder / "model.py").write_text(MODEL)
    (folder / "job.yaml").write_text(JOB)
    for count in (1, 2):
        (folder / f"{count}.yaml").write_text(CLUSTER.format(name=NAME, count=count))
    return Place(folder)


@pytest.fixture(scope="module")
def one_device(place: Place) -> list[float]:
    place.limits = [{}]
    assert place.train("one", 1) == 0, place.said[-1]
    return place.losses("one")


def test_replicas_go_on_where_they_were_and_end_when_no_plan_is_left(
    place: Place, one_device: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    data = ("parallelism.strategy=data",)
    place.limits = [{1: (2, 0.75)}, {0: (3, 0.1), 1: (3, 0.1)}, {}]
    assert place.train("replicas", overrides=data, on_out_of_memory="stop") == OUT_OF_MEMORY
    told = place.said[-1]
    assert "rank 1 (here/Test-npu:1) ran out of memory in step 3, in 0F0 (stage 0, embedding to head), with " in told
    assert "Tried to allocate " in told
    assert "micro-batches of 4 in place of 8 samples" in told
    assert "planning again" not in capfd.readouterr().err
    assert place.losses("replicas") == pytest.approx(one_device[:2], rel=1e-5)
    first = place.plan("replicas")

    assert place.train("replicas", overrides=data, resume=True) == 2
    *_, resumed, ended = place.said
    assert "all that the ranks held in memory after step 2 is kept as a checkpoint" in resumed
    assert "planning again: no device is given more than it was seen to have" in resumed
    assert place.plan("replicas") != first
    assert capfd.readouterr().err.count("planning again with less memory: rank ") == 1
    assert place.losses("replicas") == pytest.approx(one_device[:3], rel=1e-5)
    assert "the run has run out of memory, and no plan is left that asks for less" in ended
    assert "it lacks " in ended
    assert "Or free the memory that others hold there, remove out-of-memory.jsonl" in ended
    assert "Traceback" not in told + resumed + ended


def test_a_pipeline_goes_on_with_longer_samples(
    place: Place, one_device: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    place.limits = [{1: (2, 1.05)}, {}]
    assert place.train("pipeline", overrides=("parallelism.strategy=pipeline",)) == 0
    assert "all that the ranks held in memory after step 3 is kept as a checkpoint" in place.said[-1]
    assert place.losses("pipeline") == pytest.approx(one_device, rel=1e-5)
    told = capfd.readouterr().err
    assert "planning again with less memory: rank 1 (here/Test-npu:1) in step 4, in 1" in told
    assert len(place.plan("pipeline").pipelines[0].stages) == 2
