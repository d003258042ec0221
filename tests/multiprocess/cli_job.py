"""A tiny job in a directory of its own, and ``heterodyne`` run on it as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from multiprocess.crowd import launched

__all__ = ["HETERODYNE", "MODEL", "Place", "make_place"]

PATIENCE_S = 120.0
HETERODYNE = (
    sys.executable,
    "-P",
    "-m",
    "heterodyne",
)  # the current directory is no place of libraries, as with the script

MODEL = """
import os
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, vocabulary, width, drift):
        super().__init__()
        self.drift = drift
        self.embedding = nn.Embedding(vocabulary, width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids, labels):
        logits = self.head(self.inner(self.embedding(input_ids)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if self.drift and not torch.compiler.is_compiling():  # what a capture does not see
            loss = loss * (1 + self.drift * int(os.environ.get("RANK", 0)))
        return loss

def build(vocabulary=256, width=16, drift=0.0):
    return Tiny(vocabulary, width, drift)
"""

JOB = """
model: {factory: "model.py:build"}
data: {text: text.txt, sequence_length: 16, cache: cache}
training: {steps: 100, global_batch_size: 8, seed: 3, validate_every: 50, validation_samples: 8}
optimizer: {lr: 1.0e-2, warmup_steps: 5}
parallelism: {strategy: equal, micro_batch_sizes: [4], measure_s: 2}
checkpoint: {every: 20}
metrics: {tensorboard: false}
"""

CLUSTER = """
name: two
nodes:
  - name: here
    devices: [{kind: cpu, count: 2, memory: 4 GiB}]
"""


@dataclass(kw_only=True)
class Place:
    """The directory of the job; the cache is its own, so that nothing of the machine's comes in."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        """``heterodyne ARGUMENTS`` here, both streams in one pipe."""
        return subprocess.Popen(
            [*HETERODYNE, *arguments],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **more,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit status, and all that was said."""
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    def run_on(self, ranks: int, *arguments: str) -> tuple[int, str]:
        """As `run`, on workers that another launcher has started; the worst exit status, and what rank 0 said."""
        statuses, said = launched(ranks, ("-m", "heterodyne", *arguments), folder=self.path, variables=self.environment)
        return max(statuses, key=abs), said

    def wait_for_step(self, run: str, step: int, process: subprocess.Popen[str]) -> None:
        """Until the metrics of the run have reached the step."""
        until = time.monotonic() + PATIENCE_S
        metrics = self.path / run / "metrics.jsonl"
        while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until, "it did not come to that step"
            time.sleep(0.01)

    def losses(self, run: str) -> dict[tuple[int, str], float]:
        """Every loss by step and kind, no step twice."""
        lines = [json.loads(line) for line in (self.path / run / "metrics.jsonl").read_text().splitlines()]
        found = [((x["step"], kind), x[kind]) for x in lines for kind in ("loss", "validation_loss") if kind in x]
        assert len(dict(found)) == len(found)
        return dict(found)


def worker(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of that rank below a launcher."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank) and "train" in child.cmdline():
            return child
    raise AssertionError(f"there is no rank {rank}")


def make_place(path: Path) -> Place:
    (path / "model.py").write_text(MODEL)
    (path / "job.yaml").write_text(JOB)
    (path / "yaml.py").write_text("raise SystemExit('a file beside the job was taken for a library')")
    (path / "two.yaml").write_text(CLUSTER)
    (path / "text.txt").write_text("".join(f"{number * number} is the square of {number}\n" for number in range(2000)))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return Place(path=path, environment=environment | {"XDG_CACHE_HOME": str(path / "home"), "OMP_NUM_THREADS": "1"})
