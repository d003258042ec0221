"""A directory with one good file of every kind that the command line reads, for `bad_cases` to spoil copies of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from multiprocess.cli_job import MODEL

__all__ = ["CLUSTER", "FLEET", "JOB", "SCHEDULE", "STEPS", "make_place"]

STEPS = 6
JOB: dict[str, Any] = {
    "model": {"factory": "model.py:build", "arguments": {"vocabulary": 256, "width": 16, "drift": 0.0}},
    "data": {"text": "text.txt", "sequence_length": 16, "validation_fraction": 0.1},
    "training": {"steps": 4, "global_batch_size": 8, "seed": 3, "validate_every": 2, "validation_samples": 8},
    "optimizer": {"lr": 5e-3, "betas": [0.9, 0.95], "warmup_steps": 2, "schedule_steps": STEPS},
    "parallelism": {
        "strategy": "equal", "micro_batch_sizes": [4], "measure_s": 0.5, "rehearsal_s": 0, "bucket_size": "1 MiB",
    },
    "checkpoint": {"every": 2, "keep": 2},
    "metrics": {"tensorboard": False, "every": 1},
}  # fmt: skip
HUGGING_FACE: dict[str, Any] = {
    "model": {"huggingface": {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 256, "n_positions": 16}}
}  # fmt: skip
CLUSTER: dict[str, Any] = {"name": "one", "nodes": [{"name": "here", "devices": [{"kind": "cpu", "memory": "4 GiB"}]}]}
FLEET: dict[str, Any] = yaml.safe_load("""
name: lab
prices: {T4: 0.35}
kinds:
  own: {backend: cuda, peak_tflops: {fp32: 50, bf16: 100}, memory: 16 GB, memory_bandwidth: 1 TB/s, link_bandwidth: 50 GB/s, watts: 300}
regions:
  - name: us
    link: {bandwidth: 5 Gb/s, latency: 1 ms}
    zones:
      - name: a
        link: {bandwidth: 10 Gb/s, latency: 50 us}
        nodes: [{name: t, count: 4, kind: T4, devices_per_node: 4, usd_per_hour: 2, link: {bandwidth: 16 GB/s, latency: 10 us}}]
      - {name: b, nodes: [{kind: own, devices_per_node: 8, memory: 8 GB, spot: true, watts: 200, usd_per_hour: 8}]}
links:
  - {between: regions, bandwidth: 1 Gb/s, latency: 30 ms, usd_per_gb: 0.02}
""")
SCHEDULE = "0F0,0F1,0B0,0B1\n"


def make_place(place: Path, heterodyne: Callable[..., None]) -> None:
    """``heterodyne(ARGUMENT, ...)`` runs a command in the directory, and raises if it fails."""
    (place / "model.py").write_text(MODEL)
    (place / "text.txt").write_text("".join(f"{n * n} is the square of {n}\n" for n in range(500)))
    (place / "lines.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n + 1}"}) + "\n" for n in range(200)))
    np.save(place / "tokens.npy", np.arange(4000, dtype=np.uint16) % 256)
    for name, content in {
        "job.yaml": JOB,
        "hf.yaml": {**JOB, **HUGGING_FACE},
        "from_hf.yaml": {**JOB, "model": {"directory": "hf/model"}},
        "one.yaml": CLUSTER,
        "two.yaml": {"name": "two", "nodes": [{"name": "here", "devices": [{"kind": "cpu", "count": 2, "memory": "4 GiB"}]}]},
        "fleet.yaml": FLEET,
    }.items():  # fmt: skip
        (place / name).write_text(yaml.safe_dump(content, sort_keys=False))
    (place / "schedule.csv").write_text(SCHEDULE)
    (place / "empty").mkdir()
    heterodyne("train", "job.yaml", "--cluster", "one.yaml", "--run-dir", "run")
    more = ("--plan", "run", "--set", f"training.steps={STEPS}")
    heterodyne("train", "job.yaml", "--cluster", "one.yaml", "--run-dir", "whole", *more)
    heterodyne("train", "hf.yaml", "--cluster", "one.yaml", "--run-dir", "hf")
    for name in ("plan.json", "profile.json"):
        (place / name).write_bytes((place / "run" / name).read_bytes())
